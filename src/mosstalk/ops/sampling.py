"""A token for each row, out of ``topk_candidates``, and the state that follows from it."""

import torch
from torch import Tensor

from mosstalk.ops import topk_candidates
from mosstalk.ops.launch import Launch, ceil_div, runs, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.sampling_parts import (
    _BAD,
    _NO_ID,
    FREE,
    HELD,
    NO_KEY,
    NOT_DRAWN,
    DrawSettings,
    DrawState,
    draws_now,
    gumbel_at,
    id_in,
    safe_temperature,
    value_in,
    warped_at,
)
from mosstalk.ops.sampling_reference import sample_reference
from mosstalk.ops.sampling_sort import largest
from mosstalk.ops.tiles import Tile

FEW_KEYS, ANY_KEYS = 1 << 10, 1 << 31
SAMPLE_TILES = {FEW_KEYS: Tile(1, 1024, HELD, 8, 1), ANY_KEYS: Tile(1, 1024, HELD, 16, 1)}
"""By the most keys that a row's chunks hold; ``columns`` ids are looked at again at once."""

_NO_KEY, _FREE, _NOT_DRAWN = tl.constexpr(NO_KEY), tl.constexpr(FREE), tl.constexpr(NOT_DRAWN)


def sample(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    ids: Tensor,
    bad: Tensor,
    *,
    channel: int,
    last_id: int | None = None,
    masked: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """Draw an id for each row of ``logits`` (R, V), raw, in any float dtype; remember it.

    The ids are those of ``model.sampling``: mask, penalty, temperature, top-k with its ties,
    top-p, and the largest sum with Gumbel noise that is a function of (seed, channel, step, id).
    ``few`` must hold for every row, or the reference be called. Written are ``ids`` (R,) int64,
    ``bad`` (R,) bool, whose elements may lie apart, and where an id was drawn ``state``'s seen
    and latest. ``last_id`` is the largest id that may be drawn.

    A row of slot -1 writes nothing. A row draws nothing, and its id is NOT_DRAWN, if its slot
    has ended, if it is ``masked`` and its slot's mode is not ``channel``, or if any of its V
    logits is not finite: then it is bad. Without ``state.mode`` every slot draws. A slot may
    have one row. What a row draws does not depend on the others. ``workspace`` is what
    ``pick_workspace`` gives, made here where it is None; calls that follow one another share it.
    """
    last_id = logits.shape[1] - 1 if last_id is None else last_id
    if not runs(logits):
        sample_reference(
            logits, state, settings, ids, bad, channel=channel, last_id=last_id, masked=masked
        )
        return
    if workspace is None:
        workspace = sample_workspace(logits.shape[0], logits.shape[1], logits.device)
    launches = plan_sampling(
        logits, state, settings, ids, bad, workspace,
        channel=channel, last_id=last_id, masked=masked,
    )  # fmt: skip
    for launch in launches:
        launch.run()


def sample_workspace(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Room (rows, chunks, HELD) int64 for the best ids of each chunk."""
    chunks = ceil_div(vocabulary, topk_candidates.candidate_tile(vocabulary).columns)
    return torch.empty(rows, chunks, HELD, dtype=torch.int64, device=device)


def plan_sampling(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    ids: Tensor,
    bad: Tensor,
    workspace: Tensor,
    *,
    channel: int,
    last_id: int,
    masked: bool = False,
) -> tuple[Launch, Launch]:
    """The two kernels that do what ``sample`` says."""
    rows, width = logits.shape
    best = workspace[:rows]
    first = topk_candidates.plan_topk_candidates(
        logits, state, settings, best, channel=channel, last_id=last_id, masked=masked
    )
    keys = best.shape[1] * HELD
    size = next(tile for limit, tile in SAMPLE_TILES.items() if keys <= limit)
    assert ids.shape == bad.shape == (rows,)
    assert state.latest is None or state.latest.is_contiguous()
    own = ("steps", "seeds", "forced", "top_k", "tail")
    second = Launch(
        _sample,
        (rows,),
        {
            **first.arguments,
            **{name: getattr(settings, name) for name in own},
            "latest": state.latest,
            "ids": ids,
            "bad": bad.view(torch.uint8),
            "keys": keys,
            "ids_stride": ids.stride(0),
            "bad_stride": bad.stride(0),
        },
        {
            "V": width,
            "AGAIN": size.columns,
            "KEYS_BITS": (keys - 1).bit_length(),
            "HELD_BITS": HELD.bit_length() - 1,
            "CHANNEL": channel,
            "MODES": state.mode is not None,
            "MASKED": masked,
            "LATEST": state.latest is not None,
        },
        size,
    )
    return first, second


@triton.jit
def _at(rank, place, values):
    """``values`` at one place."""
    return tl.sum(tl.where(rank == place, values, 0), axis=0)


@triton.jit
def _ties_after(
    logits, seen, never, nevers, last_id, penalty, divisor, edge, after,
    V: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """How many ids above ``after`` have the value ``edge``."""
    found = tl.zeros((AGAIN,), tl.int32)
    for start in range(0, V, AGAIN):
        ids = start + tl.arange(0, AGAIN)
        value, _ = warped_at(logits, seen, never, nevers, ids, last_id, penalty, divisor, V)
        found += ((value == edge) & (ids > after)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _best_tie_after(
    logits, seen, never, nevers, last_id, penalty, divisor, edge, after, kept, seed, step,
    CHANNEL: tl.constexpr, V: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The largest sum with noise among the first ``kept`` ids above ``after`` of value ``edge``.

    Returns the sum in float64 and the id.
    """
    before = tl.sum(tl.zeros((AGAIN,), tl.int32), axis=0)
    best = tl.full((AGAIN,), float("-inf"), tl.float64)
    best_id = tl.full((AGAIN,), _NO_ID, tl.int32)
    for start in range(0, V, AGAIN):
        ids = start + tl.arange(0, AGAIN)
        value, _ = warped_at(logits, seen, never, nevers, ids, last_id, penalty, divisor, V)
        tied = ((value == edge) & (ids > after)).to(tl.int32)
        number = before + tl.cumsum(tied, axis=0)
        noisy = value.to(tl.float64) + gumbel_at(seed, step, ids, CHANNEL)
        better = (tied != 0) & (number <= kept) & (noisy > best)
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, ids, best_id)
        before += tl.sum(tied, axis=0)
    found = tl.max(best, axis=0)
    return found, tl.min(tl.where(best == found, best_id, _NO_ID), axis=0)


@triton.jit
def _kept(value, rank, k, tail, more):
    """What top-k and top-p keep of held values (HELD,), the largest first, and of ``more`` ties.

    ``more`` ids beside them have the edge's value, all above the held ones: top-p cuts those
    first. Sums are taken from the small end, in float64, and rounded to float32.
    """
    edge = _at(rank, k - 1, value)
    kept = (value >= edge) & (value > float("-inf"))
    relative = (value - _at(rank, 0, value)).to(tl.float64)
    mass = tl.where(kept, tl.exp(relative).to(tl.float32), 0.0)
    beside = more.to(tl.float64)
    edge_mass = _at(rank, k - 1, mass)
    total = tl.sum(mass.to(tl.float64), axis=0) + beside * edge_mass.to(tl.float64)
    total = total.to(tl.float32)
    share = tl.where(kept, tl.div_rn(mass, total), 0.0).to(tl.float64)
    edge_share = _at(rank, k - 1, share)
    at_most = tl.cumsum(share, axis=0, reverse=True) + beside * edge_share
    limit = tl.where(tail > 0, tail, -1.0)
    cut = (at_most.to(tl.float32) <= limit) & (rank > 0)
    # Rounding to float32 may admit one more than the quotient says.
    cut_more = tl.floor(limit.to(tl.float64) / tl.maximum(edge_share, 1e-300))
    cut_more = tl.where(
        ((cut_more + 1) * edge_share).to(tl.float32) <= limit, cut_more + 1, cut_more
    )
    cut_more = tl.minimum(tl.maximum(cut_more, 0), beside).to(tl.int32)
    return kept & (cut == 0), more - cut_more


@triton.jit(do_not_specialize=["nevers", "last_id", "never_stride", "keys"])
def _sample(
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
    steps,
    seeds,
    forced,
    top_k,
    tail,
    latest,
    ids,
    bad,
    keys,
    ids_stride,
    bad_stride,
    V: tl.constexpr,
    AGAIN: tl.constexpr,
    KEYS_BITS: tl.constexpr,
    HELD_BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    MODES: tl.constexpr,
    MASKED: tl.constexpr,
    LATEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    HELD: tl.constexpr = 1 << HELD_BITS
    row = tl.program_id(0)
    gdc_wait(DEPENDENT)
    slot = tl.load(slots + row)
    heat, factor = tl.load(temperature + row), tl.load(penalty + row)
    k = tl.minimum(tl.load(top_k + row), HELD).to(tl.int32)
    rest, wanted = tl.load(tail + row), tl.load(forced + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    if draws_now(slot, mode, CHANNEL, MODES, MASKED):
        place = tl.arange(0, 1 << KEYS_BITS)
        top = tl.load(best + row * keys + place, mask=place < keys, other=_NO_KEY)
        top = largest(top, KEYS_BITS, HELD_BITS)
        rank = tl.arange(0, HELD)
        held, value = id_in(top), value_in(top)
        chosen = _at(rank, 0, held)
        damaged = tl.max(top, axis=0) == _BAD
        if (heat > 0) & (wanted == _FREE) & (damaged == 0):
            divisor = safe_temperature(heat)
            edge, after = _at(rank, k - 1, value), _at(rank, HELD - 1, held)
            more = tl.sum(tl.zeros((HELD,), tl.int32), axis=0)
            x, known = logits + row * logits_stride, seen + slot * seen_stride
            banned = never + row * never_stride
            if (_at(rank, HELD - 1, value) == edge) & (edge > float("-inf")):
                more = _ties_after(
                    x, known, banned, nevers, last_id, factor, divisor, edge, after, V, AGAIN
                )
            kept, more = _kept(value, rank, k, rest, more)
            noisy = value.to(tl.float64) + gumbel_at(seed, step, held, CHANNEL)
            noisy = tl.where(kept, noisy, float("-inf"))
            sum_found = tl.max(noisy, axis=0)
            chosen = tl.min(tl.where(noisy == sum_found, held, _NO_ID), axis=0)
            if more > 0:
                other, other_id = _best_tie_after(
                    x, known, banned, nevers, last_id, factor, divisor, edge, after, more,
                    seed, step, CHANNEL, V, AGAIN,
                )  # fmt: skip
                chosen = tl.where(other > sum_found, other_id, chosen)
        chosen = tl.where(wanted == _FREE, chosen.to(tl.int64), wanted)
        tl.store(bad + row * bad_stride, damaged.to(tl.uint8))
        tl.store(ids + row * ids_stride, tl.where(damaged, _NOT_DRAWN, chosen))
        if damaged == 0:
            tl.store(seen + slot * seen_stride + chosen, 1)
            if LATEST:
                tl.store(latest + slot * 2 + CHANNEL, chosen)
    elif slot >= 0:
        tl.store(bad + row * bad_stride, 0)
        tl.store(ids + row * ids_stride, _NOT_DRAWN)
