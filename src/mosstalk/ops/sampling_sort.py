"""The largest of many numbers in order, by a bitonic network (Batcher 1968).

Triton has ``topk``, which its interpreter runs one number at a time; here the partner of a
number comes from a sum, which it takes at once. Numbers are arranged as a cube of sides of 2,
in which bit j of a place is an axis, so that an exchange over bit j never leaves that axis.
"""

from mosstalk.ops.launch import tl, triton


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
