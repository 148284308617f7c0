"""Rows rounded to E4M3, each by a scale of its own or all by a given one, RMSNorm before it.

``model.fp8`` says what numbers become; this is the same, in one launch.
"""

import torch
from torch import Tensor

from mosstalk.numerics.fp8 import E4M3, fp8_by
from mosstalk.numerics.fp8 import fp8_rows as plain_rows
from mosstalk.ops.launch import Launch, ceil_div, interprets, power_of_two, runs, tl, triton
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.rms_norm import normalised
from mosstalk.ops.tiles import Tile

_SHARED_ROWS = 64
"""Of so few rows each is divided among several programs."""
_SHARES = 8
_WARP_CHANNELS = 512
_MOST_WARPS = 16


def fp8_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    q: Tensor,
    scale: Tensor,
    *,
    fixed: Tensor | None = None,
    invariant: bool = False,
) -> None:
    """Write f(x) / s rounded to E4M3 into ``q`` (R, C), and s into ``scale`` (R,).

    ``x`` (R, C); rows may lie apart. f is RMSNorm with ``norm_weight`` (C,), or nothing without it,
    rounded to the dtype of ``x``. s is each row's largest magnitude / 448, or ``fixed``, float32
    (), beyond which numbers are clipped. With ``invariant`` a row's bits do not depend on the other
    rows; else the squares that RMSNorm adds up may be added in another order among many.
    """
    if not runs(x):
        fp8_rows_reference(x, norm_weight, eps, q, scale, fixed=fixed)
        return
    plan_fp8_rows(x, norm_weight, eps, q, scale, fixed=fixed, invariant=invariant).run()


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
    rows = x if norm_weight is None else normalised(x, norm_weight, eps)
    found, sizes = plain_rows(rows) if fixed is None else (fp8_by(rows, fixed), fixed)
    q.copy_(found)
    scale.copy_(sizes.expand(scale.shape))


def plan_fp8_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    q: Tensor,
    scale: Tensor,
    *,
    fixed: Tensor | None = None,
    invariant: bool = False,
) -> Launch:
    """The kernel that does what ``fp8_rows`` says."""
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
    return Launch(
        _fp8_rows,
        (rows, ceil_div(channels, share)),
        {
            "x": x,
            "norm_weight": norm_weight,
            "fixed": fixed,
            "q": q,
            "scale": scale,
            "x_stride": x.stride(0),
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
    """RMSNorm, rounded where ``model.network.RMSNorm`` is."""
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
