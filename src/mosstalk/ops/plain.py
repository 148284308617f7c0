"""Pieces that the references share, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.ops.launch import Norm


def normalise(x: Tensor, norm: Norm | None, *, mish: bool = False) -> Tensor:
    """LayerNorm of (..., C) in float32, then Mish where asked for."""
    if norm is not None:
        norm_weight, shift, eps = norm
        x = torch.layer_norm(x, norm_weight.shape, norm_weight.float(), shift.float(), eps)
    return F.mish(x) if mish else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, inputs rounded to the weight's dtype, sums float32, (..., N) float32."""
    rounded = x.to(weight.dtype).float()
    return F.linear(rounded, weight.float(), None if bias is None else bias.float())
