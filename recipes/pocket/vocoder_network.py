"""The vocoder as it is trained: how it begins, how it grows, and a sum that a card can record."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mosstalk.config import HiftConfig
from mosstalk.models.hift import HiftVocoder
from recipes.pocket.training import fresh

_MEL_CENTRE, _MEL_SPREAD = -6.0, 2.5
_QUIET_LOG_MAGNITUDE = -4.0
_CALM = 0.1
_SOURCE_WEIGHT = 0.5
_PITCH_CENTRE_HZ, _PITCH_SPREAD_HZ = 100.0, 50.0
_LEAST_SHARE = 0.25
"""Of a weight that is split in two, what either copy gets at least."""


class TrainedHift(HiftVocoder):
    """``HiftVocoder`` whose sound is summed without waiting for the card.

    ``torch.istft`` looks at its windows' sum on the host, which no CUDA graph can hold.
    """

    def inverse_stft(self, spectrum: Tensor) -> Tensor:
        """Sound (B, hop (frames - 1)) of spectra (B, n_fft // 2 + 1, frames), complex."""
        size, hop = self.config.istft_n_fft, self.config.istft_hop
        window = torch.hann_window(size, device=spectrum.device)[:, None]
        parts = torch.fft.irfft(spectrum, size, dim=1) * window
        weight = window.square().expand(1, -1, spectrum.shape[2])
        return _overlapped(parts, hop) / _overlapped(weight, hop)


def _overlapped(parts: Tensor, hop: int) -> Tensor:
    """Sum of windows (B, size, frames) that begin ``hop`` apart, half a window cut at both ends."""
    size, frames = parts.shape[1:]
    turns = size // hop
    pieces = parts.unflatten(1, (turns, hop)).unbind(1)
    whole = sum(F.pad(piece, (late, turns - 1 - late)) for late, piece in enumerate(pieces))
    assert isinstance(whole, Tensor)
    return whole.mT.flatten(1)[:, size // 2 : size // 2 + hop * (frames - 1)]


def initial_vocoder(config: HiftConfig) -> TrainedHift:
    """A vocoder to train from: torch's weights, scaled for what goes in and comes out.

    Mels are centred by the first layers, sound begins quiet and smooth, pitch begins between
    speech and none.
    """
    vocoder = TrainedHift(config)
    fresh(vocoder)
    with torch.no_grad():
        _centre_input(vocoder.conv_pre)
        _centre_input(vocoder.f0_predictor.condnet[0])
        vocoder.f0_predictor.classifier.weight *= _PITCH_SPREAD_HZ
        vocoder.f0_predictor.classifier.bias.fill_(_PITCH_CENTRE_HZ)
        vocoder.m_source.l_linear.weight.fill_(_SOURCE_WEIGHT)
        vocoder.m_source.l_linear.bias.zero_()
        vocoder.conv_post.weight *= _CALM
        assert vocoder.conv_post.bias is not None
        vocoder.conv_post.bias.zero_()[: config.istft_n_fft // 2 + 1] = _QUIET_LOG_MAGNITUDE
    return vocoder


def _centre_input(layer: nn.Module) -> None:
    """Change a convolution so that it does to a mel what it did to a centred one."""
    assert isinstance(layer, nn.Conv1d)
    assert layer.bias is not None
    layer.weight /= _MEL_SPREAD
    layer.bias -= _MEL_CENTRE * layer.weight.sum(dim=(1, 2))


def load_vocoder(vocoder: HiftVocoder, path: Path) -> None:
    """Fill ``vocoder`` from weights of its size, or of half its width, which then grow."""
    vocoder.load_state_dict(
        {name: _grown(name, value, vocoder) for name, value in load_file(path).items()}
    )


def _grown(name: str, value: Tensor, vocoder: HiftVocoder) -> Tensor:
    """``value`` where each channel has become two that together do what it did.

    Both copies of a channel hear the same; what listens to them splits its weight between them by
    chance, so that they do not stay the same (Chen et al. 2016, Net2Net).
    """
    shape = vocoder.get_parameter(name).shape
    transposed = name.startswith("ups.") and value.ndim > 1
    outputs, inputs = (1, 0) if transposed else (0, 1)
    if shape[outputs] == 2 * value.shape[outputs]:
        value = torch.cat([value, value], dim=outputs)
    if value.ndim > 1 and shape[inputs] == 2 * value.shape[inputs]:
        share = _LEAST_SHARE + (1 - 2 * _LEAST_SHARE) * torch.rand_like(value)
        value = torch.cat([value * share, value * (1 - share)], dim=inputs)
    return value
