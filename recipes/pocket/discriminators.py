"""Critics of the vocoder: its sound folded by periods, and its complex spectra.

Multi-period (Kong et al. 2020, HiFi-GAN) and multi-resolution spectrogram discriminators
(Jang et al. 2021, UnivNet; complex as in Defossez et al. 2022), small; least-squares losses.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
RESOLUTIONS = (512, 1024, 2048)

_SLOPE = 0.1
_COMPRESSION = 0.3
"""Spectra enter with their magnitudes to this power, so that quiet bands count."""
_POWER_FLOOR = 1e-8
_SPEECH_LEVEL = 0.1
"""About the root mean square of speech: samples enter in this unit."""

Features = list[Tensor]
"""Activations of one discriminator's layers, the scores last."""


def _stack(
    inputs: int, layers: list[tuple[int, tuple[int, int], tuple[int, int]]]
) -> nn.ModuleList:
    """Same-padded convolutions of (width, kernel, stride) and a last one to one score."""
    convolutions = nn.ModuleList()
    for width, kernel, stride in [*layers, (1, (3, 1), (1, 1))]:
        padding = (kernel[0] // 2, kernel[1] // 2)
        convolutions.append(weight_norm(nn.Conv2d(inputs, width, kernel, stride, padding)))
        inputs = width
    return convolutions


def _listen(layers: nn.ModuleList, x: Tensor) -> Features:
    features = []
    for layer in layers[:-1]:
        # The layout that tensor cores want; a copy after the first layer only.
        x = F.leaky_relu(layer(x), _SLOPE).contiguous(memory_format=torch.channels_last)
        features.append(x)
    return [*features, layers[-1](x).float()]


class PeriodDiscriminator(nn.Module):
    """Hears every ``period``-th sample: sound folded to rows of one period."""

    def __init__(self, period: int, width: int) -> None:
        super().__init__()
        self.period = period
        steps = [(width << min(layer, 3), (5, 1), (3, 1)) for layer in range(4)]
        self.layers = _stack(1, [*steps, (width << 3, (5, 1), (1, 1))])

    def forward(self, wave: Tensor) -> Features:
        """``wave`` (B, N) to features (B, channels, steps, period)."""
        rows = -(-wave.shape[1] // self.period)
        padded = F.pad(
            wave[:, None] / _SPEECH_LEVEL, (0, rows * self.period - wave.shape[1]), mode="reflect"
        )
        return _listen(self.layers, padded.view(-1, 1, rows, self.period))


class SpectrumDiscriminator(nn.Module):
    """Hears the complex spectrum of one resolution."""

    def __init__(self, n_fft: int, width: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        steps = [(width, (7, 5), (2, 1)), *[(width, (5, 3), (2, 1))] * 2]
        self.layers = _stack(2, [*steps, (width, (3, 3), (2, 2)), (width, (3, 3), (1, 1))])

    def forward(self, wave: Tensor) -> Features:
        """``wave`` (B, N) to features (B, channels, bands, frames)."""
        window = self.get_buffer("window")
        spectrum = torch.stft(
            wave.float(), self.n_fft, self.n_fft // 4, window=window, return_complex=True
        )
        parts = torch.stack([spectrum.real, spectrum.imag], dim=1)
        power = parts.square().sum(dim=1, keepdim=True) + _POWER_FLOOR
        return _listen(self.layers, parts * power ** ((_COMPRESSION - 1) / 2))


class Discriminators(nn.Module):
    """All of them together; ``width`` is that of the first layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                *(PeriodDiscriminator(period, width) for period in PERIODS),
                *(SpectrumDiscriminator(n_fft, width) for n_fft in RESOLUTIONS),
            ]
        )

    def forward(self, made: Tensor, real: Tensor) -> list[tuple[Features, Features]]:
        """Features of sounds ``made`` and ``real`` (B, N), for every discriminator."""
        both = torch.cat([made, real])
        pairs = []
        for part in self.parts:
            halves = [feature.chunk(2) for feature in part(both)]
            pairs.append(([made for made, _ in halves], [real for _, real in halves]))
        return pairs


def critic_loss(pairs: list[tuple[Features, Features]]) -> Tensor:
    """Least squares (Mao et al. 2017): scores of real sound near 1, of made sound near 0."""
    losses = [made[-1].square().mean() + (1 - real[-1]).square().mean() for made, real in pairs]
    return torch.stack(losses).mean()


class Persuasion(NamedTuple):
    """What the vocoder is told: to score near 1, and to match the features of real sound."""

    score: Tensor
    features: Tensor


def vocoder_loss(pairs: list[tuple[Features, Features]]) -> Persuasion:
    """The vocoder's side of the game; means over discriminators and layers.

    Feature distances are relative to the real features' size (as in EnCodec), so that no
    discriminator outweighs the others by its scale.
    """
    scores = [(1 - made[-1]).square().mean() for made, _ in pairs]
    distances = [
        _mean_size(a - b.detach()) / _mean_size(b.detach()).clamp_min(1e-3)
        for made, real in pairs
        for a, b in zip(made[:-1], real[:-1], strict=True)
    ]
    return Persuasion(torch.stack(scores).mean(), torch.stack(distances).mean())


def _mean_size(x: Tensor) -> Tensor:
    return x.abs().mean(dtype=torch.float32)
