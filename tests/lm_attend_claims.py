"""What the kernels around the language model's attention must do: the same as their references.

``test_lm_attend.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/lm_attend_claims.py`` runs the compiled kernels on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mosstalk.models.language_model import RMSNorm
from mosstalk.numerics.rope import rotary_tables, rotate
from mosstalk.ops import attention_decode as by_rows
from mosstalk.ops.attention_decode import attention_decode, decode_numbers
from mosstalk.ops.attention_prefill import (
    TILE_ROWS,
    attention_prefill,
    prefill_numbers,
    tiles_of,
)
from mosstalk.ops.launch import interprets, runs
from mosstalk.ops.move_rows import (
    Latest,
    embed_rows,
    gather_rows,
    scatter_rows,
)
from mosstalk.ops.parts import Shares
from mosstalk.ops.rope_kv import rope_kv, rotary_table
from mosstalk.runtime.device import pick_device

DEVICE = pick_device("cpu" if interprets() else "cuda")
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest relative norm of a difference; in 16 bit, what rounding the outputs may make."""
DTYPES = [torch.float32, torch.float16]
if not interprets():
    DTYPES.append(torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS, THETA, POSITIONS = 1e-6, 1e6, 2048
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Heads:
    """So many query and key heads of so many channels."""

    queries: int
    keys: int
    channels: int

    @property
    def qkv_width(self) -> int:
        """Numbers of a row's queries, keys and values."""
        return (self.queries + 2 * self.keys) * self.channels


SMALL = [Heads(4, 2, 16), Heads(4, 1, 32), Heads(3, 3, 16), Heads(6, 2, 24)]
PUBLISHED = Heads(32, 8, 128)
SIZES = SMALL if interprets() else [SMALL[-1], PUBLISHED]
CASES = [
    (dtype, heads)
    for dtype in DTYPES
    for heads in SIZES
    # An interpreter rounds alike at every size, and takes its time.
    if not interprets() or dtype is torch.float32 or heads is SIZES[-1]
]
every_case = pytest.mark.parametrize(("dtype", "heads"), CASES, ids=str)


@pytest.fixture
def rand() -> Draw:
    """Draws of a standard normal, the same in every run, on the device of the claims."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    return draw


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def unwritten(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.full(size, float("nan"), device=DEVICE, dtype=dtype)


def same(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Not a number stands where it is expected, and the rest is near."""
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    difference = found.double().nan_to_num() - expected.double().nan_to_num()
    assert float(difference.norm()) <= BOUND[dtype] * float(expected.double().nan_to_num().norm())


@dataclass(frozen=True)
class Layer:
    """Gains, angles and the store of one layer, whose unwritten rows are not numbers."""

    heads: Heads
    gains: tuple[Tensor, Tensor]
    angles: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    block_rows: int

    @classmethod
    def of(
        cls, rand: Draw, heads: Heads, dtype: torch.dtype, lengths: list[int], block_rows: int
    ) -> "Layer":
        """Blocks for items of ``lengths`` rows, in no order, written up to their last row."""
        counts = [-(-length // block_rows) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1))
        table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
        for item, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            table[item, :count] = order[end - count : end]
        places = len(order) * block_rows
        keys, values = (
            unwritten(places, heads.keys, heads.channels, dtype=dtype) for _ in range(2)
        )
        table = table.to(DEVICE)
        for item, length in enumerate(lengths):
            place = places_of(table[item], 0, max(0, length - 1), block_rows)
            for store in (keys, values):
                store[place] = rand(len(place), heads.keys, heads.channels, dtype=dtype)
        gains = tuple((1 + 0.3 * rand(heads.channels)).to(dtype) for _ in range(2))
        angles = rotary_table(POSITIONS, heads.channels, THETA, DEVICE)
        return cls(heads, (gains[0], gains[1]), angles, keys, values, table, block_rows)

    def copy(self) -> "Layer":
        """The same with a store of its own."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def only(self, items: list[int]) -> "Layer":
        """The same store for some of the items."""
        return replace(self, table=self.table[items].contiguous())

    def attend(
        self,
        qkv: Tensor,
        length: list[int],
        span: int,
        reference: bool = False,
        work: Tensor | None = None,
    ) -> Tensor:
        """``attention_decode`` into an output of which nothing is written yet."""
        out = unwritten(
            len(length), self.heads.queries * self.heads.channels, dtype=self.keys.dtype
        )
        given = (
            qkv, self.gains, EPS, self.angles, self.keys, self.values, self.table,
            ints(length), out,
        )  # fmt: skip
        if reference:
            return attention_decode.reference(*given, block_rows=self.block_rows)
        heads = self.heads
        numbers = decode_numbers(
            len(length), heads.queries, heads.keys, heads.channels, span, qkv.dtype
        )  # fmt: skip
        work = torch.zeros(numbers, device=DEVICE) if work is None else work
        for _ in range(2):
            attention_decode(*given, block_rows=self.block_rows, span=span, work=work)
            counters = work.view(torch.int32)[: len(length) * heads.keys]
            assert not counters.any()
        return out


def test_kernels_run_here() -> None:
    assert runs(torch.empty(1, device=DEVICE))


def test_rotary_table_is_the_networks() -> None:
    cos, sin = rotary_tables(torch.arange(999, device=DEVICE), 32, THETA)
    table = rotary_table(999, 32, THETA, DEVICE)
    assert torch.equal(torch.cat([table[:, :16]] * 2, dim=1), cos)
    assert torch.equal(torch.cat([table[:, 16:]] * 2, dim=1), sin)


@every_case
def test_rope_kv(rand: Draw, dtype: torch.dtype, heads: Heads) -> None:
    gains = ((1 + 0.3 * rand(heads.channels)).to(dtype), rand(heads.channels, dtype=dtype))
    angles = rotary_table(POSITIONS, heads.channels, THETA, DEVICE)
    qkv = rand(5, heads.qkv_width + 16, dtype=dtype)[:, : heads.qkv_width]
    qkv[3] = float("nan")
    positions = ints([0, 7, 1000, 0, 2047])
    for kind in (torch.int32, torch.int64):
        places = ints([4, 0, 9, -1, 2], kind)
        results = []
        for function in (rope_kv, rope_kv.reference):
            store = [unwritten(11, heads.keys, heads.channels, dtype=dtype) for _ in range(2)]
            out = unwritten(5, heads.queries * heads.channels, dtype=dtype)
            found = function(qkv, gains, EPS, angles, positions, places, store[0], store[1], out)
            assert found is out
            results.append((out, *store))
        for found, expected in zip(*results, strict=True):
            same(found, expected, dtype)
        assert int(results[0][0].isnan().sum()) == results[0][0].shape[1]


def test_rope_kv_twin_is_the_network(rand: Draw) -> None:
    heads, positions = Heads(4, 2, 16), ints([3, 0, 77])
    norms = [RMSNorm(16, EPS).to(DEVICE), RMSNorm(16, EPS).to(DEVICE)]
    for norm in norms:
        norm.weight.data = rand(16)
    qkv = rand(3, heads.qkv_width)
    store, out = [torch.empty(3, 2, 16, device=DEVICE) for _ in range(2)], rand(3, 64)
    rope_kv.reference(
        qkv, (norms[0].weight.data, norms[1].weight.data), EPS, rotary_table(99, 16, THETA, DEVICE),
        positions, ints([0, 1, 2]), store[0], store[1], out,
    )  # fmt: skip
    tables = rotary_tables(positions, 16, THETA)
    query, key, value = qkv.view(3, 8, 16).transpose(0, 1).split([4, 2, 2])
    assert torch.equal(out.view(3, 4, 16).transpose(0, 1), rotate(norms[0](query), tables))
    assert torch.equal(store[0].transpose(0, 1), rotate(norms[1](key), tables))
    assert torch.equal(store[1].transpose(0, 1), value)


LENGTHS = [1, 70, 0, 33, 200, 2]


@every_case
@pytest.mark.parametrize("block_rows", [1, 4, 16])
def test_attention_decode(rand: Draw, dtype: torch.dtype, heads: Heads, block_rows: int) -> None:
    layer = Layer.of(rand, heads, dtype, LENGTHS, block_rows)
    other = layer.copy()
    qkv = rand(len(LENGTHS), heads.qkv_width + 32, dtype=dtype)[:, : heads.qkv_width]
    qkv[LENGTHS.index(0)] = float("nan")
    found = layer.attend(qkv, LENGTHS, 200)
    expected = other.attend(qkv, LENGTHS, 200, reference=True)
    assert not expected.isnan().any()
    same(found, expected, dtype)
    same(layer.keys, other.keys, dtype)
    assert torch.equal(layer.values.nan_to_num(), other.values.nan_to_num())


@every_dtype
def test_attention_decode_does_not_depend_on_company(rand: Draw, dtype: torch.dtype) -> None:
    heads = SIZES[-1]
    layer = Layer.of(rand, heads, dtype, LENGTHS, 4)
    qkv = rand(len(LENGTHS), heads.qkv_width, dtype=dtype)
    together = layer.copy().attend(qkv, LENGTHS, 500)
    for item, length in enumerate(LENGTHS):
        alone = layer.copy().only([item]).attend(qkv[item : item + 1], [length], max(1, length))
        # In 16 bit keys are shared out otherwise where there are more items.
        if by_rows.shares_for(1, dtype) == by_rows.shares_for(len(LENGTHS), dtype):
            assert torch.equal(alone[0], together[item])
        same(alone, together[item : item + 1], dtype)
    poisoned, broken = layer.copy(), qkv.clone()
    broken[1] = float("nan")
    among = poisoned.attend(broken, LENGTHS, 500)
    assert among[1].isnan().all()
    others = [item for item in range(len(LENGTHS)) if item != 1]
    assert torch.equal(among[others], together[others])


@every_dtype
def test_launches_of_any_sizes_share_their_work(rand: Draw, dtype: torch.dtype) -> None:
    heads, lengths = SIZES[-1], [140, 130, 2, 135]
    layer = Layer.of(rand, heads, dtype, lengths, 16)
    qkv = rand(4, heads.qkv_width, dtype=dtype)
    q = rand(40, heads.queries * heads.channels, dtype=dtype)
    shape = (heads.queries, heads.keys, heads.channels)
    lines = packed([Stretch(0, 40)], lengths, padding=0)
    sizes = decode_numbers(4, *shape, 140, dtype), prefill_numbers(len(lines), *shape, 140, dtype)
    work = torch.zeros(max(sizes), device=DEVICE)
    firsts: list[Tensor] = []
    for _ in range(2):
        found = [
            layer.copy().attend(qkv, lengths, 140, work=work),
            layer.copy().only([3]).attend(qkv[3:], lengths[3:], 140, work=work),
            mix(layer, q, lines, 140, work=work),
        ]
        assert all(torch.isfinite(one.float()).all() for one in found)
        firsts = firsts or found
        assert all(torch.equal(one, first) for one, first in zip(found, firsts, strict=True))
    assert torch.equal(firsts[0][3], firsts[1][0])
    same(firsts[0], layer.copy().attend(qkv, lengths, 140, reference=True), dtype)


@every_dtype
@pytest.mark.parametrize("shares", [Shares(16, 32, 4, 4, 1), Shares(32, 32, 16, 2, 2)], ids=str)
def test_attention_decode_in_every_way(
    rand: Draw, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shares: Shares
) -> None:
    for name, value in {"SHARES": {by_rows.ANY_ITEMS: shares}, "EXACT": shares}.items():
        monkeypatch.setattr(by_rows, name, value)
    lengths = [1, 33, 34, 400]
    layer = Layer.of(rand, SIZES[-1], dtype, lengths, 4)
    qkv = rand(len(lengths), SIZES[-1].qkv_width, dtype=dtype)
    expected = layer.copy().attend(qkv, lengths, 400, reference=True)
    same(layer.attend(qkv, lengths, 400), expected, dtype)


@dataclass(frozen=True)
class Stretch:
    """So many new rows of an item, at the end of what it has."""

    item: int
    rows: int


def places_of(blocks: Tensor, first: int, end: int, block_rows: int) -> Tensor:
    """Places (end - first,) of an item's rows from ``first`` on, by its line of the table."""
    row = torch.arange(first, end, device=blocks.device)
    return blocks[row // block_rows].long() * block_rows + row % block_rows


def packed(stretches: list[Stretch], lengths: list[int], padding: int) -> list[list[int]]:
    """Tiles of rows side by side, then some of nothing."""
    found: list[list[int]] = []
    first = 0
    for one in stretches:
        found += tiles_of(first, one.rows, lengths[one.item] - 1 - one.rows, one.item)
        first += one.rows
    return found + [[0, 0, 0, 0]] * padding


def mix(
    layer: Layer,
    q: Tensor,
    lines: list[list[int]],
    span: int,
    work: Tensor | None = None,
    **how: bool,
) -> Tensor:
    """``attention_prefill`` into an output of which nothing is written yet."""
    heads, count = layer.heads, len(lines)
    out = torch.full_like(q, float("nan"))
    numbers = prefill_numbers(
        count, heads.queries, heads.keys, heads.channels, span, q.dtype, **how
    )  # fmt: skip
    work = torch.zeros(numbers, device=DEVICE) if work is None else work
    tiles = ints(lines)
    for _ in range(2):
        attention_prefill(
            q, layer.keys, layer.values, layer.table, tiles, out,
            block_rows=layer.block_rows, span=span, work=work, **how,
        )  # fmt: skip
        assert not work.view(torch.int32)[: count * heads.keys].any()
    return out


STRETCHES = [Stretch(3, 6), Stretch(1, 40), Stretch(0, 1)]
LONG = [2, 61, 0, 400]


@every_case
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_prefill(
    rand: Draw, dtype: torch.dtype, heads: Heads, block_rows: int, invariant: bool
) -> None:
    layer = Layer.of(rand, heads, dtype, LONG, block_rows)
    lines = packed(STRETCHES, LONG, padding=2)
    q = rand(50, heads.queries * heads.channels + 16, dtype=dtype)[:, :-16]
    q[47:] = float("nan")
    found = mix(layer, q, lines, 400, invariant=invariant)
    expected = attention_prefill.reference(
        q, layer.keys, layer.values, layer.table, ints(lines), torch.full_like(q, float("nan")),
        block_rows=block_rows,
    )  # fmt: skip
    assert int(expected.isnan().sum()) == 3 * q.shape[1]
    same(found, expected, dtype)


@every_dtype
def test_many_tiles_share_no_keys(rand: Draw, dtype: torch.dtype) -> None:
    heads = SIZES[0]
    layer = Layer.of(rand, heads, dtype, [1, 161], 4)
    lines = packed([Stretch(1, 160)], [1, 161], padding=200)
    q = rand(160, heads.queries * heads.channels, dtype=dtype)
    expected = attention_prefill.reference(
        q, layer.keys, layer.values, layer.table, ints(lines), torch.empty_like(q), block_rows=4
    )
    same(mix(layer, q, lines, 161), expected, dtype)


@every_dtype
def test_attention_prefill_does_not_depend_on_company(rand: Draw, dtype: torch.dtype) -> None:
    heads = SIZES[-1]
    layer = Layer.of(rand, heads, dtype, LONG, 16)
    q = rand(47, heads.queries * heads.channels, dtype=dtype)
    together = mix(layer, q, packed(STRETCHES, LONG, padding=30), 1000, invariant=True)
    first = 0
    for one in STRETCHES:
        rows = slice(first, first + one.rows)
        alone = mix(layer, q[rows], packed([one], LONG, padding=0), 400, invariant=True)
        assert torch.equal(alone, together[rows])
        first += one.rows
    cut = [*tiles_of(6, 7, 20, 1), *tiles_of(13, 33, 27, 1)]
    found = mix(layer, q, cut, 400, invariant=True)
    if found.is_cuda:
        assert torch.equal(found[6:46], together[6:46])
    else:  # numpy multiplies there: on some processors a small tile is summed in another order
        torch.testing.assert_close(found[6:46], together[6:46], rtol=0, atol=1e-6)


def test_tiles_are_cut_where_positions_say() -> None:
    lines = list(tiles_of(5, 40, 10, 3))
    assert lines == [[5, 6, 10, 3], [11, 16, 16, 3], [27, 16, 32, 3], [43, 2, 48, 3]]
    assert all(rows <= TILE_ROWS for _, rows, _, _ in lines)
    assert list(tiles_of(0, 0, 10, 3)) == []


@every_dtype
@pytest.mark.parametrize("width", [24, 64, 1500])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_gather_and_scatter_rows(
    rand: Draw, dtype: torch.dtype, width: int, kind: torch.dtype
) -> None:
    source = rand(9, width + 8, dtype=dtype)[:, :width]
    source[[0, 2]] = float("nan")
    places = ints([3, -1, 8, 3], kind)
    found = gather_rows(source, places, unwritten(4, width, dtype=dtype))
    assert torch.equal(found[[0, 2, 3]], source[[3, 8, 3]])
    assert not found[1].any()
    target = unwritten(6, width, dtype=dtype)
    scatter_rows(source[3:6], ints([5, -1, 0], kind), target)
    assert torch.equal(target[[5, 0]], source[[3, 5]])
    assert target[1:5].isnan().all()


@every_dtype
@pytest.mark.parametrize("width", [24, 64, 1500])
def test_embed_rows(rand: Draw, dtype: torch.dtype, width: int) -> None:
    text, audio, pad = rand(9, width, dtype=dtype), rand(5, width, dtype=dtype), 6
    rows = ints([[8, 4], [6, 3], [6, 0], [0, 99], [-1, -1], [-1, -1], [-1, 2]], torch.int64)
    nobody = Latest(ints([[1, 1]], torch.int64), ints([-1] * 7))
    out = embed_rows(rows, text, audio, pad, unwritten(7, width, dtype=dtype), nobody)
    expected = torch.stack([text[8], audio[3], audio[0], text[0]])
    assert torch.equal(out[:4], expected)
    assert not out[4:].any()
    latest = Latest(
        ints([[1, 1], [6, 2], [-1, -1]], torch.int64), ints([2, 0, -1, -1, 1, 0, -1])
    )  # fmt: skip
    out = embed_rows(rows, text, audio, pad, unwritten(7, width, dtype=dtype), latest)
    assert torch.equal(out[:4], expected)
    assert torch.equal(out[4:6], torch.stack([audio[2], text[1]]))
    assert not out[6].any()
    reference = embed_rows.reference(rows, text, audio, pad, torch.empty_like(out), latest)
    assert torch.equal(out, reference)
