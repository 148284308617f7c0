"""The best ids of each chunk of a channel's vocabulary."""

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.sampling_parts import (
    _BAD,
    BAD_KEY,
    HELD,
    NO_KEY,
    DrawSettings,
    DrawState,
    draws_now,
    key_of,
    safe_temperature,
    warped_at,
)
from mosstalk.ops.sampling_reference import penalised, safely
from mosstalk.ops.sampling_sort import largest
from mosstalk.ops.tiles import Tile

FEW_IDS, ANY_IDS = 1 << 15, 1 << 31
CANDIDATE_TILES = {FEW_IDS: Tile(1, 2048, HELD, 8, 1), ANY_IDS: Tile(1, 8192, HELD, 16, 1)}
"""By the most ids that a tile is for: ``columns`` ids to a program, which keeps ``inner``."""


def candidate_tile(vocabulary: int) -> Tile:
    """The chunk for a channel of so many ids."""
    return next(tile for limit, tile in CANDIDATE_TILES.items() if vocabulary <= limit)


def topk_candidates_reference(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    best: Tensor,
    *,
    last_id: int,
) -> Tensor:
    """What the kernel writes into ``best`` where every row draws, in plain torch; return it.

    ``logits`` (R, V) raw; ``best`` (R, chunks, HELD) int64: keys of each chunk's best ids after
    mask, penalty and temperature, the largest value first, of equal ones the lowest id; BAD_KEY
    first where a logit is not finite.
    """
    rows, width = logits.shape
    size = candidate_tile(width).columns
    values = penalised(logits, state.seen, settings, last_id)
    values = values / safely(settings.temperature)[:, None]
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(best.shape[1] * size, device=logits.device)
    keys = torch.full((rows, len(ids)), NO_KEY >> 32, device=logits.device)
    keys[:, :width] = ordered
    keys = (keys << 32 | (0x7FFFFFFF - ids)).view(rows, -1, size)
    best.copy_(keys.topk(HELD, dim=2).values)
    finite = torch.ones(rows, len(ids), dtype=torch.bool, device=logits.device)
    finite[:, :width] = logits.isfinite()
    best[:, :, 0].masked_fill_(~finite.view(rows, -1, size).all(dim=2), BAD_KEY)
    return best


def plan_topk_candidates(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    best: Tensor,
    *,
    channel: int,
    last_id: int,
    masked: bool,
) -> Launch:
    """The kernel that does what ``best_ids_reference`` says for the rows that draw."""
    rows, width = logits.shape
    size = candidate_tile(width)
    chunks = ceil_div(width, size.columns)
    assert best.shape == (rows, chunks, HELD)
    assert best.is_contiguous()
    assert logits.stride(1) == state.seen.stride(1) == 1
    assert state.seen.shape[1] == width
    assert state.mode is not None or not masked
    return Launch(
        _topk_candidates,
        (chunks, rows),
        {
            "logits": logits,
            "seen": state.seen.view(torch.uint8),
            "mode": state.mode,
            "slots": settings.slots,
            "never": settings.never,
            "penalty": settings.penalty,
            "temperature": settings.temperature,
            "best": best,
            "nevers": settings.never.shape[1],
            "last_id": last_id,
            "logits_stride": logits.stride(0),
            "seen_stride": state.seen.stride(0),
            "never_stride": settings.never.stride(0),
        },
        {
            "V": width,
            "CHUNK_BITS": size.columns.bit_length() - 1,
            "HELD_BITS": HELD.bit_length() - 1,
            "CHANNEL": channel,
            "MODES": state.mode is not None,
            "MASKED": masked,
        },
        size,
    )


@triton.jit(do_not_specialize=["nevers", "last_id", "never_stride"])
def _topk_candidates(
    logits,
    seen,
    mode,
    slots,
    never,
    penalty,
    temperature,
    best,
    nevers,
    last_id,
    logits_stride,
    seen_stride,
    never_stride,
    V: tl.constexpr,
    CHUNK_BITS: tl.constexpr,
    HELD_BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    MODES: tl.constexpr,
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1)
    gdc_wait(DEPENDENT)
    slot = tl.load(slots + row)
    divisor = safe_temperature(tl.load(temperature + row))
    factor = tl.load(penalty + row)
    if draws_now(slot, mode, CHANNEL, MODES, MASKED):
        ids = (chunk << CHUNK_BITS) + tl.arange(0, 1 << CHUNK_BITS)
        value, bad = warped_at(
            logits + row * logits_stride,
            seen + slot * seen_stride,
            never + row * never_stride,
            nevers,
            ids,
            last_id,
            factor,
            divisor,
            V,
        )
        keys = largest(key_of(value, ids), CHUNK_BITS, HELD_BITS)
        rank = tl.arange(0, 1 << HELD_BITS)
        poisoned = tl.max(bad.to(tl.int32), axis=0) != 0
        keys = tl.where(poisoned & (rank == 0), _BAD, keys)
        place = ((row * tl.num_programs(0) + chunk) << HELD_BITS) + rank
        tl.store(best + place, keys)
