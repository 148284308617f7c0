"""Matmuls of the flow's layers, each with the norm, residual or write of pages around it.

Behind them, one guided Euler step of the flow.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Norm,
    ceil_div,
    given,
    linear,
    normalise,
    op,
    page_strides,
    power_of_two,
    sides,
    strided,
    tl,
    triton,
)
from mosstalk.ops.parts import (
    activate,
    await_turn,
    bias_at,
    gdc_wait,
    matmul,
    mish,
    moments,
    times_held,
)
from mosstalk.ops.tiles import SOME_ROWS, Kernel, tile

Activation = Literal["none", "gelu", "silu"]

# A linear layer added to the stream it stands beside.


def linear_add_reference(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``linear_add`` in plain torch."""
    return given(linear(a, weight, bias).add_(x), out)


@op(linear_add_reference)
def linear_add(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> tuple[Tensor, Launch]:
    """x + a W^T + b, written into ``out``, which may be ``x`` itself; made where it is None.

    ``x`` (R, N) float32, ``out`` (R, N) and ``a`` (R, K) in any float dtype, ``weight`` (N, K)
    in the dtype of the matmul's inputs, ``bias`` (N,). Rows may lie apart, channels may not.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return out, _planned("linear_add", a, None, weight, bias, out, add=x)


# A linear layer on normalised rows, with its activation.


def norm_linear_reference(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
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
    return given(y, out)


@op(norm_linear_reference)
def norm_linear(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    *,
    activation: Activation = "none",
    mish: bool = False,
) -> tuple[Tensor, Launch]:
    """Write act(LN(x) W^T + b) into ``out`` and return it; GELU is the exact one.

    ``x`` (R, C) in any float dtype, ``weight`` (N, C) in the dtype of the matmul's inputs,
    ``bias`` (N,) float32 or the weight's dtype, ``out`` (R, N) in any float dtype, made in float32
    where it is None. Rows of ``x`` and ``out`` may lie apart; their channels may not. ``norm``
    None leaves ``x`` as it is; ``mish``: the matmul's input is mish(LN(x)), as a final
    projection has it.
    """
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32) if out is None else out
    how: dict[str, Any] = {"activation": activation, "mish": mish}
    return out, _planned("norm_linear", x, norm, weight, bias, out, **how)


def _planned(
    kernel: Kernel,
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: Tensor | None = None,
    activation: Activation = "none",
    mish: bool = False,
) -> Launch:
    """The launch of either step: act(LN(x) W^T + b + add), by the tiles of ``kernel``."""
    (rows, channels), columns = x.shape, weight.shape[0]
    assert weight.shape == (columns, channels)
    assert weight.is_contiguous()
    assert out.shape == (rows, columns)
    assert x.stride(1) == out.stride(1) == 1
    assert add is None or (add.shape == out.shape and add.stride(1) == 1)
    norm_weight, shift, eps = norm or (None, None, 0.0)
    size = tile(kernel, rows, weight.dtype)
    return Launch(
        _norm_linear,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            **strided(x=x, add=add, out=out),
            "norm_weight": norm_weight,
            "shift": shift,
            "weight": weight,
            "bias": bias,
            "rows": rows,
            "eps": eps,
        },
        {
            "K": channels,
            "N": columns,
            "NORM": norm is not None,
            "MISH": mish,
            "BIAS": bias is not None,
            "ADD": add is not None,
            "ACTIVATION": activation,
            **sides(size, channels, weight),
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
    add,
    out,
    rows,
    x_stride,
    add_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    MISH: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
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
    inside = here & (column < N)[None, :]
    if ADD:
        place = add + row[:, None] * add_stride + column[None, :]
        beside += tl.load(place, mask=inside, other=0.0)
    x += row[:, None] * x_stride
    if AT_ONCE:
        total = times_held(
            x, here, w, factor, offset, eps, K, NORM, MISH, ROWS, WIDTH, GROUPS
        )  # fmt: skip
    else:
        total = matmul(
            x, here, norm_weight, shift, eps, weight, column,
            K, N, NORM, MISH, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    total = activate(total + beside, ACTIVATION)
    place = row[:, None] * out_stride + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# Queries, keys and values of normalised rows, keys and values straight into their pages.


def norm_qkv_reference(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    q_out: Tensor,
    kv: Tensor,
    page: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
) -> Tensor:
    """``norm_qkv`` in plain torch."""
    _, branches, _, heads, _, size = kv.shape
    y = linear(normalise(x, norm), weight, bias)
    inner = heads * size
    parts = y[:, inner:].view(branches, page.shape[0], frames, 2, heads, size)
    kv[page.long(), :, :, :, :frames] = parts.permute(1, 0, 3, 4, 2, 5).to(kv.dtype)
    return q_out.copy_(y[:, :inner])


@op(norm_qkv_reference)
def norm_qkv(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    q_out: Tensor,
    kv: Tensor,
    page: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """Project LN(x): queries into ``q_out``, keys and values into each item's page; return q.

    ``x`` (R, C) in any float dtype with row = (branch * items + item) * frames + frame;
    ``weight`` (3 H d, C) holds q, k and v one after the other, ``bias`` (3 H d,) too; ``q_out``
    (R, H d); ``kv`` (pages, branches, 2, H, P, d) is one layer's view of the pages, any strides
    but the last; ``page`` (items,) int32, read before the kernel's turn (docs/kernels.md). Row
    ``frame`` of a page gets row ``frame`` of its item.
    """
    (rows, channels), columns = x.shape, weight.shape[0]
    _, branches, parts, heads, page_rows, channels_of_head = kv.shape
    inner = heads * channels_of_head
    assert weight.shape == (3 * inner, channels)
    assert weight.is_contiguous()
    assert q_out.shape == (rows, inner)
    assert rows == branches * page.shape[0] * frames
    assert parts == 2
    assert frames <= page_rows
    assert page.is_contiguous()
    assert x.stride(1) == q_out.stride(1) == kv.stride(5) == 1
    norm_weight, shift, eps = norm or (None, None, 0.0)
    size = tile("norm_qkv", rows, weight.dtype)
    return q_out, Launch(
        _norm_qkv,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            **strided(x=x),
            "norm_weight": norm_weight,
            "shift": shift,
            "weight": weight,
            "bias": bias,
            "q_out": q_out,
            "kv": kv,
            "page": page,
            "rows": rows,
            "items": page.shape[0],
            "q_stride": q_out.stride(0),
            **page_strides(kv),
            "eps": eps,
        },
        {
            "FRAMES": frames,
            "D": channels_of_head,
            "Q": inner,
            "K": channels,
            "NORM": norm is not None,
            "BIAS": bias is not None,
            **sides(size, channels, weight),
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["rows", "items"])
def _norm_qkv(
    x,
    norm_weight,
    shift,
    weight,
    bias,
    q_out,
    kv,
    page,
    rows,
    items,
    x_stride,
    q_stride,
    kv_page,
    kv_branch,
    kv_part,
    kv_head,
    kv_row,
    eps,
    FRAMES: tl.constexpr,
    D: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
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
    N: tl.constexpr = 3 * Q
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    pair = row // FRAMES
    # A page of a full-size flow is 23 million numbers: its place needs 64 bits.
    own = tl.load(page + pair % items, mask=here, other=0).to(tl.int64)
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
            x, here[:, None], w, factor, offset, eps, K, NORM, False, ROWS, WIDTH, GROUPS
        )  # fmt: skip
    else:
        total = matmul(
            x, here[:, None], norm_weight, shift, eps, weight, column,
            K, N, NORM, False, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    total += beside
    query = here[:, None] & (column < Q)[None, :]
    tl.store(
        q_out + row[:, None] * q_stride + column[None, :],
        total.to(q_out.dtype.element_ty),
        mask=query,
    )
    further = column - Q
    place = own * kv_page + (pair // items) * kv_branch + (row % FRAMES) * kv_row
    channel = further // Q * kv_part + further % Q // D * kv_head + further % D
    tl.store(
        kv + place[:, None] + channel[None, :],
        total.to(kv.dtype.element_ty),
        mask=here[:, None] & ((column >= Q) & (column < N))[None, :],
    )


# The end of a residual block: the second bracket's norm and Mish, and the 1x1 beside it.


def close_residual_reference(
    y: Tensor,
    norm: Norm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """``close_residual`` in plain torch."""
    return given(linear(x, weight, bias).add_(normalise(y, norm, mish=True)), out)


@op(close_residual_reference)
def close_residual(
    y: Tensor,
    norm: Norm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """Write mish(LN(y)) + x W^T + b into ``out`` and return it.

    ``y`` (R, N) float32, ``x`` (R, K) in any float dtype, ``weight`` (N, K) in the dtype of the
    matmul's inputs, ``bias`` (N,), ``out`` (R, N) float32, not ``y`` nor ``x``, made where it is
    None. Rows may lie apart, channels may not.
    """
    out = torch.empty_like(y) if out is None else out
    (rows, channels), columns = x.shape, weight.shape[0]
    assert weight.shape == (columns, channels)
    assert weight.is_contiguous()
    assert y.shape == out.shape == (rows, columns)
    assert y.stride(1) == x.stride(1) == out.stride(1) == 1
    norm_weight, shift, eps = norm
    size = tile("close_residual", rows, weight.dtype)
    return out, Launch(
        _close_residual,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            **strided(y=y, x=x, out=out),
            "norm_weight": norm_weight,
            "shift": shift,
            "weight": weight,
            "bias": bias,
            "rows": rows,
            "eps": eps,
        },
        {
            "K": channels,
            "N": columns,
            "BIAS": bias is not None,
            "SPAN": power_of_two(columns),
            **sides(size, channels, weight),
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
    factors = tl.load(norm_weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
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
        total = matmul(
            x, here, None, None, 0.0, weight, column,
            K, N, False, False, ROWS, COLUMNS, INNER, WIDTH,
        )  # fmt: skip
    mean, scale = moments(y, inside, eps, N)
    bracket = mish((bracket - mean) * scale * factors + shifts)
    total += beside + bracket
    tl.store(out + row[:, None] * out_stride + column[None, :], total, mask=here & there[None, :])


def euler_reference(
    x_in: Tensor,
    velocity: Tensor,
    guidance: float,
    duration: float,
    rounded: Tensor | None = None,
) -> Tensor:
    """``euler`` in plain torch."""
    conditioned, unconditioned = velocity.chunk(2, dim=-2)
    guided = (1 + guidance) * conditioned - guidance * unconditioned
    x = x_in[..., : velocity.shape[-1]]
    x.unflatten(-2, (2, -1)).add_((duration * guided).unsqueeze(-3))
    if rounded is not None:
        rounded[:, : velocity.shape[1]] = x
    return x_in


@op(euler_reference)
def euler(
    x_in: Tensor,
    velocity: Tensor,
    guidance: float,
    duration: float,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """x += duration ((1 + g) v_conditioned - g v_unconditioned), in place; return ``x_in``.

    ``x_in`` (2 n, C) float32 holds x in its first M columns, the same in both branches, the
    conditioned rows first; ``velocity`` (2 n, M) float32 in the same order; g = ``guidance``
    (classifier-free guidance, Ho & Salimans 2021). ``rounded`` (2 n, at least M) in any float
    dtype, where given, gets the new x in its first M columns.
    """
    rows, columns = velocity.shape
    assert x_in.shape[0] == rows
    assert rows % 2 == 0
    assert x_in.stride(1) == velocity.stride(1) == 1
    assert rounded is None or (rounded.shape[0] == rows and rounded.stride(1) == 1)
    size = tile("euler", rows, velocity.dtype)
    return x_in, Launch(
        _euler,
        (ceil_div(rows // 2, size.rows), ceil_div(columns, size.columns)),
        {
            **strided(velocity=velocity, rounded=rounded),
            "x_in": x_in,
            "x_stride": x_in.stride(0),
            "half": rows // 2,
            "guidance": guidance,
            "duration": duration,
        },
        {
            "M": columns,
            "ROUNDED": rounded is not None,
            "ROWS": size.rows,
            "COLUMNS": size.columns,
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["half"])
def _euler(
    x_in,
    velocity,
    rounded,
    half,
    x_stride,
    rounded_stride,
    velocity_stride,
    guidance,
    duration,
    M: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < half) & (column < M)
    gdc_wait(DEPENDENT)
    first = velocity + row * velocity_stride + column
    conditioned = tl.load(first, mask=inside)
    unconditioned = tl.load(first + half * velocity_stride, mask=inside)
    step = duration * ((1.0 + guidance) * conditioned - guidance * unconditioned)
    place = x_in + row * x_stride + column
    again = place + half * x_stride
    one, other = tl.load(place, mask=inside) + step, tl.load(again, mask=inside) + step
    tl.store(place, one, mask=inside)
    tl.store(again, other, mask=inside)
    if ROUNDED:
        copy = rounded + row * rounded_stride + column
        tl.store(copy, one.to(rounded.dtype.element_ty), mask=inside)
        tl.store(copy + half * rounded_stride, other.to(rounded.dtype.element_ty), mask=inside)
