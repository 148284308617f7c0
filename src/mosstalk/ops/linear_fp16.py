"""Matmuls on a CPU with weights that are numbers of float16: half the bytes, sums in float32.

What a file stores in 8 or 16 bits is widened to float32 for a CPU (``models.weights``), and a step
of few rows then takes the time that reading its weights takes. FBGEMM, a part of torch on x86-64,
multiplies float32 rows with weights in float16: the same products, added up in float32. Where it is
missing, and for weights that float16 does not hold exactly, there is nothing here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_FEWEST = 1 << 14
"""Numbers in the smallest matrix that is worth it: a call costs some microseconds."""


class _Kept(NamedTuple):
    """A matrix and its bias as FBGEMM takes them, and which state of the matrix that is."""

    version: int
    bias: Tensor | None
    packed: Any


_kept = WeakIdKeyDictionary()
"""By matrix; one that nobody holds any more is forgotten."""


def keep_fp16(weight: Tensor, bias: Tensor | None = None) -> bool:
    """Pack ``weight`` (N, K) in float32 and ``bias`` (N,) for ``linear_fp16``; say if it is packed.

    It is not if it is not on a CPU, not exact in float16, small, or if FBGEMM is missing. The
    tensor itself is known afterwards, and no other view of its numbers.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _FEWEST:
        return False
    if not torch.equal(weight.half().float(), weight):
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)
    except (AttributeError, RuntimeError):  # a torch without FBGEMM, as on Arm
        return False
    _kept[weight] = _Kept(_version(weight), bias, packed)
    return True


def linear_fp16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + b of ``x`` (..., K), or None if ``weight`` with this ``bias`` is not kept as it is.

    A row's last bits may depend on how many rows there are, up to two, as with the float32
    library (``engine.layers``).
    """
    kept: _Kept | None = _kept.get(weight)
    if kept is None or kept.bias is not bias or kept.version != _version(weight):
        return None
    if x.dtype != torch.float32 or (x.requires_grad and torch.is_grad_enabled()):
        return None
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, kept.packed)
    return y


def _version(weight: Tensor) -> int:
    """How often it was changed in place, as far as torch counts."""
    return 0 if weight.is_inference() else weight._version
