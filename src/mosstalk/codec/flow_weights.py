"""The flow's weights as its kernels read them: matmuls in one dtype, all else float32.

Channels lie last. Calling a torch module costs as much as a small matmul, and a convolution
of few rows twice as much as the matmul it is; a hop has some five hundred of them. Shapes:
B sequences, T rows, C channels of a layer, k the kernel, steps Euler steps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.models.flow_networks import (
    ConvBlock,
    EncoderBlock,
    Estimator,
    GeluProjection,
    ResidualBlock,
    TransformerBlock,
)
from mosstalk.ops.launch import keep_fp16


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


def packed(layer: Linear | Conv, dtype: torch.dtype) -> Linear:
    """A layer with its weight (N, K) in ``dtype`` and its bias in float32, both contiguous."""
    bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
    weight = layer.weight.detach().to(dtype).contiguous()
    keep_fp16(weight, bias)
    return Linear(weight, bias)


def held_bytes(value: object) -> int:
    """Memory of all tensors in ``value``, however deep in tuples, lists and objects' fields."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    if isinstance(value, dict):
        return held_bytes(list(value.values()))
    return 0


def plain(norm: nn.Module) -> Norm:
    """A LayerNorm in float32."""
    weight, bias, eps = Norm.of(norm)
    return Norm(weight.detach().float(), bias.detach().float(), eps)


class Transformer(NamedTuple):
    """A transformer block: q, k and v side by side (3 H d, C), then as the names say."""

    norm: Norm
    qkv: Linear
    out: Linear
    wide_norm: Norm
    widen: Linear
    narrow: Linear

    @classmethod
    def of(cls, block: nn.Module, dtype: torch.dtype) -> "Transformer":
        """A block of the estimator."""
        assert isinstance(block, TransformerBlock)
        attention, (widen, _, narrow) = block.attn1, block.ff.net.children()
        assert isinstance(widen, GeluProjection)
        return cls(
            plain(block.norm1),
            packed(Linear.of(attention.to_q, attention.to_k, attention.to_v), dtype),
            packed(Linear.of(attention.to_out[0]), dtype),
            plain(block.norm3),
            packed(Linear.of(widen.proj), dtype),
            packed(Linear.of(narrow), dtype),
        )

    @classmethod
    def of_encoder(cls, block: nn.Module) -> "Transformer":
        """A block of the encoder, in float32, without what its attention knows of distances."""
        assert isinstance(block, EncoderBlock)
        attention, ff = block.self_attn, block.feed_forward
        return cls(
            plain(block.norm_mha),
            packed(
                Linear.of(attention.linear_q, attention.linear_k, attention.linear_v), torch.float32
            ),
            packed(Linear.of(attention.linear_out), torch.float32),
            plain(block.norm_ff),
            packed(Linear.of(ff.w_1), torch.float32),
            packed(Linear.of(ff.w_2), torch.float32),
        )


class Stage(NamedTuple):
    """A stage of the estimator; ``times`` (steps, C) is what each step's time adds in it."""

    conv1: Linear
    norm1: Norm
    times: Tensor
    conv2: Linear
    norm2: Norm
    beside: Linear
    transformers: list[Transformer]
    closing: Linear | None

    @classmethod
    def of(cls, stage: nn.Module, time: Tensor, dtype: torch.dtype) -> "Stage":
        """A stage for the time embeddings ``time`` (steps, 4 C)."""
        residual, transformers, *closing = stage.children()
        assert isinstance(residual, ResidualBlock)
        (conv1, norm1), (conv2, norm2) = (
            _conv_block(block, dtype) for block in (residual.block1, residual.block2)
        )
        return cls(
            conv1,
            norm1,
            residual.mlp(time).detach().float().contiguous(),
            conv2,
            norm2,
            packed(Linear.of_pointwise(residual.res_conv), dtype),
            [Transformer.of(block, dtype) for block in transformers.children()],
            packed(Conv.of(closing[0]), dtype) if closing else None,
        )


def _conv_block(block: ConvBlock, dtype: torch.dtype) -> tuple[Linear, Norm]:
    return packed(Conv.of(block.block[0]), dtype), plain(block.block[2])


class EstimatorWeights(NamedTuple):
    """The estimator for fixed times; stages in the order down, mids, up."""

    stages: list[Stage]
    final: Linear
    final_norm: Norm
    proj: Linear

    @classmethod
    def of(cls, estimator: Estimator, times: Tensor, dtype: torch.dtype) -> "EstimatorWeights":
        """Pack for ``times`` (steps,), those at which the Euler steps ask for the velocity."""
        time = estimator.time_mlp(times)
        modules = (*estimator.down_blocks, *estimator.mid_blocks, *estimator.up_blocks)
        return cls(
            [Stage.of(module, time, dtype) for module in modules],
            *_conv_block(estimator.final_block, dtype),
            packed(Linear.of_pointwise(estimator.final_proj), dtype),
        )
