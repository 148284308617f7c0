"""What draws share: their state and settings, a sort of keys, and draws in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.numerics.rng import gumbel_rows
from mosstalk.ops.launch import tl, triton

# What the kernels that draw tokens share: their inputs, and pieces inlined into them.
#
# Letters: R rows, V tokens of a channel, S slots.


TEXT, AUDIO, ENDED = 0, 1, 2
"""Channels, which are modes too; and the mode of a slot that draws nothing more."""
FREE = -1
"""No token is forced, or none forbidden."""
NOT_DRAWN = -2
"""What stands for the token of a row that drew none."""
HELD = 64
"""The largest top_k whose candidates the kernels keep apart; a power of two."""
BAD_KEY = (1 << 63) - 1
"""Above every key: in a chunk's list, that one of its logits is not finite."""
NO_KEY = -0x7F800001 << 32
"""The key of -inf and the largest token: below the keys of all tokens there are."""

_ENDED, _BAD, _NO_TOKEN = tl.constexpr(ENDED), tl.constexpr(BAD_KEY), tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class DrawState:
    """What draws read and change of each slot.

    ``seen`` (S, V) bool is the history that the penalty reads. ``latest`` (S, 2) int64 gets
    drawn tokens, text beside audio. ``mode`` (S,) int8 says what a slot draws: TEXT, AUDIO, ENDED.
    """

    seen: Tensor
    latest: Tensor | None = None
    mode: Tensor | None = None


@dataclass(frozen=True)
class DrawSettings:
    """How each row is drawn: (R,) int64, but ``never`` (R, n) int64 and the last three float32.

    ``slots`` -1 is a row that is not in use and writes nothing. ``forced`` and ``never`` name
    tokens, or FREE. ``temperature`` 0 is greedy; ``tail`` is 1 - top_p, taken in double precision.
    """

    slots: Tensor
    steps: Tensor
    seeds: Tensor
    forced: Tensor
    never: Tensor
    top_k: Tensor
    temperature: Tensor
    tail: Tensor
    penalty: Tensor


def few(temperature: float, top_k: int) -> bool:
    """Whether the kernels draw such a row: it is greedy, or its top-k is on and small."""
    return temperature == 0 or 0 < top_k <= HELD


@triton.jit
def draws_now(
    slot, mode, CHANNEL: tl.constexpr, MODES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Whether the row of ``slot`` draws from this channel."""
    drawing = slot >= 0
    if MODES:
        state = tl.load(mode + tl.maximum(slot, 0))
        drawing = drawing & (state != _ENDED)
        if MASKED:
            drawing = drawing & (state == CHANNEL)
    return drawing


@triton.jit
def warped_at(
    logits, seen, never, nevers, tokens, last_token, penalty, temperature, V: tl.constexpr
):
    """Logits of ``tokens`` after mask, penalty and temperature, float32; which are not finite.

    Quotients are rounded as torch rounds them; a zero has no sign, so that equal is equal in
    keys too.
    """
    inside = tokens < V
    raw = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float32)
    known = tl.load(seen + tokens, mask=inside, other=0) != 0
    value = tl.where(tokens <= last_token, raw, float("-inf"))
    for place in range(nevers):
        value = tl.where(tokens == tl.load(never + place), float("-inf"), value)
    penalised = tl.where(value < 0, value * penalty, tl.div_rn(value, penalty))
    value = tl.div_rn(tl.where(known, penalised, value), temperature)
    bad = (tl.abs(raw) < float("inf")) == 0
    return tl.where(value == 0, 0.0, value), bad


@triton.jit
def safe_temperature(temperature):
    """What to divide by: 1 for greedy rows."""
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def key_of(value, tokens):
    """An int64 that orders by value, then by the lower token."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def value_in(key):
    """The value that a key was made of."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_in(key):
    """The token that a key was made of."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def gumbel_at(seed, step, tokens, CHANNEL: tl.constexpr):
    """``rng.gumbel`` of tokens int32, float64."""
    zero = tokens * 0
    bits, _, _, _ = tl.philox(seed, tokens, zero + step.to(tl.int32), zero + CHANNEL, zero)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


# The largest of many numbers in order, by a bitonic network (Batcher 1968).
#
# Triton has ``topk``, which its interpreter runs one number at a time; here the partner of a
# number comes from a sum, which it takes at once. Numbers are arranged as a cube of sides of 2,
# in which bit j of a place is an axis, so that an exchange over bit j never leaves that axis.


@triton.jit
def _bit(j: tl.constexpr, BITS: tl.constexpr):
    """Bit j of every place of a cube."""
    return tl.reshape(tl.arange(0, 2), [1] * (BITS - 1 - j) + [2] + [1] * j)


@triton.jit
def _exchanged(cube, flip, j: tl.constexpr, BITS: tl.constexpr):
    """Larger numbers where bit j is 0 and smaller ones where it is 1, or the other way round."""
    partner = tl.sum(cube, axis=BITS - 1 - j, keep_dims=True) - cube
    first = (_bit(j, BITS) ^ flip) == 0
    return tl.where((cube > partner) == first, cube, partner)


@triton.jit
def _merged(cube, flip, RUN: tl.constexpr, BITS: tl.constexpr):
    """Sort runs of 2^RUN numbers that rise and then fall; to falling ones where ``flip`` is 0."""
    for step in tl.static_range(RUN):
        cube = _exchanged(cube, flip, RUN - 1 - step, BITS)
    return cube


@triton.jit
def _fewer(cube, BITS: tl.constexpr, HELD_BITS: tl.constexpr):
    """The larger numbers of each two runs, sorted into one run; BITS is that of the result."""
    cube = tl.max(cube, axis=BITS - HELD_BITS)
    if BITS > HELD_BITS:
        cube = _merged(cube, _bit(HELD_BITS, BITS), HELD_BITS, BITS)
    else:
        cube = _merged(cube, 0, HELD_BITS, BITS)
    return cube


@triton.jit
def largest(x, BITS: tl.constexpr, HELD_BITS: tl.constexpr):
    """The largest 2^HELD_BITS of ``x`` (2^BITS,) int64, the largest first.

    Runs of that length are sorted, every other one backwards; then the larger of each pair in
    two such runs is kept, which leaves half as many runs to sort again, until there is one.
    """
    cube = tl.reshape(x, [2] * BITS)
    for run in tl.static_range(1, HELD_BITS + 1):
        if run < BITS:
            cube = _merged(cube, _bit(run, BITS), run, BITS)
        else:
            cube = _merged(cube, 0, run, BITS)
    for halving in tl.static_range(BITS - HELD_BITS):
        cube = _fewer(cube, BITS - 1 - halving, HELD_BITS)
    return tl.reshape(cube, [1 << HELD_BITS])


# Draws in plain torch: what the kernels must give, and the path for rows that they do not take.


_NEVER = float("-inf")


def sample_reference(
    logits: Tensor,
    state: DrawState,
    settings: DrawSettings,
    tokens: Tensor,
    bad: Tensor,
    *,
    channel: int,
    last_token: int | None = None,
    masked: bool = False,
) -> None:
    """``sample`` in plain torch, for any top-k; nothing waits for the device."""
    last_token = logits.shape[1] - 1 if last_token is None else last_token
    values = penalised(logits, state.seen, settings, last_token)
    warped = _warped(values / safely(settings.temperature)[:, None], settings)
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    noise = gumbel_rows(settings.seeds, channel, settings.steps, ids)
    noisy = torch.where(warped > _NEVER, warped.double() + noise, _NEVER)
    drawn = torch.where(settings.temperature == 0, values.argmax(dim=1), noisy.argmax(dim=1))
    drawn = torch.where(settings.forced == FREE, drawn, settings.forced)
    drawing = _drawing(state, settings.slots, channel, masked)
    damaged = drawing & ~logits.isfinite().all(dim=1)
    valid = drawing & ~damaged
    used = settings.slots >= 0
    bad.copy_(torch.where(used, damaged, bad))
    tokens.copy_(torch.where(valid, drawn, torch.where(used, NOT_DRAWN, tokens)))
    _remember(state, settings.slots, drawn, valid, channel)


def safely(temperature: Tensor) -> Tensor:
    """What to divide logits by: 1 for greedy rows."""
    return torch.where(temperature == 0, 1.0, temperature)


def penalised(logits: Tensor, seen: Tensor, settings: DrawSettings, last_token: int) -> Tensor:
    """Logits (R, V) in float32 after mask and repetition penalty."""
    rows, width = logits.shape
    # One token more than there are: that is the place of ``never`` where it forbids none.
    padded = logits.new_full((rows, width + 1), _NEVER, dtype=torch.float32)
    padded[:, : last_token + 1] = logits[:, : last_token + 1]
    if settings.never.shape[1]:
        padded.scatter_(1, torch.where(settings.never == FREE, width, settings.never), _NEVER)
    values = padded[:, :-1]
    penalty = settings.penalty[:, None]
    changed = torch.where(values < 0, values * penalty, values / penalty)
    return torch.where(seen[settings.slots.clamp(min=0)], changed, values)


def _warped(values: Tensor, settings: DrawSettings) -> Tensor:
    """Top-k with its ties, then top-p, which of equal values keeps the lower tokens: (R, V).

    Sums are float64, rounded to float32, as the kernel's are.
    """
    width = values.shape[1]
    descending, order = values.sort(dim=1, descending=True, stable=True)
    last = torch.where(settings.top_k == 0, width, settings.top_k).clamp(max=width) - 1
    edge = descending.gather(1, last[:, None])
    descending = descending.masked_fill(descending < edge, _NEVER)
    mass = (descending - descending[:, :1]).double().exp().float()
    share = mass / mass.double().sum(dim=1, keepdim=True).float()
    at_most = share.double().flip(1).cumsum(dim=1).flip(1).float()
    cut = (at_most <= settings.tail[:, None]) & (settings.tail > 0)[:, None]
    cut[:, 0] = False
    return torch.empty_like(values).scatter(1, order, descending.masked_fill(cut, _NEVER))


def _drawing(state: DrawState, slots: Tensor, channel: int, masked: bool) -> Tensor:
    """Which rows (R,) draw from this channel."""
    if state.mode is None:
        return slots >= 0
    mode = state.mode[slots.clamp(min=0)]
    return (slots >= 0) & ((mode == channel) if masked else (mode != ENDED))


def _remember(state: DrawState, slots: Tensor, tokens: Tensor, valid: Tensor, channel: int) -> None:
    """Write the tokens of ``valid`` rows; all others write what the first such row does, if any."""
    some = valid.any()
    rows = torch.arange(len(tokens), device=tokens.device)
    source = torch.where(valid, rows, valid.int().argmax())
    slots, tokens = slots[source].clamp(min=0), tokens[source]
    state.seen.index_put_((slots, tokens), some | state.seen[slots, tokens])
    if state.latest is not None:
        latest = state.latest[:, channel]
        latest.index_put_((slots,), torch.where(some, tokens, latest[slots]))
