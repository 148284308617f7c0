"""``bench codec``: how long hops of many replies and pushes of many streams take, and their memory.

Every timed run is held to an untimed one. All in one run on one device.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosstalk.audio.sound import Samples
from mosstalk.bench.timed import Run, Timed, measure_ceilings, run_timed, timed_table
from mosstalk.codec.speech_decoder import DecodeRequest, DecoderOptions, SpeechDecoder
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.constants import CODE_MS, INPUT_RATE
from mosstalk.models.codec_folder import Codec
from mosstalk.models.flow import RecomputingFlowStream
from mosstalk.models.hift import HiftStream
from mosstalk.models.voices import Voice
from mosstalk.plan.limits import Ceilings, Work, hop_work, push_work
from mosstalk.progress import Progress
from mosstalk.reporting.tables import Table
from mosstalk.runtime.device import pick_dtype

PARTS = ("decode", "recompute", "encode", "memory")
OfSpeech = Callable[[Codec, Voice], tuple[list[Table], dict[str, dict[str, float]]]]
"""A part that needs speech, and so comes from elsewhere: tables, and curves for the document."""
_CROWD_HOPS = 12
"""Of each of several replies."""
_PUSHES = 20
_MB = 1e6
_SEED = 7
_RECOMPUTED, _BEFORE = 2, 20
"""Timed runs of a hop that is recomputed, and mel frames that its vocoder had before it."""
FIRST = "first"
PUSH_S = 0.4
_WARM_UPS = 3
_REPAIRS = 5
_LOUD, _SILENT = (0.5, 0.6), (0.3, 0.4)
"""Seconds of a sound."""
_LOUDER = 5.0


@dataclass
class CodecBench:
    """A codec and what is measured of it; then what was found.

    Attributes:
        voices: by what they are called in the tables.
        replies, streams: how many at once; ``hops`` are those of one reply alone.
        settings, tables, timed, memory, curves: for people, and for the document.
    """

    codec: Codec
    voices: dict[str, Voice]
    parts: Sequence[str]
    replies: Sequence[int]
    hops: int
    rounds: int
    streams: Sequence[int]
    options: DecoderOptions
    settings: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    timed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    curves: dict[str, dict[str, float]] = field(default_factory=dict)

    def measure(self, of_speech: Mapping[str, OfSpeech], tell: Progress) -> None:
        """All that is asked for; ``of_speech``: parts that are measured on speech, by name.

        Raises:
            BenchError: a run was not valid.
        """
        codec = self.codec
        ceilings = measure_ceilings(codec.device, self.options.flow.dtype)
        self.settings["rates"] = ceilings.describe()
        if "recompute" in self.parts:
            for name, voice in self.voices.items():
                hops = [hop for hop in (1, 2, 50, 250) if hop <= self.hops]
                rows = measure_recomputing(codec, voice, hops)
                self._add(f"The same by decoding everything anew, {name}", rows, "In float32.")
        for name, measure in of_speech.items():
            if name in self.parts:
                tables, curves = measure(codec, next(iter(self.voices.values())))
                self.tables += tables
                self.curves |= curves
        # From here on the codec itself decodes no more: its float32 weights are given back.
        decodes = {"decode", "memory"} & set(self.parts)
        decoder = self._decode(ceilings, tell) if decodes else None
        live = self._encode(tell) if "encode" in self.parts else None
        if decoder and live and codec.device.type == "cuda":
            self.memory["codec besides voices, replies and streams, MB"] = (
                _besides(decoder, live) / _MB
            )
        if self.memory:
            self.tables.append(memory_table(self.memory))

    def _add(self, title: str, rows: list[Timed], note: str) -> None:
        """A table of valid measurements."""
        self.tables.append(timed_table(title, rows, note))
        self.timed[title] = [row.figures() for row in rows]

    def _decode(self, ceilings: Ceilings, tell: Progress) -> SpeechDecoder:
        codec, chunk = self.codec, self.codec.flow.config.chunk_size
        decoder = SpeechDecoder(codec, self.options)
        decoder.release_float32()
        self._fixed_memory(decoder)
        tell("capturing graphs", 0, 1)
        before, started = _held_bytes(codec.device), time.perf_counter()
        decoder.warm()
        self.settings["warm-up"] = f"{time.perf_counter() - started:.1f} s"
        if codec.device.type == "cuda":
            graphs = _held_bytes(codec.device) - before
            self.memory["graphs of flow and vocoder, MB"] = graphs / _MB
        for name, voice in self.voices.items() if "decode" in self.parts else ():
            rows = list[Timed]()
            for replies in self.replies:
                hops = self.hops if replies == 1 else min(_CROWD_HOPS, self.hops)
                load = HopLoad.of(replies, hops)
                times = measure_crowd(decoder, voice, load, self.rounds, tell)
                limit = ceilings.limit_ms(self._hop_work(voice, replies))
                rows += [replace(row, limit_ms=limit) for row in times]
                factor = times[1].p50_ms / (replies * CODE_MS * chunk)
                self.settings[f"real-time factor, {replies} at once, {name}"] = f"{factor:.3f}"
            title = f"A hop of {chunk} codes through flow and vocoder, {name}"
            self._add(title, rows, "Of all replies, until their sound is there.")
        return decoder

    def _fixed_memory(self, decoder: SpeechDecoder) -> None:
        """What there is besides graphs, and what a second of voice and of a reply takes."""
        flow, vocoder = decoder.figures()
        pages = flow.pages * flow.page_bytes if decoder.device.type == "cuda" else 0
        self.memory |= {
            "flow weights, MB": flow.weight_bytes / _MB,
            "flow tables and buffers, MB": flow.fixed_bytes / _MB,
            "vocoder weights, MB": vocoder.weight_bytes / _MB,
            "vocoder state of a reply, MB": vocoder.state_bytes / (vocoder.slots + 1) / _MB,
            "a second of voice or own history, MB": flow.mb_per_s,
            "room for voices and replies, MB": pages / _MB,
        }
        context_s = decoder.flow.options.context_s
        if context_s is not None:
            self.memory["a reply at the context, MB"] = context_s * flow.mb_per_s

    def _hop_work(self, voice: Voice, replies: int) -> Work:
        flow, config = self.options.flow, self.codec.flow.config
        context = flow.context_blocks(config)
        own = 0 if context is None else (context - 1) * config.chunk_size * config.token_mel_ratio
        return hop_work(
            self.codec,
            flow.dtype,
            hops=replies,
            voice_frames=voice.mel.shape[0],
            own_frames=own,
            steps=flow.steps or config.n_timesteps,
        )

    def _encode(self, tell: Progress) -> LiveTokenizer:
        tokenizer = self.codec.tokenizer
        ceilings = measure_ceilings(self.codec.device, pick_dtype("float32"))
        live, rows = LiveTokenizer(tokenizer), list[Timed]()
        live.warm(max(self.streams))
        for number, streams in enumerate(self.streams):
            tell(f"{streams} streams", number, len(self.streams))
            for at_s in (0.0, 15.0):
                row, held = measure_pushes(live, streams, at_s, _PUSHES)
                limit = ceilings.limit_ms(push_work(tokenizer, 20 * streams, round(at_s * 50)))
                rows.append(replace(row, limit_ms=limit))
                self.memory["a second of live sound, MB"] = held["bytes_per_s"] / _MB
            rows.append(measure_repairing(live, streams, 15.0))
        note = "Of all streams; float32, offline codes."
        self._add("400 ms of live sound to codes", rows, note)
        return live


def _besides(decoder: SpeechDecoder, live: LiveTokenizer) -> int:
    """Memory of weights, tables, buffers and graphs."""
    flow, vocoder = decoder.figures()
    kept = flow.pages * flow.page_bytes + vocoder.state_bytes
    return _held_bytes(decoder.device) - kept - (live.pages.count + 1) * live.pages.page_bytes


def _held_bytes(device: torch.device) -> int:
    """Memory of a GPU that torch cannot give back: what tensors and graphs lie in."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def memory_table(memory: dict[str, float]) -> Table:
    """The memory that was found, in 10^6 bytes."""
    rows = tuple((name.removesuffix(", MB"), f"{value:,.1f}") for name, value in memory.items())
    return Table("Memory", "In 10^6 bytes.", ("", "MB"), rows)


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
    return _random_codes(config.vocab_size, crowd.replies, longest)


def _random_codes(entries: int, replies: int, longest: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, min(entries, 16384), (replies, longest), generator=random).tolist()


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
    longest = (max(hops, default=0) + 2) * codec.flow.config.chunk_size + 8
    (codes,), rows = _random_codes(codec.flow.config.vocab_size, 1, longest), list[Timed]()
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
