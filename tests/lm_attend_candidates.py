"""Ways of attending that ``gpu_lm_attend.py`` tries, and what stands for a product before."""

from torch import Tensor

from mosstalk.ops.launch import Launch, tl, triton
from mosstalk.ops.parts import Shares, gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

ROW_TRIES = [
    Shares(*values)
    for values in (
        (64, 64, 64, 4, 2),
        (32, 32, 64, 4, 2),
        (32, 32, 64, 2, 2),
        (32, 64, 64, 2, 3),
        (32, 64, 64, 4, 3),
        (64, 64, 32, 4, 2),
        (64, 64, 64, 2, 2),
        (64, 64, 64, 8, 2),
        (64, 128, 64, 4, 2),
        (64, 128, 32, 4, 3),
        (64, 256, 32, 4, 3),
        (64, 512, 16, 4, 3),
        (64, 1024, 8, 4, 3),
        (32, 256, 32, 4, 3),
        (32, 512, 16, 4, 4),
        (128, 512, 16, 8, 2),
        (128, 128, 32, 4, 2),
        (128, 128, 64, 8, 2),
    )
]
"""For single rows."""

_TILE_SHARES = [
    Shares(*values)
    for values in (
        (64, 64, 16, 4, 2),
        (64, 128, 8, 4, 2),
        (64, 128, 16, 4, 2),
        (32, 32, 32, 4, 2),
        (64, 64, 16, 8, 2),
        (32, 64, 16, 4, 2),
        (64, 128, 8, 4, 1),
        (64, 128, 8, 8, 2),
        (64, 256, 4, 4, 2),
        (64, 128, 1, 4, 2),
        (64, 128, 1, 4, 1),
        (64, 128, 1, 8, 2),
        (32, 128, 8, 4, 3),
        (32, 128, 1, 4, 3),
        (128, 128, 8, 8, 1),
        (128, 128, 8, 4, 1),
        (128, 128, 1, 8, 1),
    )
]
_JOINED = [
    Shares(*values, joined=rows)
    for values in ((64, 64, 16, 4, 2), (64, 128, 8, 4, 2), (64, 128, 8, 8, 2), (64, 256, 4, 8, 2))
    for rows in (2, 4, 8, 16, 32)
]
TILE_TRIES = list(dict.fromkeys([*_TILE_SHARES, *_JOINED]))


@triton.jit  # type: ignore[untyped-decorator]
def _read(weight, kept, numbers, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    gdc_launch(DEPENDENT)
    gdc_wait(DEPENDENT)
    total = tl.zeros((BLOCK,), tl.float32)
    share = numbers // tl.num_programs(0)
    for start in range(0, share, BLOCK):
        place = tl.program_id(0) * share + start + tl.arange(0, BLOCK)
        total += tl.load(weight + place).to(tl.float32)
    tl.store(kept + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def reading(weight: Tensor, kept: Tensor) -> Launch:
    """A kernel that reads ``weight`` as a product of one row does, and little else."""
    arguments = {"weight": weight, "kept": kept, "numbers": weight.numel()}
    return Launch(_read, (384,), arguments, {"BLOCK": 4096}, Tile(0, 0, 0, 8, 4))
