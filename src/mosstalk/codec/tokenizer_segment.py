"""What a live stream knows of the segment that it is in; keys, values and features are in pages.

Sound and the least value of each frame stay on the host, where it is decided what must be
encoded again. Shapes: F frames of 10 ms, two of them to a row.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.tokenizer_pages import Held, Pages
from mosstalk.models.features import WHISPER_HOP, WHISPER_N_FFT, WHISPER_RANGE
from mosstalk.models.speech_tokenizer import CONV_STRIDE, SpeechTokenizer

Floats = npt.NDArray[np.float32]

MIRRORED = WHISPER_N_FFT // 2
"""Samples that stand before the first one and after the last one, mirrored."""
FRAMES_BEFORE = 2 * CONV_STRIDE
"""Frames before a row's own that it reads: two convolutions, each two steps back."""


@dataclass
class LiveSegment:
    """One segment while it is heard, of ``samples`` so far.

    ``sound`` (200 + samples + 200) has room for the mirrored ends. Of the first ``frames``
    the features are in the pages ``held``; ``quietest`` (F,) is the least of each, and
    ``loudest`` the largest of all. The first ``rows`` were encoded with the floor ``floor``.
    """

    sound: Floats
    quietest: Floats
    held: Held
    samples: int = 0
    frames: int = 0
    rows: int = 0
    loudest: float = -math.inf
    floor: float = -math.inf

    @classmethod
    def of(cls, tokenizer: SpeechTokenizer, pages: Pages) -> "LiveSegment":
        """An empty segment of the tokenizer's; it holds no page yet."""
        sound = np.empty(tokenizer.segment_samples + 2 * MIRRORED, np.float32)
        frames = tokenizer.segment_samples // WHISPER_HOP
        return cls(sound, np.empty(frames, np.float32), Held(pages))

    def clear(self) -> None:
        """Begin a new segment in the same memory."""
        self.samples = self.frames = self.rows = 0
        self.loudest = self.floor = -math.inf

    @property
    def room(self) -> int:
        """Samples that the segment still takes."""
        return len(self.sound) - 2 * MIRRORED - self.samples

    @property
    def pcm(self) -> Tensor:
        """The samples heard, (samples,), on the host."""
        return torch.from_numpy(self.sound[MIRRORED : MIRRORED + self.samples])

    def write(self, sound: Floats) -> None:
        """Take samples (n,), n no more than ``room``."""
        start = MIRRORED + self.samples
        self.sound[start : start + len(sound)] = sound
        if self.samples <= MIRRORED < self.samples + len(sound):
            self.sound[:MIRRORED] = self.sound[2 * MIRRORED : MIRRORED : -1]
        self.samples += len(sound)

    def whole_frames(self) -> int:
        """Frames all of whose samples are there; the first ones read 201 from the start."""
        if self.samples <= MIRRORED:
            return 0
        return (self.samples - MIRRORED) // WHISPER_HOP + 1

    def close(self, samples_per_code: int) -> int:
        """Pad with silence to whole codes and mirror the end; return all frames there are.

        ``samples`` stays what was heard.
        """
        padded = -(-self.samples // samples_per_code) * samples_per_code
        self.sound[MIRRORED + self.samples : MIRRORED + padded] = 0
        end = MIRRORED + padded
        self.sound[end : end + MIRRORED] = self.sound[padded - 1 : end - 1][::-1]
        if self.samples <= MIRRORED:
            self.sound[:MIRRORED] = self.sound[2 * MIRRORED : MIRRORED : -1]
        return padded // WHISPER_HOP

    def windows(self, start: int, end: int) -> Floats:
        """Samples (n, 400) that the frames from ``start`` to before ``end`` read, a view."""
        read = self.sound[start * WHISPER_HOP : (end - 1) * WHISPER_HOP + WHISPER_N_FFT]
        return np.lib.stride_tricks.sliding_window_view(read, WHISPER_N_FFT)[::WHISPER_HOP]

    def put(self, quietest: Floats, loudest: float) -> None:
        """Note the least values (n,) of the next frames and the largest of them all."""
        start, self.frames = self.frames, self.frames + len(quietest)
        self.quietest[start : self.frames] = quietest
        self.loudest = max(self.loudest, loudest)

    def first_row_changed_by(self, floor: float) -> int:
        """The first row that another floor than ``self.floor`` changes, or ``rows``: none."""
        if floor == self.floor or self.rows == 0:
            return self.rows
        read = self.quietest[: self.rows * CONV_STRIDE - 1]
        changed = read < max(floor, self.floor)
        first = int(changed.argmax())
        return -(-first // CONV_STRIDE) if changed[first] else self.rows


def floor_below(loudest: float) -> float:
    """Where the floor lies, in float32, of sound whose loudest value is ``loudest``."""
    return float(np.float32(loudest) - np.float32(WHISPER_RANGE))
