"""Attention of new rows over keys and values that lie in pages."""

import math
from typing import Required, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    LINE_BYTES,
    Launch,
    ceil_div,
    page_strides,
    power_of_two,
    runs,
    tl,
    triton,
)
from mosstalk.ops.parts import gdc_launch, gdc_wait, prefetch_l2
from mosstalk.ops.split_kv import combine_split_sums
from mosstalk.ops.tiles import FEW_ROWS, SOME_ROWS, tile

_LOG2_E = 1 / math.log(2)
_ALIGNED = 32
"""Numbers of 4 bytes from whose multiples on wide loads are possible."""


class _Shared(TypedDict):
    splits: int
    least: int
    workspace: Tensor | None


class _How(TypedDict, total=False):
    frames: Required[int]
    bias: Tensor | None
    causal: bool
    scale: float | None


def attention_flow(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
    causal: bool = False,
    splits: int = 1,
    least: int = 0,
    scale: float | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Write softmax(q k^T scale + bias) v of each item's new rows into ``out``; return it.

    ``q`` and ``out`` (R, H d), row = (branch * items + item) * frames + r; ``kv`` (pages,
    branches, 2, H, P, d) in the queries' dtype, any strides but the last; ``table`` (items,
    max_pages) int32: key j of an item is row j % P of page table[item, j // P]; ``visible``
    (items,) int32: the item sees its first so many keys (none: zeros come out). Both lists are
    read before the kernel's turn (docs/kernels.md). ``scale`` is 1 / sqrt(d) unless given.

    Row r of an item has place first + r among its keys. With ``causal`` the rows are the last
    visible ones, first = visible - frames, and r sees keys up to its own place; otherwise all
    rows see the same keys and stand in the last page: first = (visible - 1) // P * P.

    ``bias`` (items, H, frames, D) float32, one branch only, is added to the scaled scores: its
    column c is for distance reach - 1 - c with reach = D - frames + 1, from reach - 1 down to
    -(frames - 1), where the distance of row r to key j is first + r - j (Transformer-XL's
    relative attention, Dai et al. 2019). reach must be at least first + frames.

    ``splits`` > 1: so many programs share an item's keys, each a range of them that depends on
    ``visible`` alone, and their sums are joined in order: the same bits at every run. Each takes
    ``least`` keys if there are so many; programs that nothing is left for do nothing.
    ``workspace`` is what ``attend_workspace`` gives; made here where it is None.
    """
    how: _How = {"frames": frames, "bias": bias, "causal": causal, "scale": scale}
    if not runs(q):
        return attention_flow_reference(q, kv, table, visible, out, **how)
    if workspace is None and splits > 1:
        workspace = attend_workspace(table.shape[0], kv, frames, splits)
    shared: _Shared = {"splits": splits, "least": least, "workspace": workspace}
    plan_attention_flow(q, kv, table, visible, out, **shared, **how).run()
    return out


def attend_workspace(items: int, kv: Tensor, frames: int, splits: int) -> Tensor:
    """Room for the partial sums of ``splits``, (numbers,) float32 zeros.

    Calls that follow one another share it: each leaves the counters in it at zero.
    """
    pairs = _pairs(items, kv, frames)
    sums = pairs * splits * _tile_rows(frames, kv) * (kv.shape[5] + 2)
    return torch.zeros(_aligned(pairs) + sums, device=kv.device)


def attention_flow_reference(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
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
        first = seen - frames if causal else (seen - 1) // page_rows * page_rows
        pages = table[item, : ceil_div(seen, page_rows)]
        kept = by_head.index_select(3, pages).flatten(3, 4)[:, :, :, :seen].float()
        mask = _mask(None if bias is None else bias[item], frames, seen, first, causal, q.device)
        found = F.scaled_dot_product_attention(
            queries[:, item].float(), kept[:, 0], kept[:, 1], attn_mask=mask, scale=scale
        )
        blind = frames if seen <= 0 else max(0, -first)
        found[:, :, :blind] = 0
        mixed[:, item] = found.transpose(1, 2).to(out.dtype)
    return out


def _mask(
    bias: Tensor | None, frames: int, seen: int, first: int, causal: bool, device: torch.device
) -> Tensor | None:
    """What is added to the scores (H, frames, seen) of one item, None where that is nothing."""
    row = torch.arange(frames, device=device)[:, None]
    place = torch.arange(seen, device=device)[None, :]
    added = None
    if bias is not None:
        column = (bias.shape[2] - frames - first - row + place).expand(bias.shape[0], -1, -1)
        added = bias.gather(2, column)
    if causal:
        added = torch.zeros(1, frames, seen, device=device) if added is None else added
        added = added.masked_fill(place > first + row, float("-inf"))
    return added


def plan_attention_flow(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    frames: int,
    bias: Tensor | None = None,
    causal: bool = False,
    splits: int = 1,
    least: int = 0,
    scale: float | None = None,
    workspace: Tensor | None = None,
) -> Launch:
    """The kernel that does what ``attention_flow`` says."""
    items, pages = table.shape
    _, branches, _, heads, page_rows, channels = kv.shape
    _check(q, kv, out, items * frames, bias)
    assert visible.shape == (items,)
    assert all(one.is_contiguous() for one in (table, visible))
    size = tile("attention_flow", q.shape[0], kv.dtype)
    pairs = _pairs(items, kv, frames)
    return Launch(
        _attention_flow,
        (pairs // (branches * heads), branches * heads, splits),
        {
            "q": q,
            "kv": kv,
            "table": table,
            "visible": visible,
            "bias": bias,
            "out": out,
            "counters": None if workspace is None else workspace.view(torch.int32),
            "sums": None if workspace is None else workspace[_aligned(pairs) :],
            "pages": pages,
            "items": items,
            "q_stride": q.stride(0),
            "out_stride": out.stride(0),
            **page_strides(kv),
            "scale": _LOG2_E * (1 / math.sqrt(channels) if scale is None else scale),
        },
        {
            "FRAMES": frames,
            "PAGE": page_rows,
            "HEADS": heads,
            "D": channels,
            "DISTANCES": 0 if bias is None else bias.shape[3],
            "CAUSAL": causal,
            "SPLITS": splits,
            "LEAST": ceil_div(least, size.columns) * size.columns,
            "ASK": q.shape[0] <= FEW_ROWS,
            "ROWS": _tile_rows(frames, kv),
            "KEYS": size.columns,
            "WIDTH": power_of_two(channels),
            "LINE": LINE_BYTES // kv.element_size(),
        },
        size,
        short=q.shape[0] <= SOME_ROWS,
    )


def _tile_rows(frames: int, kv: Tensor) -> int:
    return min(tile("attention_flow", frames, kv.dtype).rows, power_of_two(frames))


def _pairs(items: int, kv: Tensor, frames: int) -> int:
    """How many tiles of rows and heads there are, each of which adds up its own splits."""
    _, branches, _, heads, _, _ = kv.shape
    return ceil_div(frames, _tile_rows(frames, kv)) * items * branches * heads


def _aligned(counters: int) -> int:
    return ceil_div(counters, _ALIGNED) * _ALIGNED


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
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
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
    if CAUSAL:
        first = seen - FRAMES
    share = tl.maximum(tl.cdiv(tl.cdiv(seen, SPLITS), KEYS) * KEYS, LEAST)
    begin = tl.program_id(2) * share
    end = tl.minimum(seen, begin + share)
    if CAUSAL:
        end = tl.minimum(end, first + (step + 1) * ROWS)
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
        hidden = inside[None, :] == 0
        if CAUSAL:
            hidden = hidden | (key[None, :] > first + t[:, None])
        score = tl.where(hidden, float("-inf"), score)
        higher = tl.maximum(highest, tl.max(score, axis=1))
        # A row that has seen nothing yet has no maximum to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(score - level[:, None])
        fade = tl.exp2(highest - level)
        weight = weight * fade + tl.sum(part, axis=1)
        mixed = tl.dot(part.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
        highest = higher
    last = True
    if SPLITS > 1:
        used = tl.cdiv(seen, tl.maximum(share, 1))
        last, weight, mixed = combine_split_sums(
            counters, sums, used, t < FRAMES, highest, weight, mixed, SPLITS, ROWS, D, WIDTH
        )
    if last:
        mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        place = out + row[:, None] * out_stride + head * D + channel[None, :]
        tl.store(place, mixed.to(out.dtype.element_ty), mask=mine)


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
