"""Attention of new rows over keys and values that lie in pages.

Items that begin with the same pages, as replies in one voice do, may be packed: one program takes
the rows of several, and reads what they share once.
"""

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
from mosstalk.ops.parts import (
    LOG2_E,
    Room,
    combine,
    combined_at_once,
    gdc_launch,
    gdc_wait,
    prefetch_l2,
    room_numbers,
    softmax_step,
    store_partial,
)
from mosstalk.ops.tiles import FEW_ROWS, SOME_ROWS, tile

MEMBERS = 3
"""Most items of a pack: of 20 frames each, they fill a tile of 64 rows."""
_PACKED_REGISTERS = 128
"""So that four programs fit on a multiprocessor of an H200; a tenth faster there."""


def may_pack(items: int, kv: Tensor, frames: int) -> bool:
    """Whether ``attention_flow`` packs ``items`` that it is told share pages.

    Where rows are many, in 16 bit: in float32 nothing may depend on company.
    """
    rows = kv.shape[1] * items * frames
    many = kv.dtype != torch.float32 and rows > SOME_ROWS
    return many and MEMBERS * frames <= tile("attention_flow", rows, kv.dtype).rows


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
    packs: Tensor | None = None,
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

    ``packs`` (items, 2) int32, used where ``may_pack`` says so and ``splits`` is 1: how many items
    a program takes at once, this one and those that follow it (up to MEMBERS; 0: it is taken with
    one before it), and with how many pages, the same for each, all of them begin, an item's last
    not among these. In its last bits what an item gets depends on its pack.

    ``splits`` > 1: so many programs share an item's keys, each a range of them that depends on
    ``visible`` alone, and their sums are joined in order: the same bits at every run. Each takes
    ``least`` keys if there are so many; programs that nothing is left for do nothing.
    ``workspace`` is what ``attention_workspace`` gives; made here where it is None.
    """
    items, pages = table.shape
    _, branches, _, heads, page_rows, channels = kv.shape
    _check(q, kv, table, visible, out, frames, bias, packs)
    size = tile("attention_flow", q.shape[0], kv.dtype)
    packed = packs is not None and splits == 1 and may_pack(items, kv, frames)
    rows = power_of_two(MEMBERS * frames) if packed else _tile_rows(frames, kv)
    steps, most = ceil_div(frames, rows), 1 << (splits - 1).bit_length()
    return out, Launch(
        _attention_flow,
        (steps * items, branches * heads, splits),
        {
            **strided(q=q, out=out),
            "kv": kv,
            "table": table,
            "visible": visible,
            "bias": bias,
            "packs": packs if packed else None,
            **_room(workspace, items, kv, frames, splits),
            "pages": pages,
            "items": items,
            **page_strides(kv),
            "scale": LOG2_E / math.sqrt(channels),
        },
        {
            "FRAMES": frames,
            "PAGE": page_rows,
            "HEADS": heads,
            "D": channels,
            "DISTANCES": 0 if bias is None else bias.shape[3],
            "PACKED": packed,
            "SPLITS": splits,
            "MOST": most,
            "TOGETHER": combined_at_once(most, rows),
            "LEAST": ceil_div(least, size.columns),
            "ASK": q.shape[0] <= FEW_ROWS,
            "ROWS": rows,
            "KEYS": size.columns,
            "WIDTH": power_of_two(channels),
            "LINE": LINE_BYTES // kv.element_size(),
        },
        size,
        registers=_PACKED_REGISTERS if packed else None,
        short=q.shape[0] <= SOME_ROWS,
    )


def _tile_rows(frames: int, kv: Tensor) -> int:
    return min(tile("attention_flow", frames, kv.dtype).rows, power_of_two(frames))


def _pairs(items: int, kv: Tensor, frames: int) -> int:
    """Tiles of rows, with a branch and head each, whose keys programs share."""
    return ceil_div(frames, _tile_rows(frames, kv)) * items * kv.shape[1] * kv.shape[3]


def _room(
    workspace: Tensor | None, items: int, kv: Tensor, frames: int, splits: int
) -> dict[str, Tensor | None]:
    """Where programs that share keys count themselves and leave their sums."""
    if splits == 1:
        return {"counters": None, "sums": None}
    if workspace is None:
        workspace = attention_workspace(items, kv, frames, splits)
    rows, pairs = _tile_rows(frames, kv), _pairs(items, kv, frames)
    room = Room.of(workspace, pairs, splits, rows, kv.shape[5])
    return {"counters": room.counters, "sums": room.sums}


def attention_workspace(items: int, kv: Tensor, frames: int, splits: int) -> Tensor:
    """Room for the partial sums of ``splits``, (numbers,) float32 zeros.

    Calls that follow one another share it: each leaves the counters in it at zero.
    """
    rows, channels = _tile_rows(frames, kv), kv.shape[5]
    pairs = _pairs(items, kv, frames) if splits > 1 else 0
    return torch.zeros(room_numbers(pairs, splits, rows, channels), device=kv.device)


def _check(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    out: Tensor,
    frames: int,
    bias: Tensor | None,
    packs: Tensor | None,
) -> None:
    _, branches, parts, heads, _, channels = kv.shape
    items = table.shape[0]
    assert q.shape == out.shape == (branches * items * frames, heads * channels)
    assert q.dtype == kv.dtype
    assert parts == 2
    assert q.stride(1) == out.stride(1) == kv.stride(5) == 1
    assert bias is None or (branches == 1 and bias.is_contiguous())
    assert visible.shape == (items,)
    assert packs is None or (packs.shape == (items, 2) and packs.is_contiguous())
    assert all(one.is_contiguous() for one in (table, visible))


@triton.jit(do_not_specialize=["pages", "items"])
def _attention_flow(
    q,
    kv,
    table,
    visible,
    bias,
    packs,
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
    PACKED: tl.constexpr,
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
    branch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    channel = tl.arange(0, WIDTH)
    kv += branch * kv_branch + head * kv_head
    table += item * pages
    seen = tl.load(visible + item)
    count, turns, pack = 1, tl.cdiv(seen, KEYS), (seen,)
    slot, t = 0, tl.program_id(0) // items * ROWS + tl.arange(0, ROWS)
    here = t < FRAMES
    if PACKED:
        count, turns, pack = _pack(packs + 2 * item, visible + item, PAGE, KEYS)
        slot, t = tl.arange(0, ROWS) // FRAMES, tl.arange(0, ROWS) % FRAMES
        here = slot < count
    share = tl.maximum(tl.cdiv(turns, SPLITS), LEAST)
    begin = tl.program_id(2) * share
    end = tl.minimum(turns, begin + share)
    start, limit, owner, view = _turn(begin, pack, PACKED, KEYS)
    ahead = _pages_at(table + owner * pages, start, limit, begin < end, PAGE, KEYS)
    if DEPENDENT and ASK:
        _ask_for_keys(
            kv, table, begin * KEYS, tl.minimum(seen, end * KEYS),
            kv_page, kv_part, kv_row, PAGE, KEYS, D, LINE,
        )  # fmt: skip
    gdc_wait(DEPENDENT)
    row = (branch * items + item + slot) * FRAMES + t
    mine = here[:, None] & (channel < D)[None, :]
    query = tl.load(q + row[:, None] * q_stride + head * D + channel[None, :], mask=mine, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for turn in range(begin, end):
        key = start + tl.arange(0, KEYS)
        inside = key < limit
        number = tl.zeros((KEYS,), tl.int32)
        for near in tl.static_range((KEYS + PAGE - 2) // PAGE + 1):
            number = tl.where(key // PAGE == start // PAGE + near, ahead[near], number)
        # A page of a full-size flow is 23 million numbers: its place needs 64 bits.
        place = number.to(tl.int64) * kv_page + key % PAGE * kv_row
        sees = tl.where((view < 0) | (slot == view), 0.0, float("-inf"))
        # Pages of the next turn are known before they are needed.
        start, limit, owner, view = _turn(turn + 1, pack, PACKED, KEYS)
        ahead = _pages_at(table + owner * pages, start, limit, turn + 1 < end, PAGE, KEYS)
        spot = kv + place[:, None] + channel[None, :]
        known = inside[:, None] & (channel < D)[None, :]
        keys = tl.load(spot, mask=known, other=0.0)
        values = tl.load(spot + kv_part, mask=known, other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if DISTANCES > 0:
            first = (seen - 1) // PAGE * PAGE
            column = DISTANCES - FRAMES - first - t[:, None] + key[None, :]
            near_enough = (column >= 0) & (column < DISTANCES)
            line = ((item * HEADS + head) * FRAMES + t[:, None]) * DISTANCES
            asked = here[:, None] & inside[None, :] & near_enough
            score += tl.load(bias + line + column, mask=asked, other=0.0) * 1.4426950408889634
        if PACKED:
            score += sees[:, None]
        score = tl.where(inside[None, :], score, float("-inf"))
        highest, weight, mixed = softmax_step(score, values, highest, weight, mixed)
    last = tl.program_id(2) == 0
    result = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    used = tl.cdiv(turns, tl.maximum(share, 1))
    if SPLITS > 1 and used > 1:
        last, result = _joined(
            counters, sums, used, here, highest, weight, mixed,
            SPLITS, ROWS, D, WIDTH, MOST, TOGETHER,
        )  # fmt: skip
    if last:
        place = out + row[:, None] * out_stride + head * D + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _pack(packed, visible, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """How many members the pack has that begins with an item, in how many turns its keys are taken.

    And what ``_turn`` is told: keys that the first, second and third member see, keys that are
    the same for all, and up to which turns those, the first's own and the second's are taken.
    """
    count, alike = tl.load(packed), tl.load(packed + 1) * PAGE
    first = tl.load(visible, mask=count > 0, other=0)
    second = tl.load(visible + 1, mask=count > 1, other=0)
    third = tl.load(visible + 2, mask=count > 2, other=0)
    of_all = tl.cdiv(alike, KEYS)
    of_first = of_all + tl.cdiv(tl.maximum(first - alike, 0), KEYS)
    of_second = of_first + tl.cdiv(tl.maximum(second - alike, 0), KEYS)
    turns = of_second + tl.cdiv(tl.maximum(third - alike, 0), KEYS)
    return count, turns, (first, second, third, alike, of_all, of_first, of_second)


@triton.jit
def _turn(turn, pack, PACKED: tl.constexpr, KEYS: tl.constexpr):
    """The keys of a turn: the first, their end, whose table has them, and whose rows see them.

    Of a pack those that all members see (-1) come first, then each member's own.
    """
    start, limit, owner, view = turn * KEYS, pack[0], 0, -1
    if PACKED:
        first, second, third, alike, of_all, of_first, of_second = pack
        owner = (turn >= of_first).to(tl.int32) + (turn >= of_second).to(tl.int32)
        limit = tl.where(owner == 0, first, tl.where(owner == 1, second, third))
        since = tl.where(owner == 0, of_all, tl.where(owner == 1, of_first, of_second))
        common = turn < of_all
        start = tl.where(common, start, alike + (turn - since) * KEYS)
        limit = tl.where(common, alike, limit)
        view = tl.where(common, -1, owner)
    return start, limit, owner, view


@triton.jit
def _joined(
    counters, sums, used, here, highest, weight, mixed,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Whether this is the last of the ``used`` programs that share keys, and what all mixed."""
    pair = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    sums += pair.to(tl.int64) * SPLITS * (ROWS * (D + 2))
    split, line, last, result = tl.program_id(2), tl.arange(0, ROWS), used < 0, mixed
    if split < used:
        own = sums + split * (ROWS * (D + 2))
        last = store_partial(
            own, counters + pair, used, line, here, highest, weight, mixed, ROWS, D, WIDTH
        )
        if last:
            result = combine(sums, used, line, here, ROWS, D, WIDTH, MOST, TOGETHER)
    return last, result


@triton.jit
def _pages_at(table, start, limit, some, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The numbers of the pages of KEYS keys from ``start`` on, those below ``limit``, as a tuple.

    Read one by one: a list would have to go from thread to thread through memory.
    """
    found = ()
    for near in tl.static_range((KEYS + PAGE - 2) // PAGE + 1):
        page = start // PAGE + near
        one = tl.load(table + page, mask=some & (page * PAGE < limit), other=0)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


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
