"""Attention over pages of items that see the same keys first, which are then read once."""

import math
from collections.abc import Sequence

from torch import Tensor

from mosstalk.ops.attention_flow import attention_flow_reference
from mosstalk.ops.launch import Launch, page_strides, power_of_two, runs, tl, triton
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import SOME_ROWS, tile

MEMBERS = 3
"""Most items of a group: of 20 frames each, they fill a tile of 64 rows."""
NOBODY = -1
_LOG2_E = 1 / math.log(2)


def attend_groups(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    groups: Tensor,
    out: Tensor,
    *,
    frames: int,
    scale: float | None = None,
) -> Tensor:
    """``attention_flow`` without bias, mask and splits, for items in groups; returns ``out``.

    ``groups`` (G, 1 + MEMBERS) int32: how many keys a group's items have in common at their
    start, then its items, -1 where there are fewer. Every item is in one group, and its first
    so many entries of ``table`` are those of the group's first item. Like the other lists it is
    read before the kernel's turn. What an item gets depends, in its last bits, on its group.
    """
    if not runs(q):
        return attention_flow_reference(q, kv, table, visible, out, frames=frames, scale=scale)
    plan_attend_groups(q, kv, table, visible, groups, out, frames=frames, scale=scale).run()
    return out


def groups_of(pages: Sequence[Sequence[int]], frames: int) -> list[list[int]]:
    """Rows of ``groups`` for items that see these pages of ``frames`` keys, in order.

    Items whose first page is the same are put together, MEMBERS at a time; what they have in
    common is whole pages, the last of an item, which may be short, not among them.
    """
    alike: dict[int, list[int]] = {}
    for item, seen in enumerate(pages):
        alike.setdefault(seen[0] if seen else NOBODY, []).append(item)
    rows = []
    for items in alike.values():
        for first in range(0, len(items), MEMBERS):
            members = items[first : first + MEMBERS]
            shared = _alike([pages[item] for item in members]) if len(members) > 1 else 0
            rows.append([shared * frames, *members, *[NOBODY] * (MEMBERS - len(members))])
    return rows


def _alike(lists: Sequence[Sequence[int]]) -> int:
    """How many pages, from the first on, are the same in all lists and nobody's last."""
    most = min(len(pages) for pages in lists) - 1
    columns = zip(*(pages[:most] for pages in lists), strict=True)
    return next((place for place, column in enumerate(columns) if len(set(column)) > 1), most)


def plan_attend_groups(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    visible: Tensor,
    groups: Tensor,
    out: Tensor,
    *,
    frames: int,
    scale: float | None = None,
) -> Launch:
    """The kernel that does what ``attend_groups`` says."""
    items, pages = table.shape
    _, branches, parts, heads, page_rows, channels = kv.shape
    assert q.shape == out.shape == (branches * items * frames, heads * channels)
    assert q.dtype == kv.dtype
    assert parts == 2
    assert q.stride(1) == out.stride(1) == kv.stride(5) == 1
    assert groups.shape[1] == 1 + MEMBERS
    assert table.is_contiguous()
    assert visible.is_contiguous()
    assert groups.is_contiguous()
    size = tile("attend_groups", q.shape[0], kv.dtype)
    return Launch(
        _attend_groups,
        (groups.shape[0], branches * heads),
        {
            "q": q,
            "kv": kv,
            "table": table,
            "visible": visible,
            "groups": groups,
            "out": out,
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
            "ROWS": power_of_two(MEMBERS * frames),
            "KEYS": size.columns,
            "WIDTH": power_of_two(channels),
        },
        size,
        short=q.shape[0] <= SOME_ROWS,
    )


@triton.jit
def _at(turn, shared, e0, e1, e2, i0, i1, i2, s0, s1, s2, KEYS: tl.constexpr):
    """The keys of a turn: whose rows see them (-1: all), whose pages they are in, and which.

    Turns below ``e0`` are of the ``shared`` keys, below ``e1`` of the others of the first member
    ``i0``, which sees ``s0`` in all, below ``e2`` of the second's, then of the third's.
    """
    common, first, second = turn < e0, turn < e1, turn < e2
    member = tl.where(common, -1, tl.where(first, 0, tl.where(second, 1, 2)))
    item = tl.where(first, i0, tl.where(second, i1, i2))
    begin = tl.where(common, 0, tl.where(first, e0, tl.where(second, e1, e2)))
    end = tl.where(common, shared, tl.where(first, s0, tl.where(second, s1, s2)))
    key = tl.where(common, 0, shared) + (turn - begin) * KEYS + tl.arange(0, KEYS)
    return member, item, key, key < end


@triton.jit
def _member(group, visible, place, shared, KEYS: tl.constexpr):
    """A member of a group, how many keys it sees, and in how many turns those not shared."""
    item = tl.load(group + 1 + place)
    seen = tl.load(visible + tl.maximum(item, 0), mask=item >= 0, other=0)
    return tl.maximum(item, 0), seen, tl.cdiv(tl.maximum(seen - shared, 0), KEYS)


@triton.jit(do_not_specialize=["pages", "items"])
def _attend_groups(
    q,
    kv,
    table,
    visible,
    groups,
    out,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    branch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    group = groups + tl.program_id(0) * 4
    slot = tl.arange(0, ROWS) // FRAMES
    channel = tl.arange(0, WIDTH)
    item = tl.load(group + 1 + slot, mask=slot < 3, other=-1)
    row = (branch * items + item) * FRAMES + tl.arange(0, ROWS) % FRAMES
    mine = (item >= 0)[:, None] & (channel < D)[None, :]
    shared = tl.load(group)
    i0, s0, n0 = _member(group, visible, 0, shared, KEYS)
    i1, s1, n1 = _member(group, visible, 1, shared, KEYS)
    i2, s2, n2 = _member(group, visible, 2, shared, KEYS)
    e0 = tl.cdiv(shared, KEYS)
    e1, e2 = e0 + n0, e0 + n0 + n1
    kv += branch * kv_branch + head * kv_head
    _, owner, key, inside = _at(0, shared, e0, e1, e2, i0, i1, i2, s0, s1, s2, KEYS)
    ahead = tl.load(table + owner * pages + key // PAGE, mask=inside, other=0)
    gdc_wait(DEPENDENT)
    query = tl.load(q + row[:, None] * q_stride + head * D + channel[None, :], mask=mine, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for turn in range(e2 + n2):
        whose, _, key, inside = _at(turn, shared, e0, e1, e2, i0, i1, i2, s0, s1, s2, KEYS)
        # A page of a full-size flow is 23 million numbers: its place needs 64 bits.
        place = ahead.to(tl.int64) * kv_page + key % PAGE * kv_row
        # Pages of the next turn are known before they are needed.
        _, owner, next_key, next_inside = _at(
            turn + 1, shared, e0, e1, e2, i0, i1, i2, s0, s1, s2, KEYS
        )
        ahead = tl.load(table + owner * pages + next_key // PAGE, mask=next_inside, other=0)
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
        seen = inside[None, :] & ((whose < 0) | (slot == whose))[:, None]
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        # A row that has seen nothing yet has no maximum to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(score - level[:, None])
        fade = tl.exp2(highest - level)
        weight = weight * fade + tl.sum(part, axis=1)
        mixed = tl.dot(part.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
        highest = higher
    mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    place = out + row[:, None] * out_stride + head * D + channel[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=mine)
