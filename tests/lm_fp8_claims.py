"""What rows and matmuls in FP8 must do: what ``model.fp8`` says of them.

``test_lm_fp8.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/lm_fp8_claims.py`` runs the compiled kernels on it.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_rig import CONFIG, wild_model
from fast_rig import Scene, read
from kernel_claims import DEVICE, Rand, apart, every_dtype, rand, same, unwritten
from torch import Tensor

from mosstalk.engine.layers import LayerOptions
from mosstalk.models.quantization import Quantization, quantize_in_place
from mosstalk.numerics.fp8 import E4M3, Fp8Weight
from mosstalk.numerics.fp8 import fp8_rows as plain_rows
from mosstalk.ops.launch import Workspace, interprets
from mosstalk.ops.linear_fp8 import (
    divided_fp8_linear,
    fp8_library,
    fp8_linear,
    fp8_rows,
    library_takes,
)
from mosstalk.ops.linear_tiles import ANY_ROWS, FP8_INVARIANT, FP8_TILES, Division, Kind, division
from mosstalk.ops.tiles import Tile

__all__ = ["rand"]
EPS = 1e-6
ROUNDED_OTHERWISE = 0.01
"""Of numbers: those that a norm's last bit moves over the middle between two of 8 bits."""
SUMS = 2.0**-10
"""Largest relative norm of a difference of sums. Matrix units of compute capability 9.0 keep 13
bits of the largest of what they add, 32 channels at a time, and cut the rest off; up to 8 such
sums (256 channels) are added before float32 takes over: at most 8 x 2^-13 of a sum's size.
"""
GATED_SUMS = 2 * SUMS
"""SwiGLU has two factors."""
LAYERS_BOUND = 0.03
"""A sum's last bit may move a number over the middle between two of 8 bits."""
SMALL = replace(CONFIG, num_shared_layers=1, num_modality_layers=1)


def room(rows: int, channels: int) -> tuple[Tensor, Tensor]:
    q = torch.full((rows, channels), 99, dtype=torch.uint8, device=DEVICE).view(E4M3)
    return q, unwritten(rows)


def operands(
    rand: Rand, rows: int, channels: int, columns: int, gated: bool
) -> tuple[Tensor, Tensor, Fp8Weight, Tensor]:
    """Rows in E4M3 with their scales, weights and residual."""
    weight = Fp8Weight.of(rand(columns * (1 + gated), channels) / channels**0.5)
    return *plain_rows(rand(rows, channels)), weight, rand(rows, columns)


def near(found: Tensor, expected: Tensor, gated: bool = False) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(expected).all()
    bound = (GATED_SUMS if gated else SUMS) if not interprets() else 1e-6
    assert float((found - expected).norm()) <= bound * float(expected.norm())


@every_dtype
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(1, 64), (3, 82), (20, 1100), (66, 320)])
def test_rows(
    rand: Rand, dtype: torch.dtype, rows: int, channels: int, normed: bool, fixed: bool
) -> None:
    # Magnitudes of many sizes, so that some numbers fall below the smallest with three bits.
    wide = rand(rows, channels) * (2.5 * rand(rows, channels)).exp()
    x, gain = apart(wide.to(dtype)), 1 + 0.3 * rand(channels, dtype=dtype)
    scale = torch.tensor(0.004, device=DEVICE) if fixed else None
    found, expected = room(rows, channels), room(rows, channels)
    fp8_rows(x, gain if normed else None, EPS, *found, fixed=scale)
    fp8_rows.reference(x, gain if normed else None, EPS, *expected, fixed=scale)
    numbers, others = found[0].float(), expected[0].float()
    assert others.isfinite().all()
    if normed:
        # Rounding of what is normed may differ by a bit in 8, in the row's dtype by one in 16.
        torch.testing.assert_close(found[1], expected[1], rtol=2**-7, atol=0)
        share = float((numbers != others).float().mean())
        assert share <= (ROUNDED_OTHERWISE if dtype == torch.float32 else 0.1)
        same(numbers * found[1][:, None], others * expected[1][:, None], torch.bfloat16)
    else:
        assert torch.equal(found[1], expected[1])
        assert torch.equal(numbers, others)


def test_rows_that_are_not_finite_do_not_pass_unseen(rand: Rand) -> None:
    x = rand(4, 80)
    x[1, 3], x[2, 5], x[3] = math.nan, math.inf, 0
    q, scale = room(4, 80)
    fp8_rows(x, None, EPS, q, scale)
    weight = Fp8Weight.of(rand(24, 80))
    out = fp8_linear(q, scale, weight, unwritten(4, 24))
    assert out[0].isfinite().all()
    assert not out[1:3].isfinite().any()
    assert not out[3].any()


@pytest.mark.parametrize("rows", [1, 65])
def test_rows_beyond_a_fixed_scale_are_clipped(rand: Rand, rows: int) -> None:
    x, fixed = 1000 * rand(rows, 128), torch.tensor(0.5, device=DEVICE)
    q, scale = room(rows, 128)
    fp8_rows(x, None, EPS, q, scale, fixed=fixed)
    assert torch.equal(scale, fixed.expand(rows))
    clipped = x.abs() > 224
    assert clipped.any()
    assert torch.equal(q.float()[clipped], 448 * x.sign()[clipped])


@every_dtype
@pytest.mark.parametrize("normed", [False, True])
def test_a_rows_numbers_do_not_depend_on_its_company(
    rand: Rand, dtype: torch.dtype, normed: bool
) -> None:
    x, gain = rand(130, 320, dtype=dtype), rand(320, dtype=dtype) if normed else None
    whole = room(130, 320)
    fp8_rows(x, gain, EPS, *whole, invariant=True)
    for few in (1, 16, 64, 65):
        found = room(few, 320)
        fp8_rows(x[:few], gain, EPS, *found, invariant=True)
        assert torch.equal(found[0].float(), whole[0][:few].float())
        assert torch.equal(found[1], whole[1][:few])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "channels", "columns"),
    [
        (1, 64, 96),
        (1, 82, 50),
        (1, 4100, 5),
        (2, 16, 20),
        (5, 80, 50),
        (17, 512, 33),
        (40, 48, 96),
        (70, 96, 40),
    ],
)
def test_matmuls(rand: Rand, rows: int, channels: int, columns: int, gated: bool) -> None:
    q, scale, weight, residual = operands(rand, rows, channels, columns, gated)
    for beside in (None, apart(residual)):
        how: dict[str, Any] = {"residual": beside, "gated": gated}
        expected = fp8_linear.reference(q, scale, weight, unwritten(rows, columns), **how)
        for invariant in (False, True):
            out = apart(unwritten(rows, columns))
            assert fp8_linear(q, scale, weight, out, **how, invariant=invariant) is out
            near(out, expected, gated)
            around = torch.as_strided(out, (rows, columns + 48), (columns + 48, 1), 0)
            assert int(around.isnan().sum()) == rows * 48


@every_dtype
@pytest.mark.parametrize("rows", [1, 6])
def test_matmuls_add_in_place(rand: Rand, dtype: torch.dtype, rows: int) -> None:
    q, scale, weight, stream = operands(rand, rows, 96, 64, False)
    stream = stream.to(dtype)
    expected = fp8_linear.reference(q, scale, weight, torch.empty_like(stream), residual=stream)
    assert fp8_linear(q, scale, weight, stream, residual=stream) is stream
    same(stream, expected, dtype if dtype != torch.float32 else torch.float16)


@pytest.mark.parametrize("rows", [1, 3])
def test_matmuls_take_numbers_at_odd_places(rand: Rand, rows: int) -> None:
    _, scale, weight, _ = operands(rand, rows, 80, 64, False)
    place = plain_rows(rand(1, rows * 80 + 1))[0][0, 1:].view(rows, 80)
    expected = fp8_linear.reference(place, scale, weight, unwritten(rows, 64))
    near(fp8_linear(place, scale, weight, unwritten(rows, 64)), expected)


@pytest.mark.parametrize("gated", [False, True])
def test_matmuls_keep_a_row_whatever_its_company(rand: Rand, gated: bool) -> None:
    q, scale, weight, residual = operands(rand, 130, 256, 40, gated)

    def found(rows: slice) -> Tensor:
        return fp8_linear(
            q[rows], scale[rows], weight, torch.empty_like(residual[rows]),
            residual=residual[rows], gated=gated, invariant=True,
        )  # fmt: skip

    whole = found(slice(None))
    for few in (1, 16, 65):
        assert torch.equal(found(slice(few)), whole[:few])
    scale[1::2] = math.nan
    assert torch.equal(found(slice(None))[::2], whole[::2])


@pytest.mark.parametrize("gated", [False, True])
def test_splits_of_channels_make_the_whole(rand: Rand, gated: bool) -> None:
    q, scale, weight, residual = operands(rand, 20, 320, 70, gated)
    how: dict[str, Any] = {"residual": residual, "gated": gated}
    expected = fp8_linear.reference(q, scale, weight, torch.empty_like(residual), **how)
    workspace = Workspace(1 << 18, DEVICE)
    for splits in (2, 3, 4):
        divided = Division(Tile(16, 64, 64, 4, 2), splits=splits)
        found = [unwritten(20, 70) for _ in range(2)]
        for out in found:
            divided_fp8_linear(
                q, scale, weight, out, divided=divided, workspace=workspace, **how
            ).run()
        near(found[0], expected, gated)
        assert torch.equal(*found)
        assert not workspace.counters.any()


@pytest.mark.parametrize("kind", ["normed", "plain", "gated", "deep"])
def test_matmuls_are_the_same_by_every_division(rand: Rand, kind: Kind) -> None:
    gated = kind == "gated"
    q, scale, weight, residual = operands(rand, 1, 200, 40, gated)
    how: dict[str, Any] = {"residual": None if kind == "normed" else residual, "gated": gated}
    expected = fp8_linear.reference(q, scale, weight, torch.empty_like(residual), **how)
    for divided in {*FP8_TILES[kind].values(), FP8_INVARIANT[kind]}:
        out = torch.empty_like(residual)
        divided_fp8_linear(q, scale, weight, out, divided=divided, **how).run()
        near(out, expected, gated)


def test_every_number_that_8_bits_can_be_is_read() -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers[[0x7F, 0xFF]] = 0  # NaN
    weight = Fp8Weight(torch.diag(numbers).view(E4M3), torch.ones(256, device=DEVICE))
    one = torch.ones(1, 256, device=DEVICE).to(E4M3)
    scale = torch.ones(1, device=DEVICE)
    found = fp8_linear(one, scale, weight, unwritten(1, 256))
    assert torch.equal(found[0], numbers.view(E4M3).float())
    several = one.expand(3, 256).contiguous()
    found = fp8_linear(several, scale.expand(3).contiguous(), weight, unwritten(3, 256))
    assert torch.equal(found[2], numbers.view(E4M3).float())


def test_every_number_of_rows_has_a_division() -> None:
    for table in FP8_TILES.values():
        assert list(table) == sorted(table)
        assert list(table)[-1] == ANY_ROWS
    for rows in (1, 64, 576):
        cut = division("deep", rows, E4M3, invariant=True)
        assert (cut.splits, cut.tile.inner) == (
            FP8_INVARIANT["deep"].splits,
            FP8_INVARIANT["deep"].tile.inner,
        )


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("activations", ["row", "calibrated"])
def test_layers_by_kernels_read_what_plain_layers_read(activations: str, invariant: bool) -> None:
    model = wild_model(str(DEVICE), config=SMALL)
    record = Quantization("all", activations)
    scales = {name: torch.tensor(0.01, device=DEVICE) for name in record.linears(SMALL)}
    quantize_in_place(model, record, scales)
    expected = Scene.of(model, [(13, 33), (0, 5), (30, 31), (9, 10)])
    found = expected.own()
    layers = found.fast(model, LayerOptions(rows=96, singles=8, invariant=invariant))
    pairs = zip(read(layers, found), read(expected.plain(model), expected), strict=True)
    for one, other in pairs:
        assert float((one - other).norm()) <= LAYERS_BOUND * float(other.norm())


if not interprets():

    @pytest.mark.parametrize(
        ("rows", "channels", "columns"), [(65, 512, 1024), (200, 1040, 528), (576, 4096, 6144)]
    )
    def test_a_librarys_matmul_is_the_same(
        rand: Rand, rows: int, channels: int, columns: int
    ) -> None:
        q, scale, weight, _ = operands(rand, rows, channels, columns, False)
        out = unwritten(rows, columns, dtype=torch.bfloat16)
        assert library_takes(weight, out.dtype)
        assert not library_takes(weight, torch.float16)
        assert fp8_library(q, scale, weight, out) is out
        expected = fp8_linear.reference(q, scale, weight, unwritten(rows, columns))
        same(out, expected, torch.bfloat16)

    def test_a_library_does_not_take_odd_sides(rand: Rand) -> None:
        assert not library_takes(Fp8Weight.of(rand(40, 128)), torch.bfloat16)
        assert not library_takes(Fp8Weight.of(rand(48, 120)), torch.bfloat16)
