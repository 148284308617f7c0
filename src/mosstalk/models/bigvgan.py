"""BigVGAN: mel frames to sound through anti-aliased periodic activations.

Lee et al. 2023 (BigVGAN: A Universal Neural Vocoder with Large-Scale Training) in the sizes of
NVIDIA's published v2 folders, ``config.json`` and ``bigvgan_generator.pt``, and their tensor
names, with weight norm folded into plain weights. Shapes: B sequences, T mel frames, L samples
of a stage, N = hop T samples.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import Reader
from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import read_json
from mosstalk.models.features import MelSpec
from mosstalk.models.weights import Store, fill, fold_weight_norm, open_pickled

_CONFIG, _WEIGHTS, _PART = "config.json", "bigvgan_generator.pt", "generator"
_ACTIVATIONS = ("snake", "snakebeta")
_EPS = 1e-9
_FILTER_BOUND = 1e-3
FILTER_LENGTH = 12
"""Taps of the low-pass filters around each activation."""
ACTIVATION_REACH = 5
"""Samples on either side that an anti-aliased activation reads."""


@dataclass(frozen=True)
class BigVganConfig:
    """Sizes of a BigVGAN and the mel that it speaks from, as far as they change the arithmetic."""

    mel: MelSpec
    initial_channels: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    beta: bool
    """Whether activations have a height of their own (SnakeBeta)."""
    log_scale: bool
    """Whether stored frequencies and heights are logarithms."""
    final_bias: bool
    final_tanh: bool
    """Whether sound ends in a tanh, or is cut at +-1."""

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = _CONFIG) -> "BigVganConfig":
        """Read a published ``config.json``; keys of the training alone are passed over.

        Raises:
            ConfigError: a key is missing, malformed, or asks for arithmetic we do not do.
        """
        reader = Reader(values, where)
        reader.refuse("resblock", ("1",))
        reader.refuse("activation", _ACTIVATIONS)
        mel = _mel_spec(reader)
        rates, kernels = (
            _sizes(reader, name) for name in ("upsample_rates", "upsample_kernel_sizes")
        )
        dilations: list[Any] = reader.get("resblock_dilation_sizes", list)
        config = cls(
            mel,
            reader.size("upsample_initial_channel"),
            rates,
            kernels,
            _sizes(reader, "resblock_kernel_sizes"),
            tuple(_positive(row, where, "resblock_dilation_sizes") for row in dilations),
            reader.get("activation", str) == "snakebeta",
            reader.get("snake_logscale", bool),
            reader.get("use_bias_at_final", bool, True),
            reader.get("use_tanh_at_final", bool, True),
        )
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        pairs = list(zip(self.upsample_rates, self.upsample_kernel_sizes, strict=False))
        if len(self.upsample_rates) != len(self.upsample_kernel_sizes):
            raise ConfigError(f"{where}: one upsampling kernel for each rate")
        if any(kernel < rate or (kernel - rate) % 2 for rate, kernel in pairs):
            raise ConfigError(f"{where}: an upsampling kernel exceeds its rate by an even number")
        if math.prod(self.upsample_rates) != self.mel.hop:
            raise ConfigError(f"{where}: the upsampling rates must multiply to hop_size")
        if len(self.resblock_kernel_sizes) != len(self.resblock_dilation_sizes):
            raise ConfigError(f"{where}: dilations for each residual kernel")
        if not all(kernel % 2 for kernel in self.resblock_kernel_sizes):
            raise ConfigError(f"{where}: residual kernels are odd")
        if self.initial_channels % 2 ** len(self.upsample_rates):
            raise ConfigError(f"{where}: upsample_initial_channel must halve at each upsampling")


def _mel_spec(reader: Reader) -> MelSpec:
    rate = reader.size("sampling_rate")
    n_fft, hop = reader.size("n_fft"), reader.size("hop_size")
    if reader.size("win_size") != n_fft or n_fft <= hop:
        raise ConfigError(f"{reader.where}: win_size must be n_fft, and longer than hop_size")
    high = reader.positive("fmax", rate / 2)
    low = reader.get("fmin", float, 0.0)
    if not 0 <= low < high:
        raise ConfigError(f"{reader.where}: fmin and fmax must be in this order")
    return MelSpec(rate, n_fft, hop, reader.size("num_mels"), low, high)


def _sizes(reader: Reader, key: str) -> tuple[int, ...]:
    return _positive(reader.get(key, list), reader.where, key)


def _positive(values: Any, where: str, key: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and v > 0 for v in values):
        raise ConfigError(f"{where}: {key} must hold whole numbers above 0")
    if not values:
        raise ConfigError(f"{where}: {key} is empty")
    return tuple(values)


def low_pass() -> Tensor:
    """The filter (12,) float32 that halves the band: a sinc under a Kaiser window, of sum 1.

    Cut at a quarter of the doubled rate; the window's beta is Kaiser's (1974) for a transition
    1.2 times as wide: attenuation A = 2.285 (12 / 2 - 1) pi 1.2 + 7.95, beta = 0.1102 (A - 8.7).
    """
    attenuation = 2.285 * (FILTER_LENGTH // 2 - 1) * math.pi * 1.2 + 7.95
    beta = 0.1102 * (attenuation - 8.7)
    times = torch.arange(FILTER_LENGTH, dtype=torch.float64) - (FILTER_LENGTH - 1) / 2
    window = torch.kaiser_window(FILTER_LENGTH, False, beta, dtype=torch.float64)
    taps = window * torch.sinc(times / 2)
    return (taps / taps.sum()).float()


@lru_cache
def _filters(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Taps (2, 1, 7) that give even and odd samples at twice the rate, and (1, 1, 12) back."""
    with torch.inference_mode(False):
        taps = low_pass()
        even, odd = taps.flip(0)[0::2], taps.flip(0)[1::2]
        doubling = 2 * torch.stack([F.pad(even, (0, 1)), F.pad(odd, (1, 0))])[:, None]
        return doubling.to(device, dtype), taps[None, None].to(device, dtype)


class Periodic(nn.Module):
    """x + sin^2(a x) / b for each channel; without ``beta`` b is a (Ziyin et al. 2020)."""

    def __init__(self, channels: int, *, beta: bool, log_scale: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels)) if beta else None
        self._log_scale = log_scale

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, L) to the same."""
        rate = self._scaled(self.alpha)
        height = rate if self.beta is None else self._scaled(self.beta)
        waves = (x * rate[:, None]).sin_().square_()
        return torch.addcmul(x, waves, (height + _EPS).reciprocal()[:, None])

    def _scaled(self, stored: Tensor) -> Tensor:
        return stored.exp() if self._log_scale else stored


class AntiAliased(nn.Module):
    """An activation at twice the rate: what it makes above the band is filtered out."""

    def __init__(self, act: Periodic) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, L) to the same; beyond its ends x goes on as it ends."""
        batch, channels, length = x.shape
        doubling, halving = _filters(x.device, x.dtype)
        alone = F.pad(x.reshape(-1, 1, length), (3, 3), mode="replicate")
        double = F.conv1d(alone, doubling).mT.reshape(batch, channels, 2 * length)
        active = self.act(double).reshape(-1, 1, 2 * length)
        padded = F.pad(active, (ACTIVATION_REACH, ACTIVATION_REACH + 1), mode="replicate")
        return F.conv1d(padded, halving, stride=2).reshape(batch, channels, length)


class AmpBlock(nn.Module):
    """Per dilation: x += conv(activation(dilated conv(activation(x)))), all same-padded."""

    def __init__(
        self, config: BigVganConfig, channels: int, kernel: int, dilations: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel // 2))
            for d in dilations
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in dilations
        )
        self.activations = nn.ModuleList(_activation(config, channels) for _ in 2 * dilations)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, L) to the same."""
        pairs = zip(self.activations[::2], self.activations[1::2], strict=True)
        for first, second, (before, between) in zip(self.convs1, self.convs2, pairs, strict=True):
            x = x + second(between(first(before(x))))
        return x


def _activation(config: BigVganConfig, channels: int) -> AntiAliased:
    return AntiAliased(Periodic(channels, beta=config.beta, log_scale=config.log_scale))


class BigVgan(nn.Module):
    """The generator: mels (B, bins, T) in, sound (B, hop T) out."""

    def __init__(self, config: BigVganConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.initial_channels
        self.conv_pre = nn.Conv1d(config.mel.bins, channels, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            padding = (kernel - rate) // 2
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=padding)
            # A list of one, as the published names have it.
            self.ups.append(nn.ModuleList([up]))
            channels //= 2
            self.resblocks.extend(
                AmpBlock(config, channels, size, dilations)
                for size, dilations in zip(
                    config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
                )
            )
        self.activation_post = _activation(config, channels)
        self.conv_post = nn.Conv1d(channels, 1, 7, padding=3, bias=config.final_bias)

    @torch.inference_mode()
    def forward(self, mel: Tensor) -> Tensor:
        """Sound (B, N) float32 at the config's rate, within +-1."""
        x = self.conv_pre(mel.to(self.conv_pre.weight.dtype))
        branches = len(self.config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            assert isinstance(up, nn.ModuleList)
            x = up[0](x)
            total = torch.zeros_like(x)
            for block in self.resblocks[stage * branches : (stage + 1) * branches]:
                total += block(x)
            x = total / branches
        x = self.conv_post(self.activation_post(x))[:, 0].float()
        return torch.tanh(x) if self.config.final_tanh else x.clamp(-1, 1)


def read_bigvgan_config(folder: Path) -> BigVganConfig:
    """The config of a published folder; raises ConfigError."""
    path = folder / _CONFIG
    return BigVganConfig.from_dict(read_json(path), str(path))


def load_bigvgan(
    folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> BigVgan:
    """Read ``config.json`` and ``bigvgan_generator.pt`` from ``folder`` onto ``device``.

    Raises:
        ConfigError: the config is absent or asks for other arithmetic.
        CheckpointError: weights are missing, unexpected, misshapen, damaged or not finite, or
            were trained with other filters.
    """
    path = folder / _WEIGHTS
    store = fold_weight_norm(open_pickled(path, _PART))
    config = read_bigvgan_config(folder)
    _check_filters(store, path)
    with torch.device("meta"):
        vocoder = BigVgan(config)
    fill(
        vocoder, store, where=str(path), device=device, dtype=dtype,
        unused=lambda name: name.endswith(".filter"),
    )  # fmt: skip
    return vocoder


def _check_filters(store: Store, path: Path) -> None:
    """The filters are a constant of the architecture that the published file carries along."""
    expected = low_pass()
    for name, stored in store.items():
        if not name.endswith(".filter"):
            continue
        found = stored.load().float().flatten()
        if found.shape != expected.shape or float((found - expected).abs().max()) > _FILTER_BOUND:
            raise CheckpointError(f"{path}: {name} is another filter than BigVGAN-v2's")
