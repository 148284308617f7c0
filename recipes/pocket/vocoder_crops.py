"""Crops of recordings for the vocoder: sound, mel and pitch of the same frames, in batches."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import vocoder_mel
from recipes.pocket.data import Spoken

# Fundamental frequency of a recording, every frame at once: the vocoder's pitch targets.
#
# Autocorrelation of a windowed frame divided by the window's own (Boersma 1993, "Accurate
# short-term analysis of the fundamental frequency"), on the part of the spectrum below 1.5 kHz.


_FRAMES_AT_ONCE = 8192
_LOWEST_HZ, _HIGHEST_HZ = 60.0, 400.0
"""Where fundamentals are looked for."""
_WINDOW_SAMPLES = 1200
"""Three periods of the lowest fundamental."""
_N_FFT = 2048
_CUTOFF_HZ = 1500.0
_STRENGTH = 0.6
"""Least normalised autocorrelation of a voiced frame."""
_OCTAVE_COST = 0.02
"""What a candidate an octave lower has to be better by."""
_SPREAD = 1.75
"""How far from a voice's median its pitch may go: beyond lie an octave's errors."""
_SILENCE = 1e-3
"""Least root mean square of a voiced frame's low band: -60 dB of full scale."""


def pitch(wave: Tensor) -> Tensor:
    """Fundamental frequency (frames,) float32 in Hz of ``wave`` (480 frames,), 0 where unvoiced.

    ``wave`` is int16, or float in [-1, 1], at 24 kHz, of one voice: a second pass looks around
    the median of the first. A frame's window lies around the middle of its 480 samples, as
    that of the mel frame does.
    """
    found = _track(wave, _LOWEST_HZ, _HIGHEST_HZ)
    if not bool(found.any()):
        return found
    middle = float(found[found > 0].median())
    return _track(wave, max(middle / _SPREAD, _LOWEST_HZ), min(middle * _SPREAD, _HIGHEST_HZ))


def _track(wave: Tensor, low_hz: float, high_hz: float) -> Tensor:
    # Shortest and longest period, in samples.
    lags = int(OUTPUT_RATE / high_hz), int(OUTPUT_RATE / low_hz) + 1
    frames = wave.shape[0] // MEL_FRAME_SAMPLES
    margin = (_WINDOW_SAMPLES - MEL_FRAME_SAMPLES) // 2
    found = []
    for first in range(0, frames, _FRAMES_AT_ONCE):
        last = min(first + _FRAMES_AT_ONCE, frames)
        start, end = first * MEL_FRAME_SAMPLES - margin, last * MEL_FRAME_SAMPLES + margin
        piece = wave[max(start, 0) : end]
        piece = piece / 32768 if piece.dtype == torch.int16 else piece.float()
        around = (max(-start, 0), end - max(start, 0) - piece.shape[0])
        windows = F.pad(piece, around).unfold(0, _WINDOW_SAMPLES, MEL_FRAME_SAMPLES)
        found.append(_frame_pitch(windows, *lags))
    return _without_lone_frames(torch.cat(found))


def _frame_pitch(windows: Tensor, shortest: int, longest: int) -> Tensor:
    """Pitch of each row of (frames, window samples), 0 where it is not periodic enough."""
    window, low_pass, expected = _constants(windows.device)
    centred = windows - windows.mean(dim=1, keepdim=True)
    power = torch.fft.rfft(centred * window, _N_FFT).abs().square() * low_pass
    correlation = torch.fft.irfft(power, _N_FFT)
    energy = correlation[:, :1]
    reach = slice(shortest - 1, longest + 2)
    strength = correlation[:, reach] / (energy.clamp_min(1e-12) * expected[reach])
    octaves = torch.log2(torch.arange(shortest, longest + 1, device=windows.device) / shortest)
    left, middle, right = strength[:, :-2], strength[:, 1:-1], strength[:, 2:]
    peak = (middle >= left) & (middle > right)
    score = torch.where(peak, middle - _OCTAVE_COST * octaves, -1.0)
    best = score.argmax(dim=1, keepdim=True)
    before, at, after = (side.gather(1, best)[:, 0] for side in (left, middle, right))
    bend = (before - 2 * at + after).clamp_max(-1e-9)
    lag = best[:, 0] + shortest + 0.5 * (before - after) / bend
    loud = energy[:, 0] > _SILENCE**2 * window.square().sum()
    voiced = peak.any(dim=1) & (at > _STRENGTH) & loud
    return torch.where(voiced, OUTPUT_RATE / lag, 0.0)


@lru_cache(maxsize=1)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The window, the low-pass of power spectra, and the window's normalised autocorrelation.

    The low-pass falls off as a raised cosine over the octave below the cutoff. It is even and
    smooth, so that it widens the autocorrelation's peaks and moves none.
    """
    window = torch.hann_window(_WINDOW_SAMPLES, periodic=False, device=device)
    hz = torch.fft.rfftfreq(_N_FFT, 1 / OUTPUT_RATE, device=device)
    share = (hz * 2 / _CUTOFF_HZ - 1).clamp(0, 1)
    low_pass = 0.5 + 0.5 * torch.cos(torch.pi * share)
    own = torch.fft.irfft(torch.fft.rfft(window, _N_FFT).abs().square(), _N_FFT)
    return window, low_pass, own / own[0]


def _without_lone_frames(f0: Tensor) -> Tensor:
    """Unvoice single voiced frames, and octave jumps of a single frame to their neighbours."""
    before, after = F.pad(f0, (1, 0))[:-1], F.pad(f0, (0, 1))[1:]
    median = torch.stack([before, f0, after]).median(dim=0).values
    level = median.clamp_min(1.0)
    jumps = (before > 0) & (after > 0) & (((f0 / level) > 1.3) | ((f0 / level) < 0.77)) & (f0 > 0)
    kept = torch.where(jumps, median, f0)
    return torch.where((before > 0) | (after > 0), kept, 0.0)


# Crops: sound, mel and pitch of the same frames.


_CONTEXT_FRAMES = 2
"""Frames around a crop that its mel's windows reach into."""
_HELD_OUT_EVERY = 50
_PERTURBED_SHARE = 0.3
_TRUE_SHARE = 0.5
"""Of the crops those with the recording's own mel where a flow's are there."""
_LOUDEST_MEL_NOISE = 0.2


@dataclass(frozen=True)
class Crops:
    """A batch: ``wave`` (B, N) in [-1, 1], ``mel`` (B, 80, T) and ``f0`` (B, T) in Hz."""

    wave: Tensor
    mel: Tensor
    f0: Tensor


class Cropper:
    """Cuts batches from recordings; one recording in fifty is held out from ``draw``.

    ``mels`` (total frames, 80) stand for the recordings' own in half of the crops to learn from,
    and in all that validate.
    """

    def __init__(self, data: Spoken, frames: int, mels: Tensor | None = None) -> None:
        self.waves, self.frames, self.mels = data.waves, frames, mels
        self.f0 = pitch(data.waves)
        starts, lengths = data.starts.cpu(), data.lengths.cpu()
        assert not bool(torch.cat([starts, lengths]).remainder(MEL_FRAME_SAMPLES).any())
        self._starts, self._lengths = (x // MEL_FRAME_SAMPLES for x in (starts, lengths))
        held = torch.arange(len(starts)) % _HELD_OUT_EVERY == 0
        self.held_out = held.nonzero()[:, 0].tolist()
        spans = (self._lengths - frames - 2 * _CONTEXT_FRAMES + 1).clamp_min(0)
        # A set of one recording is drawn from and held out.
        spans = torch.where(held, 0, spans) if not bool(held.all()) else spans
        self._ends = spans.cumsum(0).to(self.waves.device)
        self._bases = (self._starts + _CONTEXT_FRAMES + spans).to(self.waves.device) - self._ends
        self._places = int(spans.sum())
        assert self._places > 0, "recordings are shorter than a crop"

    def draw(self, count: int) -> Crops:
        """``count`` crops, every place of the training recordings as likely as another."""
        place = torch.randint(self._places, (count,), device=self.waves.device)
        recording = torch.searchsorted(self._ends, place, right=True)
        true = torch.rand(count, 1, 1, device=self.waves.device) < _TRUE_SHARE
        return self._cut(self._bases[recording] + place, self.frames, true)

    def validation(self, count: int, frames: int) -> Crops:
        """The middles of the first ``count`` recordings held out that are long enough."""
        needed = frames + 2 * _CONTEXT_FRAMES
        longest = max(int(self._lengths[index]) for index in self.held_out)
        frames -= max(0, needed - longest)
        needed = frames + 2 * _CONTEXT_FRAMES
        chosen = [index for index in self.held_out if int(self._lengths[index]) >= needed]
        firsts = [
            int(self._starts[index]) + (int(self._lengths[index]) - frames) // 2
            for index in chosen[:count]
        ]
        first = torch.tensor(firsts, device=self.waves.device)
        return self._cut(first, frames, torch.tensor(False, device=first.device))

    def recording(self, index: int, longest_frames: int) -> Tensor:
        """Sound (480 frames,) float of a recording's beginning."""
        frames = min(int(self._lengths[index]), longest_frames)
        start = int(self._starts[index]) * MEL_FRAME_SAMPLES
        return self.waves[start : start + frames * MEL_FRAME_SAMPLES].float() / 32768

    def _cut(self, first: Tensor, frames: int, true: Tensor) -> Crops:
        """Crops of ``frames`` frames from ``first`` (B,), counted over all recordings.

        ``true`` bool (B, 1, 1), or one for all: whose mel is the recording's own even where there
        are others.
        """
        around = torch.arange(-_CONTEXT_FRAMES, frames + _CONTEXT_FRAMES, device=first.device)
        inner = slice(_CONTEXT_FRAMES, _CONTEXT_FRAMES + frames)
        rows = self.waves.view(-1, MEL_FRAME_SAMPLES)[first[:, None] + around]
        wave = rows.float() / 32768
        places = first[:, None] + around[inner]
        mel = vocoder_mel(wave.flatten(1))[:, inner]
        if self.mels is not None:
            mel = torch.where(true, mel, self.mels[places].float())
        return Crops(wave[:, inner].flatten(1), mel.mT.contiguous(), self.f0[places])


def perturbed(mel: Tensor) -> Tensor:
    """Mels (B, 80, T) of which some are a little noisy and smooth, as a flow's mels are."""
    count = mel.shape[0]
    chosen, level, blend = torch.rand((3, count, 1, 1), device=mel.device)
    kernel = mel.new_tensor([0.25, 0.5, 0.25])
    around = F.pad(mel[:, None], (1, 1, 1, 1), mode="replicate")
    smooth = F.conv2d(around, (kernel[:, None] * kernel)[None, None])[:, 0]
    noisy = torch.randn_like(mel) * level * _LOUDEST_MEL_NOISE
    changed = torch.lerp(mel, smooth, blend) + noisy
    return torch.where(chosen < _PERTURBED_SHARE, changed, mel)
