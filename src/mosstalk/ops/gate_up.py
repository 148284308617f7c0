"""SwiGLU of what one product has made, gate and up side by side."""

import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, power_of_two, runs, tl, triton
from mosstalk.ops.lm_parts import silu
from mosstalk.ops.parts import gdc_launch, gdc_wait
from mosstalk.ops.tiles import Tile

_TILE = Tile(1, 1024, 0, 4, 1)


def gate_up(y: Tensor, out: Tensor) -> Tensor:
    """Write silu(gate) up of ``y`` (R, 2N), gate then up, into ``out`` (R, N); return it.

    Both in one dtype; rows may lie apart. Rounded where ``model.network.MLP`` is: after silu
    and after the product.
    """
    if not runs(y):
        return gate_up_reference(y, out)
    plan_gate_up(y, out).run()
    return out


def gate_up_reference(y: Tensor, out: Tensor) -> Tensor:
    """``gate_up`` in plain torch."""
    gate, up = y.chunk(2, dim=1)
    return out.copy_(F.silu(gate) * up)


def plan_gate_up(y: Tensor, out: Tensor) -> Launch:
    """The kernel that does what ``gate_up`` says."""
    rows, columns = out.shape
    assert y.shape == (rows, 2 * columns)
    assert y.dtype == out.dtype
    assert y.stride(1) == out.stride(1) == 1
    width = min(_TILE.columns, power_of_two(columns))
    return Launch(
        _gate_up,
        (rows, ceil_div(columns, width)),
        {"y": y, "out": out, "y_stride": y.stride(0), "out_stride": out.stride(0)},
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
