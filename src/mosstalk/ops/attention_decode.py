"""Attention of one new row an item over its pages, from the row's matmuls to what it mixes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, op, power_of_two, strided, tl, triton
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
    softmax_step,
    store_partial,
)
from mosstalk.ops.rope_kv import (
    check_store,
    rotations,
    turned,
    turned_reference,
    with_partner,
)

ANY_ITEMS = 1 << 31
SHARES = {
    4: Shares(64, 64, 64, 2, 2),
    24: Shares(64, 256, 32, 4, 3),
    ANY_ITEMS: Shares(32, 512, 16, 4, 4),
}
"""In 16 bit, by the most items that each is for."""
EXACT = Shares(32, 64, 64, 4, 1)
"""In float32: for any number of items, so that company changes no bit."""


def shares_for(items: int, dtype: torch.dtype) -> Shares:
    """How ``items`` of ``dtype`` share out their keys."""
    if dtype == torch.float32:
        return EXACT
    return next(shares for most, shares in SHARES.items() if items <= most)


def decode_numbers(
    items: int, heads: int, kv_heads: int, channels: int, span: int, dtype: torch.dtype
) -> int:
    """How many float32 numbers ``work`` of ``attention_decode`` has; zeros before the first call.

    Calls that follow one another share them, and so do calls with fewer items or keys.
    """
    group = heads // kv_heads
    counts = {min(items, most) for most in SHARES}
    return max(
        room_numbers(count * kv_heads, shares_for(count, dtype).splits(span), group, channels)
        for count in counts
    )


def attention_decode_reference(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    eps: float,
    angles: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor,
    *,
    block_rows: int,
) -> Tensor:
    """``attention_decode`` in plain torch, item by item; reads ``length`` on the host."""
    lines = angles[(length - 1).clamp(min=0).long()]
    query, key, value = turned_reference(qkv, norm_weights, eps, lines, keys.shape[1])
    out.zero_()
    for item, seen in enumerate(length.tolist()):
        if seen == 0:
            continue
        block, inside = divmod(seen - 1, block_rows)
        place = int(table[item, block]) * block_rows + inside
        keys[place], values[place] = key[item], value[item]
        both = rows_of((keys, values), table[item], seen, block_rows)
        mixed = mixed_reference(query[item, :, None], *both)
        out[item] = mixed[:, 0].flatten().to(out.dtype)
    return out


def rows_of(
    parts: tuple[Tensor, Tensor], blocks: Tensor, seen: int, block_rows: int
) -> list[Tensor]:
    """The first ``seen`` rows (seen, G, D) of an item in each of ``parts`` (places, G, D).

    ``blocks`` is the item's line of the table. Blocks that follow one another are left where they
    are; others are copied whole: that takes half of what row by row does.
    """
    used = blocks[: ceil_div(seen, block_rows)]
    first, *_ = numbers = used.tolist()
    if adjacent(numbers):
        return [part.narrow(0, first * block_rows, seen) for part in parts]
    whole = (part.unflatten(0, (-1, block_rows)).index_select(0, used) for part in parts)
    return [copied.flatten(0, 1)[:seen] for copied in whole]


def adjacent(blocks: list[int]) -> bool:
    """Whether each of ``blocks`` lies behind the one before it."""
    return blocks == [*range(blocks[0], blocks[0] + len(blocks))]


def mixed_reference(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention in float32 of ``query`` (H, rows, D) to kept rows (S, G, D): (H, rows, D).

    The rows are the last of those kept, and see none after themselves.
    """
    rows, seen = query.shape[1], len(keys)
    mask = None
    if 1 < rows < seen:
        own = torch.arange(seen - rows, seen, device=query.device)
        mask = torch.arange(seen, device=query.device) <= own[:, None]
    key, value = (one.float().transpose(0, 1)[None] for one in (keys, values))
    causal = 1 < rows == seen
    return F.scaled_dot_product_attention(
        query.float()[None], key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
    )[0]


@op(attention_decode_reference)
def attention_decode(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    eps: float,
    angles: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor,
    *,
    block_rows: int,
    span: int,
    work: Tensor,
) -> tuple[Tensor, Launch]:
    """Write each item's new key and value to their place and what it mixes into ``out``.

    ``qkv`` (I, (H + 2 G) D), ``norm_weights``, ``eps``, ``angles``, ``keys`` and ``values`` are
    as in ``rope_kv``. ``table`` (I, B) int32: row j of an item is at place
    table[item, j // block_rows] * block_rows + j % block_rows. ``length`` (I,) int32: keys an
    item sees, the new row's included, which is its last; 0: nothing is written but zeros into
    ``out`` (I, H D). No length may be above ``span``. Scores are divided by sqrt(D).

    ``table``, ``length`` and keys and values of earlier rows are read before the kernel's turn:
    no kernel of the same chain of dependent launches may write them. ``work`` (float32) has at
    least ``decode_numbers`` numbers. An item's bits do not depend on other items or on ``span``,
    but in 16 bit on how many items there are.
    """
    items, (kv_heads, channels) = table.shape[0], keys.shape[1:]
    group = (qkv.shape[1] // channels - 2 * kv_heads) // kv_heads
    _check(qkv, table, length, out, kv_heads * group * channels)
    check_store(qkv, norm_weights, angles, keys, values)
    shares = shares_for(items, qkv.dtype)
    splits, queries = shares.splits(span), queries_of(group)
    room = Room.of(work, items * kv_heads, splits, group, channels)
    return out, Launch(
        _attention_decode,
        (kv_heads, items, splits),
        {
            **strided(qkv=qkv, out=out),
            "q_norm_weight": norm_weights[0],
            "k_norm_weight": norm_weights[1],
            "angles": angles,
            "keys": keys,
            "values": values,
            "table": table,
            "length": length,
            "counters": room.counters,
            "sums": room.sums,
            "blocks": table.shape[1],
            "eps": eps,
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
            "ROWS": power_of_two(queries),
            "QUERIES": queries,
            "AT_ONCE": combined_at_once(shares.most, queries),
            "WIDTH": power_of_two(channels),
        },
        shares.tile,
    )


def _check(qkv: Tensor, table: Tensor, length: Tensor, out: Tensor, width: int) -> None:
    assert qkv.shape[0] == table.shape[0]
    assert length.shape == (table.shape[0],)
    assert out.shape == (table.shape[0], width)
    assert qkv.stride(1) == out.stride(1) == 1
    assert table.is_contiguous()
    assert length.is_contiguous()
    assert table.dtype == length.dtype == torch.int32


@triton.jit
def kept(
    store, table, g, start, end, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile (KEYS, WIDTH) of an item's kept rows from ``start`` on, zeros from ``end`` on."""
    key = start + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK, mask=key < end, other=0).to(tl.int64)
    place = ((block * BLOCK + key % BLOCK) * G + g) * D
    channel = tl.arange(0, WIDTH)[None, :]
    inside = key[:, None] < end
    return tl.load(store + place[:, None] + channel, mask=inside & (channel < D), other=0.0)


@triton.jit
def see_kept(query, keys, values, hidden, highest, weight, mixed, scale):
    """``softmax_step`` of ``query`` (rows, d) over keys and values (keys, d) not ``hidden``."""
    score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(hidden, float("-inf"), score)
    return softmax_step(score, values, highest, weight, mixed)


@triton.jit
def _give(
    out, counters, sums, pair, split, used, seen, highest, weight, mixed,
    GROUP: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what a key head's queries mix to ``out`` (1, WIDTH), or leave it for the last split."""
    member = tl.arange(0, ROWS)
    real = (tl.arange(0, WIDTH) < D)[None, :]
    if used == 1:
        mixed = tl.where(seen > 0, mixed / weight[:, None], 0.0)
        inside = (member < GROUP)[:, None] & real
        tl.store(out + member[:, None] * D, mixed.to(out.dtype.element_ty), mask=inside)
    else:
        sums += pair.to(tl.int64) * tl.num_programs(2) * (GROUP * (D + 2))
        own_sums = sums + split * (GROUP * (D + 2))
        here = member < GROUP
        if store_partial(
            own_sums, counters + pair, used, member, here, highest, weight, mixed, GROUP, D, WIDTH
        ):
            one = tl.arange(0, QUERIES)
            known = one < GROUP
            result = combine(sums, used, one, known, GROUP, D, WIDTH, MOST, AT_ONCE)
            spot = out + one[:, None] * D
            tl.store(spot, result.to(out.dtype.element_ty), mask=known[:, None] & real)


@triton.jit(do_not_specialize=["blocks"])
def _attention_decode(
    qkv,
    q_norm_weight,
    k_norm_weight,
    angles,
    keys,
    values,
    table,
    length,
    out,
    counters,
    sums,
    blocks,
    qkv_stride,
    out_stride,
    eps,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    g, item, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seen = tl.load(length + item)
    # The first split sees the new row too, which is never read from where it is written.
    old = tl.maximum(seen - 1, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(old, MOST), KEYS) * KEYS, LEAST)
    used = tl.maximum(tl.cdiv(old, share), 1)
    # The first splits always wait for their turn, so that the kernel's end is after all before.
    if split >= used:
        return
    begin = split * share
    end = tl.minimum(old, begin + share)
    table += item * blocks
    first_keys = kept(keys, table, g, begin, end, G, D, BLOCK, KEYS, WIDTH)
    first_values = kept(values, table, g, begin, end, G, D, BLOCK, KEYS, WIDTH)
    channel = tl.arange(0, WIDTH)
    real = (channel < D)[None, :]
    cos, sin = rotations(angles + old.to(tl.int64) * D, D, WIDTH)
    q_own, q_partner = with_partner(q_norm_weight, real, D, WIDTH)
    k_own, k_partner = with_partner(k_norm_weight, real, D, WIDTH)
    block = tl.load(table + old // BLOCK, mask=seen > 0, other=0).to(tl.int64)
    gdc_wait(DEPENDENT)
    member = tl.arange(0, ROWS)
    qkv += item.to(tl.int64) * qkv_stride
    x = qkv + (g * GROUP + member)[:, None] * D
    own, partner = with_partner(x, (member < GROUP)[:, None], D, WIDTH)
    new_own, new_partner = with_partner(qkv + (G * GROUP + g) * D, real, D, WIDTH)
    new_value = tl.load(qkv + (G * GROUP + G + g) * D + channel, mask=channel < D, other=0.0)
    query = turned(own, partner, q_own, q_partner, cos, sin, eps, D)
    new_key = turned(new_own, new_partner, k_own, k_partner, cos, sin, eps, D)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    if split == 0:
        place = ((block * BLOCK + old % BLOCK) * G + g) * D + channel
        written = (channel < D) & (seen > 0)
        tl.store(keys + place[None, :], new_key, mask=written[None, :])
        tl.store(values + place, new_value, mask=written)
        highest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
        weight += 1.0
        mixed += new_value.to(tl.float32)[None, :]
    hidden = (begin + tl.arange(0, KEYS) >= end)[None, :]
    highest, weight, mixed = see_kept(
        query, first_keys, first_values, hidden, highest, weight, mixed, scale
    )
    for start in range(begin + KEYS, end, KEYS):
        more_keys = kept(keys, table, g, start, end, G, D, BLOCK, KEYS, WIDTH)
        more_values = kept(values, table, g, start, end, G, D, BLOCK, KEYS, WIDTH)
        hidden = (start + tl.arange(0, KEYS) >= end)[None, :]
        highest, weight, mixed = see_kept(
            query, more_keys, more_values, hidden, highest, weight, mixed, scale
        )
    out += item.to(tl.int64) * out_stride + g * GROUP * D + channel[None, :]
    _give(
        out, counters, sums, item * G + g, split, used, seen, highest, weight, mixed,
        GROUP, D, MOST, ROWS, QUERIES, AT_ONCE, WIDTH,
    )  # fmt: skip
