"""RMSNorm of rows, after what is to be added to them."""

import torch
from torch import Tensor

from mosstalk.ops.launch import Launch, power_of_two, runs, tl, triton
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

_TILE = Tile(1, 0, 0, 4, 1)


def rms_norm(
    x: Tensor, norm_weight: Tensor, eps: float, out: Tensor, *, add: Tensor | None = None
) -> Tensor:
    """Write norm_weight RMSNorm(x) into ``out`` (R, C) and return it (Zhang & Sennrich 2019).

    ``x``, ``add`` (R, C) and ``norm_weight`` (C,) in one dtype; rows may lie apart. With ``add``, x
    becomes x + add first, rounded. Rounded where ``model.network.RMSNorm`` is.
    """
    if not runs(x):
        return rms_norm_reference(x, norm_weight, eps, out, add=add)
    plan_rms_norm(x, norm_weight, eps, out, add=add).run()
    return out


def rms_norm_reference(
    x: Tensor, norm_weight: Tensor, eps: float, out: Tensor, *, add: Tensor | None = None
) -> Tensor:
    """``rms_norm`` in plain torch."""
    if add is not None:
        x += add
    return out.copy_(normalised(x, norm_weight, eps))


def normalised(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of (..., C) in plain torch, rounded as ``model.network.RMSNorm`` rounds."""
    wide = x.float()
    return norm_weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(
        x.dtype
    )


def plan_rms_norm(
    x: Tensor, norm_weight: Tensor, eps: float, out: Tensor, *, add: Tensor | None = None
) -> Launch:
    """The kernel that does what ``rms_norm`` says."""
    rows, channels = x.shape
    assert norm_weight.shape == (channels,)
    assert out.shape == x.shape
    assert x.stride(1) == out.stride(1) == 1
    assert add is None or (add.shape == x.shape and add.stride(1) == 1)
    return Launch(
        _rms_norm,
        (rows,),
        {
            "x": x,
            "add": add,
            "norm_weight": norm_weight,
            "out": out,
            "x_stride": x.stride(0),
            "add_stride": 0 if add is None else add.stride(0),
            "out_stride": out.stride(0),
            "eps": eps,
        },
        {"C": channels, "WIDTH": power_of_two(channels), "ADD": add is not None},
        _TILE,
    )


@triton.jit
def _rms_norm(
    x,
    add,
    norm_weight,
    out,
    x_stride,
    add_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    gdc_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < C
    factor = tl.load(norm_weight + channel, mask=inside, other=0.0)
    gdc_wait(DEPENDENT)
    here = x + row * x_stride + channel
    a = tl.load(here, mask=inside, other=0.0)
    if ADD:
        beside = tl.load(add + row * add_stride + channel, mask=inside, other=0.0)
        a = (a.to(tl.float32) + beside.to(tl.float32)).to(a.dtype)
        tl.store(here, a, mask=inside)
    wide = a.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / C + eps)
    even = (wide * scale).to(a.dtype)
    found = factor.to(tl.float32) * even.to(tl.float32)
    tl.store(out + row * out_stride + channel, found.to(out.dtype.element_ty), mask=inside)
