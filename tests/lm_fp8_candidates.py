"""Divisions that ``gpu_lm_fp8.py`` tries, by the rows of a tile and the kind of product."""

from lm_linear_candidates import asking, many, one_row

from mosstalk.kernels.lm_tiles import Division, Kind

_ONE = ((4, 4096, 4), (4, 4096, 2), (8, 4096, 4), (8, 2048, 2), (16, 1024, 2), (2, 4096, 2))
_ONE_GATED = ((4, 4096, 8), (4, 4096, 4), (2, 4096, 4), (2, 4096, 2), (4, 2048, 2), (8, 1024, 2))
# Columns, channels, warps, stages, splits, channels asked for, request.
_FEW = [
    (64, 128, 4, 5, 1, 1024, 128),
    (64, 256, 4, 4, 1, 1024, 128),
    (64, 256, 4, 5, 1, 1024, 128),
    (64, 128, 4, 6, 2, 1024, 128),
    (64, 256, 4, 4, 2, 1024, 128),
    (64, 256, 4, 4, 2, 0, 128),
    (64, 512, 4, 3, 2, 1024, 128),
    (64, 256, 4, 3, 4, 512, 128),
    (128, 128, 8, 5, 4, 1024, 128),
]
_FEW_GATED = [
    (64, 128, 4, 4, 1, 1024, 128),
    (64, 128, 4, 4, 1, 0, 128),
    (64, 128, 4, 6, 1, 1024, 128),
    (64, 256, 4, 3, 1, 1024, 128),
    (64, 128, 4, 5, 2, 1024, 128),
    (128, 128, 8, 4, 1, 1024, 128),
    (128, 128, 8, 3, 2, 1024, 128),
]
_SIXTY = [
    (64, 128, 4, 5, 1, 1024, 128),
    (64, 128, 4, 5, 2, 1024, 128),
    (64, 256, 4, 3, 2, 1024, 128),
    (64, 128, 4, 5, 4, 1024, 128),
    (64, 256, 4, 3, 4, 1024, 128),
    (128, 128, 8, 4, 4, 1024, 128),
]
_SIXTY_GATED = [
    (64, 128, 4, 4, 1, 1024, 128),
    (64, 128, 4, 3, 1, 1024, 128),
    (64, 128, 4, 4, 2, 1024, 128),
    (64, 128, 8, 4, 1, 1024, 128),
    (128, 128, 8, 3, 1, 1024, 128),
    (128, 128, 8, 3, 2, 1024, 128),
]


def _by_kind(plain: list[Division], gated: list[Division]) -> dict[Kind, list[Division]]:
    return {"normed": plain, "plain": plain, "gated": gated, "deep": plain}


CANDIDATES: dict[int, dict[Kind, list[Division]]] = {
    1: _by_kind(
        one_row(*_ONE) + asking(4, 4096, 4)[:3],
        one_row(*_ONE_GATED) + asking(4, 4096, 8)[:3],
    ),
    16: _by_kind(many(16, _FEW), many(16, _FEW_GATED)),
    32: _by_kind(many(32, _FEW), many(32, _FEW_GATED)),
    64: _by_kind(many(64, _SIXTY), many(64, _SIXTY_GATED)),
}
"""By the most rows that each is for; one row may be done by tiles of 16, too."""
