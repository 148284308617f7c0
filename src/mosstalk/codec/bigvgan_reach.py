"""How far a BigVGAN looks: the mel frames on either side that a frame's sound depends on."""

from typing import NamedTuple

from mosstalk.models.bigvgan import ACTIVATION_REACH, BigVganConfig


class Reach(NamedTuple):
    """Frames before and after one whose sound is made."""

    left: int
    right: int


class _Span(NamedTuple):
    """Samples of a stage, both ends included."""

    first: int
    last: int

    def widened(self, by: int) -> "_Span":
        return _Span(self.first - by, self.last + by)


def reach(config: BigVganConfig) -> Reach:
    """The receptive field, from the samples of a frame backwards through all layers.

    Exact: every sample of the frame is a function of these frames alone, as far from the ends
    of the whole.
    """
    span = _Span(0, config.mel.hop - 1).widened(3 + ACTIVATION_REACH)
    blocks = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    block = max(_block_reach(kernel, dilations) for kernel, dilations in blocks)
    sizes = zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)
    for rate, kernel in reversed(list(sizes)):
        span = _before_upsampling(span.widened(block), rate, kernel)
    span = span.widened(3)
    return Reach(-span.first, span.last)


def _block_reach(kernel: int, dilations: tuple[int, ...]) -> int:
    half = kernel // 2
    return sum(2 * ACTIVATION_REACH + half * dilation + half for dilation in dilations)


def _before_upsampling(span: _Span, rate: int, kernel: int) -> _Span:
    """Inputs of a transposed convolution whose sample n reaches outputs rate n - p .. + kernel."""
    padding = (kernel - rate) // 2
    first = -((kernel - 1 - span.first - padding) // rate)
    return _Span(first, (span.last + padding) // rate)
