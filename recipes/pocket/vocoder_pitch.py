"""Fundamental frequency of a recording, every frame at once: the vocoder's pitch targets.

Autocorrelation of a windowed frame divided by the window's own (Boersma 1993, "Accurate
short-term analysis of the fundamental frequency"), on the part of the spectrum below 1.5 kHz.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE

_FRAMES_AT_ONCE = 8192


@dataclass(frozen=True)
class PitchSettings:
    """What counts as voiced, and where fundamentals are looked for."""

    low_hz: float = 60.0
    high_hz: float = 400.0
    window_samples: int = 1200
    """Three periods of the lowest fundamental."""
    n_fft: int = 2048
    cutoff_hz: float = 1500.0
    strength: float = 0.6
    """Least normalised autocorrelation of a voiced frame."""
    octave_cost: float = 0.02
    """What a candidate an octave lower has to be better by."""
    spread: float = 1.75
    """How far from a voice's median its pitch may go: beyond lie an octave's errors."""
    silence: float = 1e-3
    """Least root mean square of a voiced frame's low band: -60 dB of full scale."""

    @property
    def lags(self) -> tuple[int, int]:
        """Shortest and longest period, in samples."""
        return int(OUTPUT_RATE / self.high_hz), int(OUTPUT_RATE / self.low_hz) + 1


def pitch(wave: Tensor, settings: PitchSettings | None = None) -> Tensor:
    """Fundamental frequency (frames,) float32 in Hz of ``wave`` (480 frames,), 0 where unvoiced.

    ``wave`` is int16, or float in [-1, 1], at 24 kHz, of one voice: a second pass looks around
    the median of the first. A frame's window lies around the middle of its 480 samples, as
    that of the mel frame does.
    """
    settings = settings or PitchSettings()
    found = _track(wave, settings)
    if not bool(found.any()):
        return found
    middle = float(found[found > 0].median())
    low, high = middle / settings.spread, middle * settings.spread
    near = replace(settings, low_hz=max(low, settings.low_hz), high_hz=min(high, settings.high_hz))
    return _track(wave, near)


def _track(wave: Tensor, settings: PitchSettings) -> Tensor:
    frames = wave.shape[0] // MEL_FRAME_SAMPLES
    margin = (settings.window_samples - MEL_FRAME_SAMPLES) // 2
    found = []
    for first in range(0, frames, _FRAMES_AT_ONCE):
        last = min(first + _FRAMES_AT_ONCE, frames)
        start, end = first * MEL_FRAME_SAMPLES - margin, last * MEL_FRAME_SAMPLES + margin
        piece = wave[max(start, 0) : end]
        piece = piece / 32768 if piece.dtype == torch.int16 else piece.float()
        around = (max(-start, 0), end - max(start, 0) - piece.shape[0])
        windows = F.pad(piece, around).unfold(0, settings.window_samples, MEL_FRAME_SAMPLES)
        found.append(_frame_pitch(windows, settings))
    return _without_lone_frames(torch.cat(found))


def _frame_pitch(windows: Tensor, settings: PitchSettings) -> Tensor:
    """Pitch of each row of (frames, window samples), 0 where it is not periodic enough."""
    window, low_pass, expected = _constants(settings, windows.device)
    centred = windows - windows.mean(dim=1, keepdim=True)
    power = torch.fft.rfft(centred * window, settings.n_fft).abs().square() * low_pass
    correlation = torch.fft.irfft(power, settings.n_fft)
    energy = correlation[:, :1]
    shortest, longest = settings.lags
    reach = slice(shortest - 1, longest + 2)
    strength = correlation[:, reach] / (energy.clamp_min(1e-12) * expected[reach])
    octaves = torch.log2(torch.arange(shortest, longest + 1, device=windows.device) / shortest)
    left, middle, right = strength[:, :-2], strength[:, 1:-1], strength[:, 2:]
    peak = (middle >= left) & (middle > right)
    score = torch.where(peak, middle - settings.octave_cost * octaves, -1.0)
    best = score.argmax(dim=1, keepdim=True)
    before, at, after = (side.gather(1, best)[:, 0] for side in (left, middle, right))
    bend = (before - 2 * at + after).clamp_max(-1e-9)
    lag = best[:, 0] + shortest + 0.5 * (before - after) / bend
    loud = energy[:, 0] > settings.silence**2 * window.square().sum()
    voiced = peak.any(dim=1) & (at > settings.strength) & loud
    return torch.where(voiced, OUTPUT_RATE / lag, 0.0)


@lru_cache(maxsize=4)
def _constants(settings: PitchSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The window, the low-pass of power spectra, and the window's normalised autocorrelation.

    The low-pass falls off as a raised cosine over the octave below the cutoff. It is even and
    smooth, so that it widens the autocorrelation's peaks and moves none.
    """
    window = torch.hann_window(settings.window_samples, periodic=False, device=device)
    hz = torch.fft.rfftfreq(settings.n_fft, 1 / OUTPUT_RATE, device=device)
    share = (hz * 2 / settings.cutoff_hz - 1).clamp(0, 1)
    low_pass = 0.5 + 0.5 * torch.cos(torch.pi * share)
    own = torch.fft.irfft(torch.fft.rfft(window, settings.n_fft).abs().square(), settings.n_fft)
    return window, low_pass, own / own[0]


def _without_lone_frames(f0: Tensor) -> Tensor:
    """Unvoice single voiced frames, and octave jumps of a single frame to their neighbours."""
    before, after = F.pad(f0, (1, 0))[:-1], F.pad(f0, (0, 1))[1:]
    median = torch.stack([before, f0, after]).median(dim=0).values
    level = median.clamp_min(1.0)
    jumps = (before > 0) & (after > 0) & (((f0 / level) > 1.3) | ((f0 / level) < 0.77)) & (f0 > 0)
    kept = torch.where(jumps, median, f0)
    return torch.where((before > 0) | (after > 0), kept, 0.0)
