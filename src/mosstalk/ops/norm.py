"""Norms by themselves: RMSNorm, LayerNorm with Mish, and LayerNorm in float32."""

from typing import Literal

import torch
from torch import Tensor

from mosstalk.ops.launch import (
    Launch,
    Norm,
    ceil_div,
    given,
    normalise,
    op,
    power_of_two,
    strided,
    tl,
    triton,
)
from mosstalk.ops.linear_tf32x3 import Tf32x3, store_tf32x3, takes
from mosstalk.ops.parts import gdc_launch, gdc_wait, mish, moments
from mosstalk.ops.tiles import SOME_ROWS, Tile, tile

# RMSNorm of rows.


_TILE = Tile(1, 0, 0, 4, 1)


def rms_norm_reference(x: Tensor, norm_weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """``rms_norm`` in plain torch."""
    return torch.mul(norm_weight, rms_scaled(x, eps), out=out)


def rms_normalised(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of (..., C) in plain torch, rounded as ``models.language_model.RMSNorm`` rounds."""
    return norm_weight * rms_scaled(x, eps)


def rms_scaled(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) of (..., C): RMSNorm without its weight, in a new tensor."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype)


@op(rms_norm_reference)
def rms_norm(x: Tensor, norm_weight: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Launch]:
    """Write norm_weight RMSNorm(x) into ``out`` (R, C) and return it (Zhang & Sennrich 2019).

    ``x`` (R, C) and ``norm_weight`` (C,) in one dtype; rows may lie apart. Rounded where
    ``models.language_model.RMSNorm`` is.
    """
    rows, channels = x.shape
    assert norm_weight.shape == (channels,)
    assert out.shape == x.shape
    assert x.stride(1) == out.stride(1) == 1
    return out, Launch(
        _rms_norm,
        (rows,),
        {**strided(x=x, out=out), "norm_weight": norm_weight, "eps": eps},
        {"C": channels, "WIDTH": power_of_two(channels)},
        _TILE,
    )


@triton.jit
def _rms_norm(
    x,
    norm_weight,
    out,
    x_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < C
    factor = tl.load(norm_weight + channel, mask=inside, other=0.0)
    gdc_wait(DEPENDENT)
    a = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
    wide = a.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / C + eps)
    even = (wide * scale).to(a.dtype)
    found = factor.to(tl.float32) * even.to(tl.float32)
    tl.store(out + row * out_stride + channel, found.to(out.dtype.element_ty), mask=inside)


# A LayerNorm of rows with its activation, rounded for the matmuls that read it.


Activation = Literal["none", "mish"]


def norm_act_reference(
    x: Tensor,
    norm: Norm,
    out: Tensor | None = None,
    *,
    activation: Activation = "none",
    add: Tensor | None = None,
) -> Tensor:
    """``norm_act`` in plain torch."""
    y = normalise(x, norm, mish=activation == "mish")
    return given(y if add is None else y.add_(add), out)


@op(norm_act_reference)
def norm_act(
    x: Tensor,
    norm: Norm,
    out: Tensor | None = None,
    *,
    activation: Activation = "none",
    add: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """Write act(LN(x)) + add into ``out`` and return it.

    ``x`` (R, C) float32, ``out`` (R, C) in any float dtype, made like ``x`` where it is None,
    ``add`` (C,) float32. Rows may lie apart, channels may not.
    """
    out = torch.empty_like(x) if out is None else out
    rows, channels = x.shape
    assert out.shape == x.shape
    assert x.stride(1) == out.stride(1) == 1
    norm_weight, shift, eps = norm
    size = tile("norm_act", rows, out.dtype)
    return out, Launch(
        _norm_act,
        (ceil_div(rows, size.rows),),
        {
            **strided(x=x, out=out),
            "norm_weight": norm_weight,
            "shift": shift,
            "add": add,
            "rows": rows,
            "eps": eps,
        },
        {
            "C": channels,
            "MISH": activation == "mish",
            "ADD": add is not None,
            "ROWS": size.rows,
            "WIDTH": power_of_two(channels),
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["rows"])
def _norm_act(
    x,
    norm_weight,
    shift,
    add,
    out,
    rows,
    x_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    MISH: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, WIDTH)
    there = channel < C
    factor = tl.load(norm_weight + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    offset = tl.load(shift + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    added = offset
    if ADD:
        added = tl.load(add + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    gdc_wait(DEPENDENT)
    inside = (row < rows) & there[None, :]
    y = tl.load(x + row * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    mean, scale = moments(y, inside, eps, C)
    y = (y - mean) * scale * factor + offset
    if MISH:
        y = mish(y)
    if ADD:
        y += added
    tl.store(out + row * out_stride + channel[None, :], y.to(out.dtype.element_ty), mask=inside)


# LayerNorm of rows, left as the float32 matmuls read them.


_WARPS = 4


def norm_float32_reference(x: Tensor, norm: Norm, *, split: bool = False) -> Tf32x3:
    """``norm_float32`` in plain torch."""
    norm_weight, shift, eps = norm
    return Tf32x3.of(torch.layer_norm(x, norm_weight.shape, norm_weight, shift, eps), split=split)


@op(norm_float32_reference, takes=takes)
def norm_float32(x: Tensor, norm: Norm, *, split: bool = False) -> tuple[Tf32x3, Launch]:
    """LN(x) of ``x`` (R, C), as high and low parts where ``split``.

    The kernel takes float32, the reference any precision where nothing is to be split.
    """
    rows, channels = x.shape
    Tf32x3(x).check(rows, channels)
    out = Tf32x3.empty(x, channels, split=split)
    norm_weight, shift, eps = norm
    return out, Launch(
        _norm_float32,
        (rows,),
        {
            "x": x,
            "norm_weight": norm_weight,
            "shift": shift,
            "high": out.high,
            "low": out.low,
            "eps": eps,
        },
        {"C": channels, "WIDTH": power_of_two(channels), "SPLIT": split},
        Tile(1, channels, 0, _WARPS, 1),
    )


@triton.jit
def _norm_float32(
    x,
    norm_weight,
    shift,
    high,
    low,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    channel = tl.arange(0, WIDTH)[None, :]
    inside = channel < C
    factor = tl.load(norm_weight + channel, mask=inside, other=0.0)
    offset = tl.load(shift + channel, mask=inside, other=0.0)
    gdc_wait(DEPENDENT)
    place = tl.program_id(0) * C + channel
    row = tl.load(x + place, mask=inside, other=0.0)
    mean, scale = moments(row, inside, eps, C)
    store_tf32x3(high, low, place, (row - mean) * scale * factor + offset, inside, SPLIT)
