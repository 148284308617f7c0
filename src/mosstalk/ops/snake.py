"""Snake, with the bias of the convolution before it and the residual sum it follows.

x + sin^2(a x) / a with one a per channel (Ziyin et al. 2020). Shapes: (B, C, L), either
channels or samples lying together in memory.
"""

import torch
from torch import Tensor

from mosstalk.ops.launch import ceil_div, runs, tl, triton

_EPS = 1e-9
_SNAKE_BLOCK = 1024


def snake(x: Tensor, alpha: Tensor, bias: Tensor | None = None) -> Tensor:
    """Snake of x + bias, in x's dtype and strides; ``alpha`` and ``bias`` (C,) float32."""
    if not runs(x):
        return snake_reference(x, alpha, bias)
    out = torch.empty_like(x)
    _launch(x, None, bias, alpha, None, out)
    return out


def snake_reference(x: Tensor, alpha: Tensor, bias: Tensor | None = None) -> Tensor:
    """``snake`` in plain torch."""
    total = x.float() if bias is None else x.float() + bias[:, None]
    waves = (total * alpha[:, None]).sin_().square_()
    return torch.addcmul(total, waves, (alpha + _EPS).reciprocal()[:, None]).to(x.dtype)


def add_snake(
    x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y + bias, and Snake of that sum, both in x's dtype and strides."""
    if not runs(x):
        return add_snake_reference(x, y, alpha, bias)
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, y, bias, alpha, total, out)
    return total, out


def add_snake_reference(
    x: Tensor, y: Tensor, alpha: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``add_snake`` in plain torch."""
    exact = x.float() + y.float()
    if bias is not None:
        exact += bias[:, None]
    return exact.to(x.dtype), snake_reference(exact, alpha).to(x.dtype)


def channel_step(x: Tensor) -> int:
    """Elements between one channel of ``x`` (B, C, L) and the next; x must fill its memory."""
    batch, channels, length = x.shape
    together = (channels * length, 1, channels)
    if batch == 0 or x.is_contiguous():
        return length
    assert x.stride() == together, f"strides {x.stride()} leave gaps or are of another order"
    return 1


def _launch(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    total: Tensor | None,
    out: Tensor,
) -> None:
    assert y is None or y.stride() == x.stride(), "both terms lie in memory in one order"
    size = x.numel()
    _snake_kernel[(ceil_div(size, _SNAKE_BLOCK),)](
        x, x if y is None else y, alpha if bias is None else bias, alpha,
        out if total is None else total, out, size, x.shape[1], channel_step(x),
        ADDS=y is not None, BIASED=bias is not None, BLOCK=_SNAKE_BLOCK, EPS=_EPS,
    )  # fmt: skip


@triton.jit
def _snake_kernel(
    x,
    y,
    bias,
    alpha,
    total,
    out,
    size,
    channels,
    step,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    channel = (place // step) % channels
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + channel, mask=inside, other=0.0)
    if ADDS:
        tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)
    rate = tl.load(alpha + channel, mask=inside, other=1.0)
    wave = tl.sin(rate * value)
    value += wave * wave / (rate + EPS)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
