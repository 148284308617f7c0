"""The live tokenizer's kernels compile for three cards, at the published sizes, without a card."""

from pathlib import Path

import pytest
import torch
from test_kernels_compiled import (
    MOST_SPILLED_BYTES,
    SHARED_KIB,
    TYPES,
    compiled,
    triton,
    undrawn,
    usage,
)

from mosstalk.ops import attention_tokenizer, linear_tf32x3
from mosstalk.ops.launch import Launch, Workspace
from mosstalk.ops.linear_tf32x3 import Paged, Tf32x3
from mosstalk.ops.norm import norm_float32

WIDTH, HEADS, WIDE, PAGE_ROWS = 1280, 20, 5120, 64
STREAMS = {20: 1, 80: 4, 1280: 64}
TYPES.setdefault(torch.int64, "*i64")


def launches(rows: int) -> dict[str, Launch]:
    """Every kernel of a layer for so many rows."""
    workspace = Workspace(1 << 24, torch.device("meta"))

    def room(columns: int) -> Tf32x3:
        return Tf32x3(undrawn(rows, columns), undrawn(rows, columns))

    stream = undrawn(rows, WIDTH)
    kv = undrawn(100, 1, 2, HEADS, PAGE_ROWS, WIDTH // HEADS)
    places = [undrawn(rows, dtype=torch.int64) for _ in range(2)]
    count = STREAMS[rows]
    items = attention_tokenizer.Items(*(undrawn(count, dtype=torch.int32) for _ in range(4)))
    norm = (undrawn(WIDTH), undrawn(WIDTH), 1e-5)
    return {
        "norm": norm_float32.plan(stream, norm, split=True),
        "qkv": linear_tf32x3.qkv_float32.plan(
            room(WIDTH), undrawn(3 * WIDTH, WIDTH), undrawn(3 * WIDTH), Paged(kv, *places),
            workspace=workspace,
        ),
        "attention": attention_tokenizer.attention_tokenizer.plan(
            stream, kv, undrawn(count, 24, dtype=torch.int32), items,
            splits=attention_tokenizer.splits_for(count, HEADS), split=True, workspace=workspace,
        ),
        "first": linear_tf32x3.linear_float32.plan(
            room(WIDTH), undrawn(WIDE, WIDTH), undrawn(WIDE),
            activation="gelu", split=True, workspace=workspace,
        ),
        "second": linear_tf32x3.linear_float32.plan(
            room(WIDE), undrawn(WIDTH, WIDE), undrawn(WIDTH),
            residual=stream, workspace=workspace,
        ),
        "exact": linear_tf32x3.linear_float32.plan(
            room(WIDE), undrawn(WIDTH, WIDE), undrawn(WIDTH),
            residual=stream, workspace=workspace, precision="ieee",
        ),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", STREAMS)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_the_card(rows: int, capability: int, tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for name, launch in launches(rows).items():
            kernel = compiled(launch, capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{rows:4} {name:10} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)
