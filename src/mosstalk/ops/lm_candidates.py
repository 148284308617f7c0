"""Divisions of the language model's products that are tried on a card.

``mosstalk build`` times the first few of each list, which differ most from one another;
``tests/gpu_lm_linear.py``, by which the package's own tables were found, times them all.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest

import torch

from mosstalk.ops.lm_tiles import ANY_ROWS, Division, Key, Kind, package_division
from mosstalk.ops.tiles import Tile

TRIED = 7
"""How many divisions of a line of the tables a build times, the package's own among them."""
Many = tuple[int, int, int, int, int, int]
"""Columns, channels, warps, stages, splits, channels asked for."""


def few_candidates(key: Key) -> list[Division]:
    """What a build times for a line of the tables: the package's own, then others."""
    dtype, kind, limit = key
    listed = FP8_CANDIDATES if dtype == torch.float8_e4m3fn else CANDIDATES
    return list(dict.fromkeys([package_division(key), *listed[limit][kind]]))[:TRIED]


def _one_row(*sizes: tuple[int, int, int]) -> list[Division]:
    """For one row, of columns, channels and warps."""
    return [Division(Tile(1, c, inner, warps, 1), one=True) for c, inner, warps in sizes]


def _asking(columns: int, inner: int, warps: int) -> list[Division]:
    """For one row, with requests for the weights of programs further on."""
    size = Tile(1, columns, inner, warps, 1)
    asked = ((264, 128), (264, 64), (528, 128), (1056, 128), (528, 256))
    return [Division(size, ask=ask, run=run, one=True) for ask, run in asked]


def _many(rows: int, sizes: Iterable[Many], *, apart: bool = False) -> list[Division]:
    """For more rows."""
    return [
        Division(Tile(rows, columns, inner, warps, stages), splits, ask, apart=apart)
        for columns, inner, warps, stages, splits, ask in sizes
    ]


def _either(rows: int, sizes: Iterable[Many]) -> list[Division]:
    """Rows normed apart and, by programs that share no channels, within the product, in turn."""
    apart = _many(rows, sizes, apart=True)
    within = [found for found in _many(rows, sizes) if found.splits == 1]
    return [found for found in chain(*zip_longest(apart, within)) if found]


def _by_kind(
    normed: list[Division], added: list[Division], gated: list[Division]
) -> Mapping[Kind, list[Division]]:
    return {"normed": normed, "gated": gated, "plain": added, "deep": added}


_ONE = (
    *((4, 2048, 2), (2, 4096, 4), (8, 1024, 2), (4, 4096, 4), (8, 2048, 4), (16, 512, 4)),
    *((4, 2048, 4), (2, 4096, 2), (8, 1024, 4), (1, 4096, 2), (8, 4096, 8), (4, 4096, 8)),
)
_ONE_GATED = (
    *((2, 4096, 4), (4, 4096, 8), (2, 2048, 4), (4, 1024, 2), (4, 2048, 4), (1, 4096, 4)),
    *((2, 4096, 8), (1, 4096, 2), (2, 2048, 2), (8, 512, 4)),
)
_FEW: tuple[Many, ...] = (
    (32, 128, 4, 5, 1, 512),
    (64, 128, 4, 4, 2, 512),
    (64, 128, 4, 5, 1, 512),
    (32, 256, 4, 4, 1, 512),
    (32, 128, 4, 5, 2, 512),
    (64, 64, 4, 6, 4, 512),
    (16, 256, 4, 4, 1, 512),
    (16, 512, 4, 3, 1, 512),
    (32, 128, 4, 5, 1, 0),
    (32, 256, 8, 4, 1, 512),
)
_FEW_GATED: tuple[Many, ...] = (
    (32, 128, 4, 4, 1, 512),
    (32, 64, 4, 6, 1, 512),
    (64, 64, 4, 5, 1, 512),
    (16, 128, 4, 5, 1, 512),
    (64, 128, 4, 3, 1, 512),
    (32, 128, 4, 4, 1, 0),
    (16, 256, 4, 3, 1, 512),
    (16, 256, 4, 4, 1, 512),
    (32, 256, 8, 3, 1, 512),
)
_THIRTY: tuple[Many, ...] = (
    (64, 128, 4, 5, 2, 512),
    (64, 128, 4, 4, 1, 512),
    (32, 128, 4, 5, 1, 512),
    (64, 64, 4, 6, 2, 512),
    (32, 256, 4, 4, 1, 512),
    (128, 64, 4, 5, 4, 512),
    (64, 64, 4, 6, 4, 512),
    (128, 64, 8, 5, 4, 512),
)
_THIRTY_GATED: tuple[Many, ...] = (
    (32, 128, 4, 4, 1, 512),
    (64, 64, 4, 4, 1, 512),
    (32, 64, 4, 6, 1, 512),
    (64, 128, 4, 3, 1, 512),
    (64, 64, 4, 6, 1, 512),
    (64, 64, 4, 4, 2, 512),
    (64, 64, 8, 4, 1, 512),
)
_SIXTY: tuple[Many, ...] = (
    (64, 64, 4, 6, 2, 512),
    (64, 128, 4, 4, 2, 512),
    (128, 64, 4, 4, 2, 512),
    (64, 64, 4, 6, 1, 512),
    (64, 64, 4, 5, 4, 512),
    (128, 64, 8, 4, 4, 512),
    (128, 64, 4, 4, 4, 512),
    (128, 128, 8, 3, 4, 512),
    (128, 64, 8, 5, 8, 512),
)
_SIXTY_GATED: tuple[Many, ...] = (
    (64, 64, 4, 4, 1, 512),
    (64, 64, 4, 5, 1, 512),
    (64, 128, 8, 3, 1, 512),
    (128, 64, 8, 4, 1, 512),
    (64, 64, 4, 4, 2, 512),
    (64, 64, 8, 4, 1, 512),
    (64, 64, 4, 4, 1, 0),
    (128, 64, 8, 3, 2, 512),
)
_ONES = _one_row(*_ONE) + _asking(4, 4096, 4)

CANDIDATES: Mapping[int, Mapping[Kind, list[Division]]] = {
    1: _by_kind(_ONES, _ONES, _one_row(*_ONE_GATED) + _asking(2, 4096, 4)),
    16: _by_kind(_either(16, _FEW), _many(16, _FEW), _either(16, _FEW_GATED)),
    32: _by_kind(_many(32, _THIRTY, apart=True), _many(32, _THIRTY), _either(32, _THIRTY_GATED)),
    ANY_ROWS: _by_kind(
        _many(64, _SIXTY, apart=True), _many(64, _SIXTY), _many(64, _SIXTY_GATED, apart=True)
    ),
}
"""In 16 bit, by the most rows that each is for."""

_FP8_ONE = ((4, 4096, 4), (8, 2048, 2), (4, 4096, 2), (8, 4096, 4), (2, 4096, 2))
_FP8_ONE_GATED = (
    *((4, 4096, 4), (4, 4096, 8), (2, 4096, 4), (4, 2048, 2), (8, 1024, 2), (2, 4096, 2)),
)
_FP8_FEW: tuple[Many, ...] = (
    (64, 256, 4, 4, 1, 1024),
    (64, 256, 4, 4, 2, 1024),
    (64, 128, 4, 5, 1, 1024),
    (64, 128, 4, 6, 2, 1024),
    (64, 256, 4, 3, 4, 512),
    (128, 128, 8, 5, 4, 1024),
    (64, 256, 4, 5, 1, 1024),
    (64, 512, 4, 3, 2, 1024),
    (64, 256, 4, 4, 2, 0),
)
_FP8_FEW_GATED: tuple[Many, ...] = (
    (64, 128, 4, 4, 1, 1024),
    (64, 128, 4, 6, 1, 1024),
    (64, 256, 4, 3, 1, 1024),
    (64, 128, 4, 5, 2, 1024),
    (128, 128, 8, 4, 1, 1024),
    (64, 128, 4, 4, 1, 0),
    (128, 128, 8, 3, 2, 1024),
)
_FP8_SIXTY: tuple[Many, ...] = (
    (64, 128, 4, 5, 1, 1024),
    (64, 128, 4, 5, 2, 1024),
    (64, 256, 4, 3, 2, 1024),
    (64, 128, 4, 5, 4, 1024),
    (128, 128, 8, 4, 4, 1024),
    (64, 256, 4, 3, 4, 1024),
)
_FP8_SIXTY_GATED: tuple[Many, ...] = (
    (64, 128, 4, 4, 1, 1024),
    (64, 128, 4, 3, 1, 1024),
    (64, 128, 4, 4, 2, 1024),
    (64, 128, 8, 4, 1, 1024),
    (128, 128, 8, 3, 1, 1024),
    (128, 128, 8, 3, 2, 1024),
)


def _in_fp8(added: list[Division], gated: list[Division]) -> Mapping[Kind, list[Division]]:
    return _by_kind(added, added, gated)


FP8_CANDIDATES: Mapping[int, Mapping[Kind, list[Division]]] = {
    1: _in_fp8(
        _one_row(*_FP8_ONE) + _asking(4, 4096, 4)[:3] + _one_row((16, 1024, 2)),
        _one_row(*_FP8_ONE_GATED) + _asking(4, 4096, 8)[:3],
    ),
    16: _in_fp8(_many(16, _FP8_FEW), _many(16, _FP8_FEW_GATED)),
    32: _in_fp8(_many(32, _FP8_FEW), _many(32, _FP8_FEW_GATED)),
    ANY_ROWS: _in_fp8(_many(64, _FP8_SIXTY), _many(64, _FP8_SIXTY_GATED)),
}
"""In E4M3, by the most rows that each is for."""
