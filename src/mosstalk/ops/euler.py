"""One guided Euler step of the flow."""

from torch import Tensor

from mosstalk.ops.launch import Launch, ceil_div, op, strided, tl, triton
from mosstalk.ops.parts import gdc_wait
from mosstalk.ops.tiles import SOME_ROWS, tile


def euler_reference(
    x_in: Tensor,
    velocity: Tensor,
    guidance: float,
    duration: float,
    rounded: Tensor | None = None,
) -> Tensor:
    """``euler`` in plain torch."""
    conditioned, unconditioned = velocity.chunk(2, dim=-2)
    guided = (1 + guidance) * conditioned - guidance * unconditioned
    x = x_in[..., : velocity.shape[-1]]
    x.unflatten(-2, (2, -1)).add_((duration * guided).unsqueeze(-3))
    if rounded is not None:
        rounded[:, : velocity.shape[1]] = x
    return x_in


@op(euler_reference)
def euler(
    x_in: Tensor,
    velocity: Tensor,
    guidance: float,
    duration: float,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """x += duration ((1 + g) v_conditioned - g v_unconditioned), in place; return ``x_in``.

    ``x_in`` (2 n, C) float32 holds x in its first M columns, the same in both branches, the
    conditioned rows first; ``velocity`` (2 n, M) float32 in the same order; g = ``guidance``
    (classifier-free guidance, Ho & Salimans 2021). ``rounded`` (2 n, at least M) in any float
    dtype, where given, gets the new x in its first M columns.
    """
    rows, columns = velocity.shape
    assert x_in.shape[0] == rows
    assert rows % 2 == 0
    assert x_in.stride(1) == velocity.stride(1) == 1
    assert rounded is None or (rounded.shape[0] == rows and rounded.stride(1) == 1)
    size = tile("euler", rows, velocity.dtype)
    return x_in, Launch(
        _euler,
        (ceil_div(rows // 2, size.rows), ceil_div(columns, size.columns)),
        {
            **strided(velocity=velocity, rounded=rounded),
            "x_in": x_in,
            "x_stride": x_in.stride(0),
            "half": rows // 2,
            "guidance": guidance,
            "duration": duration,
        },
        {
            "M": columns,
            "ROUNDED": rounded is not None,
            "ROWS": size.rows,
            "COLUMNS": size.columns,
        },
        size,
        short=rows <= SOME_ROWS,
    )


@triton.jit(do_not_specialize=["half"])
def _euler(
    x_in,
    velocity,
    rounded,
    half,
    x_stride,
    rounded_stride,
    velocity_stride,
    guidance,
    duration,
    M: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < half) & (column < M)
    gdc_wait(DEPENDENT)
    first = velocity + row * velocity_stride + column
    conditioned = tl.load(first, mask=inside)
    unconditioned = tl.load(first + half * velocity_stride, mask=inside)
    step = duration * ((1.0 + guidance) * conditioned - guidance * unconditioned)
    place = x_in + row * x_stride + column
    again = place + half * x_stride
    one, other = tl.load(place, mask=inside) + step, tl.load(again, mask=inside) + step
    tl.store(place, one, mask=inside)
    tl.store(again, other, mask=inside)
    if ROUNDED:
        copy = rounded + row * rounded_stride + column
        tl.store(copy, one.to(rounded.dtype.element_ty), mask=inside)
        tl.store(copy + half * rounded_stride, other.to(rounded.dtype.element_ty), mask=inside)
