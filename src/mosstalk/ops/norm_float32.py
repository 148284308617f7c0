"""LayerNorm of rows, left as the float32 products read them."""

import torch
from torch import Tensor

from mosstalk.ops.halves import Halves, put_halves, takes
from mosstalk.ops.launch import Launch, Norm, power_of_two, tl, triton
from mosstalk.ops.parts import follow, moments
from mosstalk.ops.tiles import Tile

_WARPS = 4


def norm_float32(x: Tensor, norm: Norm, *, split: bool = False) -> Halves:
    """LN(x) of ``x`` (R, C), in halves where they are to be ``split``.

    The kernel takes float32, the twin any precision where nothing is to be split.
    """
    if not takes(x):
        return norm_float32_twin(x, norm, split=split)
    out = Halves.empty(x, x.shape[1], split=split)
    plan(x, norm, out).run()
    return out


def norm_float32_twin(x: Tensor, norm: Norm, *, split: bool = False) -> Halves:
    """``norm_float32`` in plain torch."""
    gain, shift, eps = norm
    return Halves.of(torch.layer_norm(x, gain.shape, gain, shift, eps), split=split)


def plan(x: Tensor, norm: Norm, out: Halves) -> Launch:
    """The kernel that does what ``norm_float32`` says."""
    rows, channels = x.shape
    Halves(x).check(rows, channels)
    out.check(rows, channels)
    gain, shift, eps = norm
    return Launch(
        _norm,
        (rows,),
        {"x": x, "gain": gain, "shift": shift, "high": out.high, "low": out.low, "eps": eps},
        {"C": channels, "WIDTH": power_of_two(channels), "SPLIT": out.low is not None},
        Tile(1, channels, 0, _WARPS, 1),
    )


@triton.jit
def _norm(
    x,
    gain,
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
    factor = tl.load(gain + channel, mask=inside, other=0.0)
    offset = tl.load(shift + channel, mask=inside, other=0.0)
    follow(DEPENDENT)
    place = tl.program_id(0) * C + channel
    row = tl.load(x + place, mask=inside, other=0.0)
    mean, scale = moments(row, inside, eps, C)
    put_halves(high, low, place, (row - mean) * scale * factor + offset, inside, SPLIT)
