"""One attention over keys that several programs share: partial sums, and how they are combined."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.ops.launch import ceil_div, tl, triton
from mosstalk.ops.tiles import Tile

# How programs share the keys of one attention, and join what each of them has summed.


_COUNTERS = 1 << 14
"""The most pairs of tiles and key heads in one launch."""
_AT_ONCE = 64
"""Rows, of all splits together, whose sums are read at once to be joined."""


@dataclass(frozen=True)
class Shares:
    """Each program takes ``least`` of an item's keys, or more where else over ``most`` would.

    ``least`` and what more than it is taken are multiples of ``keys``, which are in one
    matmul; ``most`` is a power of two. How keys are shared follows from how many an item has
    and from nothing else. ``warps`` and ``stages`` are Triton's. ``joined``: of tiles of rows, how
    many queries' sums of all splits are joined at a time.
    """

    keys: int
    least: int
    most: int
    warps: int
    stages: int
    joined: int = 32

    def splits(self, span: int) -> int:
        """How many programs at most share the keys of an item that has up to ``span``."""
        return min(self.most, max(1, ceil_div(span, self.least)))

    @property
    def tile(self) -> Tile:
        """As launches have it."""
        return Tile(0, self.keys, self.least, self.warps, self.stages)


@dataclass(frozen=True)
class Room:
    """Where ``pairs`` of programs leave the sums of ``splits``, ``rows`` of D + 2 each.

    ``counters`` (int32) are zero between launches. They are in one place whatever the size, so
    that launches of any sizes may share a room: none leaves sums where another counts.
    """

    counters: Tensor
    sums: Tensor

    @classmethod
    def of(cls, work: Tensor, pairs: int, splits: int, rows: int, channels: int) -> "Room":
        """The parts of ``work``, which must have at least ``room_numbers`` float32."""
        assert pairs <= _COUNTERS
        assert work.numel() >= room_numbers(pairs, splits, rows, channels)
        assert work.dtype == torch.float32
        return cls(work.view(torch.int32), work[_COUNTERS:])


def room_numbers(pairs: int, splits: int, rows: int, channels: int) -> int:
    """How many float32 numbers a ``Room`` takes; zeros before its first use."""
    return _COUNTERS + pairs * splits * rows * (channels + 2)


def queries_of(group: int) -> int:
    """The query heads of a key head, as many as tiles have."""
    return 1 << (group - 1).bit_length()


def combined_at_once(splits: int, rows: int) -> int:
    """How many splits' sums of ``rows`` rows are read at once."""
    return min(splits, max(1, _AT_ONCE // rows))


@triton.jit
def softmax_step(score, values, highest, weight, mixed):
    """Let rows see more keys: their scores (rows, keys), -inf where hidden, and values (keys, d).

    ``highest`` (rows,), ``weight`` (rows,) and ``mixed`` (rows, d) are those of a softmax taken
    in steps, to the base of two (Milakov and Gimelshein 2018).
    """
    higher = tl.maximum(highest, tl.max(score, axis=1))
    # A row that has seen nothing yet has no maximum to subtract.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    part = tl.exp2(score - level[:, None])
    fade = tl.exp2(highest - level)
    weight = weight * fade + tl.sum(part, axis=1)
    mixed = tl.dot(part.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return higher, weight, mixed


@triton.jit
def store_partial(
    sums, counter, used, row, here, highest, weight, mixed,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one split's sums of ``row``; whether this was the last of the ``used`` splits.

    ``sums`` are this split's; the last one finds what all have written, and a counter at zero.
    """
    channel = tl.arange(0, WIDTH)[None, :]
    tl.store(sums + row[:, None] * D + channel, mixed, mask=here[:, None] & (channel < D))
    tl.store(sums + ROWS * D + row, highest, mask=here)
    tl.store(sums + ROWS * (D + 1) + row, weight, mask=here)
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def combine(
    sums, used, row, here,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What ``row`` (rows,) has mixed, (rows, WIDTH), from the sums of all ``used`` splits.

    In their order, past the nearest cache, which may be stale. Splits that are not used add
    nothing, so the result does not depend on how many there might have been.
    """
    size: tl.constexpr = ROWS * (D + 2)
    split = tl.arange(0, MOST)[:, None]
    inside = (split < used) & here[None, :]
    place = sums + split * size + ROWS * D + row[None, :]
    highest = tl.load(place, mask=inside, other=float("-inf"), cache_modifier=".cg")
    weight = tl.load(place + ROWS, mask=inside, other=0.0, cache_modifier=".cg")
    level = tl.max(highest, axis=0)
    level = tl.where(level == float("-inf"), 0.0, level)
    total = tl.sum(weight * tl.exp2(highest - level[None, :]), axis=0)
    channel = tl.arange(0, WIDTH)[None, None, :]
    mixed = tl.zeros((row.shape[0], WIDTH), tl.float32)
    for first in range(0, used, AT_ONCE):
        one = first + tl.arange(0, AT_ONCE)[:, None]
        known = (one < used) & here[None, :]
        own = sums + one * size + row[None, :]
        theirs_highest = tl.load(
            own + (ROWS * D), mask=known, other=float("-inf"), cache_modifier=".cg"
        )
        spot = sums + (one * size + row[None, :] * D)[:, :, None] + channel
        theirs = tl.load(
            spot, mask=known[:, :, None] & (channel < D), other=0.0, cache_modifier=".cg"
        )
        share = tl.exp2(theirs_highest - level[None, :])
        mixed += tl.sum(theirs * share[:, :, None], axis=0)
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]
