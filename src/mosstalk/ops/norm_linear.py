"""A linear layer on normalised rows, with its activation."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import Launch, Norm, at_once, ceil_div, runs, sides, tl, triton
from mosstalk.ops.parts import activate, await_turn, bias_at, product, times_held
from mosstalk.ops.plain import linear, normalise
from mosstalk.ops.tiles import SOME_ROWS, tile

Activation = Literal["none", "gelu", "silu"]


def norm_linear(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    activation: Activation = "none",
    mish: bool = False,
) -> Tensor:
    """Write act(LN(x) W^T + b) into ``out`` and return it; GELU is the exact one.

    ``x`` (R, C) in any float dtype, ``weight`` (N, C) in the dtype of the product's inputs,
    ``bias`` (N,) float32 or the weight's dtype, ``out`` (R, N) in any float dtype. Rows of
    ``x`` and ``out`` may lie apart; their channels may not. ``norm`` None leaves ``x`` as it is;
    ``mish``: the product's input is mish(LN(x)), as a final projection has it.
    """
    if not runs(x):
        return norm_linear_reference(x, norm, weight, bias, out, activation=activation, mish=mish)
    plan_norm_linear(x, norm, weight, bias, out, activation=activation, mish=mish).run()
    return out


def norm_linear_reference(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    activation: Activation = "none",
    mish: bool = False,
) -> Tensor:
    """``norm_linear`` in plain torch."""
    y = linear(normalise(x, norm, mish=mish), weight, bias)
    if activation == "gelu":
        y = F.gelu(y)
    elif activation == "silu":
        y = F.silu(y)
    return out.copy_(y)


def plan_norm_linear(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    activation: Activation = "none",
    mish: bool = False,
) -> Launch:
    """The kernel that does what ``norm_linear`` says."""
    (rows, channels), columns = x.shape, weight.shape[0]
    assert weight.shape == (columns, channels)
    assert weight.is_contiguous()
    assert out.shape == (rows, columns)
    assert x.stride(1) == out.stride(1) == 1
    norm_weight, shift, eps = norm or (None, None, 0.0)
    size = tile("norm_linear", rows, weight.dtype)
    return Launch(
        _norm_linear,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            "x": x,
            "norm_weight": norm_weight,
            "shift": shift,
            "weight": weight,
            "bias": bias,
            "out": out,
            "rows": rows,
            "x_stride": x.stride(0),
            "out_stride": out.stride(0),
            "eps": eps,
        },
        {
            "K": channels,
            "N": columns,
            "NORM": norm is not None,
            "MISH": mish,
            "BIAS": bias is not None,
            "ACTIVATION": activation,
            **sides(size, channels, weight),
            **at_once(size, channels),
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["rows"])
def _norm_linear(
    x,
    norm_weight,
    shift,
    weight,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    MISH: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
        weight,
        norm_weight,
        shift,
        column,
        K,
        N,
        NORM,
        WIDTH,
        LINES,
        LINE,
        AT_ONCE,
        GROUPS,
        DEPENDENT,
    )
    x += row[:, None] * x_stride
    if AT_ONCE:
        total = times_held(
            x, here, w, factor, offset, eps, K, NORM, MISH, ROWS, WIDTH, GROUPS
        )  # fmt: skip
    else:
        total = product(
            x, here, norm_weight, shift, eps, weight, column,
            K, N, NORM, MISH, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    total = activate(total + beside, ACTIVATION)
    place = row[:, None] * out_stride + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here & (column < N)[None, :])
