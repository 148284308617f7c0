"""Weights of the flow's layers, arranged for the few rows that a hop has.

Channels lie last. Calling a torch module costs as much as a small matmul, and a convolution
of few rows twice as much as the matmul it is; a hop has some five hundred of them. Shapes:
B sequences, T rows, C channels, k the kernel.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(NamedTuple):
    """A linear layer, or several of the same input side by side."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *modules: nn.Module) -> "Linear":
        """The layers' outputs one after the other; all have a bias or none has."""
        layers = [module for module in modules if isinstance(module, nn.Linear)]
        assert len(layers) == len(modules)
        if len(layers) == 1:
            return cls(layers[0].weight, layers[0].bias)
        weights: list[Tensor] = [layer.weight for layer in layers]
        # A layer made without bias has None here.
        biases: list[Tensor | None] = [layer.bias for layer in layers]
        known = [bias for bias in biases if bias is not None]
        return cls(torch.cat(weights), torch.cat(known) if known else None)

    @classmethod
    def of_pointwise(cls, conv: nn.Conv1d) -> "Linear":
        """A convolution with a kernel of one."""
        return cls(conv.weight[:, :, 0], conv.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T, inputs) to (B, T, outputs)."""
        return F.linear(x, self.weight, self.bias)


class Norm(NamedTuple):
    """A LayerNorm over the channels."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        """The norm's own weights."""
        assert isinstance(module, nn.LayerNorm)
        return cls(module.weight, module.bias, module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T, C) to the same."""
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Conv(NamedTuple):
    """A convolution of stride one, its weight (outputs, k C) as the window's rows lie."""

    weight: Tensor
    bias: Tensor | None
    kernel: int

    @classmethod
    def of(cls, module: nn.Module) -> "Conv":
        """The convolution's weights, copied in that order."""
        assert isinstance(module, nn.Conv1d)
        arranged = module.weight.transpose(1, 2).flatten(1)
        return cls(arranged.contiguous(), module.bias, module.kernel_size[0])
