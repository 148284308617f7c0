"""Matmuls in FP8: numbers of 8 bits (E4M3) with a float32 scale to a row, in plain torch.

E4M3 has 3 bits of mantissa and reaches from 2^-9 to 448 (Micikevicius et al. 2022, "FP8 formats
for deep learning"; torch calls it ``float8_e4m3fn``). A product of two such numbers is exact in
float32, so all that is lost is lost where a number is rounded to 8 bits.

Scales are the largest magnitude over 448. A number in floating point is rounded relative to
itself, so a smaller scale would round no better and would clip the largest; this one clips
nothing, and what it rounds to zero is below 2^-18 of the largest. A weight has a scale for
each output channel and an input one for each row: both can be multiplied in once a sum is done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.errors import DeviceError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_TINY = torch.finfo(torch.float32).tiny
_CAPABILITY = (8, 9)
"""CUDA compute capability from which on a card multiplies E4M3."""
_INTEGERS = {torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``x`` (..., K) to E4M3, each row by a scale of its own.

    Returns q (..., K) in E4M3 and float32 scales (...,) such that q x scale is nearly ``x``:
    scale = max|row| / 448, q = row / scale, by divisions as IEEE 754 has them. No error is above
    2^-4 of the number itself, or 2^-10 scale where that is more. A row of zeros stays zeros; a
    row with a NaN or an infinity becomes NaN, so that it cannot pass unseen.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    # By a tensor, since on a GPU torch multiplies by a number's reciprocal instead.
    scale = (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(_TINY)
    # Where a scale is as small as that, dividing by it may round to above 448.
    return fp8_by(wide, scale[..., None]), scale


def fp8_by(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x`` / ``scale`` to E4M3; what is beyond 448, infinity included, becomes 448.

    ``scale`` is float32 and broadcasts to ``x``. NaN stays.
    """
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


@dataclass(frozen=True)
class Fp8Weight:
    """A weight (N, K) as ``q`` (N, K) in E4M3 and ``scale`` (N,) in float32."""

    q: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Round a weight (N, K) by the largest magnitude of each of its rows."""
        return cls(*fp8_rows(weight))

    @property
    def nbytes(self) -> int:
        """Bytes that a matmul reads of it."""
        return self.q.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """The weight that it stands for: float32 (N, K)."""
        return self.q.float() * self.scale[:, None]


def fp8_matmul(q: Tensor, scale: Tensor, weight: Fp8Weight) -> Tensor:
    """The matmul of q x scale with a weight: float32 (..., N).

    ``q`` (..., K) is E4M3; ``scale`` is (...,) for rows, or () for all of them. The sum runs over
    the 8-bit numbers in float32 and is then multiplied by the row's scale and by the channel's,
    in that order.
    """
    return F.linear(q.float(), weight.q.float()) * scale[..., None] * weight.scale


class Fp8Linear(nn.Module):
    """A linear layer without bias whose weight and input are E4M3: what faster ones must equal.

    ``weight`` (N, K) and ``weight_scale`` (N,) make an ``Fp8Weight``. Where there is an
    ``input_scale`` () inputs are rounded by it and those beyond it are clipped; else each row is
    rounded by its own largest magnitude. The result has the input's dtype. No change of the
    model's dtype reaches these tensors: ``to`` and ``float`` move them and leave them as they are.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, calibrated: bool = False) -> None:
        super().__init__()
        self._give("weight", torch.empty(outputs, inputs, dtype=E4M3))
        self._give("weight_scale", torch.empty(outputs, dtype=torch.float32))
        self._give("input_scale", torch.empty((), dtype=torch.float32) if calibrated else None)

    @classmethod
    def holding(cls, weight: Fp8Weight, input_scale: Tensor | None = None) -> Self:
        """The matmul with ``weight``; ``input_scale`` float32 () or None."""
        outputs, inputs = weight.q.shape
        with torch.device("meta"):
            linear = cls(inputs, outputs, calibrated=input_scale is not None)
        linear._give("weight", weight.q)
        linear._give("weight_scale", weight.scale)
        linear._give("input_scale", input_scale)
        return linear

    @property
    def value(self) -> Fp8Weight:
        """Its weight as a plain value, for kernels."""
        return Fp8Weight(self.weight.detach(), self.weight_scale.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N) in the same dtype."""
        if self.input_scale is None:
            q, scale = fp8_rows(x)
        else:
            q, scale = fp8_by(x, self.input_scale), self.input_scale
        return fp8_matmul(q, scale, self.value).to(x.dtype)

    def _give(self, name: str, value: Tensor | None) -> None:
        kept = None if value is None else nn.Parameter(value, requires_grad=False)
        self.register_parameter(name, kept)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to the bits: a change of device moves them, one of dtype passes them by."""
        del recurse
        for name, value in list(self.named_parameters(recurse=False)):
            moved = fn(value.detach().view(_INTEGERS[value.dtype]))
            self._give(name, moved.view(value.dtype))
        return self


def require_fp8(device: torch.device) -> None:
    """Raise DeviceError for a card that has no FP8; a CPU computes it in float32."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, _CAPABILITY))
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {have} and FP8 needs "
            f"{need} (L4, RTX 4090, L40S, H100, H200 and later): use the checkpoint that was "
            "quantised, in bfloat16, or --device cpu"
        )
