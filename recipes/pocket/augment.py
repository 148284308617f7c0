"""What throats, rooms and telephones do to speech, on the GPU: formants, tone, echo, noise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.constants import INPUT_RATE

_RIR_SAMPLES = 8192
_WINDOW, _HOP = 512, 128
"""Samples of the spectra whose envelopes are moved, and from one to the next."""
_LIFTER = 32
"""Cepstral coefficients of an envelope: fewer than the period of a voice at 500 Hz has samples."""
_MOST_GAIN = 3.5
"""Nepers, 30 dB: a formant that moves away leaves a valley, and no more."""
_THROATS = (0.84, 1.19)
"""How many times as high formants lie; between men and women the ratio is some 1.17."""
_THROATS_SHARE = 0.7
_CURVE_POINTS, _CURVE_DB = 10, 4.0
"""Of a microphone's own tone: places on a scale of octaves from 60 Hz, and the gain's spread."""


@dataclass(frozen=True)
class _Draws:
    """One draw for each row of a batch."""

    generator: torch.Generator
    batch: int
    device: torch.device

    def uniform(self, low: float, high: float) -> Tensor:
        """(B, 1) between ``low`` and ``high``."""
        drawn = torch.rand(self.batch, 1, generator=self.generator, device=self.device)
        return low + (high - low) * drawn

    def chosen(self, probability: float) -> Tensor:
        """(B, 1) True for this share of the rows."""
        return self.uniform(0, 1) < probability

    def normal(self, samples: int) -> Tensor:
        """White noise (B, samples)."""
        return torch.randn(self.batch, samples, generator=self.generator, device=self.device)


def with_throats(sound: Tensor, higher: Tensor) -> Tensor:
    """Sound (B, n) with its formants ``higher`` (B, 1) times as high, its pitch and pace kept.

    Each spectrum's envelope, from its cepstrum (Oppenheim & Schafer 1968), is stretched along the
    frequencies, which is what another length of the vocal tract does (Eide & Gish 1996).
    """
    window = torch.hann_window(_WINDOW, device=sound.device)
    spectra = torch.stft(sound, _WINDOW, _HOP, window=window, return_complex=True)
    cepstra = torch.fft.irfft(spectra.abs().clamp_min(1e-5).log(), dim=1)
    cepstra[:, _LIFTER : 1 - _LIFTER] = 0
    envelopes = torch.fft.rfft(cepstra, dim=1).real
    last = envelopes.shape[1] - 1
    places = (torch.arange(last + 1, device=sound.device) / higher).clamp_max(last)
    below = places.long().clamp_max(last - 1)
    share = (places - below)[..., None]
    below = below[..., None].expand_as(envelopes)
    moved = envelopes.gather(1, below).lerp(envelopes.gather(1, below + 1), share)
    gains = (moved - envelopes).clamp(-_MOST_GAIN, _MOST_GAIN).exp()
    return torch.istft(spectra * gains, _WINDOW, _HOP, window=window, length=sound.shape[1])


def augment(
    clean: Tensor, generator: torch.Generator, share: float = 0.75, *, throats: bool = False
) -> Tensor:
    """Sound as it might be heard, (B, n) float at 16 kHz; ``share`` of the rows are touched.

    Level -30 to 0 dB; every touched row gets some of: band limits and tilt, a decaying-noise
    room of 0.1 to 0.5 s (Lehmann & Johansson 2008 call its tail diffuse), coloured noise or
    another row of the batch as babble at 3 to 40 dB. With ``throats`` most rows also come from
    another throat, into another microphone.
    """
    samples = clean.shape[1]
    draws = _Draws(generator, clean.shape[0], clean.device)
    touched = draws.chosen(share)
    spoken = clean
    if throats:
        higher = torch.where(draws.chosen(_THROATS_SHARE), draws.uniform(*_THROATS), 1.0)
        spoken = with_throats(clean, higher)
    size = 1 << (samples + _RIR_SAMPLES - 1).bit_length()
    spectrum = torch.fft.rfft(spoken, size)
    spectrum = spectrum * _tone(size, draws)
    if throats:
        spectrum = spectrum * _microphones(size, draws)
    echo = torch.fft.rfft(_rooms(draws), size)
    spectrum = torch.where(draws.chosen(0.4), spectrum * echo, spectrum)
    heard = torch.fft.irfft(spectrum, size)[:, :samples]
    heard = heard + _noise(clean, heard, draws)
    heard = torch.where(touched, heard, clean)
    peak = heard.abs().amax(dim=1, keepdim=True).clamp_min(1e-4)
    return heard / peak * 10 ** (draws.uniform(-30, -0.5) / 20)


def _tone(size: int, draws: _Draws) -> Tensor:
    """Gains (B, size // 2 + 1): a telephone's band now and then, and a gentle tilt."""
    hertz = torch.fft.rfftfreq(size, 1 / INPUT_RATE, device=draws.device)[None]
    low, high = draws.uniform(50, 350), draws.uniform(3000, 7500)
    band = torch.sigmoid((hertz - low) / 30) * torch.sigmoid((high - hertz) / 150)
    gain = torch.where(draws.chosen(0.25), band, torch.ones_like(band))
    octaves = torch.log2(hertz.clamp_min(50) / 1000)
    return gain * 10 ** (draws.uniform(-3, 3) * octaves / 20)


def _microphones(size: int, draws: _Draws) -> Tensor:
    """Gains (B, size // 2 + 1) that wander with the frequency, some octave by octave."""
    hertz = torch.fft.rfftfreq(size, 1 / INPUT_RATE, device=draws.device).clamp_min(60)
    places = torch.log2(hertz / 60) * ((_CURVE_POINTS - 1) / math.log2(INPUT_RATE / 2 / 60))
    below = places.long().clamp_max(_CURVE_POINTS - 2)
    points = _CURVE_DB * draws.normal(_CURVE_POINTS)
    gain = points[:, below].lerp(points[:, below + 1], places - below)
    return 10 ** (gain / 20)


def _rooms(draws: _Draws) -> Tensor:
    """Room impulse responses (B, samples): a direct sound and an exponentially decaying tail."""
    tail = draws.normal(_RIR_SAMPLES)
    time = torch.arange(_RIR_SAMPLES, device=draws.device)[None] / INPUT_RATE
    tail = tail * torch.exp(-time * 3 * math.log(10) / draws.uniform(0.1, 0.5))
    tail = tail / tail.square().sum(dim=1, keepdim=True).sqrt()
    response = tail * 10 ** (draws.uniform(-25, -4) / 20)
    response[:, 0] = 1.0
    return response


def _noise(clean: Tensor, heard: Tensor, draws: _Draws) -> Tensor:
    """Noise (B, n) at a drawn distance below ``heard``: white to brown, or other speech."""
    white = draws.normal(clean.shape[1])
    spectrum = torch.fft.rfft(white)
    bins = torch.arange(spectrum.shape[1], device=clean.device).clamp_min(1)[None]
    colour = torch.fft.irfft(spectrum * bins ** -draws.uniform(0.0, 1.0), clean.shape[1])
    babble = clean.roll(1, 0) + 0.7 * clean.roll(2, 0)
    noise = torch.where(draws.chosen(0.3), babble, colour)
    power = heard.square().mean(dim=1, keepdim=True)
    loud = noise.square().mean(dim=1, keepdim=True).clamp_min(1e-10)
    gain = (power / loud).sqrt() * 10 ** (-draws.uniform(3, 40) / 20)
    return torch.where(draws.chosen(0.7), noise * gain, torch.zeros_like(noise))
