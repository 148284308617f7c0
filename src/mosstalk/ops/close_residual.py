"""The end of a residual block: the second bracket's norm and Mish, and the 1x1 beside it."""

import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Norm,
    at_once,
    ceil_div,
    power_of_two,
    runs,
    sides,
    tl,
    triton,
)
from mosstalk.ops.parts import await_turn, bias_at, mish, moments, product, times_held
from mosstalk.ops.plain import linear, normalise
from mosstalk.ops.tiles import SOME_ROWS, tile


def close_residual(
    y: Tensor, norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Write mish(LN(y)) + x W^T + b into ``out`` and return it.

    ``y`` (R, N) float32, ``x`` (R, K) in any float dtype, ``weight`` (N, K) in the dtype of the
    product's inputs, ``bias`` (N,), ``out`` (R, N) float32, not ``y`` nor ``x``. Rows may lie
    apart, channels may not.
    """
    if not runs(x):
        return close_residual_reference(y, norm, x, weight, bias, out)
    plan_close_residual(y, norm, x, weight, bias, out).run()
    return out


def close_residual_reference(
    y: Tensor, norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """``close_residual`` in plain torch."""
    return out.copy_(F.mish(normalise(y, norm)) + linear(x, weight, bias))


def plan_close_residual(
    y: Tensor, norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Launch:
    """The kernel that does what ``close_residual`` says."""
    (rows, channels), columns = x.shape, weight.shape[0]
    assert weight.shape == (columns, channels)
    assert weight.is_contiguous()
    assert y.shape == out.shape == (rows, columns)
    assert y.stride(1) == x.stride(1) == out.stride(1) == 1
    norm_weight, shift, eps = norm
    size = tile("close_residual", rows, weight.dtype)
    return Launch(
        _close_residual,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            "y": y,
            "norm_weight": norm_weight,
            "shift": shift,
            "x": x,
            "weight": weight,
            "bias": bias,
            "out": out,
            "rows": rows,
            "y_stride": y.stride(0),
            "x_stride": x.stride(0),
            "out_stride": out.stride(0),
            "eps": eps,
        },
        {
            "K": channels,
            "N": columns,
            "BIAS": bias is not None,
            "SPAN": power_of_two(columns),
            **sides(size, channels, weight),
            **at_once(size, channels),
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["rows"])
def _close_residual(
    y,
    norm_weight,
    shift,
    x,
    weight,
    bias,
    out,
    rows,
    y_stride,
    x_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None]
    there = column < N
    beside = bias_at(bias, column, N, BIAS)
    gains = tl.load(norm_weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
    shifts = tl.load(shift + column, mask=there, other=0.0).to(tl.float32)[None, :]
    w, factor, offset = await_turn(
        weight, None, None, column, K, N, False, WIDTH, LINES, LINE, AT_ONCE, GROUPS, DEPENDENT
    )
    whole = tl.arange(0, SPAN)
    inside = here & (whole < N)[None, :]
    y += row[:, None] * y_stride
    bracket = tl.load(y + column[None, :], mask=here & there[None, :], other=0.0)
    y = tl.load(y + whole[None, :], mask=inside, other=0.0)
    x += row[:, None] * x_stride
    if AT_ONCE:
        total = times_held(x, here, w, factor, offset, 0.0, K, False, False, ROWS, WIDTH, GROUPS)
    else:
        total = product(
            x, here, None, None, 0.0, weight, column,
            K, N, False, False, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    mean, scale = moments(y, inside, eps, N)
    bracket = mish((bracket - mean) * scale * gains + shifts)
    total += beside + bracket
    tl.store(out + row[:, None] * out_stride + column[None, :], total, mask=here & there[None, :])
