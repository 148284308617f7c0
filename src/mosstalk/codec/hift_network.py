"""HiFT's convolutions for batches of calls, with everything between them in fused steps.

The same arithmetic as ``hift.HiftVocoder`` on weights converted once. The matmuls of the
middle may run in 16 bit; what decides phases (the first and the last convolution, the STFT
and its inverse) stays float32. Shapes: B calls, T mel frames, N = 480 T samples, M = N / 4 + 1
spectrum frames.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.models.hift import (
    LAST_LEAKY_SLOPE,
    MAGNITUDE_LIMIT,
    HiftVocoder,
    Snake,
    SnakeResidual,
)
from mosstalk.ops.vocoder import add_snake, inverse_basis, inverse_stft, scaled_sum, snake


@dataclass(frozen=True)
class Layout:
    """What activations are: their dtype, and who adds a bias.

    ``bias_apart``: convolutions leave their bias to the fused step after them. That saves a
    launch on a GPU; a CPU's convolutions add it for nothing.
    """

    dtype: torch.dtype
    bias_apart: bool


class Convolution:
    """One convolution, converted; ``rest`` (C,) float32 is the bias if it is still to be added."""

    def __init__(
        self, conv: nn.Conv1d | nn.ConvTranspose1d, layout: Layout, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or layout.dtype
        assert conv.bias is not None
        bias = conv.bias.detach()
        self.weight = conv.weight.detach().to(dtype).contiguous()
        self.rest = bias.float() if layout.bias_apart else None
        self.bias = None if layout.bias_apart else bias.to(dtype)
        self._transposed = isinstance(conv, nn.ConvTranspose1d)
        self._stride, self._dilation = conv.stride[0], conv.dilation[0]
        assert not isinstance(conv.padding, str)
        self._padding = conv.padding[0]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C_in, L) to (B, C_out, L'), without ``rest``, without gaps in memory."""
        given = (x, self.weight, self.bias, self._stride, self._padding)
        if self._transposed:
            return F.conv_transpose1d(*given).contiguous()
        return F.conv1d(*given, self._dilation).contiguous()

    @property
    def tensors(self) -> list[Tensor]:
        """Its weight and bias."""
        biases = (self.rest, self.bias)
        return [self.weight, *(bias for bias in biases if bias is not None)]


class SnakeChain:
    """``SnakeResidual``; its last sum is left to what follows."""

    def __init__(self, block: SnakeResidual, layout: Layout) -> None:
        self.convs = [
            (Convolution(first, layout), Convolution(second, layout))
            for first, second in zip(_convs(block.convs1), _convs(block.convs2), strict=True)
        ]
        self.alphas = [
            tuple(act.alpha.detach().float() for act in pair)
            for pair in zip(_snakes(block.activations1), _snakes(block.activations2), strict=True)
        ]
        self.rest = self.convs[-1][1].rest

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, L) to two tensors that, with ``rest``, add up to the block's output."""
        active, y = snake(x, self.alphas[0][0]), x
        for index, (first, second) in enumerate(self.convs):
            if index:
                x, active = add_snake(x, y, self.alphas[index][0], self.convs[index - 1][1].rest)
            y = second(snake(first(active), self.alphas[index][1], first.rest))
        return x, y

    @property
    def tensors(self) -> list[Tensor]:
        """Its weights and biases."""
        return [tensor for pair in self.convs for conv in pair for tensor in conv.tensors]


class _Stage:
    """One upsampling: what the source adds, then the mean of branches."""

    def __init__(self, vocoder: HiftVocoder, index: int, layout: Layout) -> None:
        kernels = len(vocoder.config.resblock_kernel_sizes)
        branches = list(vocoder.resblocks)[index * kernels : (index + 1) * kernels]
        up, down = vocoder.ups[index], vocoder.source_downs[index]
        assert isinstance(up, nn.ConvTranspose1d)
        assert isinstance(down, nn.Conv1d)
        self.last = index == len(vocoder.ups) - 1
        self.up = Convolution(up, layout)
        # With its bias: what comes next reads the sum several times.
        self.down = Convolution(down, Layout(layout.dtype, bias_apart=False))
        self.source = SnakeChain(_residual(vocoder.source_resblocks[index]), layout)
        self.branches = [SnakeChain(_residual(branch), layout) for branch in branches]
        self.source_rest = _total([self.up.rest, self.source.rest])
        self.branches_rest = _total([branch.rest for branch in self.branches])

    def __call__(self, x: Tensor, spectrum: Tensor, slope: float, dtype: torch.dtype) -> Tensor:
        """From one stage's activated sum (B, 2 C, L) to the next one's (B, C, rate L)."""
        x = self.up(x)
        if self.last:
            x = self._mirror_first(x)
        x = scaled_sum([x, *self.source(self.down(spectrum))], self.source_rest)
        parts = [part for branch in self.branches for part in branch(x)]
        share = 1 / len(self.branches)
        return scaled_sum(parts, self.branches_rest, scale=share, slope=slope, dtype=dtype)

    def _mirror_first(self, x: Tensor) -> Tensor:
        longer = x.new_empty(*x.shape[:2], x.shape[2] + 1)
        longer[..., 1:] = x
        longer[..., 0] = x[..., 1]
        return longer

    @property
    def tensors(self) -> list[Tensor]:
        """Its weights and biases."""
        chains = [tensor for chain in (self.source, *self.branches) for tensor in chain.tensors]
        return [*self.up.tensors, *self.down.tensors, *chains]


class HiftNetwork:
    """From mels and sources to sound, in batches; reads the vocoder once, keeps its own weights."""

    def __init__(self, vocoder: HiftVocoder, layout: Layout) -> None:
        config = self.config = vocoder.config
        self.layout = layout
        self._pre = Convolution(vocoder.conv_pre, layout, torch.float32)
        self._stages = [_Stage(vocoder, index, layout) for index in range(len(vocoder.ups))]
        inside = Layout(layout.dtype, bias_apart=False)
        self._post = Convolution(vocoder.conv_post, inside, torch.float32)
        n_fft, device = config.istft_n_fft, vocoder.conv_pre.weight.device
        self._window = torch.hann_window(n_fft, device=device)
        self._inverse = inverse_basis(n_fft, self._window)
        self._forward = _forward_basis(self._window)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the converted weights."""
        tensors = [*self._pre.tensors, *self._post.tensors]
        tensors += [tensor for stage in self._stages for tensor in stage.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __call__(self, mel: Tensor, source: Tensor) -> Tensor:
        """Sound (B, N) float32, clamped, from mels (B, 80, T) and sources (B, N), float32."""
        config, dtype = self.config, self.layout.dtype
        spectrum = self._spectrum(source).to(dtype)
        x = self._pre(mel.contiguous())
        x = scaled_sum([x], self._pre.rest, slope=config.lrelu_slope, dtype=dtype)
        for stage in self._stages:
            slope = LAST_LEAKY_SLOPE if stage.last else config.lrelu_slope
            x = stage(x, spectrum, slope, torch.float32 if stage.last else dtype)
        x = self._post(x)
        limit, hop = config.audio_limit, config.istft_hop
        return inverse_stft(x, self._inverse, self._window, hop, MAGNITUDE_LIMIT, limit)

    def _spectrum(self, source: Tensor) -> Tensor:
        """STFT of sources: real then imaginary parts, (B, n_fft + 2, M) float32."""
        n_fft, hop = self.config.istft_n_fft, self.config.istft_hop
        frames = F.pad(source, (n_fft // 2, n_fft // 2), mode="reflect").unfold(1, n_fft, hop)
        return (frames @ self._forward).mT.contiguous()


def _forward_basis(window: Tensor) -> Tensor:
    """Samples of a frame to real then imaginary parts of its windowed spectrum: (n_fft, 2 F)."""
    spectra = torch.fft.rfft(torch.diag(window.double().cpu()))
    return torch.cat([spectra.real, spectra.imag], dim=1).float().to(window.device)


def _convs(parts: nn.ModuleList) -> list[nn.Conv1d]:
    return [part for part in parts if isinstance(part, nn.Conv1d)]


def _snakes(parts: nn.ModuleList) -> list[Snake]:
    return [part for part in parts if isinstance(part, Snake)]


def _residual(block: nn.Module) -> SnakeResidual:
    assert isinstance(block, SnakeResidual)
    return block


def _total(biases: list[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return torch.stack(given).sum(dim=0) if given else None
