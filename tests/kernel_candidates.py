"""Tiles that ``gpu_kernels.py`` tries, by kernel, in the order in which it does."""

from mosstalk.ops.tiles import Kernel

Values = tuple[int, ...]
"""Rows, columns, inner, warps, stages, groups of a tile."""

_FEW_LINEAR: list[Values] = [
    (16, 32, 256, 4, 1, 1),
    (16, 64, 256, 4, 1, 1),
    (16, 32, 256, 4, 1, 4),
    (16, 64, 256, 4, 1, 4),
    (16, 32, 256, 8, 1, 8),
    (16, 64, 256, 8, 1, 1),
    (16, 64, 256, 8, 1, 8),
    (16, 32, 256, 2, 1, 1),
    (16, 16, 256, 4, 1, 4),
    (32, 64, 256, 4, 1, 1),
    (64, 32, 256, 4, 1, 1),
    (16, 128, 256, 8, 1, 1),
    (16, 32, 128, 4, 3, 1),
]
_FEW_CONV: list[Values] = [
    (16, 16, 256, 4, 1, 4),
    (16, 16, 256, 8, 1, 8),
    (16, 32, 256, 4, 1, 4),
    (16, 32, 256, 8, 1, 8),
    (16, 16, 256, 2, 1, 2),
    (16, 16, 128, 4, 4, 1),
    (16, 16, 256, 4, 3, 1),
]
_MANY_LINEAR: list[Values] = [
    (64, 64, 64, 4, 4),
    (64, 64, 64, 4, 3),
    (64, 64, 128, 4, 3),
    (64, 64, 256, 4, 1),
    (64, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 64, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 128, 8, 2),
    (64, 128, 256, 4, 1),
    (128, 128, 256, 8, 1),
    (64, 256, 64, 8, 4),
    (128, 256, 64, 8, 3),
]
_MANY_ADD: list[Values] = [
    (64, 64, 64, 4, 4),
    (64, 64, 64, 4, 5),
    (64, 64, 128, 4, 3),
    (64, 64, 128, 4, 4),
    (64, 32, 64, 4, 5),
    (64, 32, 128, 4, 4),
    (32, 64, 128, 4, 3),
    (32, 64, 64, 4, 5),
    (128, 32, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (32, 32, 128, 4, 4),
    (64, 64, 64, 8, 4),
]
_MANY_FUSED: list[Values] = [
    (64, 64, 256, 4, 1),
    (64, 64, 256, 8, 1),
    (64, 128, 256, 8, 1),
    (64, 128, 256, 4, 1),
    (128, 64, 256, 8, 1),
    (128, 128, 256, 8, 1),
    (32, 128, 256, 4, 1),
    (32, 64, 256, 4, 1),
    (64, 256, 256, 8, 1),
]
_NORM: list[Values] = [
    (rows, 0, 0, warps, 1) for rows, warps in ((1, 1), (2, 1), (2, 2), (4, 4), (8, 4), (16, 4))
]
_WHOLE, _APART = "transformer block", "transformer block, norms apart"

CANDIDATES: dict[str, list[tuple[Kernel, str, list[Values]]]] = {
    "few": [
        (
            "linear_add",
            _WHOLE,
            [
                (16, 16, 1024, 4, 1, 4),
                (16, 16, 1024, 8, 1, 8),
                (16, 16, 1024, 2, 1, 2),
                (16, 32, 1024, 4, 1, 4),
                (16, 32, 1024, 8, 1, 8),
                (32, 16, 1024, 8, 1, 8),
                (16, 16, 512, 4, 2, 4),
                (16, 16, 1024, 4, 1, 1),
                (16, 16, 1024, 1, 1, 1),
                (16, 16, 256, 4, 3, 1),
                (16, 16, 128, 4, 4, 1),
            ],
        ),
        (
            "attention_flow",
            _WHOLE,
            [
                (32, columns, 0, warps, stages)
                for columns, warps, stages in (
                    (64, 4, 1),
                    (64, 2, 1),
                    (64, 8, 1),
                    (128, 4, 1),
                    (128, 8, 1),
                    (64, 4, 3),
                    (32, 2, 3),
                    (128, 4, 3),
                )
            ],
        ),
        ("norm_linear", _WHOLE, _FEW_LINEAR),
        ("norm_qkv", _WHOLE, _FEW_LINEAR),
        ("conv1d", "residual block", _FEW_CONV),
        ("close_residual", "residual block", [*_FEW_CONV[:5], (16, 32, 256, 4, 1, 1)]),
        ("norm_act", "residual block", _NORM),
    ],
    "many": [
        ("norm_qkv", _APART, _MANY_LINEAR),
        ("norm_linear", _APART, _MANY_LINEAR),
        (
            "attention_flow",
            _WHOLE,
            [
                (rows, columns, 0, warps, stages)
                for rows, columns, warps, stages in (
                    # Tiles of 64 rows take packs, which win where passes run side by side.
                    (64, 64, 4, 3),
                    (64, 64, 4, 4),
                    (64, 64, 4, 2),
                    (64, 32, 4, 4),
                    (64, 32, 4, 3),
                    (32, 64, 2, 3),
                    (32, 64, 2, 1),
                    (32, 64, 1, 2),
                    (32, 64, 1, 3),
                    (32, 32, 1, 4),
                    (32, 32, 2, 3),
                    (32, 128, 2, 2),
                    (32, 128, 4, 1),
                )
            ],
        ),
        ("linear_add", _APART, _MANY_ADD),
        ("conv1d", "residual block", _MANY_ADD),
        (
            "close_residual",
            "residual block",
            [*_MANY_ADD, (64, 64, 256, 4, 1), (32, 64, 256, 4, 1)],
        ),
        ("norm_act", "residual block", _NORM),
        ("norm_qkv", _WHOLE, _MANY_FUSED),
        ("norm_linear", _WHOLE, _MANY_FUSED),
    ],
}
