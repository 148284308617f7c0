"""Causal attention in float32 of a few new rows of each stream over all that it has heard.

Shapes: R rows of all streams, H heads, d channels of a head, P rows of a page.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Shared,
    Workspace,
    ceil_div,
    op,
    page_strides,
    power_of_two,
    tl,
    triton,
)
from mosstalk.ops.linear_tf32x3 import (
    Precision,
    Tf32x3,
    store_tf32x3,
    takes,
    tf32x3_dot,
    upper,
)
from mosstalk.ops.parts import LOG2_E, combine, combined_at_once, gdc_wait, store_partial
from mosstalk.ops.tiles import Tile

ITEM_ROWS = 32
"""Most rows of an item: more are several items."""
TILE = Tile(ITEM_ROWS, 64, 0, 4, 5)
"""``columns`` are keys."""
_PROGRAMS = 160
"""So many at least should run at once, or most of a card idles."""
_SPLITS = (1, 2, 4, 8)
_MOST_SPLITS = 16
"""Where none of the others fills a card."""


class Items(NamedTuple):
    """New rows of streams, int32 (items,) each.

    The item reads the pages in row ``source`` of a table; its ``rows``, up to 32, begin at row
    ``first`` of all; the last of them sees ``visible`` keys, itself included, and each row
    before it one less.
    """

    source: Tensor
    first: Tensor
    rows: Tensor
    visible: Tensor


def splits_for(items: int, heads: int) -> int:
    """How many programs share an item's keys where there are few items."""
    fit = (n for n in _SPLITS if items * heads * n >= _PROGRAMS)
    return next(fit, _MOST_SPLITS)


def attention_numbers(heads: int, channels: int) -> int:
    """Numbers in the workspace for any items whose keys ``splits_for`` splits."""
    items = range(1, _PROGRAMS)
    most = max(n * splits_for(n, heads) for n in items if splits_for(n, heads) > 1)
    return most * heads * ITEM_ROWS * (power_of_two(channels) + 2)


def attention_tokenizer_reference(
    q: Tensor, kv: Tensor, table: Tensor, items: Items, *, split: bool = False
) -> Tf32x3:
    """``attention_tokenizer`` in plain torch, item by item; reads the items on the host."""
    _, _, _, heads, page_rows, channels = kv.shape
    queries, mixed = q.unflatten(1, (heads, channels)), torch.zeros_like(q)
    for stream, first, rows, seen in zip(*(each.tolist() for each in items), strict=True):
        pages = table[stream, : ceil_div(seen, page_rows)]
        kept = kv[pages, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seen]
        place = torch.arange(seen, device=q.device)
        visible = place <= place[seen - rows :, None]
        found = F.scaled_dot_product_attention(
            queries[first : first + rows].transpose(0, 1), kept[0], kept[1], attn_mask=visible
        )
        mixed[first : first + rows] = found.transpose(0, 1).flatten(1)
    return Tf32x3.of(mixed, split=split)


@op(attention_tokenizer_reference, takes=takes)
def attention_tokenizer(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    items: Items,
    *,
    splits: int = 1,
    split: bool = False,
    precision: Precision = "tf32x3",
    workspace: Workspace | None = None,
) -> tuple[Tf32x3, Launch]:
    """softmax(q k^T / sqrt(d)) v of every row of the items, as high and low parts where ``split``.

    ``q`` and the result (R, H d), no gaps; ``kv`` (pages, 1, 2, H, P, d), any strides but the
    last; ``table`` (streams, max_pages) int32: key j of a stream is row j % P of page
    table[stream, j // P]. Rows of no item are left unwritten.

    ``splits`` > 1: so many programs share an item's keys, each a range of them that depends on
    ``visible`` alone, and their sums are joined in order: the same bits at every run. The
    kernel takes float32, the reference any precision. ``workspace`` is made where it is needed.
    """
    _, branches, parts, heads, page_rows, channels = kv.shape
    count, tile, most = len(items.first), TILE, 1 << (splits - 1).bit_length()
    out = Tf32x3.empty(q, q.shape[1], split=split)
    assert (branches, parts) == (1, 2)
    assert kv.stride(5) == 1
    assert table.is_contiguous()
    assert all(each.is_contiguous() and each.shape == (count,) for each in items)
    Tf32x3(q).check(len(q), heads * channels)
    numbers = tile.rows * (power_of_two(channels) + 2)
    strides = page_strides(kv)
    del strides["kv_branch"]
    return out, Launch(
        _attention_tokenizer,
        (count, heads, splits),
        {
            "q": q,
            "kv": kv,
            "table": table,
            **items._asdict(),
            "out": out.high,
            "out_low": out.low,
            **Shared.of(workspace, splits, count * heads, numbers, q)._asdict(),
            "pages": table.shape[1],
            **strides,
            "scale": LOG2_E / math.sqrt(channels),
        },
        {
            "SPLIT": out.low is not None,
            "IEEE": precision == "ieee",
            "PAGE": page_rows,
            "HEADS": heads,
            "D": channels,
            "SHARED": splits > 1,
            "MOST": most,
            "TOGETHER": combined_at_once(most, tile.rows),
            "ROWS": tile.rows,
            "KEYS": tile.columns,
            "WIDTH": power_of_two(channels),
        },
        tile,
    )


@triton.jit
def _attention_tokenizer(
    q,
    kv,
    table,
    source,
    first,
    rows,
    visible,
    out,
    out_low,
    counters,
    sums,
    pages,
    kv_page,
    kv_part,
    kv_head,
    kv_row,
    scale,
    SPLIT: tl.constexpr,
    IEEE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    MOST: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    head = tl.program_id(1)
    t = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    gdc_wait(DEPENDENT)
    own = tl.load(rows + tl.program_id(0))
    seen = tl.load(visible + tl.program_id(0))
    table += tl.load(source + tl.program_id(0)) * pages
    # Rows are the tiles' second side: keys and values are split in registers, queries and
    # weights lie in shared memory, which is where TF32 units take them from.
    row = (tl.load(first + tl.program_id(0)) + t)[None, :] * (HEADS * D) + head * D
    mine = (channel < D)[:, None] & (t < own)[None, :]
    query = tl.load(q + row + channel[:, None], mask=mine, other=0.0)
    query_high = upper(query)
    query_low = query - query_high
    splits = tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(seen, splits), KEYS) * KEYS
    begin = tl.program_id(2) * share
    end = tl.minimum(seen, begin + share)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((KEYS, ROWS), tl.float32)
    mixed = tl.zeros((WIDTH, ROWS), tl.float32)
    kv += head * kv_head
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        # A page has millions of numbers: its place needs 64 bits.
        if PAGE % KEYS == 0:
            page = kv + tl.load(table + start // PAGE).to(tl.int64) * kv_page
            place = page + (start % PAGE + tl.arange(0, KEYS)) * kv_row
        else:
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            place = kv + page * kv_page + key % PAGE * kv_row
        known = inside[:, None] & (channel < D)[None, :]
        keys = tl.load(place[:, None] + channel[None, :], mask=known, other=0.0)
        score = tf32x3_dot(keys, query_high, query_low, True, IEEE) * scale
        score = tl.where(key[:, None] > (seen - own + t)[None, :], float("-inf"), score)
        higher = tl.maximum(highest, tl.max(score, axis=0))
        # A row that has seen nothing yet has no maximum to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp2(score - level[None, :])
        fade = tl.exp2(highest - level)
        known = (channel < D)[:, None] & inside[None, :]
        values = tl.load(place[None, :] + kv_part + channel[:, None], mask=known, other=0.0)
        weight = weight * fade[None, :] + part
        mixed = mixed * fade[None, :] + tf32x3_dot(values, part, part, False, IEEE)
        highest = higher
    total = tl.sum(weight, axis=0)
    last = True
    if SHARED:
        pair = tl.program_id(0) * HEADS + head
        sums += pair * splits * (ROWS * (WIDTH + 2))
        part = sums + tl.program_id(2) * (ROWS * (WIDTH + 2))
        last = store_partial(
            part, counters + pair, splits, t, t < own, highest, total, tl.trans(mixed),
            ROWS, WIDTH, WIDTH,
        )  # fmt: skip
        if last:
            mixed = tl.trans(combine(sums, splits, t, t < own, ROWS, WIDTH, WIDTH, MOST, TOGETHER))
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[None, :]
    if last:
        store_tf32x3(out, out_low, row + channel[:, None], mixed, mine, SPLIT)
