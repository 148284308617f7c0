"""The kernels around attention compile for three cards, at the published sizes, without a card."""

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

from mosstalk.ops import attention_decode, attention_prefill, move_rows, rope_kv
from mosstalk.ops.launch import Launch

TYPES.setdefault(torch.int64, "*i64")
HEADS, KV_HEADS, CHANNELS, HIDDEN, SPAN = 32, 8, 128, 4096, 2048
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launches(dtype: torch.dtype) -> dict[str, Launch]:
    """Every kernel for a few single rows, few tiles and many."""
    sizes = HEADS, KV_HEADS, CHANNELS
    width = (HEADS + 2 * KV_HEADS) * CHANNELS
    keys = undrawn(4096, KV_HEADS, CHANNELS, dtype=dtype)
    gains = undrawn(CHANNELS, dtype=dtype), undrawn(CHANNELS, dtype=dtype)
    angles, query = undrawn(40960, CHANNELS), undrawn(64, HIDDEN, dtype=dtype)
    turn = gains, 1e-6, angles

    def ints(*size: int) -> torch.Tensor:
        return undrawn(*size, dtype=torch.int32)

    def tiles(count: int) -> Launch:
        work = undrawn(attention_prefill.prefill_numbers(count, *sizes, SPAN, dtype))
        return attention_prefill.attention_prefill.plan(
            query, keys, keys, ints(8, 128), ints(count, 4), query,
            block_rows=16, span=SPAN, work=work,
        )  # fmt: skip

    rows = undrawn(64, 2, dtype=torch.int64)
    latest = move_rows.Latest(rows, ints(64))
    table = undrawn(151680, HIDDEN, dtype=dtype)
    return {
        "attention_decode": attention_decode.attention_decode.plan(
            undrawn(64, width, dtype=dtype), *turn, keys, keys, ints(64, 128), ints(64), query,
            block_rows=16, span=SPAN,
            work=undrawn(attention_decode.decode_numbers(64, *sizes, SPAN, dtype)),
        ),
        "few tiles": tiles(2),
        "many tiles": tiles(36),
        "rope_kv": rope_kv.rope_kv.plan(
            undrawn(64, width, dtype=dtype), *turn, ints(64), ints(64), keys, keys, query
        ),
        "gather_rows": move_rows.gather_rows.plan(table, ints(64), query),
        "scatter_rows": move_rows.scatter_rows.plan(query, ints(64), table),
        "embed_rows": move_rows.embed_rows.plan(rows, table, table, 151667, query, latest),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_the_card(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for name, launch in launches(dtype).items():
            kernel = compiled(launch, capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{name:12} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)
