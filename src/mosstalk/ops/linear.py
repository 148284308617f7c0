"""Matmuls of few or many rows with a norm before them, a gate, or a residual, in one kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Plans,
    Shared,
    Workspace,
    ceil_div,
    linear,
    op,
    power_of_two,
    strided,
    tl,
    triton,
)
from mosstalk.ops.linear_tiles import Division, division, kind_of
from mosstalk.ops.norm import rms_norm, rms_normalised
from mosstalk.ops.parts import gdc_launch, gdc_wait, prefetch_l2, summed
from mosstalk.ops.tiles import Tile

# Pieces that the language model's kernels share; each is inlined into the kernel that calls it.


@triton.jit
def prefetch_runs(place, size):
    """Ask for ``size`` bytes from each of a tile of pointers on to be brought into the cache.

    Both are multiples of 16 bytes. One instruction brings a whole run, where ``prefetch_l2`` brings
    a line; it needs compute capability 9.0, as dependent launches do.
    """
    place = place.to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, tl.zeros_like(place).to(tl.int32) + size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(
    weight, column, start, K: tl.constexpr, SPAN: tl.constexpr, RUNS: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """Ask for SPAN channels from ``start`` on of rows ``column`` of ``weight`` (., K).

    In RUNS requests a row; without BULK each brings but the line that it begins with.
    """
    bits: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth
    run = start + tl.arange(0, RUNS) * (SPAN // RUNS)
    place = weight + column[:, None] * K + run[None, :]
    if BULK:
        prefetch_runs(place, SPAN // RUNS * bits // 8)
    else:
        prefetch_l2(place)


@triton.jit
def silu(x):
    """x / (1 + e^-x)."""
    return x / (1.0 + tl.exp(-x))


# SwiGLU of what one matmul has made, gate and up side by side.


_TILE = Tile(1, 1024, 0, 4, 1)


def gate_up_reference(y: Tensor, out: Tensor) -> Tensor:
    """``gate_up`` in plain torch."""
    gate, up = y.chunk(2, dim=1)
    return torch.mul(F.silu(gate), up, out=out)


@op(gate_up_reference)
def gate_up(y: Tensor, out: Tensor) -> tuple[Tensor, Launch]:
    """Write silu(gate) up of ``y`` (R, 2N), gate then up, into ``out`` (R, N); return it.

    Both in one dtype; rows may lie apart. Rounded where ``models.language_model.MLP`` is: after
    silu and after the matmul.
    """
    rows, columns = out.shape
    assert y.shape == (rows, 2 * columns)
    assert y.dtype == out.dtype
    assert y.stride(1) == out.stride(1) == 1
    width = min(_TILE.columns, power_of_two(columns))
    return out, Launch(
        _gate_up,
        (rows, ceil_div(columns, width)),
        strided(y=y, out=out),
        {"N": columns, "COLUMNS": width},
        _TILE,
    )


@triton.jit
def _gate_up(
    y, out, y_stride, out_stride, N: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    gdc_wait(DEPENDENT)
    here = y + row * y_stride + column
    gate = tl.load(here, mask=inside, other=0.0)
    up = tl.load(here + N, mask=inside, other=0.0)
    gate = silu(gate.to(tl.float32)).to(gate.dtype)
    found = gate.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_stride + column, found.to(out.dtype.element_ty), mask=inside)


# ``rms_linear`` of one row in 16 bit: weights go straight into sums, past the matrix units.


def takes(x: Tensor, norm_weight: Tensor | None, weight: Tensor) -> bool:
    """Whether the numbers lie so that they can be read in pairs."""
    given = [one for one in (x, norm_weight, weight) if one is not None]
    return x.shape[1] % 2 == 0 and all(one.storage_offset() % 2 == 0 for one in given)


def _one_row_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    out: Tensor,
    residual: Tensor | None,
    gated: bool,
    divided: Division,
) -> Launch:
    """The kernel that does what ``rms_linear`` says for one row."""
    (rows, channels), columns = x.shape, weight.shape[0] // (1 + gated)
    assert rows == 1
    assert weight.element_size() == 2
    tile = divided.tile
    inner = min(tile.inner, power_of_two(channels)) // 2
    programs = ceil_div(columns, tile.columns)
    whole = channels % (2 * inner) == 0
    return Launch(
        _rms_linear_one_row,
        (programs,),
        {
            "x": x[0].view(torch.int32),
            "norm_weight": None if norm_weight is None else norm_weight.view(torch.int32),
            "weight": weight.view(torch.int32),
            "residual": residual,
            "out": out,
            "eps": eps,
        },
        {
            "K": channels // 2,
            "N": columns,
            "NORM": norm_weight is not None,
            "GATED": int(gated),
            "ADD": residual is not None,
            "BRAIN": weight.dtype == torch.bfloat16,
            "WHOLE": whole,
            "COLUMNS": tile.columns,
            "INNER": inner,
            "AHEAD": divided.ask if whole and divided.ask < programs else 0,
            **divided.requests(2 * inner, weight),
        },
        tile,
    )


@triton.jit
def _rms_linear_one_row(
    x,
    norm_weight,
    weight,
    residual,
    out,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BRAIN: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    AHEAD: tl.constexpr,
    RUNS: tl.constexpr,
    BULK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # All numbers are read in pairs: taken apart by the load itself they would need twice the
    # registers, and would be waited for before the turn.
    gdc_launch(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = tl.minimum(column, N - 1)
    inner = tl.arange(0, INNER)
    gates = weight + known[:, None] * K + inner[None, :]
    w, u, factor = _taken(gates, norm_weight, 0, K, N, NORM, GATED, WHOLE, INNER)
    if DEPENDENT and AHEAD > 0:
        further = tl.minimum(known + AHEAD * COLUMNS, N - 1)
        prefetch_rows(weight, further, 0, K, INNER, RUNS, BULK)
        if GATED:
            prefetch_rows(weight + N * K, further, 0, K, INNER, RUNS, BULK)
    gdc_wait(DEPENDENT)
    a = tl.load(x + inner, mask=inner < K, other=0)
    stream = tl.zeros((COLUMNS,), tl.float32)
    if ADD:
        stream += tl.load(residual + column, mask=column < N, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    upper = total
    squares = 0.0
    for start in tl.static_range(0, K, INNER):
        w_next, u_next, factor_next, a_next = w, u, factor, a
        if start + INNER < K:
            later = start + INNER + inner
            w_next, u_next, factor_next = _taken(
                gates, norm_weight, start + INNER, K, N, NORM, GATED, WHOLE, INNER
            )
            a_next = tl.load(x + later, mask=later < K, other=0)
        first, second = _parts(a, BRAIN)
        power = first * first + second * second
        if NORM:
            factor_first, factor_second = _parts(factor, BRAIN)
            first *= factor_first
            second *= factor_second
        total += _matmul(w, first, second, BRAIN)
        if GATED:
            upper += _matmul(u, first, second, BRAIN)
        if NORM:
            squares += tl.sum(power, axis=0)
        w, u, factor, a = w_next, u_next, factor_next, a_next
    if NORM:
        # Taken out of the sums, to read the row once.
        scale = 1.0 / tl.sqrt(squares / (2 * K) + eps)
        total *= scale
        upper *= scale
    total = silu(total) * upper if GATED else total
    tl.store(out + column, (total + stream).to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _taken(
    gates, norm_weight, start, K: tl.constexpr, N: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Pairs from ``start`` on of the weights, of those of U where GATED, and of the norm weight."""
    inner = start + tl.arange(0, INNER)
    w = _pairs(gates + start, inner, K, WHOLE)
    u = _pairs(gates + N * K + start, inner, K, WHOLE) if GATED else w
    factor = tl.load(norm_weight + inner, mask=inner < K, other=0) if NORM else inner
    return w, u, factor


@triton.jit
def _pairs(place, inner, K: tl.constexpr, WHOLE: tl.constexpr):
    """Pairs ``inner`` of a tile of rows, zeros past the last."""
    return tl.load(place) if WHOLE else tl.load(place, mask=(inner < K)[None, :], other=0)


@triton.jit
def _parts(pair, BRAIN: tl.constexpr):
    """Both numbers of each pair in float32, of bfloat16 or of float16."""
    if BRAIN:
        first = (pair << 16).to(tl.float32, bitcast=True)
        second = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        first = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _matmul(w, first, second, BRAIN: tl.constexpr):
    """Sums over pairs (columns,) of weights (columns, pairs) times a row's two numbers."""
    w_first, w_second = _parts(w, BRAIN)
    return tl.sum(w_first * first[None, :] + w_second * second[None, :], axis=1)


# A linear layer on few rows, RMSNorm before it and SwiGLU or a residual after it.


_MOST_PROGRAMS = 400
"""Where there are so many tiles of columns, none share one."""
_FP8_SIDE = 32
"""The fewest channels that matrix units multiply in 8 bits."""


def rms_linear_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """``rms_linear`` in plain torch."""
    y = linear(x if norm_weight is None else rms_normalised(x, norm_weight, eps), weight, None)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return out.copy_(y if residual is None else residual + y)


def divided_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    divided: Division,
    workspace: Workspace | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """The kernel of ``rms_linear`` by one division; what is ``apart`` there, is to be done before.

    ``scales`` (R,) and (N,), or (2N,) where gated, in float32: of rows and weights in E4M3.
    """
    rows, columns, channels = _sizes(x, norm_weight, weight, out, residual, gated)
    if divided.one:
        return _one_row_linear(x, norm_weight, eps, weight, out, residual, gated, divided)
    tile = divided.tile
    inner = min(tile.inner, max(power_of_two(channels), _FP8_SIDE if scales else 0))
    tiles = ceil_div(columns, tile.columns)
    # Whatever the rows are, so that they do not decide in which order channels are summed.
    splits = max(1, min(divided.splits, ceil_div(channels, inner), _MOST_PROGRAMS // tiles))
    assert norm_weight is None or (splits == 1 and scales is None), (
        "rows of shared channels are normalised apart"
    )
    grid = (ceil_div(rows, tile.rows), tiles, splits)
    numbers = (1 + gated) * tile.rows * tile.columns
    shared = Shared.of(workspace, splits, grid[0] * tiles, numbers, x)
    return Launch(
        _rms_linear,
        grid,
        {
            **strided(x=x, out=out),
            "norm_weight": norm_weight,
            "weight": weight,
            "row_scale": scales[0] if scales else None,
            "channel_scale": scales[1] if scales else None,
            "residual": residual,
            "counters": shared.counters,
            "sums": shared.sums,
            "rows": rows,
            "add_stride": 0 if residual is None else residual.stride(0),
            "eps": eps,
        },
        {
            "K": channels,
            "N": columns,
            "NORM": norm_weight is not None,
            "GATED": int(gated),
            "ADD": residual is not None,
            "SCALED": scales is not None,
            **_sides(divided, weight, inner, splits),
        },
        tile,
    )


@op(rms_linear_reference)
def rms_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    invariant: bool = False,
    workspace: Workspace | None = None,
) -> Plans[Tensor]:
    """Write f(RMSNorm(x) W^T) + residual into ``out`` (R, N) and return it.

    ``x`` (R, C), ``norm_weight`` (C,), None to leave rows as they are, and ``weight`` (N, C) in one
    dtype; ``residual`` (R, N), which may be ``out``. Rows may lie apart, channels may not. f is
    nothing, or with ``gated`` SwiGLU (Shazeer 2020): silu(x G^T) x U^T with ``weight`` (2N, C)
    the rows of G, then of U. Sums are float32, and nothing is rounded between the matmuls'
    inputs and ``out``.

    With ``invariant``, and in float32, a row's bits do not depend on the other rows. Best for
    few rows; else right, but slower than torch. ``workspace`` is made where one is needed and None
    is given.
    """
    rows, channels = x.shape
    kind = kind_of(channels, normed=norm_weight is not None, gated=gated)
    # Pairs of numbers are what the kernel for one row reads.
    few = rows if takes(x, norm_weight, weight) else max(rows, 2)
    divided = division(kind, few, weight.dtype, invariant=invariant)
    launches: tuple[Launch, ...] = ()
    if norm_weight is not None and divided.apart:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launches = rms_norm.launches(x, norm_weight, eps, normed)
        x, norm_weight = normed, None
    matmul = divided_linear(
        x, norm_weight, eps, weight, out,
        residual=residual, gated=gated, divided=divided, workspace=workspace,
    )  # fmt: skip
    launches = (*launches, matmul)
    return out, *launches


def _sides(divided: Division, weight: Tensor, inner: int, splits: int) -> dict[str, int]:
    """What the division says, by the kernel's constants."""
    channels, tile = weight.shape[1], divided.tile
    whole = channels % inner == 0
    span = divided.ask if whole and channels % (splits * max(divided.ask, 1)) == 0 else 0
    return {
        "WHOLE": whole,
        "SPLITS": splits,
        "SHARE": ceil_div(ceil_div(channels, splits), inner) * inner,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "INNER": inner,
        "ASK": span,
        **divided.requests(span, weight),
    }


def _sizes(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    out: Tensor,
    residual: Tensor | None,
    gated: bool,
) -> tuple[int, int, int]:
    """Rows, columns written and channels, checked."""
    (rows, channels), columns = x.shape, weight.shape[0] // (1 + gated)
    assert weight.shape == (columns * (1 + gated), channels)
    assert weight.is_contiguous()
    assert weight.numel() < 1 << 31
    assert x.dtype == weight.dtype
    assert norm_weight is None or norm_weight.shape == (channels,)
    assert out.shape == (rows, columns)
    assert x.stride(1) == out.stride(1) == 1
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    return rows, columns, channels


@triton.jit(do_not_specialize=["rows"])
def _rms_linear(
    x,
    norm_weight,
    weight,
    row_scale,
    channel_scale,
    residual,
    out,
    counters,
    sums,
    rows,
    x_stride,
    add_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ASK: tl.constexpr,
    RUNS: tl.constexpr,
    BULK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Weights are the matmuls' first side, so that few rows are the narrow one of matrix units.
    gdc_launch(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(2) * SHARE
    # Columns past the last take its weights: no mask is then in the way of wide copies.
    known = tl.minimum(column, N - 1)
    sizes, upper_sizes = _channel_sizes(channel_scale, known, N, SCALED, GATED)
    if DEPENDENT and ASK > 0:
        prefetch_rows(weight, known, begin, K, ASK, RUNS, BULK)
        if GATED:
            prefetch_rows(weight + N * K, known, begin, K, ASK, RUNS, BULK)
    gdc_wait(DEPENDENT)
    here = row < rows
    row_sizes = tl.load(row_scale + row, mask=here, other=0.0) if SCALED else row
    inside = (column < N)[:, None] & here[None, :]
    beside = residual + row[None, :] * add_stride + column[:, None] if ADD else residual
    stream = _added(beside, inside, ROWS, COLUMNS, ADD and SPLITS == 1)
    inner = tl.arange(0, INNER)
    ours = x + row[:, None] * x_stride + inner[None, :]
    theirs = weight + known[:, None] * K + inner[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    upper = total
    squares = tl.zeros((ROWS,), tl.float32)
    # In 8 bits matrix units may add in fewer than float32's: after so many channels the sum is
    # taken out of them and added in float32.
    within: tl.constexpr = INNER if SCALED else None
    for start in range(begin, tl.minimum(K, begin + SHARE), INNER):
        left = start + inner < K
        a = tl.load(ours + start, mask=here[:, None] if WHOLE else here[:, None] & left, other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            factor = tl.load(norm_weight + start + inner, mask=left, other=0.0)
            a = (wide * factor.to(tl.float32)[None, :]).to(a.dtype)
        w = _weights(theirs + start, left, WHOLE)
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee", max_num_imprecise_acc=within)
        if GATED:
            w = _weights(theirs + N * K + start, left, WHOLE)
            upper = tl.dot(
                w, tl.trans(a), upper, input_precision="ieee", max_num_imprecise_acc=within
            )
    last = True
    if SPLITS > 1:
        total, upper, last = summed(total, upper, counters, sums, GATED, ROWS, COLUMNS)
    if last:
        if SPLITS > 1:
            stream = _added(beside, inside, ROWS, COLUMNS, ADD)
        if NORM:
            # Taken out of the sums, to read the rows once.
            scale = (1.0 / tl.sqrt(squares / K + eps))[None, :]
            total *= scale
            upper *= scale
        total = _scaled(total, row_sizes, sizes, SCALED)
        upper = _scaled(upper, row_sizes, upper_sizes, SCALED)
        total = silu(total) * upper if GATED else total
        place = out + row[None, :] * out_stride + column[:, None]
        tl.store(place, (total + stream).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _channel_sizes(scale, column, N: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr):
    """Scales of columns (COLUMNS,), and of the upper ones; where there are none, anything."""
    sizes = tl.load(scale + column) if SCALED else column
    upper = tl.load(scale + N + column) if SCALED and GATED else sizes
    return sizes, upper


@triton.jit
def _scaled(total, row_sizes, sizes, SCALED: tl.constexpr):
    """Sums (COLUMNS, ROWS) times the scales of rows and of columns, where there are any."""
    return total * row_sizes[None, :] * sizes[:, None] if SCALED else total


@triton.jit
def _weights(place, left, WHOLE: tl.constexpr):
    """A tile of weights, zeros where no channels are ``left``."""
    return tl.load(place) if WHOLE else tl.load(place, mask=left[None, :], other=0.0)


@triton.jit
def _added(beside, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr):
    """What is to be added (COLUMNS, ROWS) in float32, zeros where nothing is."""
    stream = tl.zeros((COLUMNS, ROWS), tl.float32)
    if ADD:
        stream += tl.load(beside, mask=inside, other=0.0).to(tl.float32)
    return stream
