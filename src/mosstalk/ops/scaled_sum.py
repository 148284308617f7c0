"""A sum of several tensors with a bias, scaled, through leaky ReLU, in another dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mosstalk.ops.launch import ceil_div, runs, tl, triton
from mosstalk.ops.snake import channel_step

_MOST_TERMS = 6
_SUM_BLOCK = 1024


def scaled_sum(
    terms: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    slope: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Leaky ReLU with ``slope`` of ``scale`` times the sum of ``terms`` and ``bias``.

    ``terms`` one to six (B, C, L) of one dtype and order in memory, which the result has too,
    unless ``dtype`` says otherwise; ``bias`` (C,) float32. Summed in float32. A slope of 1
    leaves the sum as it is.
    """
    if not runs(terms[0]) or len(terms) > _MOST_TERMS:
        return scaled_sum_reference(terms, bias, scale=scale, slope=slope, dtype=dtype)
    first = terms[0]
    assert all(term.stride() == first.stride() for term in terms), "terms of one order in memory"
    out = torch.empty_like(first, dtype=dtype or first.dtype)
    given = [*terms, *[first] * (_MOST_TERMS - len(terms))]
    size = first.numel()
    _sum_kernel[(ceil_div(size, _SUM_BLOCK),)](
        *given, first if bias is None else bias, out, size, first.shape[1], channel_step(first),
        scale, slope, TERMS=len(terms), BIASED=bias is not None, BLOCK=_SUM_BLOCK,
    )  # fmt: skip
    return out


def scaled_sum_reference(
    terms: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    slope: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``scaled_sum`` in plain torch."""
    total = terms[0].to(torch.float32, copy=True)
    for term in terms[1:]:
        total += term
    if bias is not None:
        total += bias[:, None]
    if scale != 1:
        total *= scale
    if slope != 1:
        torch.nn.functional.leaky_relu_(total, slope)
    return total.to(dtype or terms[0].dtype)


@triton.jit
def _sum_kernel(
    a,
    b,
    c,
    d,
    e,
    f,
    bias,
    out,
    size,
    channels,
    step,
    scale,
    slope,
    TERMS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 1:
        value += tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 2:
        value += tl.load(c + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 3:
        value += tl.load(d + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 4:
        value += tl.load(e + place, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 5:
        value += tl.load(f + place, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + (place // step) % channels, mask=inside, other=0.0)
    value *= scale
    value = tl.where(value < 0, value * slope, value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
