"""A LayerNorm of rows with its activation, rounded for the products that read it."""

from typing import Literal

from torch import Tensor

from mosstalk.ops.launch import Launch, Norm, ceil_div, power_of_two, runs, tl, triton
from mosstalk.ops.parts import gdc_launch, gdc_wait, mish, moments
from mosstalk.ops.plain import normalise
from mosstalk.ops.tiles import SOME_ROWS, tile

Activation = Literal["none", "mish"]


def norm_act(
    x: Tensor,
    norm: Norm,
    out: Tensor,
    *,
    activation: Activation = "none",
    add: Tensor | None = None,
) -> Tensor:
    """Write act(LN(x)) + add into ``out`` and return it.

    ``x`` (R, C) float32, ``out`` (R, C) in any float dtype, ``add`` (C,) float32. Rows may lie
    apart, channels may not.
    """
    if not runs(x):
        return norm_act_reference(x, norm, out, activation=activation, add=add)
    plan_norm_act(x, norm, out, activation=activation, add=add).run()
    return out


def norm_act_reference(
    x: Tensor,
    norm: Norm,
    out: Tensor,
    *,
    activation: Activation = "none",
    add: Tensor | None = None,
) -> Tensor:
    """``norm_act`` in plain torch."""
    y = normalise(x, norm, mish=activation == "mish")
    return out.copy_(y if add is None else y + add.float())


def plan_norm_act(
    x: Tensor,
    norm: Norm,
    out: Tensor,
    *,
    activation: Activation = "none",
    add: Tensor | None = None,
) -> Launch:
    """The kernel that does what ``norm_act`` says."""
    rows, channels = x.shape
    assert out.shape == x.shape
    assert x.stride(1) == out.stride(1) == 1
    norm_weight, shift, eps = norm
    size = tile("norm_act", rows, out.dtype)
    return Launch(
        _norm_act,
        (ceil_div(rows, size.rows),),
        {
            "x": x,
            "norm_weight": norm_weight,
            "shift": shift,
            "add": add,
            "out": out,
            "rows": rows,
            "x_stride": x.stride(0),
            "out_stride": out.stride(0),
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
