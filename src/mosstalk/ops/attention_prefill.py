"""Attention of several new rows a sequence over its pages."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mosstalk.ops.attention_decode import kept, mixed_reference, rows_of, see_kept
from mosstalk.ops.launch import Launch, op, power_of_two, strided, tl, triton
from mosstalk.ops.parts import (
    LOG2_E,
    Room,
    Shares,
    combine,
    combined_at_once,
    gdc_launch,
    gdc_wait,
    queries_of,
    room_numbers,
    store_partial,
)

TILE_ROWS = 16
"""The most rows of a sequence that one program takes."""
ENOUGH_PROGRAMS = 200
"""So many keep the card busy without sharing keys."""
SHARES = Shares(64, 256, 4, 8, 2)
EXACT = Shares(16, 128, 8, 8, 1, joined=8)
"""In 16 bit, and in float32, where keys are shared."""
WHOLE = Shares(64, 128, 1, 4, 2)
"""In 16 bit where there are enough tiles, so that each takes all of its keys."""
INVARIANT = Shares(64, 128, 8, 4, 2, joined=8)
"""In 16 bit where keys are shared alike for any number of tiles: many single rows too."""
_SHORT_TILES = 128


def tiles_of(first_row: int, rows: int, position: int, item: int) -> Iterator[list[int]]:
    """Lines of ``attention_prefill``'s ``tiles`` for packed rows from ``first_row`` on.

    They are so many ``rows`` of one sequence from ``position`` on. Cut at positions that
    ``TILE_ROWS`` divides: wherever stretches begin and end, a row's keys are then shared alike.
    """
    end = position + rows
    while position < end:
        taken = min(end, (position // TILE_ROWS + 1) * TILE_ROWS) - position
        yield [first_row, taken, position, item]
        first_row, position = first_row + taken, position + taken


def shares_for(tiles: int, kv_heads: int, dtype: torch.dtype, *, invariant: bool) -> Shares:
    """How tiles share out their keys; with ``invariant`` the same for any number of tiles."""
    if dtype == torch.float32:
        return EXACT
    if invariant:
        return INVARIANT
    return WHOLE if tiles * kv_heads >= ENOUGH_PROGRAMS else SHARES


def prefill_numbers(
    tiles: int,
    heads: int,
    kv_heads: int,
    channels: int,
    span: int,
    dtype: torch.dtype,
    *,
    invariant: bool = False,
) -> int:
    """How many float32 numbers ``work`` of ``attention_prefill`` has; zeros before the first call.

    Calls that follow one another share them, and so do calls with fewer tiles or keys.
    """
    if not invariant and dtype != torch.float32:
        tiles = min(tiles, (ENOUGH_PROGRAMS - 1) // kv_heads)
    splits = shares_for(tiles, kv_heads, dtype, invariant=invariant).splits(span)
    return room_numbers(
        tiles * kv_heads, splits, TILE_ROWS * queries_of(heads // kv_heads), channels
    )


def attention_prefill_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    block_rows: int,
) -> Tensor:
    """``attention_prefill`` in plain torch, tile by tile; reads ``tiles`` on the host.

    A tile may have any number of rows.
    """
    channels = keys.shape[2]
    for first, rows, position, item in tiles.tolist():
        if rows == 0:
            continue
        seen = position + rows
        query = q[first : first + rows].unflatten(1, (-1, channels)).transpose(0, 1)
        both = rows_of((keys, values), table[item], seen, block_rows)
        mixed = mixed_reference(query, *both)
        out[first : first + rows] = mixed.transpose(0, 1).flatten(1)
    return out


@op(attention_prefill_reference)
def attention_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    block_rows: int,
    span: int,
    work: Tensor,
    invariant: bool = False,
) -> tuple[Tensor, Launch]:
    """Write what rows of several sequences mix into ``out`` (N, H D); return it.

    ``q`` (N, H D) are queries as ``rope_kv`` leaves them, ``keys`` and ``values``
    (places, G, D) hold those of all rows already; ``table`` (items, B) int32 as in
    ``attention_decode``. ``tiles`` (T, 4) int32: the first packed row of a tile, its rows (at most
    ``TILE_ROWS``, one after another in one sequence; 0: none), the first one's position and its
    line of the table. A row sees all positions up to its own; none may be ``span`` or later.
    Rows that are in no tile are neither read nor written. Scores are divided by sqrt(D).

    ``table`` and ``tiles`` are read before the kernel's turn. ``work`` has ``prefill_numbers``
    numbers. In float32, and with ``invariant``, a row's bits do not depend on other rows as long
    as tiles are those of ``tiles_of``; else how many tiles there are says whether keys are shared.
    """
    count, (kv_heads, channels) = tiles.shape[0], keys.shape[1:]
    group = q.shape[1] // (kv_heads * channels)
    _check(q, keys, values, table, tiles, out)
    shares = shares_for(count, kv_heads, q.dtype, invariant=invariant)
    splits, queries = shares.splits(span), queries_of(group)
    together = min(shares.joined, TILE_ROWS * queries)
    # Where keys are not shared nothing is left there.
    room = Room.of(
        work, count * kv_heads if splits > 1 else 0, splits, TILE_ROWS * queries, channels
    )
    return out, Launch(
        _attention_prefill,
        (kv_heads, count, splits),
        {
            **strided(q=q, out=out),
            "keys": keys,
            "values": values,
            "table": table,
            "tiles": tiles,
            "counters": room.counters,
            "sums": room.sums,
            "blocks": table.shape[1],
            "scale": LOG2_E / math.sqrt(channels),
        },
        {
            "G": kv_heads,
            "GROUP": group,
            "D": channels,
            "BLOCK": block_rows,
            "LEAST": shares.least,
            "MOST": shares.most,
            "KEYS": shares.keys,
            "TILE": TILE_ROWS,
            "QUERIES": queries,
            "JOINED": together,
            "AT_ONCE": combined_at_once(shares.most, together),
            "WIDTH": power_of_two(channels),
        },
        shares.tile,
        short=count <= _SHORT_TILES,
    )


def _check(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: Tensor, out: Tensor
) -> None:
    assert keys.shape == values.shape
    assert all(one.is_contiguous() for one in (keys, values, table, tiles))
    assert q.shape == out.shape
    assert q.stride(1) == out.stride(1) == 1
    assert q.dtype == keys.dtype == values.dtype
    assert tiles.shape[1] == 4
    assert table.dtype == tiles.dtype == torch.int32


@triton.jit(do_not_specialize=["blocks"])
def _attention_prefill(
    q,
    keys,
    values,
    table,
    tiles,
    out,
    counters,
    sums,
    blocks,
    q_stride,
    out_stride,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    JOINED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    ROWS: tl.constexpr = TILE * QUERIES
    g, split = tl.program_id(0), tl.program_id(2)
    # A long stretch's last tiles, which see most, begin first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    first = tl.load(tiles + tile * 4).to(tl.int64)
    rows = tl.load(tiles + tile * 4 + 1)
    position = tl.load(tiles + tile * 4 + 2)
    item = tl.load(tiles + tile * 4 + 3)
    # From where the tile lies, not from how many rows it has.
    most_keys = (position // TILE + 1) * TILE
    share = tl.maximum(tl.cdiv(tl.cdiv(most_keys, MOST), KEYS) * KEYS, LEAST)
    seen = tl.where(rows > 0, position + rows, 0)
    used = tl.maximum(tl.cdiv(seen, share), 1)
    # The first splits always wait for their turn, so that the kernel's end is after all before.
    if split >= used:
        return
    begin = split * share
    end = tl.minimum(seen, begin + share)
    table += item * blocks
    line = tl.arange(0, ROWS)
    row, member = line // QUERIES, line % QUERIES
    channel = tl.arange(0, WIDTH)[None, :]
    here = (row < rows) & (member < GROUP)
    head = (g * GROUP + member)[:, None] * D
    gdc_wait(DEPENDENT)
    place = q + (first + row)[:, None] * q_stride + head + channel
    query = tl.load(place, mask=here[:, None] & (channel < D), other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(begin, end, KEYS):
        some_keys = kept(keys, table, g, start, end, G, D, BLOCK, KEYS, WIDTH)
        some_values = kept(values, table, g, start, end, G, D, BLOCK, KEYS, WIDTH)
        key = (start + tl.arange(0, KEYS))[None, :]
        hidden = (key >= end) | (key > position + row[:, None])
        highest, weight, mixed = see_kept(
            query, some_keys, some_values, hidden, highest, weight, mixed, scale
        )
    if used == 1:
        mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        place = out + (first + row)[:, None] * out_stride + head + channel
        tl.store(place, mixed.to(out.dtype.element_ty), mask=here[:, None] & (channel < D))
    else:
        pair = tile * G + g
        sums += pair.to(tl.int64) * tl.num_programs(2) * (ROWS * (D + 2))
        own = sums + split * (ROWS * (D + 2))
        if store_partial(
            own, counters + pair, used, line, here, highest, weight, mixed, ROWS, D, WIDTH
        ):
            for group in range(0, rows * QUERIES, JOINED):
                one = group + tl.arange(0, JOINED)
                known = (one // QUERIES < rows) & (one % QUERIES < GROUP)
                result = combine(sums, used, one, known, ROWS, D, WIDTH, MOST, AT_ONCE)
                spot = out + (first + one // QUERIES)[:, None] * out_stride + channel
                spot += (g * GROUP + one % QUERIES)[:, None] * D
                inside = known[:, None] & (channel < D)
                tl.store(spot, result.to(out.dtype.element_ty), mask=inside)
