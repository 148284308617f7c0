"""How each kernel divides its output among programs.

In 16 bit the division follows the number of rows: few rows need many small tiles to keep the
card busy, many rows large ones. In float32 it is always the same, so that a row's sums are
taken in one order whoever shares its batch.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal[
    "norm_act",
    "norm_linear",
    "linear_add",
    "norm_qkv",
    "attention_flow",
    "conv1d",
    "close_residual",
    "euler",
]


@dataclass(frozen=True)
class Tile:
    """``rows`` x ``columns`` of the output to a program, ``inner`` channels in one matmul.

    For attention ``rows`` is the most of an item's, ``columns`` are keys and ``inner`` is
    unused; a norm alone takes whole rows. ``warps`` and ``stages`` are Triton's: threads / 32
    of a program, and how many loads are under way at once. Where ``inner`` takes all channels,
    they may be summed in ``groups`` apart, one or as many as there are warps.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    groups: int = 1


FEW_ROWS, SOME_ROWS, ANY_ROWS = 128, 512, 1 << 31
"""Three items of 20 frames and two branches, twelve, and more."""

TILES: dict[Kernel, dict[int, Tile]] = {
    "norm_act": {
        SOME_ROWS: Tile(2, 0, 0, 2, 1),
        ANY_ROWS: Tile(1, 0, 0, 1, 1),
    },
    "norm_linear": {
        FEW_ROWS: Tile(16, 64, 256, 8, 1),
        ANY_ROWS: Tile(64, 64, 64, 4, 3),
    },
    "linear_add": {
        FEW_ROWS: Tile(16, 16, 1024, 1, 1),
        SOME_ROWS: Tile(32, 32, 128, 4, 4),
        ANY_ROWS: Tile(64, 64, 128, 4, 4),
    },
    "norm_qkv": {
        FEW_ROWS: Tile(16, 64, 256, 4, 1),
        SOME_ROWS: Tile(64, 64, 64, 4, 3),
        ANY_ROWS: Tile(128, 128, 64, 8, 3),
    },
    "attention_flow": {
        SOME_ROWS: Tile(32, 128, 0, 4, 3),
        ANY_ROWS: Tile(64, 64, 0, 4, 3),
    },
    "conv1d": {
        FEW_ROWS: Tile(16, 16, 128, 4, 4),
        SOME_ROWS: Tile(32, 32, 64, 4, 4),
        ANY_ROWS: Tile(64, 64, 64, 4, 5),
    },
    "close_residual": {
        FEW_ROWS: Tile(16, 32, 256, 4, 1),
        SOME_ROWS: Tile(32, 32, 256, 4, 1),
        ANY_ROWS: Tile(32, 64, 256, 4, 1),
    },
    "euler": {ANY_ROWS: Tile(4, 128, 0, 4, 1)},
}
"""In 16 bit: by the most rows that a tile is for."""

EXACT: dict[Kernel, Tile] = {
    "norm_act": Tile(2, 0, 0, 2, 1),
    "norm_linear": Tile(16, 32, 32, 4, 2),
    "linear_add": Tile(16, 32, 32, 4, 2),
    "norm_qkv": Tile(16, 32, 32, 4, 2),
    "attention_flow": Tile(32, 32, 0, 4, 1),
    "conv1d": Tile(16, 32, 32, 4, 2),
    "close_residual": Tile(16, 32, 32, 4, 2),
    "euler": Tile(4, 128, 0, 4, 1),
}
"""In float32, for any number of rows."""


def tile(kernel: Kernel, rows: int, dtype: torch.dtype) -> Tile:
    """The tile of ``kernel`` for ``rows`` rows whose matmuls take inputs in ``dtype``."""
    if dtype == torch.float32:
        return EXACT[kernel]
    return next(tile for limit, tile in TILES[kernel].items() if rows <= limit)


def norms_apart(rows: int, dtype: torch.dtype) -> bool:
    """Whether rows are better normalised once, by ``norm_act``, than in each matmul's program.

    In float32 the same for any number of rows, as tiles are.
    """
    return dtype != torch.float32 and rows > FEW_ROWS
