"""What the language model's matmuls, norms and gates must do: the same as their references.

``test_lm_linear.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/lm_linear_claims.py`` runs the compiled kernels on it.
"""

from typing import Any

import pytest
import torch
from kernel_claims import DEVICE, DTYPES, Rand, apart, every_dtype, rand, same, unwritten
from torch import Tensor

from mosstalk.ops.launch import Workspace
from mosstalk.ops.linear import divided_linear, gate_up, rms_linear
from mosstalk.ops.linear_tiles import ANY_ROWS, TILES, Division, Kind, division
from mosstalk.ops.norm import rms_norm
from mosstalk.ops.tiles import Tile

__all__ = ["rand"]
EPS = 1e-6
SIXTEEN = [dtype for dtype in DTYPES if dtype != torch.float32]
sixteen_bit = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)


def operands(
    rand: Rand, dtype: torch.dtype, rows: int, channels: int, columns: int, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, gain, weights and residual."""
    weight = rand(columns * (1 + gated), channels, dtype=dtype) / channels**0.5
    gain = 1 + 0.3 * rand(channels, dtype=dtype)
    return rand(rows, channels, dtype=dtype), gain, weight, rand(rows, columns, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "channels", "columns"),
    [
        (1, 64, 96),
        (1, 82, 50),
        (1, 4098, 5),
        (5, 80, 50),
        (17, 512, 33),
        (40, 48, 96),
        (70, 96, 40),
    ],
)
def test_rms_linear(
    rand: Rand, dtype: torch.dtype, rows: int, channels: int, columns: int, gated: bool
) -> None:
    x, gain, weight, residual = operands(rand, dtype, rows, channels, columns, gated)
    x, residual = apart(x), apart(residual)
    for factor, beside in ((gain, None), (None, residual), (gain, residual)):
        how: dict[str, Any] = {"residual": beside, "gated": gated}
        expected = unwritten(rows, columns, dtype=dtype)
        rms_linear.reference(x, factor, EPS, weight, expected, **how)
        for invariant in (False, True):
            out = apart(unwritten(rows, columns, dtype=dtype))
            assert rms_linear(x, factor, EPS, weight, out, **how, invariant=invariant) is out
            same(out, expected, dtype)
            around = torch.as_strided(out, (rows, columns + 48), (columns + 48, 1), 0)
            assert int(around.isnan().sum()) == rows * 48


@every_dtype
@pytest.mark.parametrize("rows", [1, 6])
def test_rms_linear_adds_in_place(rand: Rand, dtype: torch.dtype, rows: int) -> None:
    x, _, weight, stream = operands(rand, dtype, rows, 96, 64, False)
    expected = rms_linear.reference(x, None, EPS, weight, torch.empty_like(stream), residual=stream)
    assert rms_linear(x, None, EPS, weight, stream, residual=stream) is stream
    same(stream, expected, dtype)


@every_dtype
@pytest.mark.parametrize("rows", [1, 3])
def test_rms_linear_takes_rows_at_odd_places(rand: Rand, dtype: torch.dtype, rows: int) -> None:
    _, gain, weight, _ = operands(rand, dtype, rows, 80, 64, False)
    x = rand(rows, 83, dtype=dtype)[:, 1:81]
    expected = rms_linear.reference(x, gain, EPS, weight, unwritten(rows, 64, dtype=dtype))
    same(rms_linear(x, gain, EPS, weight, unwritten(rows, 64, dtype=dtype)), expected, dtype)


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_rms_linear_keeps_a_row_whatever_its_company(
    rand: Rand, dtype: torch.dtype, gated: bool
) -> None:
    x, gain, weight, residual = operands(rand, dtype, 130, 256, 40, gated)
    how: dict[str, Any] = {"gated": gated, "invariant": dtype != torch.float32}

    def found(rows: slice) -> Tensor:
        out = torch.empty_like(residual[rows])
        return rms_linear(x[rows], gain, EPS, weight, out, residual=residual[rows], **how)

    whole = found(slice(None))
    for few in (1, 16, 65):
        assert torch.equal(found(slice(few)), whole[:few])
    x[1::2] = float("nan")
    assert torch.equal(found(slice(None))[::2], whole[::2])


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_rms_linear_splits_of_channels_make_the_whole(
    rand: Rand, dtype: torch.dtype, gated: bool
) -> None:
    x, _, weight, residual = operands(rand, dtype, 20, 320, 70, gated)
    how: dict[str, Any] = {"residual": residual, "gated": gated}
    expected = rms_linear.reference(x, None, EPS, weight, torch.empty_like(residual), **how)
    workspace = Workspace(1 << 18, DEVICE)
    for splits in (2, 3, 4):
        divided = Division(Tile(16, 32, 64, 4, 2), splits=splits)
        found = [unwritten(20, 70, dtype=dtype) for _ in range(2)]
        for out in found:
            divided_linear(
                x, None, EPS, weight, out, divided=divided, workspace=workspace, **how
            ).run()  # fmt: skip
        same(found[0], expected, dtype)
        assert torch.equal(*found)
        assert not workspace.counters.any()


@sixteen_bit
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_rms_linear_is_the_same_by_every_division(
    rand: Rand, dtype: torch.dtype, kind: Kind
) -> None:
    x, _, weight, residual = operands(rand, dtype, 1, 200, 40, kind == "gated")
    how: dict[str, Any] = {"residual": residual, "gated": kind == "gated"}
    expected = rms_linear.reference(x, None, EPS, weight, torch.empty_like(residual), **how)
    for divided in TILES[kind].values():
        out = torch.empty_like(residual)
        divided_linear(x, None, EPS, weight, out, divided=divided, **how).run()
        same(out, expected, dtype)


@pytest.mark.parametrize("rows", [1, 4])
def test_rms_linear_of_large_rows_is_finite_in_float16(rand: Rand, rows: int) -> None:
    x, gain, weight, _ = operands(rand, torch.float16, rows, 64, 32, False)
    x, gain = x.clamp(-2, 2) * 30000, gain * 8
    out = unwritten(rows, 32, dtype=torch.float16)
    expected = rms_linear.reference(x, gain, EPS, weight, torch.empty_like(out))
    same(rms_linear(x, gain, EPS, weight, out), expected, torch.float16)


def test_float32_has_one_division_and_every_number_of_rows_one() -> None:
    assert len({division("normed", rows, torch.float32) for rows in (1, 64, 576)}) == 1
    for table in TILES.values():
        assert list(table) == sorted(table)
        assert list(table)[-1] == ANY_ROWS


@every_dtype
@pytest.mark.parametrize(("rows", "channels"), [(1, 64), (7, 80), (20, 320)])
def test_rms_norm(rand: Rand, dtype: torch.dtype, rows: int, channels: int) -> None:
    x, gain = apart(rand(rows, channels, dtype=dtype)), 1 + 0.3 * rand(channels, dtype=dtype)
    expected = rms_norm.reference(x, gain, EPS, unwritten(rows, channels, dtype=dtype))
    out = apart(unwritten(rows, channels, dtype=dtype))
    assert rms_norm(x, gain, EPS, out) is out
    same(out, expected, dtype)


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (7, 81), (20, 1100)])
def test_gate_up(rand: Rand, dtype: torch.dtype, rows: int, columns: int) -> None:
    y = apart(rand(rows, 2 * columns, dtype=dtype) * 3)
    expected = gate_up.reference(y, unwritten(rows, columns, dtype=dtype))
    out = apart(unwritten(rows, columns, dtype=dtype))
    assert gate_up(y, out) is out
    same(out, expected, dtype)
