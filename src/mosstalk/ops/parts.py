"""Pieces that kernels share; each is inlined into the kernel that calls it.

At the end is one attention over keys that several programs share: partial sums, and how they are
combined.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.ops.launch import ceil_div, tl, triton
from mosstalk.ops.tiles import Tile


@triton.jit
def gdc_launch(DEPENDENT: tl.constexpr):
    """Let the kernel after this one start as soon as all programs of this one have started.

    It may then read what no kernel writes, and waits for the rest in ``gdc_wait``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one; a kernel that has not let the next start does it here.

    Every program of every kernel calls this before it touches what another kernel writes or
    reads: only then does the end of a kernel mean the end of all before it.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(
    weight, column, LENGTH: tl.constexpr, N: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):
    """Ask for rows ``column`` of ``weight`` (N, LENGTH) to be brought into the cache.

    A row is LINES lines of LINE numbers, the last ones perhaps past its end. Weights are what
    a kernel may read before those it waits for are done.
    """
    element = tl.arange(0, LINES) * LINE
    place = tl.minimum(column, N - 1)[:, None] * LENGTH + tl.minimum(element, LENGTH - 1)[None, :]
    prefetch_l2(weight + place)


@triton.jit
def fetch_once(
    weight, column, LENGTH: tl.constexpr, N: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):
    """``fetch_ahead`` by the first of the programs that share columns."""
    if tl.program_id(0) == 0:
        fetch_ahead(weight, column, LENGTH, N, LINES, LINE)


@triton.jit
def prefetch_l2(place):
    """Ask for the lines that a tile of pointers is in to be brought into the cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def held(
    weight,
    column,
    start,
    LENGTH: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """C columns from ``start`` on of rows ``column`` of ``weight`` (N, LENGTH), zeros outside.

    (WIDTH, columns), or with several GROUPS (GROUPS, WIDTH / GROUPS, columns).
    """
    if GROUPS == 1:
        tile = weights_at(weight, column, tl.arange(0, WIDTH), start, LENGTH, N, C)
    else:
        share: tl.constexpr = WIDTH // GROUPS
        inner = tl.arange(0, GROUPS)[:, None, None] * share + tl.arange(0, share)[None, :, None]
        place = column[None, None, :] * LENGTH + start + inner
        tile = tl.load(weight + place, mask=(column < N)[None, None, :] & (inner < C), other=0.0)
    return tile


@triton.jit
def rows_at_once(
    x,
    here,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Rows that ``x`` (rows, 1) points to, zeros where not ``here``, arranged as ``held``.

    (rows, WIDTH), or with several GROUPS (GROUPS, rows, WIDTH / GROUPS).
    """
    if GROUPS == 1:
        inner = tl.arange(0, WIDTH)[None, :]
        tile = tl.load(x + inner, mask=here & (inner < C), other=0.0)
    else:
        share: tl.constexpr = WIDTH // GROUPS
        part = tl.arange(0, GROUPS)[:, None, None] * share + tl.arange(0, share)[None, None, :]
        tile = tl.load(x[None, :, :] + part, mask=here[None, :, :] & (part < C), other=0.0)
    return tile


@triton.jit
def await_turn(
    weight,
    norm_weight,
    shift,
    column,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Take what no kernel writes, then wait for the kernel before.

    Returns the weights and the norm's factor and offset (WIDTH,) where all channels are in one
    matmul; else weights are but asked for.
    """
    gdc_launch(DEPENDENT)
    w, factor, offset = column, column, column
    if AT_ONCE:
        w = held(weight, column, 0, K, N, K, WIDTH, GROUPS)
        if NORM:
            inner = tl.arange(0, WIDTH)
            factor = tl.load(norm_weight + inner, mask=inner < K, other=0.0).to(tl.float32)
            offset = tl.load(shift + inner, mask=inner < K, other=0.0).to(tl.float32)
    elif DEPENDENT:
        fetch_once(weight, column, K, N, LINES, LINE)
    gdc_wait(DEPENDENT)
    return w, factor, offset


@triton.jit
def times_held(
    x,
    here,
    w,
    factor,
    offset,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    MISH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Matmul in float32 of what ``await_turn`` gives and rows that ``x`` (ROWS, 1) points to."""
    if NORM:
        inside = here & (tl.arange(0, WIDTH) < K)[None, :]
        a = tl.load(x + tl.arange(0, WIDTH)[None, :], mask=inside, other=0.0).to(tl.float32)
        mean, scale = moments(a, inside, eps, K)
        a = (a - mean) * scale * factor[None, :] + offset[None, :]
        if MISH:
            a = mish(a)
        if GROUPS > 1:
            a = tl.permute(tl.reshape(a, (ROWS, GROUPS, WIDTH // GROUPS)), (1, 0, 2))
    else:
        a = rows_at_once(x, here, K, WIDTH, GROUPS)
        if MISH:
            a = mish(a.to(tl.float32))
    return matmul_at_once(a, w, GROUPS)


@triton.jit
def matmul_at_once(a, w, GROUPS: tl.constexpr):
    """Matmul of all channels, as ``rows_at_once`` and ``held`` give them, in float32."""
    if GROUPS == 1:
        total = tl.dot(a.to(w.dtype), w, input_precision="ieee")
    else:
        total = tl.sum(tl.dot(a.to(w.dtype), w, input_precision="ieee"), axis=0)
    return total


@triton.jit
def moments(x, inside, eps, C: tl.constexpr):
    """Mean and 1 / standard deviation (rows, 1) of ``x`` (rows, >= C), zero where not inside."""
    mean = tl.sum(x, axis=1)[:, None] / C
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1)[:, None] / C
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def mish(x):
    """x tanh(ln(1 + e^x)), with the tanh written out as a quotient (Misra 2019)."""
    power = tl.exp(tl.minimum(x, 20.0))
    twice = power * (power + 2.0)
    return x * (twice / (twice + 2.0))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Exact GELU, SiLU, or ``x`` itself."""
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def normalised(
    x, mean, scale, norm_weight, shift, inner, inside, NORM: tl.constexpr, MISH: tl.constexpr
):
    """LayerNorm and Mish of a tile (rows, inner), as far as they are asked for, in float32."""
    x = x.to(tl.float32)
    if NORM:
        factor = tl.load(norm_weight + inner, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift + inner, mask=inside, other=0.0).to(tl.float32)
        x = (x - mean) * scale * factor[None, :] + offset[None, :]
    if MISH:
        x = mish(x)
    return x


@triton.jit
def weights_at(
    weight, column, inner, start, LENGTH: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):
    """A tile (inner, column) of ``weight`` (N, LENGTH) from column ``start`` on, zeros outside."""
    place = column[None, :] * LENGTH + (start + inner)[:, None]
    return tl.load(weight + place, mask=(column < N)[None, :] & (inner < C)[:, None], other=0.0)


@triton.jit
def matmul(
    x,
    here,
    norm_weight,
    shift,
    eps,
    weight,
    column,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    MISH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """LN(x) W^T (ROWS, COLUMNS) in float32; ``x`` (ROWS, 1) points to rows, ``here`` to keep."""
    mean = tl.zeros((ROWS, 1), tl.float32)
    scale = mean
    if NORM:
        whole = tl.arange(0, WIDTH)
        inside = here & (whole < K)[None, :]
        row = tl.load(x + whole[None, :], mask=inside, other=0.0).to(tl.float32)
        mean, scale = moments(row, inside, eps, K)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, INNER):
        inner = start + tl.arange(0, INNER)
        a = tl.load(x + inner[None, :], mask=here & (inner < K)[None, :], other=0.0)
        # Left alone otherwise, so that 16-bit rows are copied straight to where matmuls read.
        if NORM or MISH:
            a = normalised(a, mean, scale, norm_weight, shift, inner, inner < K, NORM, MISH)
        w = weights_at(weight, column, inner, 0, K, N, K)
        total = tl.dot(a.to(w.dtype), w, total, input_precision="ieee")
    return total


@triton.jit
def bias_at(bias, column, N: tl.constexpr, BIAS: tl.constexpr):
    """The bias of columns in float32, zeros where there is none."""
    if BIAS:
        shown = tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    else:
        shown = tl.zeros_like(column).to(tl.float32)
    return shown[None, :]


@triton.jit
def _store_sum(
    total, sums, tile, part, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Put one of a split's PARTS totals (COLUMNS, ROWS) where its tile's last program finds it."""
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    own = (tile * tl.num_programs(2) + tl.program_id(2)) * PARTS + part
    tl.store(sums + own * ROWS * COLUMNS + place, total)


@triton.jit
def _comes_last(counters, tile):
    """Whether all other splits of ``tile`` have left their totals; leaves its counter at zero."""
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == tl.num_programs(2) - 1
    if last:
        tl.store(counters + tile, 0)
    return last


@triton.jit
def _sum_of(sums, tile, part, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of what the splits of ``tile`` left, in their order."""
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    splits = tl.num_programs(2)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for split in range(splits):
        own = (tile * splits + split) * PARTS + part
        # Past the nearest cache, which may be stale.
        total += tl.load(sums + own * ROWS * COLUMNS + place, cache_modifier=".cg")
    return total


@triton.jit
def summed(
    total, upper, counters, sums,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums over all splits for the program that comes last, and whether this is it.

    ``upper`` is another total, summed where GATED.
    """
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    _store_sum(total, sums, tile, 0, 1 + GATED, ROWS, COLUMNS)
    if GATED:
        _store_sum(upper, sums, tile, 1, 1 + GATED, ROWS, COLUMNS)
    last = _comes_last(counters, tile)
    if last:
        total = _sum_of(sums, tile, 0, 1 + GATED, ROWS, COLUMNS)
        if GATED:
            upper = _sum_of(sums, tile, 1, 1 + GATED, ROWS, COLUMNS)
    return total, upper, last


# How programs share the keys of one attention, and join what each of them has summed.


LOG2_E = 1 / math.log(2)
"""Factor of scores, for ``softmax_step`` takes powers of two where a softmax has powers of e."""
_COUNTERS = 1 << 14
"""The most (tile, key head) pairs in one launch."""
_AT_ONCE = 64
"""Rows, of all splits together, whose sums are read at once to be joined."""


@dataclass(frozen=True)
class Shares:
    """How the keys of an item are divided among programs, each of which is one split.

    A program takes ``least`` keys, or as many more as it takes for ``most`` programs to cover all.
    Both numbers are multiples of ``keys``, those of one matmul; ``most`` is a power of two. The
    division depends on how many keys the item has and on nothing else. ``warps`` and ``stages``
    are Triton's. ``joined``, for tiles of rows: how many queries' sums the last program reads at a
    time, of all splits.
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
    """Memory where the splits of an attention leave their sums for the one that joins them.

    Each (tile, key head) pair has a counter and, for each split, ``rows`` rows of D + 2 float32
    numbers. ``counters`` (int32) are zero between launches. They are in one place whatever the
    size, so that launches of any sizes may share a room: none leaves sums where another counts.
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
    """How many query heads a tile has for each key head: ``group``, rounded up to a power of 2."""
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
