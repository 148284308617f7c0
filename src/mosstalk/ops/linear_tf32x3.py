"""Float32 matmuls of the speech tokenizer as three TF32 matmuls each."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Shared,
    Workspace,
    ceil_div,
    op,
    page_strides,
    runs,
    tl,
    triton,
)
from mosstalk.ops.parts import activate, gdc_wait, prefetch_l2, summed
from mosstalk.ops.tiles import Tile

# float32 numbers as two that a card's TF32 units take, which multiply them at float32's accuracy.
#
# The units keep 11 significant bits of an operand. With x = high + low, three products of parts,
# high high + high low + low high, leave out 2^-21 of x y at most, which is less than what summing
# in float32 rounds away; each short run of products is added to the float32 sum outside the units,
# whose own additions round toward zero (Ootomo and Yokota 2022).


Precision = Literal["tf32x3", "ieee"]
"""How float32 matmuls are computed: of parts in TF32 units, or by float32's own multiply-adds."""


class Tf32x3(NamedTuple):
    """A float32 tensor: ``high`` alone, or the sum of ``high`` in TF32 and the rest ``low``."""

    high: Tensor
    low: Tensor | None = None

    @classmethod
    def empty(cls, like: Tensor, columns: int, *, split: bool) -> "Tf32x3":
        """Room for (R, columns) of float32 beside ``like`` (R, ...); ``split``: for both."""
        return cls(*torch.empty(2 if split else 1, len(like), columns, device=like.device))

    @classmethod
    def of(cls, x: Tensor, *, split: bool) -> "Tf32x3":
        """``x`` in any precision, float32 where it is to be ``split``."""
        if not split:
            return cls(x)
        bits = x.contiguous().view(torch.int32) + (1 << 12)
        high = (bits & -(1 << 13)).view(torch.float32)
        return cls(high, x - high)

    def whole(self) -> Tensor:
        """The tensor itself."""
        return self.high if self.low is None else self.high + self.low

    def check(self, rows: int, columns: int) -> None:
        """Assert the size and that rows follow one another without gaps."""
        for half in self:
            assert half is None or half.shape == (rows, columns)
            assert half is None or half.is_contiguous()


def takes(x: Tensor) -> bool:
    """Whether the kernels for float32, rather than their references, take ``x``."""
    return x.dtype == torch.float32 and runs(x)


def _takes(x: Tf32x3) -> bool:
    return takes(x.high)


@triton.jit
def upper(x):
    """The nearest number of 11 significant bits to each of ``x``, float32."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return (bits & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def store_tf32x3(high, low, place, x, mask, SPLIT: tl.constexpr):
    """Write ``x`` as its two parts where SPLIT, else the whole of it to ``high``."""
    if SPLIT:
        top = upper(x)
        tl.store(high + place, top, mask=mask)
        tl.store(low + place, x - top, mask=mask)
    else:
        tl.store(high + place, x.to(high.dtype.element_ty), mask=mask)


@triton.jit
def tf32x3_dot(a, b, b_low, B_SPLIT: tl.constexpr, IEEE: tl.constexpr):
    """a b of float32 tiles (m, k) and (k, n); where B_SPLIT, b is given as ``b`` + ``b_low``."""
    if IEEE:
        if B_SPLIT:
            b += b_low
        dot = tl.dot(a, b, input_precision="ieee")
    else:
        a_high = upper(a)
        a_low = a - a_high
        b_high = b
        if not B_SPLIT:
            b_high = upper(b)
            b_low = b - b_high
        dot = tl.dot(a_low, b_high, input_precision="tf32")
        dot = tl.dot(a_high, b_low, dot, input_precision="tf32")
        dot = tl.dot(a_high, b_high, dot, input_precision="tf32")
    return dot


# Linear layers in float32: few rows as fast as weights arrive, many split on TF32 units.
#
# Shapes: R rows, K channels in, N out, H heads, d channels of a head, P rows of a page.


Activation = Literal["none", "gelu"]

_SIXTEENTHS = 16
"""Rows are passed so many times over: for a multiple of 16 Triton would compile anew."""


@dataclass(frozen=True)
class Division:
    """A tile, and how many programs should run at least: below, they share channels in.

    ``registers`` of a thread are what lets several programs be on one processor.
    """

    tile: Tile
    programs: int
    registers: int | None = None

    def splits(self, rows: int, columns: int, channels: int) -> int:
        """How many programs share the channels in of a tile; each gets two runs of them or more."""
        tiles = ceil_div(rows, self.tile.rows) * ceil_div(columns, self.tile.columns)
        most = max(channels // (2 * self.tile.inner), 1)
        return min(ceil_div(self.programs, tiles), most)


FEW, MANY = 32, 1 << 31
DIVISIONS = {
    FEW: Division(Tile(32, 64, 32, 4, 4), 320),
    MANY: Division(Tile(64, 128, 32, 8, 3), 200, registers=128),
}
"""By the most rows that each is for."""
EXACT = Division(Tile(64, 64, 16, 8, 2), 240)
"""For any rows where matmuls are float32's own."""


def division(rows: int, precision: Precision = "tf32x3") -> Division:
    """How a matmul of so many rows is divided."""
    if precision == "ieee":
        return EXACT
    return next(each for limit, each in DIVISIONS.items() if rows <= limit)


def linear_numbers() -> int:
    """Numbers in the workspace for any matmul."""
    divisions = (EXACT, *DIVISIONS.values())
    return max(2 * each.programs * each.tile.rows * each.tile.columns for each in divisions)


class Paged(NamedTuple):
    """Where keys and values of rows go: row ``rows`` (R,) of page ``pages`` (R,), int64.

    ``kv`` is (pages, 1, 2, H, P, d), any strides but the last.
    """

    kv: Tensor
    pages: Tensor
    rows: Tensor

    def put(self, both: Tensor) -> None:
        """Write keys and values, (R, 2 H d)."""
        _, _, parts, heads, _, _ = self.kv.shape
        by_row = self.kv[:, 0].permute(0, 3, 1, 2, 4)
        by_row[self.pages, self.rows] = both.unflatten(1, (parts, heads, -1))


def linear_float32_reference(
    x: Tf32x3,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    split: bool = False,
) -> Tf32x3:
    """``linear_float32`` in plain torch."""
    y = F.linear(x.whole(), weight, bias)
    if activation == "gelu":
        y = F.gelu(y)
    return Tf32x3.of(y if residual is None else residual + y, split=split)


def qkv_float32_reference(x: Tf32x3, weight: Tensor, bias: Tensor | None, paged: Paged) -> Tensor:
    """``qkv_float32`` in plain torch."""
    width = weight.shape[0] // 3
    y = F.linear(x.whole(), weight, bias)
    paged.put(y[:, width:])
    return y[:, :width]


def divided_float32(
    x: Tf32x3,
    weight: Tensor,
    bias: Tensor | None,
    out: Tf32x3,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    paged: Paged | None = None,
    divided: Division,
    precision: Precision = "tf32x3",
    workspace: Workspace | None = None,
) -> Launch:
    """The kernel of ``linear_float32``, or with ``paged`` of ``qkv_float32``, by one division."""
    (rows, channels), columns = x.high.shape, weight.shape[0]
    x.check(rows, channels)
    out.check(rows, columns if paged is None else columns // 3)
    Tf32x3(weight).check(columns, channels)
    assert residual is None or residual.is_contiguous()
    tile = divided.tile
    splits = divided.splits(rows, columns, channels)
    grid = (ceil_div(rows, tile.rows), ceil_div(columns, tile.columns), splits)
    shared = Shared.of(workspace, splits, grid[0] * grid[1], tile.rows * tile.columns, weight)
    return Launch(
        _linear_float32,
        grid,
        {
            "x": x.high,
            "x_low": x.low,
            "weight": weight,
            "bias": bias,
            "residual": residual,
            "out": out.high,
            "out_low": out.low,
            **shared._asdict(),
            "rows_16": rows * _SIXTEENTHS,
            "K": channels,
            "N": columns,
            **_places(paged),
        },
        {
            "ACTIVATION": activation,
            "BIAS": bias is not None,
            "ADD": residual is not None,
            "X_SPLIT": x.low is not None,
            "SPLIT": out.low is not None,
            "PAGED": paged is not None,
            "WHOLE": channels % tile.inner == 0 and columns % tile.columns == 0,
            "IEEE": precision == "ieee",
            "FETCH": rows <= FEW,
            "SHARED": splits > 1,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "INNER": tile.inner,
        },
        tile,
        divided.registers,
    )


def _places(paged: Paged | None) -> dict[str, Any]:
    """What the kernel is told about pages; where there are none, numbers that it never reads."""
    if paged is None:
        none = {"kv": None, "pages": None, "page_rows": None, "D": 16, "Q": 16}
        return none | dict.fromkeys(("kv_page", "kv_part", "kv_head", "kv_row"), 16)
    _, branches, parts, heads, _, channels = paged.kv.shape
    assert (branches, parts) == (1, 2)
    assert paged.kv.stride(5) == 1
    assert channels % 4 == 0
    assert paged.pages.is_contiguous()
    assert paged.rows.is_contiguous()
    strides = page_strides(paged.kv)
    del strides["kv_branch"]
    return {
        "kv": paged.kv,
        "pages": paged.pages,
        "page_rows": paged.rows,
        "D": channels,
        "Q": heads * channels,
        **strides,
    }


@op(linear_float32_reference, takes=_takes)
def linear_float32(
    x: Tf32x3,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    split: bool = False,
    precision: Precision = "tf32x3",
    workspace: Workspace | None = None,
) -> tuple[Tf32x3, Launch]:
    """act(x W^T + b) + residual, as high and low parts where ``split``; GELU is the exact one.

    ``x`` (R, K), ``weight`` (N, K), ``bias`` (N,), ``residual`` and the result (R, N), rows
    without gaps. The kernel takes float32, the reference any precision that is not to be split.
    ``workspace`` is made where one is needed and None is given.
    """
    out = Tf32x3.empty(x.high, len(weight), split=split)
    divided = division(len(x.high), precision)
    return out, divided_float32(
        x, weight, bias, out,
        activation=activation, residual=residual,
        divided=divided, precision=precision, workspace=workspace,
    )  # fmt: skip


@op(qkv_float32_reference, takes=_takes)
def qkv_float32(
    x: Tf32x3,
    weight: Tensor,
    bias: Tensor | None,
    paged: Paged,
    *,
    precision: Precision = "tf32x3",
    workspace: Workspace | None = None,
) -> tuple[Tensor, Launch]:
    """x W^T + b as queries, returned (R, H d), and keys and values, put into their pages.

    ``weight`` (3 H d, K) and ``bias`` (3 H d,) hold q, k and v one after the other; else as
    ``linear_float32``.
    """
    query = Tf32x3.empty(x.high, len(weight) // 3, split=False)
    divided = division(len(x.high), precision)
    return query.high, divided_float32(
        x, weight, bias, query,
        paged=paged, divided=divided, precision=precision, workspace=workspace,
    )  # fmt: skip


@triton.jit
def _linear_float32(
    x,
    x_low,
    weight,
    bias,
    residual,
    out,
    out_low,
    kv,
    pages,
    page_rows,
    counters,
    sums,
    rows_16,
    K,
    N,
    kv_page,
    kv_part,
    kv_head,
    kv_row,
    D,
    Q,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    X_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    WHOLE: tl.constexpr,
    IEEE: tl.constexpr,
    FETCH: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Columns are the tile's first side: weights are split in registers, rows lie in shared
    # memory, which is where TF32 units take them from.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.cdiv(tl.cdiv(K, tl.num_programs(2)), INNER) * INNER
    begin = tl.program_id(2) * share
    end = tl.minimum(K, begin + share)
    if DEPENDENT and FETCH:
        _fetch_ahead(weight, column, begin, end, K, N)
    gdc_wait(DEPENDENT)
    here = row < rows_16 // 16
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    inner = tl.arange(0, INNER)
    ours = row[:, None] * K + inner[None, :]
    theirs = column[:, None] * K + inner[None, :]
    for start in range(begin, end, INNER):
        if WHOLE:
            a = tl.load(x + ours + start, mask=here[:, None], other=0.0)
            w = tl.load(weight + theirs + start)
        else:
            known = (start + inner < end)[None, :]
            a = tl.load(x + ours + start, mask=here[:, None] & known, other=0.0)
            w = tl.load(weight + theirs + start, mask=(column < N)[:, None] & known, other=0.0)
        a_low = a
        if X_SPLIT:
            known = here[:, None] & (start + inner < end)[None, :]
            a_low = tl.load(x_low + ours + start, mask=known, other=0.0)
        total += tf32x3_dot(w, tl.trans(a), tl.trans(a_low), X_SPLIT, IEEE)
    last = True
    if SHARED:
        total, _, last = summed(total, total, counters, sums, False, ROWS, COLUMNS)
    if last:
        inside = (column < N)[:, None] & here[None, :]
        if BIAS:
            total += tl.load(bias + column, mask=column < N, other=0.0)[:, None]
        total = activate(total, ACTIVATION)
        if ADD:
            place = column[:, None] + row[None, :] * N
            total += tl.load(residual + place, mask=inside, other=0.0)
        if PAGED:
            query = inside & (column < Q)[:, None]
            tl.store(out + column[:, None] + row[None, :] * Q, total, mask=query)
            beside = column - Q
            into = beside // Q * kv_part + beside % Q // D * kv_head + beside % D
            # So it is for heads of a multiple of 4 channels, which the compiler cannot see.
            into = tl.max_contiguous(tl.multiple_of(into, 4), 4)
            # A page has millions of numbers: its place needs 64 bits.
            place = tl.load(pages + row, mask=here, other=0) * kv_page
            place += tl.load(page_rows + row, mask=here, other=0) * kv_row
            kept = inside & (beside >= 0)[:, None]
            tl.store(kv + into[:, None] + place[None, :], total, mask=kept)
        else:
            store_tf32x3(out, out_low, column[:, None] + row[None, :] * N, total, inside, SPLIT)


@triton.jit
def _fetch_ahead(weight, column, begin, end, K, N):
    """Ask for the weights that this program reads: nothing that it waits for writes them."""
    line = tl.arange(0, 8) * 32
    for start in range(begin, end, 8 * 32):
        place = tl.minimum(column, N - 1)[:, None] * K + tl.minimum(start + line, K - 1)[None, :]
        prefetch_l2(weight + place)
