"""What the codec's kernels must do: the same as their references.

``test_kernels.py`` runs this file in a process of its own, in which Triton is an interpreter;
with a GPU, ``pytest tests/kernel_claims.py`` runs the compiled kernels on it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mosstalk.codec.flow_pages import packs_of
from mosstalk.ops.attention_flow import attention_flow, attention_workspace, may_pack
from mosstalk.ops.conv1d import conv1d
from mosstalk.ops.flow_linear import (
    close_residual,
    euler,
    linear_add,
    norm_linear,
    norm_qkv,
)
from mosstalk.ops.launch import interprets, runs
from mosstalk.ops.norm import norm_act
from mosstalk.runtime.device import pick_device

DEVICE = pick_device("cpu" if interprets() else "cuda")
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest relative norm of a difference; in 16 bit, what rounding the outputs may make."""
DTYPES = [torch.float32, torch.float16]
if not interprets():
    DTYPES.append(torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Call = Callable[..., object]


@pytest.fixture
def rand() -> Callable[..., Tensor]:
    """Draws of a standard normal, the same in every run, on the device of the claims."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    return draw


Rand = Callable[..., Tensor]


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def unwritten(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(size, float("nan"), device=DEVICE, dtype=dtype)


def apart(x: Tensor, extra: int = 48) -> Tensor:
    """The same values, in the middle of wider rows."""
    wide = torch.full((x.shape[0], x.shape[1] + extra), float("nan"), device=x.device)
    wide = wide.to(x.dtype)
    wide[:, 16 : 16 + x.shape[1]] = x
    return wide[:, 16 : 16 + x.shape[1]]


def same(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(expected.float()).all()
    difference = (found.double() - expected.double()).norm()
    assert float(difference) <= BOUND[dtype] * float(expected.double().norm())


def norm_of(rand: Rand, width: int, eps: float = 1e-5) -> tuple[Tensor, Tensor, float]:
    return 1 + 0.3 * rand(width), 0.3 * rand(width), eps


def test_kernels_run_here() -> None:
    assert runs(torch.empty(1, device=DEVICE))


@every_dtype
@pytest.mark.parametrize(
    ("rows", "width", "columns", "activation", "mish"),
    [
        (40, 64, 96, "gelu", False),
        (3, 80, 16, "none", False),
        (21, 160, 112, "silu", False),
        (40, 128, 80, "none", True),
        (130, 48, 33, "gelu", False),
    ],
)
def test_norm_linear(
    rand: Rand,
    dtype: torch.dtype,
    rows: int,
    width: int,
    columns: int,
    activation: Any,
    mish: bool,
) -> None:
    x, norm = apart(rand(rows, width) + 0.5), norm_of(rand, width)
    weight, bias = rand(columns, width, dtype=dtype) / width**0.5, rand(columns)
    for given, shift in ((norm, bias), (None, bias), (norm, None)):
        out = apart(unwritten(rows, columns, dtype=dtype))
        around = out.untyped_storage().nbytes()
        expected = torch.empty(rows, columns, device=DEVICE, dtype=dtype)
        norm_linear.reference(x, given, weight, shift, expected, activation=activation, mish=mish)
        found = norm_linear(x, given, weight, shift, out, activation=activation, mish=mish)
        assert found is out
        same(found, expected, dtype)
        norm_linear(x.to(dtype), given, weight, shift, out, activation=activation, mish=mish)
        if given is None:
            same(found, expected, dtype)
        whole = torch.as_strided(out, (rows, columns + 48), (columns + 48, 1), 0)
        assert int(whole.isnan().sum()) == rows * 48
        assert out.untyped_storage().nbytes() == around


@every_dtype
@pytest.mark.parametrize(("rows", "inner", "columns"), [(40, 128, 64), (5, 80, 20), (129, 160, 48)])
def test_linear_add(rand: Rand, dtype: torch.dtype, rows: int, inner: int, columns: int) -> None:
    x, a = apart(rand(rows, columns)), apart(rand(rows, inner, dtype=dtype))
    weight, bias = rand(columns, inner, dtype=dtype) / inner**0.5, rand(columns)
    expected = linear_add.reference(x, a, weight, bias, torch.empty_like(x))
    same(linear_add(x, a, weight, bias, torch.empty_like(x)), expected, torch.float32)
    same(linear_add(x, a.float(), weight, bias, unwritten(rows, columns)), expected, torch.float32)
    rounded = linear_add(x, a, weight, bias, unwritten(rows, columns, dtype=dtype))
    same(rounded, expected, dtype)
    without = linear_add.reference(x, a, weight, None, torch.empty_like(x))
    assert linear_add(x, a, weight, None, out=x) is x
    same(x, without, torch.float32)


@every_dtype
@pytest.mark.parametrize(
    ("heads", "size", "width", "frames", "page_rows", "branches"),
    [(2, 16, 64, 20, 20, 2), (3, 16, 80, 5, 5, 1), (1, 80, 160, 4, 12, 2)],
)
@pytest.mark.parametrize("items", [1, 3])
def test_norm_qkv(
    rand: Rand,
    dtype: torch.dtype,
    heads: int,
    size: int,
    width: int,
    frames: int,
    page_rows: int,
    branches: int,
    items: int,
) -> None:
    rows, inner = branches * items * frames, heads * size
    x, norm = apart(rand(rows, width)), norm_of(rand, width, 1e-12)
    weight = rand(3 * inner, width, dtype=dtype) / width**0.5
    page = ints(*(4, 0, 2)[:items])
    for bias in (None, rand(3 * inner)):
        # One step's and layer's view of pages that hold more.
        pages = rand(5, 2, branches, 2, heads, page_rows, size, dtype=dtype)
        other = pages.clone()
        q, expected = unwritten(rows, inner, dtype=dtype), torch.empty(rows, inner, device=DEVICE)
        norm_qkv(x, norm, weight, apart(q), pages[:, 1], page, frames=frames, bias=bias)
        found = norm_qkv(x, norm, weight, q, pages[:, 1], page, frames=frames, bias=bias)
        norm_qkv.reference(x, norm, weight, expected, other[:, 1], page, frames=frames, bias=bias)
        same(found, expected, dtype)
        written = page.long()
        same(pages[written, 1], other[written, 1], dtype)
        untouched = [index for index in range(5) if index not in page.tolist()]
        assert torch.equal(pages[untouched], other[untouched])
        assert torch.equal(pages[:, 0], other[:, 0])
        assert torch.equal(pages[..., frames:, :], other[..., frames:, :])


def paged(rand: Rand, dtype: torch.dtype, shape: tuple[int, ...], pages: int) -> Tensor:
    """Pages of one layer (pages, branches, 2, H, P, d) within those of three."""
    branches, heads, page_rows, size = shape
    return rand(pages, 3, branches, 2, heads, page_rows, size, dtype=dtype)[:, 1]


@every_dtype
@pytest.mark.parametrize(
    ("shape", "frames"),
    [((2, 1, 20, 32), 20), ((1, 2, 5, 16), 5), ((1, 1, 20, 80), 20)],
    ids=["estimator", "encoder", "odd"],
)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_attention_flow(
    rand: Rand, dtype: torch.dtype, shape: tuple[int, ...], frames: int, splits: int
) -> None:
    branches, heads, page_rows, size = shape
    kv = paged(rand, dtype, shape, 16)
    table = torch.randint(1, 16, (4, 7), generator=torch.Generator().manual_seed(1))
    table = table.to(DEVICE, torch.int32)
    # One row of one page, a part of the second, all pages, nothing.
    visible = ints(1, 2 * page_rows - 2, 7 * page_rows, 0)
    q = apart(rand(branches * 4 * frames, heads * size, dtype=dtype))
    expected = torch.empty_like(q)
    attention_flow.reference(q, kv, table, visible, expected, frames=frames)
    room = attention_workspace(4, kv, frames, splits)
    out = apart(unwritten(*q.shape, dtype=dtype))
    attention_flow(q, kv, table, visible, out, frames=frames, splits=splits, workspace=room)
    same(out, expected, dtype)
    nothing = out.unflatten(0, (branches, 4, frames))[:, 3]
    assert torch.equal(nothing, torch.zeros_like(nothing))
    few = apart(unwritten(*q.shape, dtype=dtype))
    how: dict[str, Any] = {"frames": frames, "splits": splits, "workspace": room}
    attention_flow(q, kv, table, visible, few, least=3 * page_rows, **how)
    same(few, expected, dtype)
    again = torch.empty_like(out)
    given = room if splits == 2 else None
    attention_flow(q, kv, table, visible, again, frames=frames, splits=splits, workspace=given)
    assert torch.equal(again, out)


@every_dtype
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("frames", [1, 8, 32, 40])
def test_attention_flow_of_few_rows_and_of_several_tiles(
    rand: Rand, dtype: torch.dtype, splits: int, frames: int
) -> None:
    kv = paged(rand, dtype, (1, 2, 50, 64), 8)
    table = ints([1, 2, 3], [7, 5, 0])
    visible = ints(133, 64)
    q = rand(2 * frames, 128, dtype=dtype)
    expected = torch.empty_like(q)
    attention_flow.reference(q, kv, table, visible, expected, frames=frames)
    out = unwritten(*q.shape, dtype=dtype)
    attention_flow(q, kv, table, visible, out, frames=frames, splits=splits)
    same(out, expected, dtype)
    key, value = kv[[1, 2, 3], 0, :, 1].transpose(0, 1).flatten(1, 2).float()
    last = (key[:133] @ q[frames - 1, 64:].float() / 8).softmax(dim=0) @ value[:133]
    same(out[frames - 1, 64:].float(), last, dtype)


@every_dtype
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("frames", [5, 20])
def test_attention_flow_by_distance(
    rand: Rand, dtype: torch.dtype, splits: int, frames: int
) -> None:
    heads, size, reach = 2, 16, 128
    kv = paged(rand, dtype, (1, heads, frames, size), 12)
    table, visible = ints([3, 9, 1, 4], [2, 8, 7, 7]), ints(4 * frames, 2 * frames + 1)
    q = rand(2 * frames, heads * size, dtype=dtype)
    bias = rand(2, heads, frames, reach + frames - 1)
    how: dict[str, Any] = {"frames": frames, "bias": bias}
    expected = attention_flow.reference(q, kv, table, visible, torch.empty_like(q), **how)
    found = attention_flow(q, kv, table, visible, torch.empty_like(q), splits=splits, **how)
    same(found, expected, dtype)
    # Row 1 of the second item, head 1, stands at place 2 * frames + 1.
    rows = kv[[2, 8, 7], 0, :, 1].transpose(0, 1).flatten(1, 2).float()[:, : 2 * frames + 1]
    distance = 2 * frames + 1 - torch.arange(2 * frames + 1, device=DEVICE)
    scores = rows[0] @ q[frames + 1, size:].float() / 4 + bias[1, 1, 1, reach - 1 - distance]
    same(found[frames + 1, size:].float(), scores.softmax(dim=0) @ rows[1], dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_attention_flow_of_packed_items(rand: Rand, dtype: torch.dtype) -> None:
    heads, size, frames, items = 2, 32, 20, 13
    kv = paged(rand, dtype, (2, heads, frames, size), 60)
    one, other = list(range(1, 12)), [12, 13]
    own = iter(range(14, 60))
    counts = [(one, 3), (one, 1), (one, 6), (one, 2), (one, 1), (other, 1), (other, 4)]
    pages = [[*voice, *(next(own) for _ in range(new))] for voice, new in counts]
    pages += [[*other, pages[6][2], next(own)], [next(own)], [*one, next(own)], [*one, next(own)]]
    table = torch.zeros(items, 20, dtype=torch.int32)
    for item, seen in enumerate(pages):
        table[item, : len(seen)] = torch.tensor(seen, dtype=torch.int32)
    packs = packs_of(table.numpy(), [len(seen) for seen in pages])
    assert packs[:, 0].tolist() == [3, 0, 0, 2, 0, 3, 0, 0, 1, 2, 0, 1, 1]
    assert packs[:, 1].tolist() == [11, 0, 0, 11, 0, 2, 0, 0, 0, 11, 0, 0, 0]
    visible = ints(*(len(seen) * frames - item % 3 for item, seen in enumerate(pages)), 0, 0)
    q = apart(rand(2 * items * frames, heads * size, dtype=dtype))
    assert may_pack(items, kv, frames)
    table = table.to(DEVICE)
    expected = attention_flow.reference(q, kv, table, visible, torch.empty_like(q), frames=frames)
    how: dict[str, Any] = {"frames": frames, "packs": torch.from_numpy(packs).to(DEVICE)}
    out = torch.empty_like(q)
    for _ in range(2):
        out = apart(unwritten(*q.shape, dtype=dtype))
        attention_flow(q, kv, table, visible, out, **how)
        for item in range(items):
            found, right = (x.unflatten(0, (2, items, frames))[:, item] for x in (out, expected))
            same(found, right, dtype)
    again = attention_flow(q, kv, table, visible, torch.empty_like(q), **how)
    assert torch.equal(again, out)
    whole, shared = (
        attention_flow.plan(q, kv, table, visible, out, splits=splits, **how) for splits in (1, 2)
    )
    assert whole.arguments["packs"] is how["packs"]
    assert whole.grid[2] == 1
    assert whole.arguments["sums"] is None
    assert shared.arguments["packs"] is None


@every_dtype
def test_items_are_packed_in_16_bit_alone(rand: Rand, dtype: torch.dtype) -> None:
    kv = paged(rand, dtype, (2, 1, 20, 16), 2)
    assert not may_pack(1, kv, 20)
    assert may_pack(32, kv, 20) == (dtype != torch.float32)


PLACES = {
    "nothing before": ([-1, -1, -1], [-1, -1, -1], [7, 7, 7]),
    "in a page": ([-1, -1, -1], [4, 5, 6], [7, 5, 2]),
    "in the batch": ([-1, 0, 1], [-1, -1, -1], [7, 7, 3]),
    "short": ([-1, 0, -1], [4, -1, 6], [7, 1, 0]),
    "one and none of nothing": ([-1, -1, 0], [-1, -1, 6], [1, 0, 1]),
}


@every_dtype
@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize(
    ("width", "columns", "frames"), [(80, 32, 7), (64, 16, 7), (64, 20, 24)], ids=str
)
def test_conv1d(
    rand: Rand, dtype: torch.dtype, before: str, width: int, columns: int, frames: int
) -> None:
    before_item, before_page, valid = PLACES[before]
    x = apart(rand(2 * 3 * frames, width, dtype=dtype))
    weight, bias = rand(columns, 3 * width, dtype=dtype) / width**0.5, rand(columns)
    tails = rand(8, 3, 2, 2, width, dtype=dtype)
    other = tails.clone()
    how: dict[str, Any] = {
        "before_item": ints(*before_item),
        "before_page": ints(*before_page),
        "page": ints(1, 2, 3),
        "frames": frames,
        "valid": ints(*valid),
    }
    expected = torch.empty(x.shape[0], columns, device=DEVICE)
    conv1d.reference(x, weight, bias, expected, tails=other[:, 1], **how)
    out = apart(unwritten(*expected.shape))
    conv1d(x, weight, bias, out, tails=tails[:, 1], **how)
    same(out, expected, dtype)
    assert torch.equal(tails, other)
    rounded = conv1d(x, weight, bias, out.to(dtype), tails=tails[:, 1], **how)
    assert torch.equal(rounded, out.to(dtype))


@every_dtype
@pytest.mark.parametrize("many", [False, True])
def test_conv1d_of_many_items(rand: Rand, dtype: torch.dtype, many: bool) -> None:
    items, frames = (14, 20) if many else (4, 3)
    x = rand(2 * items * frames, 48, dtype=dtype)
    weight, tails = rand(24, 144, dtype=dtype) / 7, rand(items + 1, 2, 2, 48, dtype=dtype)
    other, pages = tails.clone(), torch.arange(1, items + 1)
    how: dict[str, Any] = {
        "before_item": ints(*(item - 1 if item % 3 else -1 for item in range(items))),
        "before_page": ints(*([-1] * items)),
        "page": ints(*pages.tolist()),
        "frames": frames,
        "valid": ints(*(item % (frames + 1) for item in range(items))),
    }
    expected = torch.empty(x.shape[0], 24, device=DEVICE)
    conv1d.reference(x, weight, None, expected, tails=other, **how)
    same(conv1d(x, weight, None, unwritten(*expected.shape), tails=tails, **how), expected, dtype)
    assert torch.equal(tails, other)


@every_dtype
@pytest.mark.parametrize(("rows", "width"), [(40, 64), (7, 320), (530, 80)])
@pytest.mark.parametrize("activation", ["none", "mish"])
def test_norm_act(rand: Rand, dtype: torch.dtype, rows: int, width: int, activation: Any) -> None:
    x, norm, time = apart(rand(rows, width) + 0.5), norm_of(rand, width), rand(width)
    for add in (time, None):
        how: dict[str, Any] = {"activation": activation, "add": add}
        expected = norm_act.reference(x, norm, torch.empty_like(x, dtype=dtype), **how)
        out = apart(unwritten(rows, width, dtype=dtype))
        assert norm_act(x, norm, out, **how) is out
        same(out, expected, dtype)


def test_a_convolution_in_parts_is_the_whole_one(rand: Rand) -> None:
    x, weight = rand(2 * 40, 32), rand(16, 96) / 10
    tails = unwritten(4, 2, 2, 32)
    whole = rows = x.unflatten(0, (2, 40))
    padded = torch.nn.functional.pad(whole, (0, 0, 2, 0))
    kernel = weight.view(16, 3, 32).transpose(1, 2)
    whole = torch.nn.functional.conv1d(padded.transpose(1, 2), kernel).transpose(1, 2)
    for part in range(2):
        out = unwritten(40, 16)
        conv1d(
            rows[:, 20 * part : 20 * part + 20].flatten(0, 1), weight, None, out,
            before_item=ints(-1), before_page=ints(part - 1 if part == 0 else 1),
            tails=tails, page=ints(part + 1), frames=20, valid=ints(20),
        )  # fmt: skip
        same(out.unflatten(0, (2, 20)), whole[:, 20 * part : 20 * part + 20], torch.float32)


@every_dtype
@pytest.mark.parametrize(("rows", "inner", "columns"), [(40, 64, 48), (7, 320, 80), (130, 512, 32)])
def test_close_residual(
    rand: Rand, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> None:
    y, x, norm = rand(rows, columns) + 1, apart(rand(rows, inner)), norm_of(rand, columns)
    weight, bias = rand(columns, inner, dtype=dtype) / inner**0.5, rand(columns)
    for shift in (bias, None):
        expected = close_residual.reference(y, norm, x, weight, shift, torch.empty_like(y))
        out = apart(unwritten(rows, columns))
        assert close_residual(apart(y), norm, x, weight, shift, out) is out
        same(out, expected, dtype)
        close_residual(y, norm, x.to(dtype), weight, shift, out)
        same(out, expected, dtype)


@pytest.mark.parametrize(("rows", "bins", "width"), [(40, 80, 320), (10, 20, 21)])
def test_euler(rand: Rand, rows: int, bins: int, width: int) -> None:
    x, velocity = rand(rows, width), rand(rows, bins)
    expected = euler.reference(x.clone(), velocity, 0.7, 0.013)
    rounded = unwritten(rows, bins + 3, dtype=torch.float16)
    same(euler(x, apart(velocity), 0.7, 0.013, rounded), expected, torch.float32)
    assert torch.equal(x[:, bins:], expected[:, bins:])
    assert torch.equal(rounded[:, :bins], x[:, :bins].half())
    assert rounded[:, bins:].isnan().all()


def test_float32_rows_do_not_depend_on_their_company(rand: Rand) -> None:
    x, norm = rand(300, 96), norm_of(rand, 96)
    weight = rand(48, 96)
    whole = norm_linear(x, norm, weight, None, unwritten(300, 48))
    for few in (1, 40):
        assert torch.equal(
            norm_linear(x[:few], norm, weight, None, unwritten(few, 48)), whole[:few]
        )
