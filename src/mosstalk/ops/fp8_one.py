"""``fp8_linear`` of one row: weights go straight into sums in float32, past the matrix units."""

import torch
from torch import Tensor

from mosstalk.numerics.fp8 import Fp8Weight
from mosstalk.ops.launch import Launch, ceil_div, interprets, power_of_two, tl, triton
from mosstalk.ops.lm_parts import prefetch_rows, silu
from mosstalk.ops.lm_tiles import Division
from mosstalk.ops.parts import gdc_launch, gdc_wait

_FOUR = 4
"""Numbers in a word."""


def takes(q: Tensor, weight: Tensor) -> bool:
    """Whether the numbers lie so that they can be read in fours."""
    return q.shape[1] % _FOUR == 0 and all(x.storage_offset() % _FOUR == 0 for x in (q, weight))


def plan_fp8_one(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    residual: Tensor | None,
    gated: bool,
    divided: Division,
) -> Launch:
    """The kernel that does what ``fp8_linear`` says for one row."""
    (rows, channels), columns = q.shape, weight.q.shape[0] // (1 + gated)
    assert rows == 1
    assert weight.q.shape == (columns * (1 + gated), channels)
    assert weight.q.is_contiguous()
    assert out.shape == (1, columns)
    assert residual is None or residual.shape == out.shape
    tile = divided.tile
    inner = max(min(tile.inner, power_of_two(channels)) // _FOUR, 1)
    programs = ceil_div(columns, tile.columns)
    whole = channels % (_FOUR * inner) == 0
    return Launch(
        _one_row,
        (programs,),
        {
            "q": q[0].view(torch.int32),
            "scale": scale,
            "weight": weight.q.view(torch.int32),
            "channel_scale": weight.scale,
            "residual": residual,
            "out": out,
        },
        {
            "K": channels // _FOUR,
            "N": columns,
            "GATED": int(gated),
            "ADD": residual is not None,
            "WHOLE": whole,
            "COLUMNS": tile.columns,
            "INNER": inner,
            "AHEAD": divided.ask if whole and divided.ask < programs else 0,
            "SOFT": interprets(),
            **divided.requests(_FOUR * inner, weight.q),
        },
        tile,
    )


@triton.jit
def _one_row(
    q,
    scale,
    weight,
    channel_scale,
    residual,
    out,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    AHEAD: tl.constexpr,
    SOFT: tl.constexpr,
    RUNS: tl.constexpr,
    BULK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # All numbers are read in fours: taken apart by the load itself they would need more
    # registers, and would be waited for before the turn.
    gdc_launch(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = tl.minimum(column, N - 1)
    inner = tl.arange(0, INNER)
    gates = weight + known[:, None] * K + inner[None, :]
    w, u = _taken(gates, 0, K, N, GATED, WHOLE, INNER)
    sizes = tl.load(channel_scale + known)
    upper_sizes = tl.load(channel_scale + N + known) if GATED else sizes
    if DEPENDENT and AHEAD > 0:
        further = tl.minimum(known + AHEAD * COLUMNS, N - 1)
        prefetch_rows(weight, further, 0, K, INNER, RUNS, BULK)
        if GATED:
            prefetch_rows(weight + N * K, further, 0, K, INNER, RUNS, BULK)
    gdc_wait(DEPENDENT)
    a = tl.load(q + inner, mask=inner < K, other=0)
    size = tl.load(scale)
    stream = tl.zeros((COLUMNS,), tl.float32)
    if ADD:
        stream += tl.load(residual + column, mask=column < N, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    upper = total
    for start in tl.static_range(0, K, INNER):
        w_next, u_next, a_next = w, u, a
        if start + INNER < K:
            later = start + INNER + inner
            w_next, u_next = _taken(gates, start + INNER, K, N, GATED, WHOLE, INNER)
            a_next = tl.load(q + later, mask=later < K, other=0)
        first, second, third, fourth = _four(a, SOFT)
        total += _product(w, first, second, third, fourth, SOFT)
        if GATED:
            upper += _product(u, first, second, third, fourth, SOFT)
        w, u, a = w_next, u_next, a_next
    total = total * size * sizes
    if GATED:
        total = silu(total) * (upper * size * upper_sizes)
    tl.store(out + column, (total + stream).to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _taken(
    gates, start, K: tl.constexpr, N: tl.constexpr,
    GATED: tl.constexpr, WHOLE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Words from ``start`` on of a tile of weights, and of the upper ones; zeros past the last."""
    left = (start + tl.arange(0, INNER) < K)[None, :]
    w = tl.load(gates + start) if WHOLE else tl.load(gates + start, mask=left, other=0)
    u = w
    if GATED:
        place = gates + N * K + start
        u = tl.load(place) if WHOLE else tl.load(place, mask=left, other=0)
    return w, u


@triton.jit
def _four(word, SOFT: tl.constexpr):
    """The four E4M3 numbers of each word in float32."""
    if SOFT:
        first, second = _number(word), _number(word >> 8)
        third, fourth = _number(word >> 16), _number(word >> 24)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 halves;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 halves, low;
            mov.b32 {a, b}, halves;
            cvt.rn.f16x2.e4m3x2 halves, high;
            mov.b32 {c, d}, halves;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second, third, fourth


@triton.jit
def _number(word):
    """The E4M3 number in the last byte of each word."""
    return word.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)


@triton.jit
def _product(w, first, second, third, fourth, SOFT: tl.constexpr):
    """Sums over words (columns,) of weights (columns, words) times a row's four numbers."""
    w_first, w_second, w_third, w_fourth = _four(w, SOFT)
    near = w_first * first[None, :] + w_second * second[None, :]
    far = w_third * third[None, :] + w_fourth * fourth[None, :]
    return tl.sum(near + far, axis=1)
