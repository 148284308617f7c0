"""RMSNorm and rotary positions of queries and keys; keys and values to their places."""

import torch
from torch import Tensor

from mosstalk.numerics.rope import rotary_tables
from mosstalk.ops.launch import Launch, ceil_div, op, power_of_two, strided, tl, triton
from mosstalk.ops.norm import rms_scaled
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

_TILE = Tile(16, 0, 0, 4, 1)
"""Heads of one row to a program."""
_SHORT_ROWS = 2048


def rotary_table(positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles: (positions, D) float32.

    Half of each line of ``numerics.rope.rotary_tables``, whose other half repeats it, bit for bit.
    """
    cos, sin = rotary_tables(torch.arange(positions, device=device), head_dim, theta)
    half = head_dim // 2
    return torch.cat([cos[:, :half], sin[:, :half]], dim=-1)


def rope_kv_reference(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    eps: float,
    angles: Tensor,
    positions: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> Tensor:
    """``rope_kv`` in plain torch; which rows are written is read on the host."""
    written = places >= 0
    rows: Tensor | slice = slice(None)
    if not written.all():
        rows = written
        qkv, positions, places = qkv[rows], positions[rows], places[rows]
    lines = angles.index_select(0, positions)
    query, key, value = turned_reference(qkv, norm_weights, eps, lines, keys.shape[1])
    out[rows] = query.flatten(1)
    places = places.long()
    keys.index_copy_(0, places, key)
    values.index_copy_(0, places, value)
    return out


def turned_reference(
    qkv: Tensor, norm_weights: tuple[Tensor, Tensor], eps: float, lines: Tensor, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N, H, D), keys and values (N, G, D) of rows ``qkv`` (N, (H + 2 G) D).

    ``lines`` (N, D) are lines of a ``rotary_table``; the rest is as in ``rope_kv``.
    """
    rows, channels = lines.shape
    heads = qkv.view(rows, qkv.shape[1] // channels, channels)
    both = rms_scaled(heads[:, :-kv_heads], eps)
    query, key = both[:, :-kv_heads], both[:, -kv_heads:]
    query.mul_(norm_weights[0])
    key.mul_(norm_weights[1])
    # Each half of a head's channels is turned with the other one.
    halves = both.float().view(*both.shape[:2], 2, channels // 2)
    cos, sin = lines.view(rows, 2, 1, 1, channels // 2).unbind(1)
    turned, across = halves * cos, halves * sin
    turned[:, :, 0].sub_(across[:, :, 1])
    turned[:, :, 1].add_(across[:, :, 0])
    both.copy_(turned.flatten(2))
    return query, key, heads[:, -kv_heads:]


@op(rope_kv_reference)
def rope_kv(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    eps: float,
    angles: Tensor,
    positions: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> tuple[Tensor, Launch]:
    """Write each row's query into ``out``, its key and value to its place; return ``out``.

    ``qkv`` (N, (H + 2 G) D) are rows' H query heads, G key heads and G value heads. Queries and
    keys pass RMSNorm with ``norm_weights``, (D,) of queries and (D,) of keys, and rotary positions,
    rounded where ``models.language_model`` rounds; ``angles`` is a ``rotary_table``. ``positions``
    (N,) int32; ``places`` (N,) int32 or int64: -1 writes nothing of that row, its query included.
    ``keys``, ``values`` (places, G, D); ``out`` (N, H D).
    """
    rows, (kv_heads, channels) = qkv.shape[0], keys.shape[1:]
    heads = qkv.shape[1] // channels - 2 * kv_heads
    assert positions.shape == places.shape == (rows,)
    assert out.shape == (rows, heads * channels)
    check_store(qkv, norm_weights, angles, keys, values)
    assert qkv.stride(1) == out.stride(1) == 1
    return out, Launch(
        _rope_kv,
        (rows, ceil_div(heads + 2 * kv_heads, _TILE.rows)),
        {
            **strided(qkv=qkv, out=out),
            "q_norm_weight": norm_weights[0],
            "k_norm_weight": norm_weights[1],
            "angles": angles,
            "positions": positions,
            "places": places,
            "keys": keys,
            "values": values,
            "eps": eps,
        },
        {
            "H": heads,
            "G": kv_heads,
            "D": channels,
            "HEADS": _TILE.rows,
            "WIDTH": power_of_two(channels),
        },
        _TILE,
        short=rows <= _SHORT_ROWS,
    )


def check_store(
    qkv: Tensor, norm_weights: tuple[Tensor, Tensor], angles: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Assert that a layer's keys and values, and what turns rows into them, fit one another."""
    channels = keys.shape[2]
    assert keys.shape == values.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert qkv.dtype == keys.dtype == values.dtype
    assert all(one.shape == (channels,) and one.dtype == qkv.dtype for one in norm_weights)
    assert angles.shape[1] == channels
    assert angles.dtype == torch.float32
    assert angles.is_contiguous()


@triton.jit
def rotations(line, D: tl.constexpr, WIDTH: tl.constexpr):
    """Factors (1, WIDTH) of a channel itself and of the one it is turned with.

    ``line`` points to a line of a ``rotary_table``.
    """
    channel = tl.arange(0, WIDTH)
    here = channel < D
    angle = channel % (D // 2)
    cos = tl.load(line + angle, mask=here, other=0.0)
    sin = tl.load(line + D // 2 + angle, mask=here, other=0.0)
    return cos[None, :], tl.where(channel < D // 2, -sin, sin)[None, :]


@triton.jit
def with_partner(x, here, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (rows, WIDTH) that ``x`` (rows, 1) points to, and the channels turned with theirs."""
    channel = tl.arange(0, WIDTH)[None, :]
    partner = tl.where(channel < D // 2, channel + D // 2, channel - D // 2)
    inside = here & (channel < D)
    own = tl.load(x + channel, mask=inside, other=0.0)
    return own, tl.load(x + partner, mask=inside, other=0.0)


@triton.jit
def turned(own, partner, norm_weight, partner_norm_weight, cos, sin, eps, D: tl.constexpr):
    """RMSNorm and rotary positions of heads as ``with_partner`` gives them, in their dtype.

    Rounded where ``models.language_model`` rounds; norm weights, ``cos`` and ``sin`` are (rows or
    1, WIDTH).
    """
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1)[:, None] / D + eps)
    one = (wide * scale).to(own.dtype).to(tl.float32) * norm_weight.to(tl.float32)
    other = (partner.to(tl.float32) * scale).to(own.dtype).to(tl.float32)
    other *= partner_norm_weight.to(tl.float32)
    one, other = one.to(own.dtype).to(tl.float32), other.to(own.dtype).to(tl.float32)
    return (one * cos + other * sin).to(own.dtype)


@triton.jit
def _rope_kv(
    qkv,
    q_norm_weight,
    k_norm_weight,
    angles,
    positions,
    places,
    keys,
    values,
    out,
    qkv_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    place = tl.load(places + row).to(tl.int64)
    line = angles + tl.load(positions + row).to(tl.int64) * D
    cos, sin = rotations(line, D, WIDTH)
    q_own, q_partner = with_partner(q_norm_weight, channel < D, D, WIDTH)
    k_own, k_partner = with_partner(k_norm_weight, channel < D, D, WIDTH)
    gdc_wait(DEPENDENT)
    here = (head < H + 2 * G) & (place >= 0)
    own, partner = with_partner(qkv + row * qkv_stride + head * D, here, D, WIDTH)
    norm_weight = tl.where(head < H, q_own, k_own)
    partner_norm_weight = tl.where(head < H, q_partner, k_partner)
    result = turned(own, partner, norm_weight, partner_norm_weight, cos, sin, eps, D)
    here = here & (channel < D)
    tl.store(out + row * out_stride + head * D + channel, result, mask=here & (head < H))
    spot = (place * G + head - H) * D + channel
    tl.store(keys + spot, result, mask=here & (head >= H) & (head < H + G))
    tl.store(values + spot - G * D, own, mask=here & (head >= H + G))
