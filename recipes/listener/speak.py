"""Kokoro reads the lines: many voices, blends of two, several speeds; sound at 16 kHz.

The seed and the line's number decide who reads and how, so that sound can be made again.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evals.kokoro_voices import HELD_OUT
from mosstalk.constants import INPUT_RATE
from recipes.listener.kokoro import FRAME_SAMPLES, MOST_SYMBOLS, RATE, Clip, Kokoro
from recipes.listener.texts import Line

_ALONE = 0.4
"""Share of the clips in one voice; the others are blends of two."""
_FOREIGN_SHARE = 0.35
"""Of the blends, how many have a voice of another language as their second."""
_BATCH_SECONDS = 250.0
"""Three processes with batches of 400 s filled a card of 80 GB."""
_LOOKED_OVER = 4096
_LENGTHS = 64
_LONGEST_S = 26.0
_SILENT = 300
"""A clip whose loudest sample is below this went wrong."""


@dataclass(frozen=True)
class Reader:
    """Who reads one line: a voice, a second and its share, a speed."""

    voice: str
    other: str
    share: float
    speed: float


def reader_of(number: int, line: Line, voices: list[str], seed: int) -> Reader:
    """The reader of a line, drawn by its number."""
    draw = random.Random(f"{seed}/{number}")
    if line.kind == "bench":
        own = [voice for voice in HELD_OUT if voice[0] == line.accent]
        return Reader(draw.choice(own), "", 0.0, 1.0)
    known = [voice for voice in voices if voice not in HELD_OUT]
    own = [voice for voice in known if voice[0] == line.accent]
    voice, speed = draw.choice(own), draw.uniform(0.8, 1.25)
    if draw.random() < _ALONE:
        return Reader(voice, "", 0.0, speed)
    foreign = [voice for voice in known if voice[0] not in "ab"]
    english = [voice for voice in known if voice[0] in "ab"]
    if foreign and draw.random() < _FOREIGN_SHARE:
        return Reader(voice, draw.choice(foreign), draw.uniform(0.15, 0.5), speed)
    return Reader(voice, draw.choice(english), draw.uniform(0.2, 0.6), speed)


def style_of(reader: Reader, styles: dict[str, Tensor], symbols: int) -> Tensor:
    """The style (256,) of a reader for a clip of so many symbols."""
    row = min(symbols, MOST_SYMBOLS) - 1
    own = styles[reader.voice]
    style = own[row * len(own) // MOST_SYMBOLS].float()
    if reader.other:
        other = styles[reader.other]
        style = style.lerp(other[row * len(other) // MOST_SYMBOLS].float(), reader.share)
    return style


def heard_at_16k(sound: Tensor) -> Tensor:
    """Sound (B, n) at 24 kHz, n a multiple of 3, as int16 at 16 kHz."""
    size = sound.shape[1] * INPUT_RATE // RATE
    spectrum = torch.fft.rfft(sound)[:, : size // 2 + 1]
    return as_int16(torch.fft.irfft(spectrum, size) * (size / sound.shape[1]))


def as_int16(sound: Tensor) -> Tensor:
    """Floats of at most 1 in int16."""
    return (sound.clamp(-1, 1) * 32767).round().to(torch.int16)


def batches(clips: list[tuple[int, Clip]]) -> Iterator[list[tuple[int, Clip]]]:
    """Clips of like number of symbols in groups, some thousands looked over at a time."""
    for start in range(0, len(clips), _LOOKED_OVER):
        some = sorted(clips[start : start + _LOOKED_OVER], key=lambda item: len(item[1].symbols))
        while some:
            # About 14 symbols a second, at the speed it is read.
            seconds = len(some[-1][1].symbols) / 14 / 0.8
            count = max(1, int(_BATCH_SECONDS / seconds))
            yield some[-count:]
            del some[-count:]


class Reading(NamedTuple):
    """How a clip was read: sound in int16 at 16 and at 24 kHz, and each symbol's frames of 25 ms.

    Of the symbols the first and the last are pads.
    """

    heard: NDArray[np.int16]
    spoken: NDArray[np.int16]
    frames: NDArray[np.int64]


@torch.inference_mode()
def spoken(kokoro: Kokoro, clips: list[tuple[int, Clip]]) -> Iterator[tuple[int, Reading]]:
    """(number, reading) of all clips; those of like duration are made together."""
    for group in batches(clips):
        frames, prosody, text = kokoro.durations([clip for _, clip in group])
        styles = torch.stack([clip.style for _, clip in group]).to(frames.device)
        sums = frames.sum(1).cpu()
        order = sums.argsort()
        for rows in order.split(_LENGTHS):
            longest = int(sums[rows].max())
            rows_there = rows.to(frames.device)
            padded = frames[rows_there]
            last = (padded > 0).sum(1, keepdim=True) - 1
            padded = padded.scatter_add(1, last, (longest - sums[rows][:, None]).to(frames.device))
            made = kokoro.sound(padded, prosody[rows_there], text[rows_there], styles[rows_there])
            heard, own = heard_at_16k(made).cpu().numpy(), as_int16(made).cpu().numpy()
            for row, place in enumerate(rows.tolist()):
                samples, clip = int(sums[place]) * FRAME_SAMPLES, group[place][1]
                yield (
                    group[place][0],
                    Reading(
                        heard[row, : samples * INPUT_RATE // RATE].copy(),
                        own[row, :samples].copy(),
                        frames[place, : len(clip.symbols) + 2].cpu().numpy(),
                    ),
                )


def speak_all(
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
    most: int,
) -> float:
    """Read every ``parts``-th line until ``seconds`` are over; return the hours of sound.

    Leaves ``sound-PART.npy`` int16 and ``table-PART.npz``: ``lines``, ``starts``, ``lengths`` in
    samples, ``styles`` (n, 256) float16.
    """
    began = time.monotonic()
    voices, clips = sorted(styles), []
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda number: lines[number].kind != "bench")
    for number in order[part::parts][:most]:
        symbols = [vocabulary[s] for s in lines[number].sounds if s in vocabulary]
        if 3 <= len(symbols) <= MOST_SYMBOLS:
            reader = reader_of(number, lines[number], voices, seed)
            clip = Clip(symbols, style_of(reader, styles, len(symbols)), reader.speed)
            clips.append((number, clip))
    made: dict[int, NDArray[np.int16]] = {}
    samples = 0
    for number, (sound, _, _) in spoken(kokoro, clips):
        if len(sound) <= _LONGEST_S * INPUT_RATE and np.abs(sound).max() > _SILENT:
            made[number] = sound
            samples += len(sound)
        if len(made) % 4096 == 0:
            took = time.monotonic() - began
            hours = samples / INPUT_RATE / 3600
            print(f"speak {part}: {len(made)} clips, {hours:.2f} h in {took:.0f} s", flush=True)
        if time.monotonic() - began > seconds:
            break
    _write(folder, part, made, {number: clip.style for number, clip in clips})
    return samples / INPUT_RATE / 3600


def _write(
    folder: Path, part: int, made: dict[int, NDArray[np.int16]], styles: dict[int, Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(sound) for sound in made.values()], dtype=np.int64)
    np.save(folder / f"sound-{part}.npy", np.concatenate(list(made.values())))
    np.savez(
        folder / f"table-{part}.npz",
        lines=np.array(list(made), dtype=np.int64),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        styles=torch.stack([styles[number] for number in made]).half().numpy(),
    )
