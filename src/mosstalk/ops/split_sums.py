"""How the programs that share an item's keys join what each has summed."""

from mosstalk.ops.launch import tl, triton


@triton.jit
def combine_split_sums(
    counters, sums, used, here, highest, weight, mixed,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Whether this program is to write what came out, and then the sums of all ``used`` splits."""
    split = tl.program_id(2)
    last = split == 0
    if used > 1:
        last = split < 0
        if split < used:
            pair = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            size: tl.constexpr = ROWS * (D + 2)
            own = sums + pair * SPLITS * size
            _leave(own + split * size, here, highest, weight, mixed, ROWS, D, WIDTH)
            tl.debug_barrier()
            last = tl.atomic_add(counters + pair, 1, sem="acq_rel") == used - 1
            if last:
                weight, mixed = _join(own, here, used, ROWS, D, WIDTH)
                tl.store(counters + pair, 0)
    return last, weight, mixed


@triton.jit
def _leave(
    own, here, highest, weight, mixed, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Write one split's sums to ``own`` for whichever program of the pair comes last."""
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)[None, :]
    tl.store(own + row[:, None] * D + channel, mixed, mask=here[:, None] & (channel < D))
    tl.store(own + ROWS * D + row, highest, mask=here)
    tl.store(own + ROWS * (D + 1) + row, weight, mask=here)


@triton.jit
def _join(sums, here, used, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The splits' sums joined in their order, past the nearest cache, which may be stale."""
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)[None, :]
    inside = here[:, None] & (channel < D)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    own = sums
    for _ in range(used):
        other = tl.load(own + ROWS * D + row, mask=here, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(own + ROWS * (D + 1) + row, mask=here, other=0.0, cache_modifier=".cg")
        place = own + row[:, None] * D + channel
        theirs = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, other)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        fade, share = tl.exp2(highest - level), tl.exp2(other - level)
        weight = weight * fade + total * share
        mixed = mixed * fade[:, None] + theirs * share[:, None]
        highest = higher
        own += ROWS * (D + 2)
    return weight, mixed
