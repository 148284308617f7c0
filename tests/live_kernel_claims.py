"""What the float32 kernels must do: the same as their references, and the offline codes.

``test_live_pages.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/live_kernel_claims.py`` runs the compiled kernels on it.
"""

import copy
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from live_rig import CODE, LIVE, heard, rising, speech
from torch import Tensor

from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.ops.attention_tokenizer import (
    Items,
    attention_tokenizer,
)
from mosstalk.ops.launch import Workspace, interprets, runs
from mosstalk.ops.linear_tf32x3 import (
    Activation,
    Paged,
    Precision,
    Tf32x3,
    linear_float32,
    qkv_float32,
)
from mosstalk.ops.norm import norm_float32
from mosstalk.runtime.device import pick_device

DEVICE = pick_device("cpu" if interprets() else "cuda")
TOKENIZER = copy.deepcopy(LIVE["goldens"].tokenizer).to(DEVICE)
BOUND = 1e-6
"""Largest relative norm of a difference from float64."""
PRECISIONS = get_args(Precision)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
either = pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
Rand = Callable[..., Tensor]


@pytest.fixture
def rand() -> Rand:
    """Draws of a standard normal, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *size: torch.randn(*size, generator=generator).to(DEVICE)


def same(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    assert float((found.double() - exact).norm()) <= BOUND * float(exact.norm())


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def test_the_kernels_run() -> None:
    assert runs(TOKENIZER.encoder.codebook.weight)


# Halves.


def test_halves_are_the_whole_and_the_higher_ones_have_11_bits(rand: Rand) -> None:
    x = rand(40, 30) * 10 ** rand(40, 1)

    halves = Tf32x3.of(x, split=True)

    assert torch.equal(halves.whole(), x)
    assert not (halves.high.view(torch.int32) & 0x1FFF).any()
    assert halves.low is not None
    assert float((halves.low / x).abs().max()) <= 2**-11


def test_the_kernels_halves_are_those_of_torch(rand: Rand) -> None:
    norm = (1 + rand(48), rand(48), 1e-5)

    found = norm_float32(rand(3, 48), norm, split=True)

    again = Tf32x3.of(found.whole(), split=True)
    assert torch.equal(found.high, again.high)
    assert found.low is not None
    assert again.low is not None
    assert torch.equal(found.low, again.low)


# Norms and matmuls.


@either
@pytest.mark.parametrize("channels", [16, 40, 128])
def test_norm_equals_its_reference(rand: Rand, channels: int, *, split: bool) -> None:
    x, gain, shift = 3 + rand(5, channels), 1 + 0.3 * rand(channels), rand(channels)

    found = norm_float32(x, (gain, shift, 1e-5), split=split)

    assert (found.low is not None) == split
    exact = norm_float32.reference(x.double(), (gain.double(), shift.double(), 1e-5))
    same(found.whole(), exact.high)


@either
@every_precision
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(
    ("rows", "channels", "columns"),
    [(1, 16, 16), (20, 640, 70), (32, 400, 64), (33, 128, 64), (70, 40, 130), (161, 96, 140)],
)
def test_a_matmul_equals_its_reference(
    rand: Rand, rows: int, channels: int, columns: int, activation: Activation,
    precision: Precision, *, split: bool,
) -> None:  # fmt: skip
    x, weight, bias = rand(rows, channels), rand(columns, channels), rand(columns)
    stream = rand(rows, columns) if activation == "gelu" else None

    found = linear_float32(
        Tf32x3.of(x, split=split), weight, bias,
        activation=activation, residual=stream, split=split, precision=precision,
    )  # fmt: skip

    exact = linear_float32.reference(
        Tf32x3(x.double()), *double(weight, bias),
        activation=activation, residual=None if stream is None else stream.double(),
    )  # fmt: skip
    assert (found.low is not None) == split
    same(found.whole(), exact.high)


@pytest.mark.parametrize("rows", [20, 45])
def test_queries_keys_and_values_go_where_they_belong(rand: Rand, rows: int) -> None:
    heads, channels, page_rows = 3, 16, 7
    width = heads * channels
    x, weight, bias = rand(rows, 32), rand(3 * width, 32), rand(3 * width)
    kept = [rand(12, 1, 2, heads, page_rows, channels) for _ in range(1)] * 2
    found, exact = (kv.clone() for kv in kept)
    pages = torch.randperm(12)[torch.arange(rows) // page_rows].to(DEVICE)
    places = (pages, torch.arange(rows, device=DEVICE) % page_rows)

    query = qkv_float32(Tf32x3(x), weight, bias, Paged(found, *places))

    same(query, qkv_float32.reference(Tf32x3(x), weight, bias, Paged(exact, *places)).double())
    same(found, exact.double())
    assert torch.equal(found == kept[0], exact == kept[0])


def test_matmuls_share_a_workspace_and_leave_it_as_it_was(rand: Rand) -> None:
    workspace = Workspace(100_000, DEVICE)
    x, weights = rand(20, 640), [rand(96, 640), rand(40, 640)]

    found = [linear_float32(Tf32x3(x), each, workspace=workspace).high for each in weights * 2]

    for one, again, weight in zip(found[:2], found[2:], weights, strict=True):
        assert torch.equal(one, again)
        same(one, x.double() @ weight.double().T)
    assert not workspace.counters.any()


# Attention.

TURNS = [(1, 1), (4, 4), (20, 20), (20, 64), (8, 65), (32, 200), (3, 131)]
"""Rows of an item and the keys that its last row sees."""


def attention(rand: Rand, heads: int, channels: int, page_rows: int) -> tuple[Tensor, ...]:
    """Queries, pages, their table and the items of all ``TURNS``, with a gap between rows."""
    longest = -(-max(seen for _, seen in TURNS) // page_rows)
    count = len(TURNS)
    pages = torch.randperm(count * longest, generator=torch.Generator().manual_seed(1))
    kv = rand(count * longest, 1, 2, heads, page_rows, channels)
    rows, seen = torch.tensor(TURNS).T
    first = (rows + 2).cumsum(0) - rows
    columns = [torch.arange(count), first, rows, seen]
    items = [column.to(DEVICE, torch.int32).contiguous() for column in columns]
    query = rand(int(first[-1]) + 40, heads * channels)
    return query, kv, pages.int().view(count, longest).to(DEVICE), *items


def parts(items: Items) -> list[slice]:
    """Where the rows of each item are."""
    places = zip(items.first.tolist(), items.rows.tolist(), strict=True)
    return [slice(first, first + rows) for first, rows in places]


@every_precision
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("page_rows", [64, 50])
@pytest.mark.parametrize(("heads", "channels"), [(2, 64), (3, 16)])
def test_attention_equals_its_reference(
    rand: Rand, heads: int, channels: int, page_rows: int, splits: int, precision: Precision
) -> None:
    query, kv, table, *rest = attention(rand, heads, channels, page_rows)
    items = Items(*rest)

    found = attention_tokenizer(query, kv, table, items, splits=splits, precision=precision).high

    exact = attention_tokenizer.reference(query.double(), kv.double(), table, items).high
    for part in parts(items):
        same(found[part], exact[part])


def test_attention_leaves_halves_whose_sum_is_what_it_leaves_whole(rand: Rand) -> None:
    query, kv, table, *rest = attention(rand, 2, 16, 64)
    items = Items(*rest)

    whole, halves = (
        attention_tokenizer(query, kv, table, items, split=split).whole() for split in (False, True)
    )

    for part in parts(items):
        assert torch.equal(whole[part], halves[part])


# Codes.


@every_precision
def test_streams_in_one_run_get_the_offline_codes(precision: Precision) -> None:
    options = LiveOptions(together=True, page_s=0.14, graphs=not interprets(), precision=precision)
    live = LiveTokenizer(TOKENIZER, options=options)
    clips = [rising(7 * CODE), speech(6 * CODE + 300), speech(5 * CODE)]
    states = [live.open() for _ in clips]

    for part in range(2):
        cuts = [clip[5 * CODE * part : 5 * CODE * (part + 1)] for clip in clips]
        live.push_many(states, cuts)
    live.push_many(states, [torch.zeros(0)] * 3, [True] * 3)

    assert [state.codes for state in states] == [TOKENIZER.encode(clip) for clip in clips]


def test_a_turn_whose_rows_fill_no_item_gets_the_offline_codes() -> None:
    live = LiveTokenizer(TOKENIZER, options=LiveOptions(together=True, graphs=False, page_s=1))
    clip = rising(7 * CODE)

    state = heard(live, list(clip.split(3 * CODE + 7)))

    assert state.codes == TOKENIZER.encode(clip)
