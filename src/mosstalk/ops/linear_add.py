"""A linear layer added to the stream it stands beside."""

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, at_once, ceil_div, runs, sides, tl, triton
from mosstalk.ops.parts import await_turn, bias_at, product, times_held
from mosstalk.ops.plain import linear
from mosstalk.ops.tiles import SOME_ROWS, tile


def linear_add(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """x + a W^T + b, written into ``out``, which may be ``x`` itself; made where it is None.

    ``x`` (R, N) float32, ``out`` (R, N) and ``a`` (R, K) in any float dtype, ``weight`` (N, K)
    in the dtype of the product's inputs, ``bias`` (N,). Rows may lie apart, channels may not.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if not runs(x):
        return linear_add_reference(x, a, weight, bias, out)
    plan_linear_add(x, a, weight, bias, out).run()
    return out


def linear_add_reference(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """``linear_add`` in plain torch."""
    return out.copy_(x + linear(a, weight, bias))


def plan_linear_add(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """The kernel that does what ``linear_add`` says."""
    (rows, channels), columns = a.shape, weight.shape[0]
    assert weight.shape == (columns, channels)
    assert weight.is_contiguous()
    assert x.shape == out.shape == (rows, columns)
    assert x.stride(1) == a.stride(1) == out.stride(1) == 1
    size = tile("linear_add", rows, weight.dtype)
    return Launch(
        _linear_add,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            "x": x,
            "a": a,
            "weight": weight,
            "bias": bias,
            "out": out,
            "rows": rows,
            "x_stride": x.stride(0),
            "a_stride": a.stride(0),
            "out_stride": out.stride(0),
        },
        {
            "K": channels,
            "N": columns,
            "BIAS": bias is not None,
            **sides(size, channels, weight),
            **at_once(size, channels),
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["rows"])
def _linear_add(
    x,
    a,
    weight,
    bias,
    out,
    rows,
    x_stride,
    a_stride,
    out_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
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
    beside = bias_at(bias, column, N, BIAS)
    w, factor, offset = await_turn(
        weight, None, None, column, K, N, False, WIDTH, LINES, LINE, AT_ONCE, GROUPS, DEPENDENT
    )
    inside = here & (column < N)[None, :]
    stream = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    a += row[:, None] * a_stride
    if AT_ONCE:
        total = times_held(
            a, here, w, factor, offset, 0.0, K, False, False, ROWS, WIDTH, GROUPS
        )  # fmt: skip
    else:
        total = product(
            a, here, None, None, 0.0, weight, column,
            K, N, False, False, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    total += beside + stream
    place = row[:, None] * out_stride + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
