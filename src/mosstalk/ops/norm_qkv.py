"""Queries, keys and values of normalised rows, keys and values straight into their pages."""

from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Norm,
    at_once,
    ceil_div,
    page_strides,
    runs,
    sides,
    tl,
    triton,
)
from mosstalk.ops.parts import await_turn, bias_at, product, times_held
from mosstalk.ops.plain import linear, normalise
from mosstalk.ops.tiles import SOME_ROWS, tile


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
) -> Tensor:
    """Project LN(x): queries into ``q_out``, keys and values into each item's page; return q.

    ``x`` (R, C) in any float dtype with row = (branch * items + item) * frames + frame;
    ``weight`` (3 H d, C) holds q, k and v one after the other, ``bias`` (3 H d,) too; ``q_out``
    (R, H d); ``kv`` (pages, branches, 2, H, P, d) is one layer's view of the pages, any strides
    but the last; ``page`` (items,) int32, read before the kernel's turn (docs/kernels.md). Row
    ``frame`` of a page gets row ``frame`` of its item.
    """
    if not runs(x):
        return norm_qkv_reference(x, norm, weight, q_out, kv, page, frames=frames, bias=bias)
    plan_norm_qkv(x, norm, weight, q_out, kv, page, frames=frames, bias=bias).run()
    return q_out


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


def plan_norm_qkv(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    q_out: Tensor,
    kv: Tensor,
    page: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
) -> Launch:
    """The kernel that does what ``norm_qkv`` says."""
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
    return Launch(
        _norm_qkv,
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns)),
        {
            "x": x,
            "norm_weight": norm_weight,
            "shift": shift,
            "weight": weight,
            "bias": bias,
            "q_out": q_out,
            "kv": kv,
            "page": page,
            "rows": rows,
            "items": page.shape[0],
            "x_stride": x.stride(0),
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
            **at_once(size, channels),
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
        total = product(
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
