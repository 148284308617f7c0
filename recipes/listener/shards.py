"""What Kokoro reads, as the shards that the pocket recipe learns from.

One voice is the teacher's, whose sound is kept at 24 kHz too; all others and their blends are
listened to. How long each symbol was spoken tells the phones, which no aligner has to find.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from mosstalk.constants import INPUT_RATE
from recipes.listener.kokoro import FRAME_SAMPLES, MOST_SYMBOLS, RATE, Clip, Kokoro
from recipes.listener.segments import drawn_stretch
from recipes.listener.speak import Reader, Reading, reader_of, spoken, style_of
from recipes.listener.texts import ANSWER_KIND, TEACHER_KIND, Line, is_spelled
from recipes.pocket.data import write_shard
from recipes.pocket.voices import KOKORO, TEACHER, after_silence
from recipes.pocket.voices import Clip as Read

_SHARD_CLIPS = 400
_LONGEST_S = 26.0
_SILENT = 300
_ANSWER_SPEEDS, _SPELLED_SPEEDS = (0.94, 1.06), (0.7, 0.85)
_FRAME_S = FRAME_SAMPLES / RATE
_PHONES = (
    "a/aa \u0251/aa \u0252/aa æ/ae ʌ/ah ɐ/ax ə/ax ɚ/axr ɜ/er ɝ/er ɔ/ao o/ow ʊ/uh u/uw i/iy "
    "\u026a/ih ᵻ/ih e/ey ɛ/eh b/b d/d ð/dh f/f \u0261/g g/g h/hh j/y k/k l/l m/m n/n ŋ/ng p/p ɹ/r "
    "r/r s/s ʃ/sh t/t θ/th v/v w/w z/z ʒ/zh ɾ/dx \u0294/t"
)
_PHONE_OF = dict(pair.split("/") for pair in _PHONES.split()) | dict.fromkeys(",.?!;:", "pau")
"""Radio phones of symbols; a diphthong's two halves have one each. Others are of no known phone."""
_LONG = "\u02d0"


def phones_of(symbols: str, frames: Sequence[int]) -> tuple[tuple[str, float], ...]:
    """Phones with their end in seconds; "" where none is known.

    ``frames`` of 25 ms are those of the pad before, of each symbol, and of the pad after.
    """
    names = ["pau"]
    for symbol in symbols:
        # A vowel's mark of length is the vowel still.
        names.append(names[-1] if symbol == _LONG else _PHONE_OF.get(symbol, ""))
    ends = np.cumsum(frames) * _FRAME_S
    return tuple(zip([*names, "pau"], ends.tolist(), strict=True))


def readers(
    lines: list[Line], voices: list[str], seed: int, part: int, parts: int
) -> Iterator[tuple[int, Reader]]:
    """Every ``parts``-th line's number and who reads it, in an order that the seed draws.

    Two answers come before each other line until all are read: whoever runs out of time lacks
    general texts, not answers. The teacher reads them a little faster or slower, and spells slowly.
    """
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    for number in _answers_first(order[part::parts], lines):
        if lines[number].kind == ANSWER_KIND:
            speeds = _SPELLED_SPEEDS if is_spelled(lines[number].text) else _ANSWER_SPEEDS
            speed = random.Random(f"{seed}/{number}").uniform(*speeds)
            yield number, Reader(TEACHER, "", 0.0, speed)
        elif lines[number].kind == TEACHER_KIND:
            yield number, Reader(TEACHER, "", 0.0, 1.0)
        else:
            yield number, reader_of(number, lines[number], voices, seed)


def _answers_first(order: list[int], lines: list[Line]) -> Iterator[int]:
    others = iter([number for number in order if lines[number].kind != ANSWER_KIND])
    answers = [number for number in order if lines[number].kind == ANSWER_KIND]
    for place, number in enumerate(answers):
        yield number
        if place % 2:
            yield from islice(others, 1)
    yield from others


def make_shards(
    kokoro: Kokoro,
    vocabulary: dict[str, int],
    styles: dict[str, Tensor],
    lines: list[Line],
    folder: Path,
    *,
    part: int,
    parts: int,
    seed: int,
    seconds: float,
) -> float:
    """Read every ``parts``-th line until ``seconds`` are over; return the hours of sound."""
    folder.mkdir(parents=True, exist_ok=True)
    began, samples = time.monotonic(), 0
    clips, known = list[tuple[int, Clip]](), dict[int, str]()
    for number, reader in readers(lines, sorted(styles), seed, part, parts):
        known[number] = "".join(s for s in lines[number].sounds if s in vocabulary)
        if 3 <= len(known[number]) <= MOST_SYMBOLS:
            symbols = [vocabulary[symbol] for symbol in known[number]]
            clip = Clip(symbols, style_of(reader, styles, len(symbols)), reader.speed)
            clips.append((number, clip))
    waiting: dict[str, list[Read]] = {TEACHER: [], KOKORO: []}
    count = 0
    for number, reading in spoken(kokoro, clips):
        line = lines[number]
        voice = TEACHER if line.kind in (TEACHER_KIND, ANSWER_KIND) else KOKORO
        if _went_well(reading):
            read = Read(
                line.text,
                voice,
                reading.heard,
                reading.spoken if voice == TEACHER else None,
                phones_of(known[number], reading.frames.tolist()),
            )
            if voice != TEACHER:
                draw = random.Random(f"{seed}/{number}/silence")
                read = after_silence(stretched(read, seed, number), draw)
            waiting[voice].append(read)
            samples += len(reading.heard)
        if len(waiting[voice]) == _SHARD_CLIPS:
            write_shard(folder / f"{part:02}-{voice}-{count:05}", waiting[voice])
            waiting[voice], count = [], count + 1
            hours, took = samples / INPUT_RATE / 3600, time.monotonic() - began
            print(f"read {part}: {count} shards, {hours:.2f} h in {took:.0f} s", flush=True)
        if time.monotonic() - began > seconds:
            break
    for voice, rest in waiting.items():
        if rest:
            write_shard(folder / f"{part:02}-{voice}-{count:05}", rest)
            count += 1
    return samples / INPUT_RATE / 3600


def stretched(clip: Read, seed: int, number: int) -> Read:
    """The clip faster, slower or as it is, by the line's number; its phones move along."""
    factor = drawn_stretch(random.Random(f"{seed}/{number}/throat"))
    if factor == 1.0:
        return clip
    places = np.arange(0, len(clip.heard) - 1, factor)
    heard = np.interp(places, np.arange(len(clip.heard)), clip.heard).astype(np.int16)
    phones = tuple((name, end / factor) for name, end in clip.phones)
    return replace(clip, heard=heard, phones=phones)


def _went_well(reading: Reading) -> bool:
    loud = bool(np.abs(reading.heard).max() > _SILENT)
    return loud and len(reading.heard) <= _LONGEST_S * INPUT_RATE
