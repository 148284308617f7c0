"""Divisions that ``gpu_lm_linear.py`` tries, by the rows of a tile and the kind of product."""

from collections.abc import Iterable

from mosstalk.kernels.lm_tiles import Division, Kind
from mosstalk.kernels.tiles import Tile

KINDS: tuple[Kind, ...] = ("normed", "plain", "gated", "deep")


def one_row(*sizes: tuple[int, int, int]) -> list[Division]:
    """For one row, of columns, channels and warps."""
    return [Division(Tile(1, c, inner, warps, 1), one=True) for c, inner, warps in sizes]


def asking(columns: int, inner: int, warps: int) -> list[Division]:
    """For one row, with requests for the weights of programs further on."""
    size = Tile(1, columns, inner, warps, 1)
    asked = ((264, 128), (264, 64), (528, 128), (1056, 128), (528, 256))
    return [Division(size, ask=ask, run=run, one=True) for ask, run in asked]


def many(
    rows: int, sizes: Iterable[tuple[int, ...]], aparts: tuple[bool, ...] = (False,)
) -> list[Division]:
    """For more rows, of columns, channels, warps, stages, splits, channels asked for, request."""
    return [
        Division(Tile(rows, c, inner, warps, stages), splits, ask, run, apart)
        for apart in aparts
        for c, inner, warps, stages, splits, ask, run in sizes
        if apart or splits == 1 or aparts == (False,)
    ]


_EIGHT = [
    (16, 256, 4, 4, 1, 512, 128),
    (16, 512, 4, 3, 1, 512, 128),
    (32, 128, 4, 5, 1, 0, 128),
    (32, 128, 4, 5, 1, 512, 128),
    (32, 128, 4, 5, 1, 1024, 64),
    (32, 256, 4, 4, 1, 512, 128),
    (32, 256, 8, 4, 1, 512, 128),
    (64, 128, 4, 5, 1, 512, 128),
    (32, 128, 4, 5, 2, 512, 128),
    (64, 128, 4, 4, 2, 512, 128),
    (64, 64, 4, 6, 4, 512, 128),
]
_EIGHT_GATED = [
    (16, 128, 4, 5, 1, 512, 128),
    (16, 256, 4, 3, 1, 512, 128),
    (16, 256, 4, 4, 1, 512, 128),
    (32, 128, 4, 4, 1, 0, 128),
    (32, 128, 4, 4, 1, 512, 128),
    (32, 64, 4, 6, 1, 512, 128),
    (32, 256, 8, 3, 1, 512, 128),
    (64, 64, 4, 5, 1, 512, 128),
    (64, 128, 4, 3, 1, 512, 128),
]
_THIRTY = [
    (32, 128, 4, 5, 1, 512, 128),
    (32, 256, 4, 4, 1, 512, 128),
    (64, 128, 4, 4, 1, 512, 128),
    (64, 128, 4, 5, 2, 512, 128),
    (64, 64, 4, 6, 2, 512, 128),
    (64, 64, 4, 6, 4, 512, 128),
    (128, 64, 4, 5, 4, 512, 128),
    (128, 64, 8, 5, 4, 512, 128),
]
_THIRTY_GATED = [
    (32, 128, 4, 4, 1, 512, 128),
    (32, 64, 4, 6, 1, 512, 128),
    (64, 64, 4, 4, 1, 512, 128),
    (64, 64, 4, 6, 1, 512, 128),
    (64, 128, 4, 3, 1, 512, 128),
    (64, 64, 4, 4, 2, 512, 128),
    (64, 64, 8, 4, 1, 512, 128),
]
_SIXTY = [
    (64, 64, 4, 6, 1, 512, 128),
    (64, 64, 4, 6, 2, 512, 128),
    (64, 128, 4, 4, 2, 512, 128),
    (64, 64, 4, 5, 4, 512, 128),
    (128, 64, 4, 4, 2, 512, 128),
    (128, 64, 4, 4, 4, 512, 128),
    (128, 64, 8, 4, 4, 512, 128),
    (128, 128, 8, 3, 4, 512, 128),
    (128, 64, 8, 5, 8, 512, 128),
]
_SIXTY_GATED = [
    (64, 64, 4, 4, 1, 0, 128),
    (64, 64, 4, 4, 1, 512, 128),
    (64, 64, 4, 5, 1, 512, 128),
    (64, 64, 8, 4, 1, 512, 128),
    (64, 128, 8, 3, 1, 512, 128),
    (64, 64, 4, 4, 2, 512, 128),
    (128, 64, 8, 4, 1, 512, 128),
    (128, 64, 8, 3, 2, 512, 128),
]
_WHOLE_ROWS = ((4, 4096, 4), (2, 4096, 4), (2, 4096, 2), (1, 4096, 2), (8, 4096, 8), (4, 4096, 8))
_PART_ROWS = ((4, 2048, 4), (8, 2048, 4), (4, 2048, 2), (8, 1024, 4), (8, 1024, 2), (16, 512, 4))

CANDIDATES: dict[int, dict[Kind, list[Division]]] = {
    1: {
        "normed": one_row(*_WHOLE_ROWS, *_PART_ROWS) + asking(4, 4096, 4),
        "plain": one_row(*_WHOLE_ROWS, *_PART_ROWS) + asking(4, 4096, 4),
        "gated": one_row(
            *((2, 4096, 4), (1, 4096, 4), (1, 4096, 2), (2, 4096, 8), (4, 4096, 8)),
            *((2, 2048, 4), (4, 2048, 4), (2, 2048, 2), (4, 1024, 2), (8, 512, 4)),
        )
        + asking(2, 4096, 4),
        "deep": one_row(*_WHOLE_ROWS, *_PART_ROWS) + asking(4, 4096, 4),
    },
    16: {
        "normed": many(16, _EIGHT, (False, True)),
        "plain": many(16, _EIGHT),
        "gated": many(16, _EIGHT_GATED, (False, True)),
        "deep": many(16, _EIGHT),
    },
    32: {
        "normed": many(32, _THIRTY, (True,)),
        "plain": many(32, _THIRTY),
        "gated": many(32, _THIRTY_GATED, (True, False)),
        "deep": many(32, _THIRTY),
    },
    64: {
        "normed": many(64, _SIXTY, (True,)),
        "plain": many(64, _SIXTY),
        "gated": many(64, _SIXTY_GATED, (True,)),
        "deep": many(64, _SIXTY),
    },
}
"""By the most rows that each is for."""
