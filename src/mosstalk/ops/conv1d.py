"""A causal convolution over new rows, which find what precedes them and leave their tail."""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    ceil_div,
    linear,
    op,
    sides,
    strided,
    tl,
    triton,
)
from mosstalk.ops.parts import (
    bias_at,
    fetch_once,
    gdc_launch,
    gdc_wait,
    held,
    rows_at_once,
    weights_at,
)
from mosstalk.ops.tiles import SOME_ROWS, tile

TAIL = 2
"""Rows before its own that a kernel-3 convolution reads."""


class Places(TypedDict):
    """Where an item's rows, and those before it, are; see ``conv1d``."""

    before_item: Tensor
    before_page: Tensor
    tails: Tensor
    page: Tensor
    frames: int
    valid: Tensor


def conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, **places: Unpack[Places]
) -> Tensor:
    """``conv1d`` in plain torch."""
    page, tails, frames = places["page"], places["tails"], places["frames"]
    rows = x.unflatten(0, (tails.shape[1], page.shape[0], frames))
    in_batch = (places["before_item"] >= 0)[:, None, None]
    in_page = (places["before_page"] >= 0)[:, None, None] & ~in_batch
    kept = tails[places["before_page"].clamp(min=0).long()].transpose(0, 1)
    others = rows[:, places["before_item"].clamp(min=0).long(), -TAIL:]
    preceding = torch.where(in_batch, others, kept.masked_fill(~in_page, 0))
    window = torch.cat([preceding, rows], dim=2)
    last = places["valid"].long()[:, None] + torch.arange(TAIL, device=x.device)
    index = last[None, :, :, None].expand(rows.shape[0], -1, -1, x.shape[1])
    tails[page.long()] = window.gather(2, index).transpose(0, 1)
    taps = [window[:, :, tap : tap + frames] for tap in range(TAIL + 1)]
    return out.copy_(linear(torch.cat(taps, dim=3), weight, bias).flatten(0, 2))


@op(conv1d_reference)
def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, **places: Unpack[Places]
) -> tuple[Tensor, Launch]:
    """Write the causal kernel-3 convolution of each item's rows into ``out``; return it.

    ``x`` (R, C) in any float dtype with row = (branch * items + item) * frames + frame, rows
    may lie apart; ``weight`` (N, 3 C), window rows t-2, t-1, t side by side, in the dtype of
    the matmul's inputs; ``bias`` (N,); ``out`` (R, N) in any float dtype.

    Of the ``places``, ``before_item``, ``before_page``, ``page`` and ``valid`` are (items,)
    int32, read before the kernel's turn (docs/kernels.md), and ``tails`` (pages, branches, 2,
    C) in the dtype of ``x`` with any strides but the last. The two rows before an item's first
    are the last two of item ``before_item`` where that is not -1, else ``tails[before_page,
    branch]`` where that is not -1, else zeros. ``tails[page]`` gets the last two of the rows
    that precede followed by the first ``valid`` of the item. That page may be no item's
    ``before_page`` in the same call.
    """
    (rows, channels), columns = x.shape, weight.shape[0]
    tails, page, frames = places["tails"], places["page"], places["frames"]
    _check(x, weight, out, places)
    size = tile("conv1d", rows, weight.dtype)
    return out, Launch(
        _conv1d,
        # The last column of programs writes the tails.
        (ceil_div(rows, size.rows), ceil_div(columns, size.columns) + 1),
        {
            **strided(x=x, out=out),
            "weight": weight,
            "bias": bias,
            "before_item": places["before_item"],
            "before_page": places["before_page"],
            "tails": tails,
            "page": page,
            "valid": places["valid"],
            "rows": rows,
            "items": page.shape[0],
            "tails_page": tails.stride(0),
            "tails_branch": tails.stride(1),
            "tails_row": tails.stride(2),
        },
        {
            "FRAMES": frames,
            "C": channels,
            "N": columns,
            "BIAS": bias is not None,
            "PAIRS": 1 << (ceil_div(size.rows, frames) - 1).bit_length(),
            **sides(size, channels, weight),
        },
        size,
        short=rows <= SOME_ROWS,
    )


def _check(x: Tensor, weight: Tensor, out: Tensor, places: Places) -> None:
    (rows, channels), columns = x.shape, weight.shape[0]
    tails, items = places["tails"], places["page"].shape[0]
    assert weight.shape == (columns, (TAIL + 1) * channels)
    assert weight.is_contiguous()
    assert out.shape == (rows, columns)
    assert tails.shape[1:] == (rows // (items * places["frames"]), TAIL, channels)
    assert tails.dtype == x.dtype
    assert rows % (items * places["frames"]) == 0
    assert places["frames"] >= TAIL
    lists = (places["before_item"], places["before_page"], places["page"], places["valid"])
    assert all(one.is_contiguous() and one.shape == (items,) for one in lists)
    assert x.stride(1) == out.stride(1) == tails.stride(3) == 1


@triton.jit
def _source(
    x, tails, earlier, kept, pair, index, here, items, x_stride,
    tails_page, tails_branch, tails_row, FRAMES: tl.constexpr,
):  # fmt: skip
    """Row ``index``, from -2 on, of (branch, item) ``pair``: in x, in tails, or nowhere.

    Returns a pointer to it and whether there is one, both (rows, 1).
    """
    branch = pair // items
    inside = index >= 0
    row = tl.where(inside, pair * FRAMES, (branch * items + earlier + 1) * FRAMES) + index
    in_batch = here & (inside | (earlier >= 0))
    in_page = here & (kept >= 0) & (in_batch == 0)
    place = kept * tails_page + branch * tails_branch + (index + 2) * tails_row
    source = tl.where(in_page, tails + place, x + row * x_stride)
    return source[:, None], (in_batch | in_page)[:, None]


@triton.jit
def _leave_tails(
    x, before_item, before_page, tails, page, valid, pair, pairs, items, x_stride,
    tails_page, tails_branch, tails_row,
    FRAMES: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keep the last two rows of each (branch, item) ``pair`` in the item's page."""
    here = pair < pairs
    own = tl.load(page + pair % items, mask=here, other=0).to(tl.int64)
    last = tl.load(valid + pair % items, mask=here, other=0)
    earlier = tl.load(before_item + pair % items, mask=here, other=-1)
    kept = tl.load(before_page + pair % items, mask=here, other=-1).to(tl.int64)
    inner = tl.arange(0, WIDTH)[None, :]
    for slot in tl.static_range(2):
        source, somewhere = _source(
            x, tails, earlier, kept, pair, last - 2 + slot, here, items, x_stride,
            tails_page, tails_branch, tails_row, FRAMES,
        )  # fmt: skip
        place = own * tails_page + pair // items * tails_branch + slot * tails_row
        row = tl.load(source + inner, mask=somewhere & (inner < C), other=0.0)
        tl.store(tails + place[:, None] + inner, row, mask=here[:, None] & (inner < C))


@triton.jit(do_not_specialize=["rows", "items"])
def _conv1d(
    x,
    weight,
    bias,
    out,
    before_item,
    before_page,
    tails,
    page,
    valid,
    rows,
    items,
    x_stride,
    out_stride,
    tails_page,
    tails_branch,
    tails_row,
    FRAMES: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
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
    gdc_launch(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    pair, index = row // FRAMES, row % FRAMES
    earlier = tl.load(before_item + pair % items, mask=here, other=-1)
    kept = tl.load(before_page + pair % items, mask=here, other=-1).to(tl.int64)
    beside = bias_at(bias, column, N, BIAS)
    w0, w1, w2 = column, column, column
    if AT_ONCE:
        w0 = held(weight, column, 0, 3 * C, N, C, WIDTH, GROUPS)
        w1 = held(weight, column, C, 3 * C, N, C, WIDTH, GROUPS)
        w2 = held(weight, column, 2 * C, 3 * C, N, C, WIDTH, GROUPS)
    elif DEPENDENT:
        fetch_once(weight, column, 3 * C, N, LINES, LINE)
    gdc_wait(DEPENDENT)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
        _leave_tails(
            x, before_item, before_page, tails, page, valid, pairs, rows // FRAMES, items,
            x_stride, tails_page, tails_branch, tails_row, FRAMES, C, WIDTH,
        )  # fmt: skip
    else:
        x0, there0 = _source(
            x, tails, earlier, kept, pair, index - 2, here, items, x_stride,
            tails_page, tails_branch, tails_row, FRAMES,
        )  # fmt: skip
        x1, there1 = _source(
            x, tails, earlier, kept, pair, index - 1, here, items, x_stride,
            tails_page, tails_branch, tails_row, FRAMES,
        )  # fmt: skip
        x2 = x + row[:, None] * x_stride
        if AT_ONCE:
            a0 = rows_at_once(x0, there0, C, WIDTH, GROUPS)
            a1 = rows_at_once(x1, there1, C, WIDTH, GROUPS)
            a2 = rows_at_once(x2, here[:, None], C, WIDTH, GROUPS)
            total = tl.dot(a0.to(w0.dtype), w0, input_precision="ieee")
            total = tl.dot(a1.to(w0.dtype), w1, total, input_precision="ieee")
            total = tl.dot(a2.to(w0.dtype), w2, total, input_precision="ieee")
            if GROUPS > 1:
                total = tl.sum(total, axis=0)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            # One loop, so that loads of the next tap are under way during the last one's.
            parts: tl.constexpr = (C + INNER - 1) // INNER
            for step in range(3 * parts):
                tap = step // parts
                inner = step % parts * INNER + tl.arange(0, INNER)
                source = tl.where(tap == 0, x0, tl.where(tap == 1, x1, x2))
                there = tl.where(tap == 0, there0, tl.where(tap == 1, there1, here[:, None]))
                a = tl.load(source + inner[None, :], mask=there & (inner < C)[None, :], other=0.0)
                w = weights_at(weight, column, inner, tap * C, 3 * C, N, C)
                total = tl.dot(a.to(w.dtype), w, total, input_precision="ieee")
        total += beside
        place = row[:, None] * out_stride + column[None, :]
        mask = here[:, None] & (column < N)[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
