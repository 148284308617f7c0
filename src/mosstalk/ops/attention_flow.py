"""Attention of new rows over keys and values that lie in pages."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    LINE_BYTES,
    Launch,
    ceil_div,
    op,
    page_strides,
    power_of_two,
    strided,
    tl,
    triton,
)
from mosstalk.ops.parts import gdc_launch, gdc_wait, prefetch_l2
from mosstalk.ops.split_kv import (
    Room,
    combine,
    combined_at_once,
    room_numbers,
    softmax_step,
    store_partial,
)
from mosstalk.ops.tiles import FEW_ROWS, SOME_ROWS, tile

_LOG2_E = 1 / math.log(2)


def attention_flow_reference(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
) -> Tensor:
    """``attention_flow`` in plain torch, item by item: none is padded to another's length.

    Reads ``visible`` on the host, so no graph can capture it.
    """
    _, branches, _, heads, page_rows, channels = kv.shape
    rows = (branches, table.shape[0], frames, heads, channels)
    queries, mixed = q.reshape(rows).transpose(2, 3), out.unflatten(1, rows[3:])
    mixed = mixed.unflatten(0, rows[:3])
    by_head = kv.permute(1, 2, 3, 0, 4, 5)
    for item, seen in enumerate(visible.tolist()):
        pages = table[item, : ceil_div(seen, page_rows)]
        kept = by_head.index_select(3, pages).flatten(3, 4)[:, :, :, :seen].float()
        added = None if bias is None else _by_distance(bias[item], frames, seen, page_rows)
        found = F.scaled_dot_product_attention(
            queries[:, item].float(), kept[:, 0], kept[:, 1], attn_mask=added
        )
        if seen <= 0:
            found.zero_()
        mixed[:, item] = found.transpose(1, 2).to(out.dtype)
    return out


def _by_distance(bias: Tensor, frames: int, seen: int, page_rows: int) -> Tensor:
    """What is added to the scores (H, frames, seen) of one item, whose rows begin a page."""
    row = torch.arange(frames, device=bias.device)[:, None]
    place = torch.arange(seen, device=bias.device)[None, :]
    first = (seen - 1) // page_rows * page_rows
    column = (bias.shape[2] - frames - first - row + place).expand(bias.shape[0], -1, -1)
    return bias.gather(2, column)


@op(attention_flow_reference)
def attention_flow(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
    splits: int = 1,
    least: int = 0,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """Write softmax(q k^T / sqrt(d) + bias) v of each item's new rows into ``out``; return it.

    ``q`` and ``out`` (R, H d), row = (branch * items + item) * frames + r; ``kv`` (pages,
    branches, 2, H, P, d) in the queries' dtype, any strides but the last; ``table`` (items,
    max_pages) int32: key j of an item is row j % P of page table[item, j // P]; ``visible``
    (items,) int32: the item sees its first so many keys (none: zeros come out). Both lists are
    read before the kernel's turn (docs/kernels.md). All rows of an item see the same keys.

    ``bias`` (items, H, frames, D) float32, one branch only, is added to the scaled scores: its
    column c is for distance reach - 1 - c with reach = D - frames + 1, from reach - 1 down to
    -(frames - 1), where the distance of row r to key j is first + r - j (Transformer-XL's
    relative attention, Dai et al. 2019). Rows stand in the last page: first is
    (visible - 1) // P * P, and reach at least first + frames.

    ``splits`` > 1: so many programs share an item's keys, each a range of them that depends on
    ``visible`` alone, and their sums are joined in order: the same bits at every run. Each takes
    ``least`` keys if there are so many; programs that nothing is left for do nothing.
    ``workspace`` is what ``attend_workspace`` gives; made here where it is None.
    """
    items, pages = table.shape
    _, branches, _, heads, page_rows, channels = kv.shape
    _check(q, kv, out, items * frames, bias)
    assert visible.shape == (items,)
    assert all(one.is_contiguous() for one in (table, visible))
    size = tile("attention_flow", q.shape[0], kv.dtype)
    rows = _tile_rows(frames, kv)
    steps, most = ceil_div(frames, rows), 1 << (splits - 1).bit_length()
    room = None
    if splits > 1:
        workspace = attend_workspace(items, kv, frames, splits) if workspace is None else workspace
        room = Room.of(workspace, steps * items * branches * heads, splits, rows, channels)
    return out, Launch(
        _attention_flow,
        (steps * items, branches * heads, splits),
        {
            **strided(q=q, out=out),
            "kv": kv,
            "table": table,
            "visible": visible,
            "bias": bias,
            "counters": None if room is None else room.counters,
            "sums": None if room is None else room.sums,
            "pages": pages,
            "items": items,
            **page_strides(kv),
            "scale": _LOG2_E / math.sqrt(channels),
        },
        {
            "FRAMES": frames,
            "PAGE": page_rows,
            "HEADS": heads,
            "D": channels,
            "DISTANCES": 0 if bias is None else bias.shape[3],
            "SPLITS": splits,
            "MOST": most,
            "TOGETHER": combined_at_once(most, rows),
            "LEAST": ceil_div(least, size.columns) * size.columns,
            "ASK": q.shape[0] <= FEW_ROWS,
            "ROWS": rows,
            "KEYS": size.columns,
            "WIDTH": power_of_two(channels),
            "LINE": LINE_BYTES // kv.element_size(),
        },
        size,
        short=q.shape[0] <= SOME_ROWS,
    )


def _tile_rows(frames: int, kv: Tensor) -> int:
    return min(tile("attention_flow", frames, kv.dtype).rows, power_of_two(frames))


def attend_workspace(items: int, kv: Tensor, frames: int, splits: int) -> Tensor:
    """Room for the partial sums of ``splits``, (numbers,) float32 zeros.

    Calls that follow one another share it: each leaves the counters in it at zero.
    """
    _, branches, _, heads, _, channels = kv.shape
    rows = _tile_rows(frames, kv)
    pairs = ceil_div(frames, rows) * items * branches * heads if splits > 1 else 0
    return torch.zeros(room_numbers(pairs, splits, rows, channels), device=kv.device)


def _check(q: Tensor, kv: Tensor, out: Tensor, rows: int, bias: Tensor | None) -> None:
    _, branches, parts, heads, _, channels = kv.shape
    assert q.shape == out.shape == (branches * rows, heads * channels)
    assert q.dtype == kv.dtype
    assert parts == 2
    assert q.stride(1) == out.stride(1) == kv.stride(5) == 1
    assert bias is None or (branches == 1 and bias.is_contiguous())


@triton.jit(do_not_specialize=["pages", "items"])
def _attention_flow(
    q,
    kv,
    table,
    visible,
    bias,
    out,
    counters,
    sums,
    pages,
    items,
    q_stride,
    out_stride,
    kv_page,
    kv_branch,
    kv_part,
    kv_head,
    kv_row,
    scale,
    FRAMES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DISTANCES: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    TOGETHER: tl.constexpr,
    LEAST: tl.constexpr,
    ASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    item = tl.program_id(0) % items
    step = tl.program_id(0) // items
    branch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    t = step * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    seen = tl.load(visible + item)
    first = (seen - 1) // PAGE * PAGE
    share = tl.maximum(tl.cdiv(tl.cdiv(seen, SPLITS), KEYS) * KEYS, LEAST)
    begin = tl.program_id(2) * share
    end = tl.minimum(seen, begin + share)
    kv += branch * kv_branch + head * kv_head
    table += item * pages
    key = begin + tl.arange(0, KEYS)
    ahead = tl.load(table + key // PAGE, mask=key < end, other=0)
    if DEPENDENT and ASK:
        _ask_for_keys(kv, table, begin, end, kv_page, kv_part, kv_row, PAGE, KEYS, D, LINE)
    gdc_wait(DEPENDENT)
    row = (branch * items + item) * FRAMES + t
    mine = (t < FRAMES)[:, None] & (channel < D)[None, :]
    query = tl.load(q + row[:, None] * q_stride + head * D + channel[None, :], mask=mine, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        # A page of a full-size flow is 23 million numbers: its place needs 64 bits.
        place = ahead.to(tl.int64) * kv_page + key % PAGE * kv_row
        # Pages of the next tile are known before it is their turn.
        key_ahead = key + KEYS
        ahead = tl.load(table + key_ahead // PAGE, mask=key_ahead < end, other=0)
        keys = tl.load(
            kv + place[None, :] + channel[:, None],
            mask=inside[None, :] & (channel < D)[:, None],
            other=0.0,
        )
        values = tl.load(
            kv + kv_part + place[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        score = tl.dot(query, keys, input_precision="ieee") * scale
        if DISTANCES > 0:
            column = DISTANCES - FRAMES - first - t[:, None] + key[None, :]
            known = (t < FRAMES)[:, None] & inside[None, :] & (column >= 0) & (column < DISTANCES)
            line = ((item * HEADS + head) * FRAMES + t[:, None]) * DISTANCES
            score += tl.load(bias + line + column, mask=known, other=0.0) * 1.4426950408889634
        score = tl.where(inside[None, :], score, float("-inf"))
        highest, weight, mixed = softmax_step(score, values, highest, weight, mixed)
    split = tl.program_id(2)
    last = split == 0
    result = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    if SPLITS > 1:
        used = tl.cdiv(seen, tl.maximum(share, 1))
        if used > 1:
            last = split < 0
            if split < used:
                pair = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
                sums += pair.to(tl.int64) * SPLITS * (ROWS * (D + 2))
                own = sums + split * (ROWS * (D + 2))
                line, here = tl.arange(0, ROWS), t < FRAMES
                last = store_partial(
                    own, counters + pair, used, line, here, highest, weight, mixed, ROWS, D, WIDTH
                )
                if last:
                    result = combine(sums, used, line, here, ROWS, D, WIDTH, MOST, TOGETHER)
    if last:
        place = out + row[:, None] * out_stride + head * D + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _ask_for_keys(
    kv, table, begin, end, kv_page, kv_part, kv_row,
    PAGE: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Have keys and values brought into the cache; those that are still to come, later."""
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        page = tl.load(table + key // PAGE, mask=key < end, other=0).to(tl.int64)
        place = kv + page * kv_page + key % PAGE * kv_row
        for line in tl.static_range(0, D, LINE):
            prefetch_l2(place + line)
            prefetch_l2(place + line + kv_part)
