"""Pieces that the language model's kernels share; each is inlined into the kernel that calls it."""

from mosstalk.ops.launch import tl, triton
from mosstalk.ops.parts import prefetch_l2


@triton.jit
def prefetch_runs(place, size):
    """Ask for ``size`` bytes from each of a tile of pointers on to be brought into the cache.

    Both are multiples of 16 bytes. One instruction brings a whole run, where ``ask_for`` brings
    a line; it needs compute capability 9.0, as dependent launches do.
    """
    place = place.to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, tl.zeros_like(place).to(tl.int32) + size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(
    weight, column, start, K: tl.constexpr, SPAN: tl.constexpr, RUNS: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """Ask for SPAN channels from ``start`` on of rows ``column`` of ``weight`` (., K).

    In RUNS requests a row; without BULK each brings but the line that it begins with.
    """
    bits: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth
    run = start + tl.arange(0, RUNS) * (SPAN // RUNS)
    place = weight + column[:, None] * K + run[None, :]
    if BULK:
        prefetch_runs(place, SPAN // RUNS * bits // 8)
    else:
        prefetch_l2(place)


@triton.jit
def store_partial(
    total, sums, tile, part, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Put one of a split's PARTS totals (COLUMNS, ROWS) where its tile's last program finds it."""
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    own = (tile * tl.num_programs(2) + tl.program_id(2)) * PARTS + part
    tl.store(sums + own * ROWS * COLUMNS + place, total)


@triton.jit
def comes_last(counters, tile):
    """Whether all other splits of ``tile`` have left their totals; leaves its counter at zero."""
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == tl.num_programs(2) - 1
    if last:
        tl.store(counters + tile, 0)
    return last


@triton.jit
def combine(sums, tile, part, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
def silu(x):
    """x / (1 + e^-x)."""
    return x / (1.0 + tl.exp(-x))
