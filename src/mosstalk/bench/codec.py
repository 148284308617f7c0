"""``bench codec``: what is measured, in one run on one device, and the tables it makes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mosstalk.bench.codec_runs import (
    HopLoad,
    measure_crowd,
    measure_pushes,
    measure_recomputing,
    measure_repairing,
)
from mosstalk.bench.timed import Timed, measure_ceilings, timed_table
from mosstalk.codec.speech_decoder import DecoderOptions, SpeechDecoder
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.constants import CODE_MS, CODES_PER_SECOND
from mosstalk.models.codec_folder import Codec
from mosstalk.models.voices import Voice
from mosstalk.plan.limits import Ceilings, hop_work, push_work
from mosstalk.progress import Progress
from mosstalk.reporting.tables import Table
from mosstalk.runtime.device import pick_dtype

PARTS = ("decode", "recompute", "encode", "memory")
OfSpeech = Callable[[Codec, Voice], tuple[list[Table], dict[str, dict[str, float]]]]
"""A part that needs speech, and so comes from elsewhere: tables, and curves for the document."""
_MB = 1e6


@dataclass(frozen=True)
class Asked:
    """What to measure: ``replies`` and ``streams`` at once, the ``hops`` of one reply alone,
    ``crowd_hops`` of several, and how often.
    """

    parts: Sequence[str] = PARTS
    replies: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)
    hops: int = 250
    crowd_hops: int = 12
    rounds: int = 3
    streams: Sequence[int] = (1, 8, 64)
    pushes: int = 20
    options: DecoderOptions = field(default_factory=DecoderOptions)


@dataclass
class CodecSpeed:
    """What was found."""

    settings: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    timed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    curves: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, title: str, rows: list[Timed], note: str = "") -> None:
        """A table of valid measurements.

        Raises:
            BenchError: one is not.
        """
        self.tables.append(timed_table(title, rows, note))
        self.timed[title] = [row.figures() for row in rows]


def measure_codec(
    codec: Codec,
    voices: dict[str, Voice],
    asked: Asked,
    tell: Progress,
    of_speech: Mapping[str, OfSpeech],
) -> CodecSpeed:
    """All that is asked for. ``voices`` by what they are called in the tables.

    ``of_speech``: parts that are measured on speech, by name.

    Raises:
        BenchError: a run was not valid.
    """
    found = CodecSpeed()
    dtype = asked.options.flow.dtype
    ceilings = measure_ceilings(codec.device, dtype)
    found.settings["rates"] = ceilings.describe()
    decodes, live = bool({"decode", "memory"} & set(asked.parts)), None
    if "recompute" in asked.parts:
        for name, voice in voices.items():
            hops = [hop for hop in (1, 2, 50, 250) if hop <= asked.hops]
            rows = measure_recomputing(codec, voice, hops)
            found.add(f"The same by decoding everything anew, {name}", rows, "In float32.")
    for name, measure in of_speech.items():
        if name in asked.parts:
            tables, curves = measure(codec, next(iter(voices.values())))
            found.tables += tables
            found.curves |= curves
    # From here on the codec itself decodes no more: its float32 weights are given back.
    decoder = _decoding(codec, voices, asked, ceilings, found, tell) if decodes else None
    if "encode" in asked.parts:
        live = _encoding(codec, asked, found, tell)
    if decoder and live and codec.device.type == "cuda":
        found.memory["codec besides voices, replies and streams, MB"] = (
            _besides(decoder, live) / _MB
        )
    return found


def _besides(decoder: SpeechDecoder, live: LiveTokenizer) -> int:
    """Memory of weights, tables, rooms and graphs."""
    flow, vocoder = decoder.figures()
    kept = flow.pages * flow.page_bytes + vocoder.state_bytes
    return _held_bytes(decoder.device) - kept - (live.pages.count + 1) * live.pages.page_bytes


def _decoding(
    codec: Codec,
    voices: dict[str, Voice],
    asked: Asked,
    ceilings: Ceilings,
    found: CodecSpeed,
    tell: Progress,
) -> SpeechDecoder:
    decoder = SpeechDecoder(codec, asked.options)
    decoder.release_float32()
    _fixed_memory(decoder, found)
    tell("capturing graphs", 0, 1)
    before, started = _held_bytes(codec.device), time.perf_counter()
    decoder.warm()
    found.settings["warm-up"] = f"{time.perf_counter() - started:.1f} s"
    if codec.device.type == "cuda":
        found.memory["graphs of flow and vocoder, MB"] = (_held_bytes(codec.device) - before) / _MB
    if "decode" not in asked.parts:
        return decoder
    hop_ms = CODE_MS * codec.flow.config.chunk_size
    for name, voice in voices.items():
        rows = list[Timed]()
        for replies in asked.replies:
            hops = asked.hops if replies == 1 else asked.crowd_hops
            times = measure_crowd(decoder, voice, HopLoad.of(replies, hops), asked.rounds, tell)
            limit = _hop_limit(codec, voice, replies, asked, ceilings)
            rows += [replace(row, limit_ms=limit) for row in times]
            factor = times[1].p50_ms / (replies * hop_ms)
            found.settings[f"real-time factor, {replies} at once, {name}"] = f"{factor:.3f}"
        found.add(
            f"A hop of {codec.flow.config.chunk_size} codes through flow and vocoder, {name}",
            rows,
            "Of all replies, until their sound is there.",
        )
    return decoder


def _fixed_memory(decoder: SpeechDecoder, found: CodecSpeed) -> None:
    """What there is besides graphs, and what a second of voice and of a reply takes."""
    flow, vocoder = decoder.figures()
    pages = flow.pages * flow.page_bytes if decoder.device.type == "cuda" else 0
    found.memory |= {
        "flow weights, MB": flow.weight_bytes / _MB,
        "flow tables and rooms, MB": flow.fixed_bytes / _MB,
        "vocoder weights, MB": vocoder.weight_bytes / _MB,
        "vocoder state of a reply, MB": vocoder.state_bytes / (vocoder.slots + 1) / _MB,
        "a second of voice or own history, MB": flow.mb_per_s,
        "room for voices and replies, MB": pages / _MB,
    }
    context_s = decoder.flow.options.context_s
    if context_s is not None:
        found.memory["a reply at the context, MB"] = context_s * flow.mb_per_s


def _hop_limit(codec: Codec, voice: Voice, replies: int, asked: Asked, ceilings: Ceilings) -> float:
    flow, config = asked.options.flow, codec.flow.config
    context = flow.context_blocks(config)
    own = 0 if context is None else (context - 1) * config.chunk_size * config.token_mel_ratio
    work = hop_work(
        codec,
        flow.dtype,
        hops=replies,
        voice_frames=voice.mel.shape[0],
        own_frames=own,
        steps=flow.steps or config.n_timesteps,
    )
    return ceilings.limit_ms(work)


def _encoding(codec: Codec, asked: Asked, found: CodecSpeed, tell: Progress) -> LiveTokenizer:
    ceilings = measure_ceilings(codec.device, pick_dtype("float32"))
    live, rows = LiveTokenizer(codec.tokenizer), list[Timed]()
    live.warm(max(asked.streams))
    for number, streams in enumerate(asked.streams):
        tell(f"{streams} streams", number, len(asked.streams))
        for at_s in (0.0, 15.0):
            row, held = measure_pushes(live, streams, at_s, asked.pushes)
            work = push_work(codec.tokenizer, 20 * streams, round(at_s * 50))
            limit = ceilings.limit_ms(work)
            rows.append(replace(row, limit_ms=limit))
            found.memory["a second of live sound, MB"] = held["bytes_per_s"] / _MB
        rows.append(measure_repairing(live, streams, 15.0))
    found.add("400 ms of live sound to codes", rows, "Of all streams; float32, offline codes.")
    return live


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


def seconds_of(voice: Voice) -> float:
    """Length of a voice."""
    return len(voice.codes) / CODES_PER_SECOND
