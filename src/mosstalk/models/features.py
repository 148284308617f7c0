"""Log-mel features of the two halves of the codec, in torch."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.constants import INPUT_RATE, MEL_FRAME_SAMPLES, OUTPUT_RATE

WHISPER_N_FFT = 400
WHISPER_HOP = 160
"""Samples at 16 kHz between two frames of the speech tokenizer's features (10 ms)."""
_WHISPER_FLOOR = 1e-10
WHISPER_RANGE = 8.0
"""Decades of power below a segment's loudest band in a frame where its floor lies."""

_VOCODER_FLOOR = 1e-5
_VOCODER_MAGNITUDE_FLOOR = 1e-9


@dataclass(frozen=True)
class MelSpec:
    """Settings of a vocoder-style mel: natural log of magnitudes, not centred."""

    rate: int
    n_fft: int
    hop: int
    bins: int
    low_hz: float
    high_hz: float


FLOW_MEL = MelSpec(OUTPUT_RATE, 1920, MEL_FRAME_SAMPLES, 80, 0.0, 8000.0)
"""The mel of voice prompts and of what the flow decoder makes."""

_SLANEY_LINEAR_HZ = 200.0 / 3
_SLANEY_BREAK_HZ = 1000.0
_SLANEY_LOG_STEP = math.log(6.4) / 27


def _hz_to_mel(hz: Tensor) -> Tensor:
    """Slaney's scale (Auditory Toolbox, 1998): linear to 1 kHz, logarithmic above."""
    linear = hz / _SLANEY_LINEAR_HZ
    above = torch.log(hz.clamp_min(_SLANEY_BREAK_HZ) / _SLANEY_BREAK_HZ) / _SLANEY_LOG_STEP
    return torch.where(hz < _SLANEY_BREAK_HZ, linear, _SLANEY_BREAK_HZ / _SLANEY_LINEAR_HZ + above)


def _mel_to_hz(mel: Tensor) -> Tensor:
    linear = mel * _SLANEY_LINEAR_HZ
    above = mel - _SLANEY_BREAK_HZ / _SLANEY_LINEAR_HZ
    return torch.where(above < 0, linear, _SLANEY_BREAK_HZ * torch.exp(_SLANEY_LOG_STEP * above))


@lru_cache(maxsize=8)
def mel_filters(rate: int, n_fft: int, bins: int, low_hz: float, high_hz: float) -> Tensor:
    """Triangular Slaney filters of equal area, (bins, n_fft // 2 + 1), computed in float64."""
    frequencies = torch.linspace(0, rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    ends = _hz_to_mel(torch.tensor([low_hz, high_hz], dtype=torch.float64))
    edges = _mel_to_hz(ends[0] + (ends[1] - ends[0]) * torch.arange(bins + 2) / (bins + 1))
    width = edges.diff()
    ramps = edges[:, None] - frequencies[None, :]
    rising, falling = -ramps[:-2] / width[:-1, None], ramps[2:] / width[1:, None]
    filters = torch.minimum(rising, falling).clamp_min(0)
    area = 2.0 / (edges[2:] - edges[:-2])
    return (filters * area[:, None]).float()


class WhisperBands(NamedTuple):
    """Whisper's window (400,) and mel filters (bins, 201), where features are computed."""

    window: Tensor
    filters: Tensor

    @classmethod
    def of(cls, bins: int, device: torch.device) -> "WhisperBands":
        """Those of ``bins`` bands on ``device``."""
        filters = mel_filters(INPUT_RATE, WHISPER_N_FFT, bins, 0.0, INPUT_RATE / 2)
        return cls(torch.hann_window(WHISPER_N_FFT, device=device), filters.to(device))

    def logs(self, spectrum: Tensor) -> Tensor:
        """Log power in each band, (..., bins, frames), of ``spectrum`` (..., 201, frames)."""
        power = spectrum.abs().square()
        return (self.filters @ power).clamp_min(_WHISPER_FLOOR).log10()


def whisper_log_mel(pcm: Tensor, bins: int = 128) -> Tensor:
    """Whisper's log-mel of segments (Radford et al. 2022).

    ``pcm`` (..., samples) float at 16 kHz, a multiple of 160 samples; returns (..., bins,
    samples // 160) in float32. The floor depends on each segment's loudest frame.
    """
    bands = WhisperBands.of(bins, pcm.device)
    spectrum = torch.stft(
        _reflected(pcm.float(), WHISPER_N_FFT // 2), WHISPER_N_FFT, WHISPER_HOP,
        window=bands.window, center=False, return_complex=True,
    )  # fmt: skip
    log_mel = bands.logs(spectrum[..., :-1])
    return floored(log_mel, log_mel.amax(dim=(-2, -1), keepdim=True) - WHISPER_RANGE)


def floored(log_mel: Tensor, floor: Tensor) -> Tensor:
    """What the encoder reads of log powers: none below ``floor``, then (x + 4) / 4."""
    return (torch.maximum(log_mel, floor) + 4.0) / 4.0


def _reflected(pcm: Tensor, padding: int) -> Tensor:
    """Mirror both ends of (n,) or (B, n); n must be larger than ``padding``."""
    rows = F.pad(pcm.reshape(-1, pcm.shape[-1]), (padding, padding), mode="reflect")
    return rows.reshape(*pcm.shape[:-1], -1)


def vocoder_mel(pcm: Tensor, spec: MelSpec = FLOW_MEL) -> Tensor:
    """The mel that vocoders speak from: natural log of magnitudes in Slaney bands.

    ``pcm`` (samples,) or (B, samples) float at ``spec.rate``; returns (frames, bins) or (B,
    frames, bins) float32, one frame each hop. Not centred: (n_fft - hop) / 2 samples are
    mirrored at both ends, so ``pcm`` must be longer than that.
    """
    filters = mel_filters(spec.rate, spec.n_fft, spec.bins, spec.low_hz, spec.high_hz)
    spectrum = torch.stft(
        _reflected(pcm.float(), (spec.n_fft - spec.hop) // 2),
        spec.n_fft,
        spec.hop,
        window=torch.hann_window(spec.n_fft, device=pcm.device),
        center=False,
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square() + _VOCODER_MAGNITUDE_FLOOR
    return (filters.to(pcm.device) @ power.sqrt()).clamp_min(_VOCODER_FLOOR).log().mT
