"""Matmuls in FP8 (E4M3): rows are rounded, then multiplied with rounded weights."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.numerics.fp8 import E4M3, Fp8Weight, fp8_by, fp8_matmul
from mosstalk.numerics.fp8 import fp8_rows as plain_rows
from mosstalk.ops.launch import (
    Launch,
    Workspace,
    ceil_div,
    interprets,
    op,
    power_of_two,
    runs,
    strided,
    tl,
    triton,
)
from mosstalk.ops.linear import divided_linear, prefetch_rows, silu
from mosstalk.ops.linear_tiles import Division, division, kind_of
from mosstalk.ops.norm import rms_normalised
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

# Rows rounded to E4M3, each by a scale of its own or all by a given one, RMSNorm before it.
#
# ``numerics.fp8`` says what numbers become; this is the same, in one launch.


_SHARED_ROWS = 64
"""Of so few rows each is divided among several programs."""
_SHARES = 8
_WARP_CHANNELS = 512
_MOST_WARPS = 16


def fp8_rows_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    q: Tensor,
    scale: Tensor,
    *,
    fixed: Tensor | None = None,
) -> None:
    """``fp8_rows`` in plain torch."""
    rows = x if norm_weight is None else rms_normalised(x, norm_weight, eps)
    found, sizes = plain_rows(rows) if fixed is None else (fp8_by(rows, fixed), fixed)
    q.copy_(found)
    scale.copy_(sizes.expand(scale.shape))


@op(fp8_rows_reference)
def fp8_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    q: Tensor,
    scale: Tensor,
    *,
    fixed: Tensor | None = None,
    invariant: bool = False,
) -> tuple[None, Launch]:
    """Write f(x) / s rounded to E4M3 into ``q`` (R, C), and s into ``scale`` (R,).

    ``x`` (R, C); rows may lie apart. f is RMSNorm with ``norm_weight`` (C,), or nothing without it,
    rounded to the dtype of ``x``. s is each row's largest magnitude / 448, or ``fixed``, float32
    (), beyond which numbers are clipped. With ``invariant`` a row's bits do not depend on the other
    rows; else the squares that RMSNorm adds up may be added in another order among many.
    """
    rows, channels = x.shape
    assert q.shape == x.shape
    assert q.dtype == E4M3
    assert q.is_contiguous()
    assert scale.shape == (rows,)
    assert scale.dtype == torch.float32
    assert x.stride(1) == 1
    width = power_of_two(channels)
    shared = rows <= _SHARED_ROWS or invariant
    share = max(width // _SHARES, 16) if shared else width
    warps = min(max(width // _WARP_CHANNELS, 1), _MOST_WARPS)
    return None, Launch(
        _fp8_rows,
        (rows, ceil_div(channels, share)),
        {
            **strided(x=x),
            "norm_weight": norm_weight,
            "fixed": fixed,
            "q": q,
            "scale": scale,
            "eps": eps,
        },
        {
            "C": channels,
            "WIDTH": width,
            "SHARE": share,
            "NORM": norm_weight is not None,
            "FIXED": fixed is not None,
            "SOFT": interprets(),
        },
        Tile(1, share, width, warps, 1),
    )


@triton.jit
def _fp8_rows(
    x,
    norm_weight,
    fixed,
    q,
    scale,
    x_stride,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    NORM: tl.constexpr,
    FIXED: tl.constexpr,
    SOFT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Every program looks at a whole row, and divides no more than its share: dividing is slow.
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    own = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    factor, own_factor = channel, own
    if NORM:
        factor = tl.load(norm_weight + channel, mask=channel < C, other=0.0)
        own_factor = tl.load(norm_weight + own, mask=own < C, other=0.0)
    size = tl.load(fixed) if FIXED else 1.0
    gdc_wait(DEPENDENT)
    here = x + row * x_stride
    a = tl.load(here + channel, mask=channel < C, other=0.0)
    share = tl.load(here + own, mask=own < C, other=0.0)
    if NORM:
        wide = a.to(tl.float32)
        root = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / C + eps)
        a = _normed(a, factor, root)
        share = _normed(share, own_factor, root)
    if not FIXED:
        # As integers, of which those of NaN and infinity are the largest.
        bits = a.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        size = tl.div_rn(largest, 448.0)
        size = tl.where(size < 1.1754943508222875e-38, 1.1754943508222875e-38, size)
    if tl.program_id(1) == 0:
        tl.store(scale + row, size)
    found = tl.div_rn(share.to(tl.float32), tl.zeros((SHARE,), tl.float32) + size)
    found = tl.where(found > 448.0, 448.0, found)
    found = tl.where(found < -448.0, -448.0, found)
    if SOFT:
        found = _rounded(found)
    tl.store(q + row * C + own, found.to(q.dtype.element_ty), mask=own < C)


@triton.jit
def _normed(x, factor, root):
    """RMSNorm, rounded where ``models.language_model.RMSNorm`` is."""
    even = (x.to(tl.float32) * root).to(x.dtype)
    return (factor.to(tl.float32) * even.to(tl.float32)).to(x.dtype)


@triton.jit
def _rounded(x):
    """Numbers of magnitude 448 at most rounded to those of E4M3, ties to even.

    For where a change of type does not round as IEEE 754 has it, as in Triton's interpreter.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Three bits of mantissa; what is added leaves no room for more.
    shift = tl.maximum(power, 0.015625) * (0.125 * 12582912.0)
    return (x + shift) - shift


# ``fp8_linear`` of one row: weights go straight into sums in float32, past the matrix units.


_FOUR = 4
"""Numbers in a word."""


def takes(q: Tensor, weight: Tensor) -> bool:
    """Whether the numbers lie so that they can be read in fours."""
    return q.shape[1] % _FOUR == 0 and all(x.storage_offset() % _FOUR == 0 for x in (q, weight))


def _one_row_fp8(
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
        _fp8_linear_one_row,
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
def _fp8_linear_one_row(
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
        total += _matmul(w, first, second, third, fourth, SOFT)
        if GATED:
            upper += _matmul(u, first, second, third, fourth, SOFT)
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
def _matmul(w, first, second, third, fourth, SOFT: tl.constexpr):
    """Sums over words (columns,) of weights (columns, words) times a row's four numbers."""
    w_first, w_second, w_third, w_fourth = _four(w, SOFT)
    near = w_first * first[None, :] + w_second * second[None, :]
    far = w_third * third[None, :] + w_fourth * fourth[None, :]
    return tl.sum(near + far, axis=1)


# A linear layer in FP8 on rows that are in FP8 already, SwiGLU or a residual after it.


_SCALED_SINCE = (8, 9)
_SIDE = 16
"""Of a matrix's sides a general library asks that they be multiples of it."""


def fp8_linear_reference(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """``fp8_linear`` in plain torch."""
    y = fp8_matmul(q, scale, weight)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return out.copy_(y if residual is None else residual + y)


def divided_fp8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    divided: Division,
    workspace: Workspace | None = None,
) -> Launch:
    """The kernel of ``fp8_linear`` by one division."""
    assert q.dtype == weight.q.dtype == E4M3
    assert scale.shape == (len(q),)
    assert weight.scale.shape == (len(weight.q),)
    if divided.one:
        return _one_row_fp8(q, scale, weight, out, residual, gated, divided)
    return divided_linear(
        q, None, 0.0, weight.q, out,
        scales=(scale, weight.scale), residual=residual, gated=gated, divided=divided,
        workspace=workspace,
    )  # fmt: skip


@op(fp8_linear_reference)
def fp8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    invariant: bool = False,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Launch]:
    """Write f((q x scale) W^T) + residual into ``out`` (R, N) and return it.

    ``q`` (R, C) in E4M3 and ``scale`` (R,), as ``fp8_rows`` leaves them; ``weight`` (N, C), its
    rows those of G, then of U where ``gated``: see ``rms_linear``, also for ``residual``,
    ``invariant`` and ``workspace``. Sums are those of ``numerics.fp8.fp8_matmul``: 8-bit numbers
    are added in float32, on matrix units no more than a tile's channels within the unit (of
    compute capability 9.0 those keep 13 bits of the largest); nothing else is rounded.
    """
    # Numbers in fours are what the kernel for one row reads.
    few = len(q) if takes(q, weight.q) else max(len(q), 2)
    kind = kind_of(q.shape[1], normed=residual is None, gated=gated)
    divided = division(kind, few, E4M3, invariant=invariant)
    return out, divided_fp8_linear(
        q, scale, weight, out,
        residual=residual, gated=gated, divided=divided, workspace=workspace,
    )  # fmt: skip


def library_takes(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether torch has a matmul with this of rows in E4M3, all with scales, into ``dtype``.

    It has one into bfloat16, of sides that are multiples of 16, where a card has FP8.
    """
    q = weight.q
    if not (runs(q) and q.is_cuda and dtype == torch.bfloat16):
        return False
    return all(side % _SIDE == 0 for side in q.shape) and _scales(q.device)


@cache
def _scales(device: torch.device) -> bool:
    known = hasattr(torch, "_scaled_mm")
    return known and torch.cuda.get_device_capability(device) >= _SCALED_SINCE


def fp8_library(q: Tensor, scale: Tensor, weight: Fp8Weight, out: Tensor) -> Tensor:
    """Write (q x scale) W^T into ``out`` (R, N), bfloat16, by torch's own matmul; return it.

    For many rows; ``library_takes`` says whether it can be.
    """
    scales = scale[:, None], weight.scale[None, :]
    torch._scaled_mm(q, weight.q.t(), *scales, out_dtype=out.dtype, out=out)
    return out
