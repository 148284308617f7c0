"""Codec cases: speech tokenizer, flow, vocoder and the mel of voice prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosstalk.config import FlowConfig, HiftConfig, SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import CaseError
from mosstalk.files import read_json
from mosstalk.models.codec_folder import build, open_part, read_flow_config, read_hift_config
from mosstalk.models.features import MelSpec, vocoder_mel
from mosstalk.models.flow import FlowDecoder, FlowStream, RecomputingFlowStream, fixed_noise
from mosstalk.models.hift import HiftVocoder
from mosstalk.models.hift_stream import KEPT_FRAMES, HiftStream
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice
from mosstalk.models.weights import (
    Store,
    fold_weight_norm,
    open_pickled,
    open_safetensors,
    open_sharded,
)
from mosstalk.verify.case import Case, pcm_from
from mosstalk.verify.compare import Check, Comparer


def _weights(folder: Path, stem: str) -> Store:
    """Weights of a part in a case's own folder, or below ``flow`` in a codec folder."""
    if (folder / "flow").is_dir():
        return open_part(folder / "flow", stem)
    pickled = folder / f"{stem}.pt"
    return (
        open_pickled(pickled)
        if pickled.exists()
        else open_safetensors(folder / f"{stem}.safetensors")
    )


def _flow_config(case: Case, name: str) -> FlowConfig:
    if "config" not in case.settings and case.weights != case.folder:
        return read_flow_config(case.weights, name)
    return FlowConfig.from_dict(case.get("config"), f"{case.folder}/case.json: config")


def _hift_config(case: Case) -> HiftConfig:
    if "config" not in case.settings and case.weights != case.folder:
        return read_hift_config(case.weights)
    return HiftConfig.from_dict(case.get("config"), f"{case.folder}/case.json: config")


def load_tokenizer(case: Case, device: torch.device, dtype: torch.dtype) -> SpeechTokenizer:
    """A speech tokenizer case's tokenizer.

    Raises:
        CaseError: the case's clips are at another rate.
    """
    if case.settings.get("sampling_rate", INPUT_RATE) != INPUT_RATE:
        raise CaseError(f"{case.folder}: clips must be at {INPUT_RATE} Hz")
    path = case.weights / "config.json"
    config = SpeechTokenizerConfig.from_dict(read_json(path), str(path))
    store = open_sharded(case.weights)
    return build(lambda: SpeechTokenizer(config), store, case.weights, device=device, dtype=dtype)


def check_speech_tokenizer(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Encode every clip; intermediate tensors are compared where the case has them."""
    tokenizer = load_tokenizer(case, device, compare.dtype)
    for clip in case.get("clips"):
        name = clip["clip"]
        pcm = pcm_from(case.tensor(f"{name}.pcm16"))
        for stage in ("log_mel", "pooled", "distances"):
            if case.has(f"{name}.{stage}"):
                found = getattr(tokenizer.encode_segment(pcm), stage)
                yield compare.tensor(f"{name}.{stage}", found, case.tensor(f"{name}.{stage}"))
        codes = tokenizer.encode(pcm)
        yield compare.ids(f"{name}.tokens", codes, case.tensor(f"{name}.tokens"))
        yield compare.value(f"{name}.length", len(codes), clip["tokens"], always=True)


def load_flow(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[FlowDecoder, Voice, list[tuple[str, dict[str, Any]]]]:
    """A flow case's decoder and voice, and its replies: names' prefix and settings of each."""
    name = str(case.settings.get("flow_name", "flow"))
    config = _flow_config(case, name)
    store = _weights(case.weights, name)
    flow = build(lambda: FlowDecoder(config), store, case.weights, device=device, dtype=dtype)
    voice = Voice(
        case.tensor("prompt_tokens"), case.tensor("prompt_mel"), case.tensor("speaker_embedding")
    )
    runs: list[dict[str, Any]] | None = case.settings.get("runs")
    if runs is None:
        return flow, voice, [("", case.settings)]
    return flow, voice, [(f"run{index}.", run) for index, run in enumerate(runs)]


def check_flow(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Decode every reply whole and, where the case has hops, hop by hop."""
    flow, voice, runs = load_flow(case, device, compare.dtype)
    if case.wants("noise_head"):
        head = case.tensor("noise_head")
        noise = fixed_noise(head.shape[1], flow.config.mel_bins)[0]
        yield Comparer(torch.float32).tensor("noise_head", noise, head)
    if case.has("estimator.x"):
        yield from _check_estimator(case, flow, device, compare)
    for prefix, run in runs:
        yield from _check_reply(case, flow, voice, prefix, run, compare)


def _check_estimator(
    case: Case, flow: FlowDecoder, device: torch.device, compare: Comparer
) -> Iterator[Check]:
    inputs = [
        case.tensor(f"estimator.{name}").to(device, compare.dtype)
        for name in ("x", "mu", "t", "spks", "cond")
    ]
    block = flow.config.chunk_size * flow.config.token_mel_ratio
    for name, frames in (("estimator.offline", None), ("estimator.streaming", block)):
        with torch.inference_mode():
            found = flow.decoder.estimator(*inputs, frames)
        yield compare.tensor(name, found, case.tensor(name))


def _check_reply(
    case: Case,
    flow: FlowDecoder,
    voice: Voice,
    prefix: str,
    run: dict[str, Any],
    compare: Comparer,
) -> Iterator[Check]:
    codes = case.tensor(f"{prefix}tokens")
    on_device = codes.to(flow.encoder_proj.weight.device)
    whole = torch.cat([voice.codes.to(on_device), on_device])
    for name, masked in (("offline.mu", False), ("streaming.mu", True)):
        if case.has(prefix + name):
            mu = flow.mean(whole, final=True, masked=masked)[0]
            yield compare.tensor(prefix + name, mu, case.tensor(prefix + name))
    offline = flow.decode(voice, on_device, final=True, masked=False)
    yield compare.tensor(f"{prefix}offline.mel", offline, case.tensor(f"{prefix}offline.mel"))
    name = f"{prefix}final_upstream.mel"
    if case.wants(name):
        last = offline[:, run["final_start"] * flow.config.token_mel_ratio :]
        yield compare.tensor(name, last, case.tensor(name))
    if case.weights == case.folder or "hops" in run:
        yield from check_hops(case, RecomputingFlowStream(flow, voice), prefix, "", run, compare)


def check_hops(
    case: Case,
    stream: FlowStream,
    prefix: str,
    label: str,
    run: dict[str, Any],
    compare: Comparer,
) -> Iterator[Check]:
    """Feed the reply code by code: every hop must come when it is due, with its frames.

    ``label`` tells the checks of one kind of stream from those of another.
    """
    schedule, mels = [], list[Tensor]()
    for pushed, code in enumerate(case.tensor(f"{prefix}tokens").tolist(), 1):
        start = stream.done_codes
        for mel in stream.push([code]):
            schedule.append({"available": pushed, "start": start, "frames": mel.shape[1]})
            mels.append(mel)
    shown, start = prefix + label, stream.done_codes
    yield compare.value(f"{shown}hops", schedule, run["hops"], always=True)
    yield compare.value(f"{shown}final_start", start, run["final_start"], always=True)
    last = stream.finish()
    mels.append(torch.empty(0) if last is None else last)
    names = [*(f"hop{index}.mel" for index in range(len(mels) - 1)), "final_streaming.mel"]
    for name, mel in zip(names, mels, strict=True):
        yield compare.tensor(shown + name, mel, case.tensor(prefix + name))


def load_vocoder(case: Case, device: torch.device, dtype: torch.dtype) -> HiftVocoder:
    """A HiFT case's vocoder."""
    config = _hift_config(case)
    store = fold_weight_norm(_weights(case.weights, "hift"))
    return build(lambda: HiftVocoder(config), store, case.weights, device=device, dtype=dtype)


def check_hift(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Wave of a mel and its source; F0, the source itself and chunks where the case has them."""
    vocoder = load_vocoder(case, device, compare.dtype)
    mel = case.tensor("mel").to(device)
    if case.wants("f0"):
        yield compare.tensor("f0", vocoder.f0(mel), case.tensor("f0"))
    if case.wants("harmonic_noise"):
        f0 = case.tensor("f0").to(device)
        phases = vocoder.phase_steps(f0).cumsum(0)
        source = vocoder.source(f0, phases, case.tensor("harmonic_noise").to(device))
        yield compare.tensor("source", source, case.tensor("source"), wave=True)
    wave = vocoder.synthesise(mel, case.tensor("source").to(device))
    yield compare.tensor("wave", wave, case.tensor("wave"), wave=True)
    if case.settings.get("chunks"):
        yield from _check_chunks(case, vocoder, mel, compare)
    case.used.add("initial_phase")  # published code draws it, then discards it


def _check_chunks(
    case: Case, vocoder: HiftVocoder, mel: Tensor, compare: Comparer
) -> Iterator[Check]:
    chunks: list[int] = case.get("chunks")
    if case.settings.get("mel_cache_frames", KEPT_FRAMES) != KEPT_FRAMES:
        raise CaseError(f"{case.folder}: only {KEPT_FRAMES} kept mel frames are supported")
    stream, samples = HiftStream(vocoder), []
    for index, part in enumerate(mel.split(chunks, dim=1)):
        given = case.tensor(f"chunk{index}.source").to(mel.device)
        wave = stream.push_with_source(part, given, final=index == len(chunks) - 1)
        samples.append(wave.shape[0])
        name = f"chunk{index}.wave"
        yield compare.tensor(name, wave, case.tensor(name), wave=True)
    yield compare.value("samples", samples, case.get("samples"), always=True)


def check_prompt_mel(case: Case, device: torch.device, _: Comparer) -> Iterator[Check]:
    """The mel of a recording; always computed in float32."""
    settings: dict[str, Any] = case.get("config")
    if settings.get("center") or settings.get("win_size") != settings["n_fft"]:
        raise CaseError(f"{case.folder}: only mels that are not centred, window = n_fft")
    rate = settings["sampling_rate"]
    spec = MelSpec(
        rate,
        settings["n_fft"],
        settings["hop_size"],
        settings["num_mels"],
        float(settings["fmin"]),
        float(settings["fmax"] or rate / 2),
    )
    mel = vocoder_mel(pcm_from(case.tensor("pcm16")).to(device), spec)
    yield Comparer(torch.float32).tensor("mel", mel.T, case.tensor("mel"))
