"""How matmuls of the language model are divided among programs, and what else to try.

In 16 and 8 bit the division follows the number of rows, unless a row's bits may not depend on the
other rows; in float32 there is one for any number. Those that follow the number of rows may be
replaced by what was found faster on a card (``use_tuned``).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Literal, get_args

import torch

from mosstalk.ops.launch import LINE_BYTES, ceil_div
from mosstalk.ops.tiles import Tile

Kind = Literal["normed", "gated", "plain", "deep"]
"""Matmuls of a layer: q, k, v; gate and up; after attention, and heads; down."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Division:
    """A tile, and what goes beside it.

    ``splits`` programs share the channels of a tile of columns. ``ask``: for many rows, how
    many channels of its own weights a program asks for before its turn; for one row, whose
    first weights are taken before its turn anyway, how many programs further on the weights
    are that it asks for. ``run``: bytes that it asks for at once. ``apart``: rows are normalised
    by a kernel of their own, once. ``one``: for one row, which does without matrix units.
    """

    tile: Tile
    splits: int = 1
    ask: int = 0
    run: int = LINE_BYTES
    apart: bool = False
    one: bool = False

    def requests(self, channels: int, weight: torch.Tensor) -> dict[str, int]:
        """What ``linear.prefetch_rows`` is compiled for."""
        runs = max(1, channels * weight.element_size() // self.run)
        return {"RUNS": runs, "BULK": int(self.run > LINE_BYTES)}

    def sums(self, rows: int, columns: int, parts: int) -> int:
        """The most numbers that programs leave one another, of ``parts`` results (R, N) each."""
        tile = self.tile
        wide = ceil_div(columns, tile.columns) * tile.columns * parts
        return ceil_div(rows, tile.rows) * tile.rows * wide * self.splits


FEW_ROWS = 64
"""Above so many rows a general library's matmuls are faster."""
DEEP_CHANNELS = 8192
ANY_ROWS = 1 << 31
LIMITS = (1, 16, 32, ANY_ROWS)
"""The most rows that each line of a table is for."""
Key = tuple[torch.dtype, Kind, int]
"""A line of the tables: in what the weights are, the kind of matmul, and the most rows."""

TILES: dict[Kind, dict[int, Division]] = {
    "normed": {
        1: Division(Tile(1, 8, 1024, 2, 1), one=True),
        16: Division(Tile(16, 64, 128, 4, 5), ask=512, apart=True),
        32: Division(Tile(32, 64, 128, 4, 4), ask=512, apart=True),
        ANY_ROWS: Division(Tile(64, 64, 64, 4, 6), splits=2, ask=512, apart=True),
    },
    "gated": {
        1: Division(Tile(1, 2, 4096, 8, 1), one=True),
        16: Division(Tile(16, 32, 128, 4, 4), apart=True),
        32: Division(Tile(32, 32, 128, 4, 4), ask=512, apart=True),
        ANY_ROWS: Division(Tile(64, 64, 64, 4, 4), ask=512, apart=True),
    },
    "plain": {
        1: Division(Tile(1, 4, 2048, 2, 1), one=True),
        16: Division(Tile(16, 64, 128, 4, 4), splits=4, ask=1024),
        32: Division(Tile(32, 64, 128, 4, 5), splits=2, ask=512),
        ANY_ROWS: Division(Tile(64, 64, 128, 4, 4), splits=2, ask=512),
    },
    "deep": {
        1: Division(Tile(1, 2, 4096, 4, 1), one=True),
        16: Division(Tile(16, 64, 128, 4, 4), splits=2, ask=512),
        32: Division(Tile(32, 64, 128, 4, 5), splits=2, ask=512),
        ANY_ROWS: Division(Tile(64, 64, 128, 4, 4), splits=2, ask=512),
    },
}
"""In 16 bit: by the most rows that each is for."""

INVARIANT: dict[Kind, Division] = {
    "normed": Division(Tile(64, 64, 64, 4, 5), splits=2, ask=512, apart=True),
    "gated": Division(Tile(64, 64, 64, 4, 4), ask=512, apart=True),
    "plain": Division(Tile(64, 64, 64, 4, 5), splits=2, ask=512),
    "deep": Division(Tile(64, 64, 64, 4, 5), splits=2, ask=512),
}
"""In 16 bit where a row's bits may not depend on its company: one way to cut the channels. How
many rows a tile has changes no sum, so that follows the number of rows.
"""
_TILE_ROWS = (16, 32, 64)

FP8_TILES: dict[Kind, dict[int, Division]] = {
    "normed": {
        1: Division(Tile(1, 4, 4096, 4, 1), one=True),
        16: Division(Tile(16, 64, 256, 4, 4), splits=2),
        32: Division(Tile(32, 64, 256, 4, 5), ask=1024),
        ANY_ROWS: Division(Tile(64, 64, 128, 4, 5), ask=1024),
    },
    "gated": {
        1: Division(Tile(1, 2, 4096, 4, 1), one=True),
        16: Division(Tile(16, 64, 256, 4, 3), ask=1024),
        32: Division(Tile(32, 64, 128, 4, 4)),
        ANY_ROWS: Division(Tile(64, 64, 128, 4, 4), ask=1024),
    },
    "plain": {
        1: Division(Tile(1, 8, 2048, 2, 1), one=True),
        16: Division(Tile(16, 64, 512, 4, 3), splits=2, ask=1024),
        32: Division(Tile(32, 64, 256, 4, 5), ask=1024),
        ANY_ROWS: Division(Tile(64, 64, 128, 4, 5), splits=2, ask=1024),
    },
    "deep": {
        1: Division(Tile(1, 2, 4096, 2, 1), one=True),
        16: Division(Tile(16, 64, 512, 4, 3), splits=2, ask=1024),
        32: Division(Tile(32, 64, 256, 4, 4), splits=2, ask=1024),
        ANY_ROWS: Division(Tile(64, 64, 256, 4, 3), splits=4, ask=1024),
    },
}
"""In E4M3; rows are always made so by a kernel of their own. 64 columns are the least of which
Hopper's matrix units multiply 8 bits as such.
"""
FP8_INVARIANT: dict[Kind, Division] = {
    "normed": Division(Tile(64, 64, 128, 4, 5), splits=2, ask=1024),
    "gated": Division(Tile(64, 64, 128, 4, 4), ask=1024),
    "plain": Division(Tile(64, 64, 128, 4, 5), splits=2, ask=1024),
    "deep": Division(Tile(64, 64, 128, 4, 5), splits=2, ask=1024),
}
"""In E4M3 where a row's bits may not depend on its company."""

EXACT = Division(Tile(16, 32, 32, 4, 2))
"""In float32, for any number of rows."""


_TUNED: dict[Key, Division] = {}
"""In place of the package's own."""


def package_division(key: Key) -> Division:
    """The package's own for a line of the tables."""
    dtype, kind, limit = key
    return _table(dtype)[kind][limit]


def tuned_divisions() -> dict[Key, Division]:
    """What stands in place of the package's own now."""
    return dict(_TUNED)


def use_tuned(divisions: Mapping[Key, Division]) -> None:
    """Have ``division`` give these, and the package's own for all other lines, from now on.

    To be called before a model is loaded: an engine makes room for what the tables say then, and
    keeps in a captured pass what they said when it was captured. All models of a process share
    the tables, so the last that was started decides how those before it divide what they have
    not captured yet; where that takes more room than they made, a matmul makes its own.
    """
    _TUNED.clear()
    _TUNED.update(divisions)


@contextmanager
def tuned_as(divisions: Mapping[Key, Division]) -> Iterator[None]:
    """``use_tuned`` within a block; what was so before is so after it."""
    before = tuned_divisions()
    use_tuned(divisions)
    try:
        yield
    finally:
        use_tuned(before)


def kind_of(channels: int, *, normed: bool, gated: bool) -> Kind:
    """What a matmul of rows of so many channels is."""
    if gated:
        return "gated"
    if normed:
        return "normed"
    return "deep" if channels > DEEP_CHANNELS else "plain"


def division(kind: Kind, rows: int, dtype: torch.dtype, *, invariant: bool = False) -> Division:
    """How a matmul of ``rows`` rows is divided, whose weights are in ``dtype``."""
    if dtype == torch.float32:
        return EXACT
    if dtype == torch.float8_e4m3fn:
        if invariant:
            return _invariant(FP8_INVARIANT[kind], rows)
        return _by_rows(kind, rows, dtype)
    found = _invariant(INVARIANT[kind], rows) if invariant else _by_rows(kind, rows, dtype)
    # Before they are scaled, a row's channels times their norm_weight may be too large for float16.
    return replace(found, apart=found.apart or (dtype == torch.float16 and not found.one))


def _invariant(found: Division, rows: int) -> Division:
    most = _TILE_ROWS[-1]
    tile_rows = next(size for size in _TILE_ROWS if size >= min(rows, most))
    return replace(found, tile=replace(found.tile, rows=tile_rows))


def _by_rows(kind: Kind, rows: int, dtype: torch.dtype) -> Division:
    table = _table(dtype)[kind]
    limit, own = next((most, found) for most, found in table.items() if rows <= most)
    return _TUNED.get((dtype, kind, limit), own)


def _table(dtype: torch.dtype) -> Mapping[Kind, Mapping[int, Division]]:
    return FP8_TILES if dtype == torch.float8_e4m3fn else TILES


# Divisions of the language model's matmuls that are tried on a card.
#
# ``mosstalk build`` times the first few of each list, which differ most from one another;
# ``tests/gpu_lm_linear.py``, by which the package's own tables were found, times them all.


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
    """Rows normed apart and, by programs that share no channels, within the matmul, in turn."""
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
