"""A linear layer in FP8 on rows that are in FP8 already, SwiGLU or a residual after it."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.numerics.fp8 import E4M3, Fp8Weight, fp8_product
from mosstalk.ops import fp8_one, rms_linear
from mosstalk.ops.launch import Launch, runs
from mosstalk.ops.lm_tiles import Division, division, kind_of
from mosstalk.ops.rms_linear import LinearWorkspace

_SCALED_SINCE = (8, 9)
_SIDE = 16
"""Of a matrix's sides a general library asks that they be multiples of it."""


def fp8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    invariant: bool = False,
    workspace: LinearWorkspace | None = None,
) -> Tensor:
    """Write f((q x scale) W^T) + residual into ``out`` (R, N) and return it.

    ``q`` (R, C) in E4M3 and ``scale`` (R,), as ``fp8_rows`` leaves them; ``weight`` (N, C), its
    rows those of G, then of U where ``gated``: see ``rms_linear``, also for ``residual``,
    ``invariant`` and ``workspace``. Sums are those of ``model.fp8.fp8_product``: 8-bit numbers
    are added in float32, on matrix units no more than a tile's channels within the unit (of
    compute capability 9.0 those keep 13 bits of the largest); nothing else is rounded.
    """
    if not runs(q):
        return fp8_linear_reference(q, scale, weight, out, residual=residual, gated=gated)
    # Numbers in fours are what the kernel for one row reads.
    few = len(q) if fp8_one.takes(q, weight.q) else max(len(q), 2)
    kind = kind_of(q.shape[1], normed=residual is None, gated=gated)
    divided = division(kind, few, E4M3, invariant=invariant)
    how: dict[str, Any] = {"residual": residual, "gated": gated, "divided": divided}
    plan_fp8_linear(q, scale, weight, out, workspace=workspace, **how).run()
    return out


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
    y = fp8_product(q, scale, weight)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return out.copy_(y if residual is None else residual + y)


def plan_fp8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    divided: Division,
    workspace: LinearWorkspace | None = None,
) -> Launch:
    """The kernel that does what ``fp8_linear`` says."""
    assert q.dtype == weight.q.dtype == E4M3
    assert scale.shape == (len(q),)
    assert weight.scale.shape == (len(weight.q),)
    if divided.one:
        return fp8_one.plan_fp8_one(q, scale, weight, out, residual, gated, divided)
    return rms_linear.plan_rms_linear(
        q, None, 0.0, weight.q, out,
        scales=(scale, weight.scale), residual=residual, gated=gated, divided=divided,
        workspace=workspace,
    )  # fmt: skip


def library_takes(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether torch has a product with this of rows in E4M3, all with scales, into ``dtype``.

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
    """Write (q x scale) W^T into ``out`` (R, N), bfloat16, by torch's own product; return it.

    For many rows; ``library_takes`` says whether it can be.
    """
    scales = scale[:, None], weight.scale[None, :]
    torch._scaled_mm(q, weight.q.t(), *scales, out_dtype=out.dtype, out=out)
    return out
