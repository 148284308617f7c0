"""Codec cases: speech tokenizer, flow, vocoder and the mel of voice prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.codec.vocoder import VocoderReply
from mosstalk.config import FlowConfig, HiftConfig, SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import CaseError
from mosstalk.files import read_json
from mosstalk.models.codec_folder import build, open_part, read_flow_config, read_hift_config
from mosstalk.models.features import MelSpec, vocoder_mel
from mosstalk.models.flow import FlowDecoder, FlowStream, RecomputingFlowStream, fixed_noise
from mosstalk.models.hift import KEPT_FRAMES, HiftStream, HiftVocoder
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.voices import Voice
from mosstalk.models.weights import (
    Store,
    fold_weight_norm,
    open_pickled,
    open_safetensors,
    open_sharded,
)
from mosstalk.verify.compare import Case, Check, Comparer, pcm_from

_C = TypeVar("_C", FlowConfig, HiftConfig)
_COMPANY = 3
"""Replies that are made beside those of a case, with other codes."""
_PAGES = 512
"""More than a case's replies and those beside them ever hold; the default takes gigabytes."""


def _weights(folder: Path, stem: str) -> Store:
    """Weights of a part in a case's own folder, or below ``flow`` in a codec folder."""
    if (folder / "flow").is_dir():
        return open_part(folder / "flow", stem)
    pickled, file = folder / f"{stem}.pt", folder / f"{stem}.safetensors"
    return open_pickled(pickled) if pickled.exists() else open_safetensors(file)


def _config(case: Case, kind: type[_C], read: Callable[[Path], _C]) -> _C:
    """Sizes of a part: the case's, else those that ``read`` finds beside its weights."""
    if "config" not in case.settings and case.weights != case.folder:
        return read(case.weights)
    return kind.from_dict(case.get("config"), f"{case.folder}/case.json: config")


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
    config = _config(case, FlowConfig, lambda folder: read_flow_config(folder, name))
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
    config = _config(case, HiftConfig, read_hift_config)
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


def check_flow_fast(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """``check_flow``, and every reply hop by hop: alone, then all in one batch with others."""
    yield from check_flow(case, device, compare)
    flow, voice, runs = load_flow(case, device, torch.float32)
    runs = [(prefix, run) for prefix, run in runs if case.weights == case.folder or "hops" in run]
    # On a CPU replies lie side by side in float32; pages, as on a GPU, are verified there too.
    ways = {"fast": True} if device.type == "cuda" else {"paged": True}
    if device.type == "cpu" and compare.dtype == torch.float32:
        ways["fast"] = False
    for label, paged in ways.items():
        batched = batched_flow(flow, FlowOptions(dtype=compare.dtype, paged=paged, pages=_PAGES))
        for prefix, run in runs:
            reply = batched.open(voice)
            yield from check_hops(case, reply, prefix, f"{label}.", run, compare)
            reply.close()
        yield from _check_together(case, batched, voice, runs, f"{label} together.", compare)


@dataclass
class _Reply:
    """A reply in a batch: its codes, when it joins, and the mels that it got."""

    prefix: str
    reply: FlowReply
    codes: list[int]
    joins: int
    mels: list[Tensor] = field(default_factory=list)
    ended: bool = False


def _check_together(
    case: Case,
    batched: BatchedFlow,
    voice: Voice,
    runs: Sequence[tuple[str, dict[str, Any]]],
    label: str,
    compare: Comparer,
) -> Iterator[Check]:
    """Replies that join one by one, get a code each at a time, and leave."""
    random, limit = Random(0), batched.config.vocab_size
    replies = [
        _Reply(prefix, batched.open(voice), case.tensor(f"{prefix}tokens").tolist(), 2 * number)
        for number, (prefix, _) in enumerate(runs)
    ]
    for _ in range(_COMPANY):
        codes = [random.randrange(limit) for _ in range(random.randrange(1, 40))]
        replies.append(_Reply("", batched.open(voice), codes, random.randrange(12)))
    talking, time = list(replies), 0
    while talking:
        here = [each for each in talking if each.joins <= time]
        hops = [_given(each, time) for each in here]
        for each, mel in zip(here, batched.advance(hops) if hops else [], strict=True):
            each.mels += [mel] if mel.shape[1] else []
            if each.ended:
                batched.close(each.reply)
        talking = [each for each in talking if not each.ended]
        time += 1
    for each in replies[: len(runs)]:
        names = [*(f"hop{index}.mel" for index in range(len(each.mels) - 1)), "final_streaming.mel"]
        for name, mel in zip(names, each.mels, strict=True):
            expected = case.tensor(each.prefix + name)
            yield compare.tensor(f"{each.prefix}{label}{name}", mel, expected)


def _given(each: _Reply, time: int) -> tuple[FlowReply, list[int], bool]:
    """A reply's next code, or its end."""
    place = time - each.joins
    each.ended = place == len(each.codes)
    return each.reply, each.codes[place : place + 1], each.ended


def check_hift_fast(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """``check_hift``, and its chunks in slots among others that come and go."""
    yield from check_hift(case, device, compare)
    if not case.settings.get("chunks"):
        return
    vocoder = load_vocoder(case, device, torch.float32)
    dtype = str(compare.dtype).removeprefix("torch.")
    batched = BatchedHift(vocoder, HiftOptions(dtype=dtype, replies=8))
    mel = case.tensor("mel").to(device)
    chunks: list[int] = case.get("chunks")
    reply, neighbour = batched.open(), batched.open(1)
    for index, part in enumerate(mel.split(chunks, dim=1)):
        final, name = index == len(chunks) - 1, f"chunk{index}.wave"
        wave = batched.push_with_source(
            reply, part, case.tensor(f"chunk{index}.source"), final=final
        )
        yield compare.tensor(f"fast.{name}", wave, case.tensor(name), wave=True)
        neighbour = _moved_on(batched, neighbour, mel, index)
    yield from _check_company(case, batched, mel, compare)


def _moved_on(batched: BatchedHift, reply: VocoderReply, mel: Tensor, turn: int) -> VocoderReply:
    """Give a neighbour frames, or let another take its place."""
    if turn % 2:
        batched.close(reply)
        return batched.open(turn)
    frames = mel[:, : max(KEPT_FRAMES, mel.shape[1] // 2)]
    batched.push([(reply, frames, False)])
    return reply


def _check_company(
    case: Case, batched: BatchedHift, mel: Tensor, compare: Comparer
) -> Iterator[Check]:
    """A reply's sound among others, against its sound alone."""
    chunks: list[int] = case.get("chunks")
    parts = list(mel.split(chunks, dim=1))

    def sound(company: int) -> Tensor:
        replies = [batched.open(seed) for seed in range(company + 1)]
        waves = []
        for index, part in enumerate(parts):
            final = index == len(parts) - 1
            waves.append(batched.push([(reply, part, final) for reply in replies])[0])
        for reply in replies:
            batched.close(reply)
        return torch.cat(waves)

    yield compare.tensor("fast.in company", sound(_COMPANY), sound(0).cpu(), wave=True)


def check_speech_tokenizer_fast(
    case: Case, device: torch.device, compare: Comparer
) -> Iterator[Check]:
    """``check_speech_tokenizer``, and every clip as it arrives: alone, then all at once."""
    yield from check_speech_tokenizer(case, device, compare)
    tokenizer = load_tokenizer(case, device, compare.dtype)
    live, random = LiveTokenizer(tokenizer), Random(0)
    names = [clip["clip"] for clip in case.get("clips")]
    clips = [_slices(pcm_from(case.tensor(f"{name}.pcm16")), random) for name in names]
    for name, slices in zip(names, clips, strict=True):
        state = live.open()
        for part in slices:
            live.push(state, part)
        live.finish(state)
        yield compare.ids(f"{name}.live tokens", state.codes, case.tensor(f"{name}.tokens"))
    for name, codes in zip(names, _heard_together(live, clips), strict=True):
        yield compare.ids(f"{name}.live tokens together", codes, case.tensor(f"{name}.tokens"))


def _slices(pcm: Tensor, random: Random) -> list[Tensor]:
    cuts = sorted(random.randrange(len(pcm) + 1) for _ in range(random.randrange(3, 20)))
    return [pcm[start:end] for start, end in pairwise([0, *cuts, len(pcm)])]


def _heard_together(live: LiveTokenizer, clips: Sequence[list[Tensor]]) -> list[list[int]]:
    states = [live.open() for _ in clips]
    for turn in range(max(map(len, clips))):
        some = [(s, clip[turn]) for s, clip in zip(states, clips, strict=True) if turn < len(clip)]
        live.push_many(*map(list, zip(*some, strict=True)))
    for state in states:
        live.finish(state)
    return [list(state.codes) for state in states]
