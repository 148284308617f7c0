"""Segments of 30 s to learn from: clips one after another, their text, where speech is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE
from recipes.listener.whisper import END, NO_TIMES, START

SEGMENT = 30 * INPUT_RATE
CODES = SEGMENT // INPUT_SAMPLES_PER_CODE
_STRETCH = (0.88, 1.14)
"""Sound is played faster or slower by this at most."""
_STRETCHED_SHARE = 0.5
_ALONE_SHARE = 0.35
_MOST_TEXT = 200


@dataclass(frozen=True)
class Clips:
    """All clips on one device: ``sound`` int16 (n,); lists by clip; ``styles`` (clips, 256)."""

    sound: Tensor
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    lines: NDArray[np.int64]
    styles: Tensor

    @property
    def hours(self) -> float:
        """Hours of sound."""
        return float(self.lengths.sum()) / INPUT_RATE / 3600


def load_clips(folder: Path, device: torch.device) -> Clips:
    """What the ``speak`` stage left in ``folder``; FileNotFoundError where there is nothing."""
    paths = sorted(folder.glob("table-*.npz"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no table-PART.npz; run the stage speak first")
    tables = [np.load(path) for path in paths]
    sounds = [np.load(folder / f"sound-{path.stem.split('-')[1]}.npy", "r") for path in paths]
    sound = torch.empty(sum(len(part) for part in sounds), dtype=torch.int16, device=device)
    ends = np.cumsum([len(part) for part in sounds])
    for part, end in zip(sounds, ends, strict=True):
        sound[end - len(part) : end] = torch.from_numpy(np.array(part)).to(device)
    offsets = ends - [len(part) for part in sounds]
    starts = [table["starts"] + offset for table, offset in zip(tables, offsets, strict=True)]
    styles = np.concatenate([table["styles"] for table in tables])
    return Clips(
        sound,
        np.concatenate(starts),
        np.concatenate([table["lengths"] for table in tables]),
        np.concatenate([table["lines"] for table in tables]),
        torch.from_numpy(styles).float().to(device),
    )


@dataclass(frozen=True)
class Segments:
    """A batch: clean sound (B, 480000); tokens (B, N) with ``targets`` (-100 where none);
    ``speech`` (B, 375) bool; ``clip`` (B, 375) the clip spoken, -1 where none or its pitch was
    changed."""

    clean: Tensor
    tokens: Tensor
    targets: Tensor
    speech: Tensor
    clip: Tensor


class Maker:
    """Draws segments from ``clips`` that are in ``chosen``; ``tokens`` are each clip's text."""

    def __init__(
        self, clips: Clips, chosen: Sequence[int], tokens: dict[int, list[int]], seed: int
    ) -> None:
        self._clips, self._chosen, self._tokens = clips, list(chosen), tokens
        self._draw = random.Random(seed)

    def batch(self, rows: int) -> Segments:
        """``rows`` segments."""
        device = self._clips.sound.device
        packed = torch.zeros(rows, SEGMENT, device=device)
        stretch, plans, texts = [], [], []
        for row in range(rows):
            factor = drawn_stretch(self._draw)
            plan, text = self._plan(int(SEGMENT * min(1.0, factor)))
            for clip, begin in plan:
                start, length = self._clips.starts[clip], self._clips.lengths[clip]
                packed[row, begin : begin + length] = self._clips.sound[start : start + length]
            stretch.append(factor)
            plans.append(plan)
            texts.append(text)
        clean = _stretched(packed / 32768, torch.tensor(stretch, device=device))
        speech, spoken = self._places(plans, stretch)
        tokens, targets = _padded(texts)
        return Segments(
            clean, tokens.to(device), targets.to(device), speech.to(device), spoken.to(device)
        )

    def _plan(self, room: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Clips with their first samples, and the tokens of all."""
        draw, plan, text = self._draw, list[tuple[int, int]](), list[int]()
        place = int(draw.uniform(0, 0.6) * INPUT_RATE)
        full = room * draw.uniform(0.2, 1.0)
        while True:
            clip = draw.choice(self._chosen)
            length = int(self._clips.lengths[clip])
            fits = place + length <= room and len(text) + len(self._tokens[clip]) <= _MOST_TEXT
            if not fits and plan:
                return plan, text
            if fits:
                plan.append((clip, place))
                text += self._tokens[clip]
                place += length + int(draw.uniform(0, 0.5) * INPUT_RATE)
                alone = len(plan) == 1 and draw.random() < _ALONE_SHARE
                if alone or place > full:
                    return plan, text

    def _places(
        self, plans: list[list[tuple[int, int]]], stretch: list[float]
    ) -> tuple[Tensor, Tensor]:
        speech = torch.zeros(len(plans), CODES, dtype=torch.bool)
        clips = torch.full((len(plans), CODES), -1)
        for row, (plan, factor) in enumerate(zip(plans, stretch, strict=True)):
            for clip, begin in plan:
                end = begin + int(self._clips.lengths[clip])
                first = int(begin / factor) // INPUT_SAMPLES_PER_CODE
                last = int(end / factor) // INPUT_SAMPLES_PER_CODE + 4
                speech[row, first:last] = True
                if factor == 1.0:
                    clips[row, first:last] = clip
        return speech, clips


def drawn_stretch(draw: random.Random) -> float:
    """How many times as fast a clip is played: other pitches, other throats; 1 for half of them."""
    return draw.uniform(*_STRETCH) if draw.random() < _STRETCHED_SHARE else 1.0


def _stretched(sound: Tensor, factor: Tensor) -> Tensor:
    """Each row (B, n) played ``factor`` (B,) times as fast, by linear interpolation."""
    place = torch.arange(sound.shape[1], device=sound.device) * factor[:, None].double()
    left = place.floor().long().clamp_max(sound.shape[1] - 2)
    share = (place - left).clamp(0, 1).float()
    inside = place <= sound.shape[1] - 1
    value = sound.gather(1, left).lerp(sound.gather(1, left + 1), share)
    return torch.where(inside, value, 0.0)


def _padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts)) + 2
    tokens = torch.full((len(texts), longest), END)
    targets = torch.full((len(texts), longest), -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text) + 2] = torch.tensor([START, NO_TIMES, *text])
        targets[row, 1 : len(text) + 2] = torch.tensor([*text, END])
    return tokens, targets


def alone(clips: Clips, chosen: Sequence[int]) -> Tensor:
    """Each clip as a segment of its own, half a second in: (B, 480000) float."""
    sound = torch.zeros(len(chosen), SEGMENT, device=clips.sound.device)
    begin = INPUT_RATE // 2
    for row, clip in enumerate(chosen):
        start, length = clips.starts[clip], clips.lengths[clip]
        sound[row, begin : begin + length] = clips.sound[start : start + length] / 32768
    return sound
