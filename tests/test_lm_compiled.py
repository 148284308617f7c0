"""The language model's matmuls compile for three cards, at the published sizes, without a card."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lm_layers import EPS, HIDDEN, SHAPES, weight_of
from test_kernels_compiled import (
    MOST_SPILLED_BYTES,
    SHARED_KIB,
    compiled,
    triton,
    undrawn,
    usage,
)
from torch import Tensor

from mosstalk.numerics.fp8 import E4M3, Fp8Weight
from mosstalk.ops import linear, linear_fp8, norm
from mosstalk.ops.launch import Launch, Workspace
from mosstalk.ops.linear_tiles import (
    EXACT,
    FP8_INVARIANT,
    FP8_TILES,
    INVARIANT,
    TILES,
    Division,
    Kind,
)

WITHOUT_FP8 = 80


def matmul(kind: Kind, divided: Division, dtype: torch.dtype) -> Launch:
    """One matmul of a layer as it would be launched."""
    columns, channels = SHAPES[kind]
    rows, normed = 1 if divided.one else divided.tile.rows, kind in ("normed", "gated")
    workspace = Workspace(1 << 26, torch.device("meta"))

    def room(width: int) -> Tensor:
        return undrawn(rows, width, dtype=dtype)

    return linear.divided_linear(
        room(channels),
        undrawn(channels, dtype=dtype) if normed and not divided.apart else None,
        EPS,
        weight_of(kind, dtype, undrawn),
        room(columns),
        residual=None if normed else room(columns),
        gated=kind == "gated",
        divided=divided,
        workspace=workspace,
    )


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Every kernel of the tables, and those beside them."""
    x, wide = undrawn(8, HIDDEN, dtype=dtype), undrawn(8, 2 * HIDDEN, dtype=dtype)
    yield "norm", norm.rms_norm.plan(x, undrawn(HIDDEN, dtype=dtype), EPS, x)
    yield "gate", linear.gate_up.plan(wide, x)
    for kind in SHAPES:
        if dtype == torch.float32:
            yield f"{kind} exact", matmul(kind, EXACT, dtype)
            continue
        for divided in {*TILES[kind].values(), INVARIANT[kind]}:
            yield f"{kind} {divided}", matmul(kind, divided, dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_matmuls_fit_the_card(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for name, launch in launches(dtype):
            kernel = compiled(launch, capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{name:110} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)


def fp8_matmul(kind: Kind, divided: Division) -> Launch:
    """One matmul of a layer in FP8 as it would be launched, in a model in bfloat16."""
    columns, channels = SHAPES[kind]
    rows, normed = 1 if divided.one else divided.tile.rows, kind in ("normed", "gated")
    wide = columns * (2 if kind == "gated" else 1)
    return linear_fp8.divided_fp8_linear(
        undrawn(rows, channels, dtype=E4M3),
        undrawn(rows),
        Fp8Weight(undrawn(wide, channels, dtype=E4M3), undrawn(wide)),
        undrawn(rows, columns, dtype=torch.bfloat16),
        residual=None if normed else undrawn(rows, columns, dtype=torch.bfloat16),
        gated=kind == "gated",
        divided=divided,
        workspace=Workspace(1 << 26, torch.device("meta")),
    )


def fp8_launches() -> Iterator[tuple[str, Launch]]:
    """Every matmul in FP8, and what rounds its rows."""
    for channels in sorted({channels for _, channels in SHAPES.values()}):
        for rows in (1, 512):
            x = undrawn(rows, channels, dtype=torch.bfloat16)
            for gain in (None, undrawn(channels, dtype=torch.bfloat16)):
                plan = linear_fp8.fp8_rows.plan(
                    x, gain, EPS, undrawn(rows, channels, dtype=E4M3), undrawn(rows)
                )
                yield f"{rows} rows of {channels}, normed {gain is not None}", plan
    for kind in SHAPES:
        for divided in dict.fromkeys((*FP8_TILES[kind].values(), FP8_INVARIANT[kind])):
            yield f"{kind} {divided}", fp8_matmul(kind, divided)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [card for card in SHARED_KIB if card > WITHOUT_FP8])
def test_matmuls_in_fp8_fit_the_card_and_are_its_own(capability: int, tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for name, launch in fp8_launches():
            kernel = compiled(launch, capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{name:110} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)
            units = ".f32.e4m3.e4m3" in kernel.asm["ptx"]
            assert units == (launch.constants.get("SCALED", False)), name
            assert launch.constants.get("SOFT", False) is False
