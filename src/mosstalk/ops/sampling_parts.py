"""What the kernels that draw ids share: their inputs, and pieces inlined into them.

Letters: R rows, V ids of a channel, S slots.
"""

from dataclasses import dataclass

from torch import Tensor

from mosstalk.ops.launch import tl, triton

TEXT, AUDIO, ENDED = 0, 1, 2
"""Channels, which are modes too; and the mode of a slot that draws nothing more."""
FREE = -1
"""No id is forced, or none forbidden."""
NOT_DRAWN = -2
"""What stands for the id of a row that drew none."""
HELD = 64
"""The largest top_k whose candidates the kernels keep apart; a power of two."""
BAD_KEY = (1 << 63) - 1
"""Above every key: in a chunk's list, that one of its logits is not finite."""
NO_KEY = -0x7F800001 << 32
"""The key of -inf and the largest id: below the keys of all ids there are."""

_ENDED, _BAD, _NO_ID = tl.constexpr(ENDED), tl.constexpr(BAD_KEY), tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class DrawState:
    """What draws read and change of each slot.

    ``seen`` (S, V) bool is the history that the penalty reads. ``latest`` (S, 2) int64 gets
    drawn ids, text beside audio. ``mode`` (S,) int8 says what a slot draws: TEXT, AUDIO, ENDED.
    """

    seen: Tensor
    latest: Tensor | None = None
    mode: Tensor | None = None


@dataclass(frozen=True)
class DrawSettings:
    """How each row is drawn: (R,) int64, but ``never`` (R, n) int64 and the last three float32.

    ``slots`` -1 is a row of nobody, which writes nothing. ``forced`` and ``never`` name ids, or
    FREE. ``temperature`` 0 is greedy; ``tail`` is 1 - top_p, taken in double precision.
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
def warped_at(logits, seen, never, nevers, ids, last_id, penalty, temperature, V: tl.constexpr):
    """Logits of ``ids`` after mask, penalty and temperature, float32; which are not finite.

    Quotients are rounded as torch rounds them; a zero has no sign, so that equal is equal in
    keys too.
    """
    inside = ids < V
    raw = tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32)
    known = tl.load(seen + ids, mask=inside, other=0) != 0
    value = tl.where(ids <= last_id, raw, float("-inf"))
    for place in range(nevers):
        value = tl.where(ids == tl.load(never + place), float("-inf"), value)
    penalised = tl.where(value < 0, value * penalty, tl.div_rn(value, penalty))
    value = tl.div_rn(tl.where(known, penalised, value), temperature)
    bad = (tl.abs(raw) < float("inf")) == 0
    return tl.where(value == 0, 0.0, value), bad


@triton.jit
def safe_temperature(temperature):
    """What to divide by: 1 for greedy rows."""
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def key_of(value, ids):
    """An int64 that orders by value, then by the lower id."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_in(key):
    """The value that a key was made of."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_in(key):
    """The id that a key was made of."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def gumbel_at(seed, step, ids, CHANNEL: tl.constexpr):
    """``rng.gumbel`` of ids int32, float64."""
    zero = ids * 0
    bits, _, _, _ = tl.philox(seed, ids, zero + step.to(tl.int32), zero + CHANNEL, zero)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))
