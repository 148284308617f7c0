"""How long hops of many replies and pushes of many streams take, each held to an untimed run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mosstalk.audio.sound import Samples
from mosstalk.bench.timed import Run, Timed, run_timed
from mosstalk.codec.speech_decoder import DecodeRequest, SpeechDecoder
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.constants import INPUT_RATE
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import RecomputingFlowStream
from mosstalk.models.hift import HiftStream
from mosstalk.models.voices import Voice
from mosstalk.progress import Progress

_SEED = 7
_RECOMPUTED, _BEFORE = 2, 20
FIRST = "first"
PUSH_S = 0.4
_WARM_UPS = 3
_REPAIRS = 5
_LOUD, _SILENT = (0.5, 0.6), (0.3, 0.4)
"""Seconds of a sound."""
_LOUDER = 5.0


@dataclass(frozen=True)
class HopLoad:
    """``replies`` at once in one voice, each ``hops`` long; ``stretches`` are the hops, from 1 on,
    whose times are taken together, by what they are called.
    """

    replies: int
    hops: int
    stretches: dict[str, range]

    @classmethod
    def of(cls, replies: int, hops: int) -> "HopLoad":
        """The first hop; the ten after it; and if there are that many, the last ten."""
        early = range(2, min(hops, 11) + 1)
        stretches = {FIRST: range(1, 2), f"{early[0]}-{early[-1]}": early}
        if hops >= 40:
            stretches[f"{hops - 9}-{hops}"] = range(hops - 9, hops + 1)
        return cls(replies, hops, stretches)


def measure_crowd(
    decoder: SpeechDecoder, voice: Voice, crowd: HopLoad, rounds: int, tell: Progress
) -> list[Timed]:
    """Each stretch's times: all replies' hops, until all of their sound is there.

    An untimed walk through all hops comes first, whose sound the timed ones must repeat bit for
    bit: a hop whose codes were not those of the one before, or that was not written, would differ.
    ``rounds`` timed walks: the first hop comes once in each.
    """
    cold = list[float]()
    expected = [run.output for run in _walk(decoder, voice, crowd, cold)]
    times: dict[str, list[float]] = {name: [] for name in crowd.stretches}
    wrong: dict[str, list[str]] = {name: [] for name in crowd.stretches}
    for number in range(rounds):
        tell(f"{crowd.replies} replies", number, rounds)
        for hop, run in enumerate(_walk(decoder, voice, crowd), 1):
            fault = _hop_fault(run.output, expected[hop - 1])
            for name, hops in crowd.stretches.items():
                if hop in hops:
                    times[name].append(run.ms)
                    wrong[name] += [fault] if fault else []
    return [
        Timed(
            f"{crowd.replies} x hop {name}",
            cold[0] if name == FIRST else None,
            crowd.hops,
            tuple(times[name]),
            tuple(wrong[name]),
        )
        for name in crowd.stretches
    ]


def _walk(
    decoder: SpeechDecoder, voice: Voice, crowd: HopLoad, cold: list[float] | None = None
) -> Iterator[Run[list[Tensor]]]:
    """Hop by hop through all replies, each with codes of its own."""
    replies = [decoder.open(voice, seed) for seed in range(crowd.replies)]
    codes = _codes(decoder, crowd)
    try:
        for _ in range(crowd.hops):
            requests = [
                DecodeRequest(reply, own[len(reply.flow.codes) : reply.codes_needed])
                for reply, own in zip(replies, codes, strict=True)
            ]
            run = run_timed(lambda: _decoded(decoder, requests), decoder.device)  # noqa: B023
            if cold is not None:
                cold.append(run.ms)
            yield Run(run.ms, [sound.cpu() for sound in run.output])
    finally:
        for reply in replies:
            decoder.close(reply)


def _decoded(decoder: SpeechDecoder, requests: Sequence[DecodeRequest]) -> list[Tensor]:
    """In runs of as many hops as a server makes at once."""
    most = decoder.hops_at_once
    runs = [requests[start : start + most] for start in range(0, len(requests), most)]
    return [sound for run in runs for sound in decoder.decode(run)]


def _codes(decoder: SpeechDecoder, crowd: HopLoad) -> list[list[int]]:
    config = decoder.flow.config
    longest = (crowd.hops + 2) * config.chunk_size + config.pre_lookahead_len
    random = torch.Generator().manual_seed(_SEED)
    limit = min(config.vocab_size, 16384)
    return torch.randint(0, limit, (crowd.replies, longest), generator=random).tolist()


def _hop_fault(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What is wrong with the sounds of a hop; nothing if they are as expected."""
    for sound, wanted in zip(found, expected, strict=True):
        if sound.shape != wanted.shape or not len(sound):
            return f"{tuple(sound.shape)} samples instead of {tuple(wanted.shape)}"
        if not bool(sound.isfinite().all()):
            return "samples that are not finite"
        if not torch.equal(sound, wanted):
            apart = float((sound - wanted).abs().max())
            return f"unlike an untimed run by up to {apart:.2g}"
    return ""


def measure_recomputing(codec: Codec, voice: Voice, hops: Sequence[int]) -> list[Timed]:
    """One reply by the form that decodes voice and reply anew at each hop, as public ones do.

    Only the ``hops`` that are asked for are computed: none depends on another.
    """
    random = torch.Generator().manual_seed(_SEED)
    limit = min(codec.flow.config.vocab_size, 16384)
    longest = (max(hops, default=0) + 2) * codec.flow.config.chunk_size + 8
    codes = torch.randint(0, limit, (longest,), generator=random).tolist()
    rows = list[Timed]()
    for hop in hops:
        times = [_recomputed_ms(codec, voice, codes, hop) for _ in range(_RECOMPUTED + 1)]
        rows.append(Timed(f"1 x hop {hop}, recomputing", times[0], 1, tuple(times[1:])))
    return rows


@torch.inference_mode()
def _recomputed_ms(codec: Codec, voice: Voice, codes: list[int], hop: int) -> float:
    """Milliseconds of hop number ``hop``, its predecessors taken as played."""
    flow, vocoder = RecomputingFlowStream(codec.flow, voice), HiftStream(codec.vocoder)
    if hop > 1:
        flow.done_codes = flow.hop_codes + (hop - 2) * codec.flow.config.chunk_size
        flow.codes = codes[: flow.done_codes]
        vocoder.push(voice.mel[:_BEFORE].T.to(codec.device))
    missing = codes[flow.done_codes : flow.codes_needed]
    return run_timed(lambda: [vocoder.push(mel) for mel in flow.push(missing)], codec.device).ms


def sound_like_speech(seconds: float, seed: int) -> Samples:
    """Noise (n,) at 16 kHz that swells and falls like syllables, peak 0.3 after half a second.

    Never after its first pushes is it as loud again: then no later push has anything to repair.
    """
    return _scaled(_syllables(seconds, seed, _LOUD))


def sound_to_repair(seconds: float, seed: int) -> Samples:
    """The same with silence near its beginning, loudest in its last push.

    What lies below the loudest frame's floor is all encoded again then, from the silence on.
    """
    sound = _syllables(seconds, seed, (seconds - 0.2, seconds - 0.1))
    start, end = (round(at * INPUT_RATE) for at in _SILENT)
    sound[start:end] = 0
    return _scaled(sound)


def _syllables(seconds: float, seed: int, loud: tuple[float, float]) -> Samples:
    """Noise, at no other time as loud as between the two times ``loud``, by 14 dB."""
    random, count = np.random.default_rng(seed), round(seconds * INPUT_RATE)
    time_s = np.arange(count) / INPUT_RATE
    swell = 0.5 - 0.45 * np.cos(2 * np.pi * (3 + seed % 3) * time_s)
    swell[(time_s > loud[0]) & (time_s < loud[1])] = _LOUDER
    return (random.standard_normal(count) * swell).astype(np.float32)


def _scaled(sound: Samples) -> Samples:
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)


def measure_pushes(
    live: LiveTokenizer, streams: int, at_s: float, pushes: int
) -> tuple[Timed, dict[str, float]]:
    """``pushes`` of 400 ms into ``streams`` streams that have heard ``at_s`` s, after a few others.

    Nothing is repaired in them: see ``measure_repairing``. Every stream's codes must equal the
    offline ones at the end; where one stream's do not, no push is valid. Also returns how many
    pages' bytes a second of sound takes.
    """
    longest_s = at_s + PUSH_S * (pushes + _WARM_UPS)
    sounds = [sound_like_speech(longest_s, seed) for seed in range(streams)]
    states = _opened(live, sounds, at_s)
    size, runs = round(PUSH_S * INPUT_RATE), list[Run[list[Change]]]()
    for start in range(round(at_s * INPUT_RATE), len(sounds[0]) - size + 1, size):
        runs.append(_push(live, states, [sound[start : start + size] for sound in sounds]))
    held = live.pages.taken * live.pages.page_bytes / (streams * longest_s)
    fault = _push_fault(live, states, _offline(live, sounds))
    kept = runs[_WARM_UPS:]
    if any(change.repaired for run in kept for change in run.output):
        fault = fault or "a stream repaired in a push that is to have no repair"
    name = f"{streams} x 400 ms after {at_s:g} s"
    wrong = (fault,) * len(kept) if fault else ()
    times = tuple(run.ms for run in kept)
    return Timed(name, runs[0].ms, _WARM_UPS, times, wrong), {"bytes_per_s": held}


def measure_repairing(live: LiveTokenizer, streams: int, at_s: float) -> Timed:
    """Pushes of 400 ms in which one of ``streams`` streams encodes ``at_s`` seconds again.

    New streams for each of them. All codes must equal the offline ones at the end.
    """
    times, wrong = list[float](), list[str]()
    others = [sound_like_speech(at_s + PUSH_S, seed) for seed in range(1, streams)]
    expected = _offline(live, others)
    for number in range(1 + _REPAIRS):
        last = sound_to_repair(at_s + PUSH_S, number)
        sounds = [*others, last]
        states = _opened(live, sounds, at_s)
        run = _push(live, states, [sound[round(at_s * INPUT_RATE) :] for sound in sounds])
        times.append(run.ms)
        repaired = [change.repaired for change in run.output]
        fault = _push_fault(live, states, [*expected, *_offline(live, [last])])
        if number and repaired != [False] * (streams - 1) + [True]:
            fault = fault or f"{sum(repaired)} streams repaired, not the last alone"
        wrong += [fault] if fault else []
    name = f"{streams} x 400 ms after {at_s:g} s, one repairs"
    return Timed(name, times[0], 1, tuple(times[1:]), tuple(wrong))


def _opened(live: LiveTokenizer, sounds: Sequence[Samples], at_s: float) -> list[LiveCodes]:
    """Streams that have heard ``at_s`` seconds of their sound."""
    states, heard = [live.open() for _ in sounds], round(at_s * INPUT_RATE)
    if heard:
        live.push_many(states, [sound[:heard] for sound in sounds])
    return states


def _push(
    live: LiveTokenizer, states: Sequence[LiveCodes], pieces: Sequence[Samples]
) -> Run[list[Change]]:
    device = live.tokenizer.encoder.codebook.weight.device
    return run_timed(lambda: live.push_many(states, pieces), device)


def _offline(live: LiveTokenizer, sounds: Sequence[Samples]) -> list[list[int]]:
    return [live.tokenizer.encode(torch.from_numpy(sound)) for sound in sounds]


def _push_fault(live: LiveTokenizer, states: Sequence[LiveCodes], expected: list[list[int]]) -> str:
    """End the streams; what is wrong with their codes, nothing if they are the ``expected``."""
    for state in states:
        live.finish(state)
    for number, (state, whole) in enumerate(zip(states, expected, strict=True)):
        if state.codes != whole:
            differ = sum(a != b for a, b in zip(state.codes, whole, strict=False))
            return f"stream {number}: {differ} of {len(whole)} codes unlike the offline ones"
    return ""
