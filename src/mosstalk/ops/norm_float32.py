"""LayerNorm of rows, left as the float32 products read them."""

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, Norm, power_of_two, tl, triton
from mosstalk.ops.parts import gdc_wait, moments
from mosstalk.ops.tf32x3 import Tf32x3, store_tf32x3, takes
from mosstalk.ops.tiles import Tile

_WARPS = 4


def norm_float32(x: Tensor, norm: Norm, *, split: bool = False) -> Tf32x3:
    """LN(x) of ``x`` (R, C), in halves where they are to be ``split``.

    The kernel takes float32, the reference any precision where nothing is to be split.
    """
    if not takes(x):
        return norm_float32_reference(x, norm, split=split)
    out = Tf32x3.empty(x, x.shape[1], split=split)
    plan_norm_float32(x, norm, out).run()
    return out


def norm_float32_reference(x: Tensor, norm: Norm, *, split: bool = False) -> Tf32x3:
    """``norm_float32`` in plain torch."""
    norm_weight, shift, eps = norm
    return Tf32x3.of(torch.layer_norm(x, norm_weight.shape, norm_weight, shift, eps), split=split)


def plan_norm_float32(x: Tensor, norm: Norm, out: Tf32x3) -> Launch:
    """The kernel that does what ``norm_float32`` says."""
    rows, channels = x.shape
    Tf32x3(x).check(rows, channels)
    out.check(rows, channels)
    norm_weight, shift, eps = norm
    return Launch(
        _norm,
        (rows,),
        {
            "x": x,
            "norm_weight": norm_weight,
            "shift": shift,
            "high": out.high,
            "low": out.low,
            "eps": eps,
        },
        {"C": channels, "WIDTH": power_of_two(channels), "SPLIT": out.low is not None},
        Tile(1, channels, 0, _WARPS, 1),
    )


@triton.jit
def _norm(
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
