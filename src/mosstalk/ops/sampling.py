"""Draws on the device: the best logits of each row, a token out of them, and each reply's mode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, Plans, ceil_div, op, runs, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.sampling_parts import (
    _BAD,
    _NO_TOKEN,
    AUDIO,
    BAD_KEY,
    ENDED,
    FREE,
    HELD,
    NO_KEY,
    NOT_DRAWN,
    TEXT,
    DrawSettings,
    DrawState,
    draws_now,
    gumbel_at,
    key_of,
    largest,
    penalised,
    safe_temperature,
    safely,
    sample_reference,
    token_in,
    value_in,
    warped_at,
)
from mosstalk.ops.tiles import Tile

# The best tokens of each chunk of a channel's vocabulary.


FEW_TOKENS, ANY_TOKENS = 1 << 15, 1 << 31
CANDIDATE_TILES = {FEW_TOKENS: Tile(1, 2048, HELD, 8, 1), ANY_TOKENS: Tile(1, 8192, HELD, 16, 1)}
"""By the most tokens that a tile is for: ``columns`` tokens to a program, which keeps ``inner``."""


def candidate_tile(vocabulary: int) -> Tile:
    """The chunk for a channel of so many tokens."""
    return next(tile for limit, tile in CANDIDATE_TILES.items() if vocabulary <= limit)


def topk_candidates_reference(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    best: Tensor,
    *,
    last_token: int,
) -> Tensor:
    """What the kernel writes into ``best`` where every row draws, in plain torch; return it.

    ``logits`` (R, V) raw; ``best`` (R, chunks, HELD) int64: keys of each chunk's best tokens after
    mask, penalty and temperature, the largest value first, of equal ones the lowest token; BAD_KEY
    first where a logit is not finite.
    """
    rows, width = logits.shape
    size = candidate_tile(width).columns
    values = penalised(logits, state.seen, settings, last_token)
    values = values / safely(settings.temperature)[:, None]
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tokens = torch.arange(best.shape[1] * size, device=logits.device)
    keys = torch.full((rows, len(tokens)), NO_KEY >> 32, device=logits.device)
    keys[:, :width] = ordered
    keys = (keys << 32 | (0x7FFFFFFF - tokens)).view(rows, -1, size)
    best.copy_(keys.topk(HELD, dim=2).values)
    finite = torch.ones(rows, len(tokens), dtype=torch.bool, device=logits.device)
    finite[:, :width] = logits.isfinite()
    best[:, :, 0].masked_fill_(~finite.view(rows, -1, size).all(dim=2), BAD_KEY)
    return best


@op(topk_candidates_reference)
def topk_candidates(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    best: Tensor,
    *,
    channel: int,
    last_token: int,
    masked: bool,
) -> tuple[Tensor, Launch]:
    """Write the best tokens of each chunk of the rows that draw into ``best``; return it.

    ``channel`` and ``masked`` say which rows draw, as in ``sample``.
    """
    rows, width = logits.shape
    size = candidate_tile(width)
    chunks = ceil_div(width, size.columns)
    assert best.shape == (rows, chunks, HELD)
    assert best.is_contiguous()
    assert logits.stride(1) == state.seen.stride(1) == 1
    assert state.seen.shape[1] == width
    assert state.mode is not None or not masked
    return best, Launch(
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
            "last_token": last_token,
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


@triton.jit(do_not_specialize=["nevers", "last_token", "never_stride"])
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
    last_token,
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
        tokens = (chunk << CHUNK_BITS) + tl.arange(0, 1 << CHUNK_BITS)
        value, bad = warped_at(
            logits + row * logits_stride,
            seen + slot * seen_stride,
            never + row * never_stride,
            nevers,
            tokens,
            last_token,
            factor,
            divisor,
            V,
        )
        keys = largest(key_of(value, tokens), CHUNK_BITS, HELD_BITS)
        rank = tl.arange(0, 1 << HELD_BITS)
        poisoned = tl.max(bad.to(tl.int32), axis=0) != 0
        keys = tl.where(poisoned & (rank == 0), _BAD, keys)
        place = ((row * tl.num_programs(0) + chunk) << HELD_BITS) + rank
        tl.store(best + place, keys)


# A token for each row, out of ``topk_candidates``, and the state that follows from it.


FEW_KEYS, ANY_KEYS = 1 << 10, 1 << 31
SAMPLE_TILES = {FEW_KEYS: Tile(1, 1024, HELD, 8, 1), ANY_KEYS: Tile(1, 1024, HELD, 16, 1)}
"""By the most keys that a row's chunks hold; ``columns`` tokens are looked at again at once."""

_NO_KEY, _FREE, _NOT_DRAWN = tl.constexpr(NO_KEY), tl.constexpr(FREE), tl.constexpr(NOT_DRAWN)


def sample_workspace(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Room (rows, chunks, HELD) int64 for the best tokens of each chunk."""
    chunks = ceil_div(vocabulary, candidate_tile(vocabulary).columns)
    return torch.empty(rows, chunks, HELD, dtype=torch.int64, device=device)


@op(sample_reference)
def sample(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    tokens: Tensor,
    bad: Tensor,
    *,
    channel: int,
    last_token: int | None = None,
    masked: bool = False,
) -> Plans[None]:
    """Draw a token for each row of ``logits`` (R, V), raw, in any float dtype; remember it.

    The tokens are those of ``models.generation``: mask, penalty, temperature, top-k with its ties,
    top-p, and the largest sum with Gumbel noise that is a function of (seed, channel, step, token).
    ``few`` must hold for every row, or the reference be called. Written are ``tokens`` (R,) int64,
    ``bad`` (R,) bool, whose elements may lie apart, and where a token was drawn ``state``'s seen
    and latest. ``last_token`` is the largest token that may be drawn.

    A row of slot -1 is not in use and writes nothing. A row draws nothing, and its token is
    NOT_DRAWN, if its slot has ended, if it is ``masked`` and its slot's mode is not ``channel``, or
    if any of its V logits is not finite: then it is bad. Without ``state.mode`` every slot draws. A
    slot may have one row. What a row draws does not depend on the others.
    """
    rows, width = logits.shape
    last_token = width - 1 if last_token is None else last_token
    best = sample_workspace(rows, width, logits.device)
    first = topk_candidates.plan(
        logits, state, settings, best, channel=channel, last_token=last_token, masked=masked
    )
    keys = best.shape[1] * HELD
    size = next(tile for limit, tile in SAMPLE_TILES.items() if keys <= limit)
    assert tokens.shape == bad.shape == (rows,)
    assert state.latest is None or state.latest.is_contiguous()
    own = ("steps", "seeds", "forced", "top_k", "tail")
    second = Launch(
        _sample,
        (rows,),
        {
            **first.arguments,
            **{name: getattr(settings, name) for name in own},
            "latest": state.latest,
            "tokens": tokens,
            "bad": bad.view(torch.uint8),
            "keys": keys,
            "tokens_stride": tokens.stride(0),
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
    return None, first, second


@triton.jit
def _at(rank, place, values):
    """``values`` at one place."""
    return tl.sum(tl.where(rank == place, values, 0), axis=0)


@triton.jit
def _ties_after(
    logits, seen, never, nevers, last_token, penalty, divisor, edge, after,
    V: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """How many tokens above ``after`` have the value ``edge``."""
    found = tl.zeros((AGAIN,), tl.int32)
    for start in range(0, V, AGAIN):
        tokens = start + tl.arange(0, AGAIN)
        value, _ = warped_at(logits, seen, never, nevers, tokens, last_token, penalty, divisor, V)
        found += ((value == edge) & (tokens > after)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _best_tie_after(
    logits, seen, never, nevers, last_token, penalty, divisor, edge, after, kept, seed, step,
    CHANNEL: tl.constexpr, V: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The largest sum with noise among the first ``kept`` tokens above ``after`` of value ``edge``.

    Returns the sum in float64 and the token.
    """
    before = tl.sum(tl.zeros((AGAIN,), tl.int32), axis=0)
    best = tl.full((AGAIN,), float("-inf"), tl.float64)
    best_token = tl.full((AGAIN,), _NO_TOKEN, tl.int32)
    for start in range(0, V, AGAIN):
        tokens = start + tl.arange(0, AGAIN)
        value, _ = warped_at(logits, seen, never, nevers, tokens, last_token, penalty, divisor, V)
        tied = ((value == edge) & (tokens > after)).to(tl.int32)
        number = before + tl.cumsum(tied, axis=0)
        noisy = value.to(tl.float64) + gumbel_at(seed, step, tokens, CHANNEL)
        better = (tied != 0) & (number <= kept) & (noisy > best)
        best = tl.where(better, noisy, best)
        best_token = tl.where(better, tokens, best_token)
        before += tl.sum(tied, axis=0)
    found = tl.max(best, axis=0)
    return found, tl.min(tl.where(best == found, best_token, _NO_TOKEN), axis=0)


@triton.jit
def _kept(value, rank, k, tail, more):
    """What top-k and top-p keep of held values (HELD,), the largest first, and of ``more`` ties.

    ``more`` tokens beside them have the edge's value, all above the held ones: top-p cuts those
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


@triton.jit(do_not_specialize=["nevers", "last_token", "never_stride", "keys"])
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
    last_token,
    logits_stride,
    seen_stride,
    never_stride,
    steps,
    seeds,
    forced,
    top_k,
    tail,
    latest,
    tokens,
    bad,
    keys,
    tokens_stride,
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
        held, value = token_in(top), value_in(top)
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
                    x, known, banned, nevers, last_token, factor, divisor, edge, after, V, AGAIN
                )
            kept, more = _kept(value, rank, k, rest, more)
            noisy = value.to(tl.float64) + gumbel_at(seed, step, held, CHANNEL)
            noisy = tl.where(kept, noisy, float("-inf"))
            sum_found = tl.max(noisy, axis=0)
            chosen = tl.min(tl.where(noisy == sum_found, held, _NO_TOKEN), axis=0)
            if more > 0:
                other, other_token = _best_tie_after(
                    x, known, banned, nevers, last_token, factor, divisor, edge, after, more,
                    seed, step, CHANNEL, V, AGAIN,
                )  # fmt: skip
                chosen = tl.where(other > sum_found, other_token, chosen)
        chosen = tl.where(wanted == _FREE, chosen.to(tl.int64), wanted)
        tl.store(bad + row * bad_stride, damaged.to(tl.uint8))
        tl.store(tokens + row * tokens_stride, tl.where(damaged, _NOT_DRAWN, chosen))
        if damaged == 0:
            tl.store(seen + slot * seen_stride + chosen, 1)
            if LATEST:
                tl.store(latest + slot * 2 + CHANNEL, chosen)
    elif slot >= 0:
        tl.store(bad + row * bad_stride, 0)
        tl.store(tokens + row * tokens_stride, _NOT_DRAWN)


# What each slot draws next, from the row just drawn.


_TEXT, _AUDIO, _ENDED = tl.constexpr(TEXT), tl.constexpr(AUDIO), tl.constexpr(ENDED)


@dataclass(frozen=True)
class ModeTokens:
    """Tokens that change a mode, and those that stand beside another channel's tokens."""

    sosp: int
    eosp: int
    modality_pad: int
    audio_pad: int


def update_modes_reference(
    text: DrawState, slots: Tensor, bad: Tensor, stop: Tensor, tokens: ModeTokens, *, deferred: bool
) -> None:
    """``update_modes`` in plain torch; nothing waits for the device."""
    assert text.latest is not None
    assert text.mode is not None
    # Which slot (S, R) each row belongs to: -1 to none.
    owns = torch.arange(len(text.mode), device=slots.device)[:, None] == slots
    live = owns.any(dim=1) & (text.mode != ENDED)
    damaged = live & (owns & bad.any(dim=1)).any(dim=1)
    whole = live & ~damaged
    speaking = text.mode == AUDIO
    drawn_text, audio = text.latest[:, 0], text.latest[:, 1]
    if deferred:
        audio = torch.where(speaking, audio, tokens.audio_pad)
    opens = ~speaking & (drawn_text == tokens.sosp)
    after = torch.where((speaking | opens) & (audio != tokens.eosp), AUDIO, TEXT)
    stopped = ~speaking & torch.isin(drawn_text, stop)
    after = torch.where(stopped | damaged, ENDED, after)
    said = torch.where(speaking, tokens.modality_pad, drawn_text)
    row = torch.stack([said, audio], dim=1)
    text.latest.copy_(torch.where(whole[:, None], row, text.latest))
    text.seen[:, tokens.modality_pad] |= whole & speaking
    text.mode.copy_(torch.where(live, after, text.mode))


@op(update_modes_reference, takes=lambda text: runs(text.seen))
def update_modes(
    text: DrawState, slots: Tensor, bad: Tensor, stop: Tensor, tokens: ModeTokens, *, deferred: bool
) -> tuple[None, Launch]:
    """Complete the row that ``text.latest`` holds for each of ``slots``, and set the next mode.

    ``slots`` (R,) int64, each at most once, -1 for a row that is not in use; ``bad`` (R, 2) bool,
    by channel; ``stop`` (n,) int64, text tokens that end a reply. In AUDIO mode the row's text
    becomes modality_pad, which ``text.seen`` then has. In TEXT mode sosp opens AUDIO, and eosp in
    an AUDIO row, or in the very row that opened it, leads to TEXT. A stop token drawn in TEXT mode,
    or a bad row, sets ENDED; ended slots stay as they are.

    ``deferred``: TEXT rows have drawn no audio token. They get audio_pad, and a row that opens
    AUDIO stays there until its deferred draw is resolved and says otherwise.
    """
    assert text.latest is not None
    assert text.mode is not None
    assert text.latest.is_contiguous()
    assert bad.is_contiguous()
    assert bad.shape == (len(slots), 2)
    rows = len(slots)
    return None, Launch(
        _update_modes,
        (1,),
        {
            "latest": text.latest,
            "mode": text.mode,
            "seen": text.seen.view(torch.uint8),
            "slots": slots,
            "bad": bad.view(torch.uint8),
            "stop": stop,
            "rows": rows,
            "stops": len(stop),
            "seen_stride": text.seen.stride(0),
        },
        {
            "SOSP": tokens.sosp,
            "EOSP": tokens.eosp,
            "MODALITY_PAD": tokens.modality_pad,
            "AUDIO_PAD": tokens.audio_pad,
            "DEFERRED": deferred,
            "ROWS": 1 << (rows - 1).bit_length(),
        },
        Tile(rows, 0, 0, 1 if rows <= 64 else 4, 1),
    )


@triton.jit(do_not_specialize=["rows", "stops"])
def _update_modes(
    latest,
    mode,
    seen,
    slots,
    bad,
    stop,
    rows,
    stops,
    seen_stride,
    SOSP: tl.constexpr,
    EOSP: tl.constexpr,
    MODALITY_PAD: tl.constexpr,
    AUDIO_PAD: tl.constexpr,
    DEFERRED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    gdc_wait(DEPENDENT)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    used = slot >= 0
    before = tl.load(mode + slot, mask=used, other=_ENDED).to(tl.int32)
    live = before != _ENDED
    drawn_text = tl.load(latest + slot * 2, mask=live, other=0)
    audio = tl.load(latest + slot * 2 + 1, mask=live, other=0)
    one = tl.load(bad + row * 2, mask=live, other=0)
    damaged = (one | tl.load(bad + row * 2 + 1, mask=live, other=0)) != 0
    speaking = before == _AUDIO
    if DEFERRED:
        audio = tl.where(speaking, audio, AUDIO_PAD)
    opens = (before == _TEXT) & (drawn_text == SOSP)
    after = tl.where((speaking | opens) & (audio != EOSP), _AUDIO, _TEXT)
    for place in range(stops):
        stopped = (before == _TEXT) & (drawn_text == tl.load(stop + place))
        after = tl.where(stopped, _ENDED, after)
    after = tl.where(damaged, _ENDED, after)
    whole = live & (damaged == 0)
    said = tl.where(speaking, MODALITY_PAD, drawn_text)
    tl.store(latest + slot * 2, said, mask=whole)
    tl.store(latest + slot * 2 + 1, audio, mask=whole)
    known = tl.full((ROWS,), 1, tl.uint8)
    tl.store(seen + slot * seen_stride + MODALITY_PAD, known, mask=whole & speaking)
    tl.store(mode + slot, after.to(tl.int8), mask=live)
