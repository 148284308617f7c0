"""``rms_linear`` of one row in 16 bit: weights go straight into sums, past the matrix units."""

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, power_of_two, tl, triton
from mosstalk.ops.lm_parts import prefetch_rows, silu
from mosstalk.ops.lm_tiles import Division
from mosstalk.ops.parts import gdc_launch, gdc_wait


def takes(x: Tensor, norm_weight: Tensor | None, weight: Tensor) -> bool:
    """Whether the numbers lie so that they can be read in pairs."""
    given = [one for one in (x, norm_weight, weight) if one is not None]
    return x.shape[1] % 2 == 0 and all(one.storage_offset() % 2 == 0 for one in given)


def plan_rms_linear_one(
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
        _one_row,
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
def _one_row(
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
            gain_first, gain_second = _parts(factor, BRAIN)
            first *= gain_first
            second *= gain_second
        total += _product(w, first, second, BRAIN)
        if GATED:
            upper += _product(u, first, second, BRAIN)
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
    """Pairs from ``start`` on of weights, the upper ones too, and of the norm's norm_weight."""
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
def _product(w, first, second, BRAIN: tl.constexpr):
    """Sums over pairs (columns,) of weights (columns, pairs) times a row's two numbers."""
    w_first, w_second = _parts(w, BRAIN)
    return tl.sum(w_first * first[None, :] + w_second * second[None, :], axis=1)
