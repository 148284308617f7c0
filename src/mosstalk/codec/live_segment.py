"""What a live stream keeps of the segment that it is in: sound, features, keys and values.

Everything has the size of a whole segment from the start and is written in place. Shapes: F
frames of 10 ms, R rows of 20 ms, L layers, H heads, d channels of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.features import WHISPER_HOP, WHISPER_N_FFT, WHISPER_RANGE, WhisperBands
from mosstalk.codec.speech_tokenizer import CONV_STRIDE, SpeechTokenizer

MIRRORED = WHISPER_N_FFT // 2
"""Samples that stand before the first one and after the last one, mirrored."""
FRAMES_BEFORE = 2 * CONV_STRIDE
"""Frames before a row's own that it reads: two convolutions, each two steps back."""


@dataclass
class LiveSegment:
    """One segment while it is heard, of ``samples`` so far.

    ``sound`` (200 + samples + 200) has room for the mirrored ends. The first ``frames`` of
    ``log_mel`` (4 + F, bins) are whole, before any floor and after the 4 frames that the first
    row's convolutions read; ``quietest`` (F,), on the host, is the least of each, and
    ``loudest`` the largest of all. The first ``rows`` of ``keys`` (L, 2, H, R, d) were encoded
    with the floor ``floor``.
    """

    sound: Tensor
    log_mel: Tensor
    quietest: npt.NDArray[np.float32]
    keys: Tensor
    samples: int = 0
    frames: int = 0
    rows: int = 0
    loudest: float = -math.inf
    floor: float = -math.inf

    @classmethod
    def of(cls, tokenizer: SpeechTokenizer) -> "LiveSegment":
        """An empty segment of the tokenizer's, where its weights are.

        In the published sizes keys and values are 245 MB in float32, in the pocket codec's 9.
        """
        config, weight = tokenizer.config, tokenizer.encoder.codebook.weight
        rows, heads = config.max_source_positions, config.encoder_attention_heads
        frames = rows * CONV_STRIDE
        keys = (config.quantize_position, 2, heads, rows, config.d_model // heads)
        sound = torch.empty(tokenizer.segment_samples + 2 * MIRRORED, device=weight.device)
        log_mel = sound.new_empty(FRAMES_BEFORE + frames, config.num_mel_bins)
        log_mel[:FRAMES_BEFORE] = 0
        return cls(sound, log_mel, np.empty(frames, np.float32), weight.new_empty(keys))

    def clear(self) -> None:
        """Begin a new segment in the same memory."""
        self.samples = self.frames = self.rows = 0
        self.loudest = self.floor = -math.inf

    @property
    def room(self) -> int:
        """Samples that the segment still takes."""
        return self.sound.shape[0] - 2 * MIRRORED - self.samples

    @property
    def pcm(self) -> Tensor:
        """The samples heard, (samples,)."""
        return self.sound[MIRRORED : MIRRORED + self.samples]

    def write(self, sound: Tensor) -> None:
        """Take samples (n,), n no more than ``room``."""
        start = MIRRORED + self.samples
        self.sound[start : start + sound.shape[0]] = sound
        self.samples += sound.shape[0]

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
        self.sound[end : end + MIRRORED] = self.sound[padded - 1 : end - 1].flip(0)
        return padded // WHISPER_HOP

    def windows(self, frames: int) -> Tensor:
        """Samples (n, 400) of the frames that are new when there are to be ``frames``."""
        if self.frames == 0:
            self.sound[:MIRRORED] = self.sound[MIRRORED + 1 : 2 * MIRRORED + 1].flip(0)
        end = (frames - 1) * WHISPER_HOP + WHISPER_N_FFT
        return self.sound[self.frames * WHISPER_HOP : end].unfold(0, WHISPER_N_FFT, WHISPER_HOP)

    def put(self, log_mel: Tensor, ends: npt.NDArray[np.float32]) -> None:
        """Keep new frames (n, bins) and their least and largest values ``ends`` (2, n)."""
        start, self.frames = self.frames, self.frames + log_mel.shape[0]
        self.log_mel[FRAMES_BEFORE + start : FRAMES_BEFORE + self.frames] = log_mel
        self.quietest[start : self.frames] = ends[0]
        self.loudest = max(self.loudest, float(ends[1].max()))

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


def hear(segments: Sequence[LiveSegment], frames: Sequence[int], bands: WhisperBands) -> None:
    """Compute the features of each segment up to its number of ``frames``, all in one batch.

    Every segment must have a frame that is new.
    """
    windows = [segment.windows(end) for segment, end in zip(segments, frames, strict=True)]
    log_mel = bands.logs(torch.fft.rfft(torch.cat(windows) * bands.window).T).T
    ends = torch.stack(torch.aminmax(log_mel, dim=1)).cpu().numpy()
    at = 0
    for segment, window in zip(segments, windows, strict=True):
        end = at + window.shape[0]
        segment.put(log_mel[at:end], ends[:, at:end])
        at = end
