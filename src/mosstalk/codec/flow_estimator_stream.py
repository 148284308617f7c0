"""The flow's estimator on the frames that are new, with what it keeps of those before.

Every Euler step sees other values, so each has its own tails, keys and values; the two
branches of the guidance are a batch of two. Shapes as in ``flow_estimator``, but with
channels last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.flow_kept import KeptKeys, LayerKeys
from mosstalk.codec.flow_parts import Conv, Linear, Norm
from mosstalk.models.flow_estimator import (
    ConvBlock,
    Estimator,
    GeluProjection,
    ResidualBlock,
    TransformerBlock,
)

_BRANCHES = 2


@dataclass(frozen=True)
class StageTails:
    """Tails (2, 2, C) of a stage's convolutions; mid stages have none that closes them."""

    block1: Tensor
    block2: Tensor
    closing: Tensor | None


@dataclass(frozen=True)
class StepTails:
    """Tails of all convolutions in one Euler step."""

    stages: tuple[StageTails, ...]
    final: Tensor


@dataclass
class EstimatorState:
    """What the estimator keeps: tails of each Euler step, keys of each step's layers in turn."""

    tails: list[StepTails]
    keys: KeptKeys

    def fork(self) -> "EstimatorState":
        """The same state for another stream; neither then changes the other."""
        return EstimatorState(list(self.tails), self.keys.fork())


class _ConvBlock(NamedTuple):
    conv: Conv
    norm: Norm

    @classmethod
    def of(cls, block: ConvBlock) -> "_ConvBlock":
        return cls(Conv.of(block.block[0]), Norm.of(block.block[2]))

    def __call__(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        y, tail = self.conv.slide_on(x, tail)
        return F.mish(self.norm(y)), tail


class _Transformer(NamedTuple):
    norm1: Norm
    qkv: Linear
    out: Linear
    norm3: Norm
    widen: Linear
    narrow: Linear
    heads: int

    @classmethod
    def of(cls, block: nn.Module) -> "_Transformer":
        assert isinstance(block, TransformerBlock)
        attention, (widen, _, narrow) = block.attn1, block.ff.net.children()
        assert isinstance(widen, GeluProjection)
        return cls(
            Norm.of(block.norm1),
            Linear.of(attention.to_q, attention.to_k, attention.to_v),
            Linear.of(attention.to_out[0]),
            Norm.of(block.norm3),
            Linear.of(widen.proj),
            Linear.of(narrow),
            attention.heads,
        )

    def __call__(self, x: Tensor, kept: LayerKeys, mask: Tensor | None) -> Tensor:
        query = kept.put(self.qkv(self.norm1(x)))
        mixed = F.scaled_dot_product_attention(query, kept.keys, kept.values, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm3(x))))


class _Stage(NamedTuple):
    """A stage's parts; ``times`` is what each Euler step's time adds in it, (1, 1, W)."""

    block1: _ConvBlock
    block2: _ConvBlock
    beside: Linear
    times: list[Tensor]
    transformers: list[_Transformer]
    closing: Conv | None

    @classmethod
    def of(cls, stage: nn.Module, time: Tensor) -> "_Stage":
        residual, transformers, *closing = stage.children()
        assert isinstance(residual, ResidualBlock)
        return cls(
            _ConvBlock.of(residual.block1),
            _ConvBlock.of(residual.block2),
            Linear.of_pointwise(residual.res_conv),
            list(residual.mlp(time)[:, None, None]),
            [_Transformer.of(block) for block in transformers.children()],
            Conv.of(closing[0]) if closing else None,
        )

    def no_tails(self) -> StageTails:
        block1, block2 = (block.conv.no_tail(_BRANCHES) for block in (self.block1, self.block2))
        return StageTails(block1, block2, self.closing and self.closing.no_tail(_BRANCHES))

    def __call__(
        self,
        x: Tensor,
        step: int,
        tails: StageTails,
        keys: Iterator[LayerKeys],
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, StageTails]:
        """(2, T, inputs) to (2, T, W) before and after the closing convolution."""
        y, tail1 = self.block1(x, tails.block1)
        y, tail2 = self.block2(y + self.times[step], tails.block2)
        y = y + self.beside(x)
        for block in self.transformers:
            y = block(y, next(keys), mask)
        if self.closing is None or tails.closing is None:
            return y, y, StageTails(tail1, tail2, None)
        closed, tail3 = self.closing.slide_on(y, tails.closing)
        return y, closed, StageTails(tail1, tail2, tail3)


class StreamingEstimator:
    """``Estimator`` on new frames at fixed times; equal to it on all frames with the mask."""

    def __init__(self, estimator: Estimator, times: Tensor) -> None:
        """``times`` (steps,) are those at which the Euler steps ask for the velocity."""
        time = estimator.time_mlp(times)
        modules = (*estimator.down_blocks, *estimator.mid_blocks, *estimator.up_blocks)
        self._steps = times.shape[0]
        self._stages = [_Stage.of(module, time) for module in modules]
        self._final_block = _ConvBlock.of(estimator.final_block)
        self._final_proj = Linear.of_pointwise(estimator.final_proj)

    def start(self) -> EstimatorState:
        """The state before the first frame."""
        final = self._final_block.conv.no_tail(_BRANCHES)
        tails = StepTails(tuple(stage.no_tails() for stage in self._stages), final)
        layers = [block for stage in self._stages for block in stage.transformers]
        heads, inner = layers[0].heads, layers[0].out.weight.shape[1]
        shape = (self._steps * len(layers), 2, _BRANCHES, heads, 0, inner // heads)
        return EstimatorState([tails] * self._steps, KeptKeys(final.new_empty(shape)))

    def velocity(
        self, x: Tensor, step: int, tails: StepTails, keys: Iterator[LayerKeys], mask: Tensor | None
    ) -> tuple[Tensor, StepTails]:
        """d x / d t (2, T, 80) of new frames in Euler step ``step``, and the tails they leave.

        ``x`` (2, T, 320) holds x, mu, speaker and condition of both branches; ``keys`` gives
        this step's layers in turn; ``mask`` (T, S) is as ``seen_mask`` gives it.
        """
        (down, tail), *mids, (up, up_tail) = zip(self._stages, tails.stages, strict=True)
        skip, y, left = down(x, step, tail, keys, mask)
        stages = [left]
        for mid, tail in mids:
            _, y, left = mid(y, step, tail, keys, mask)
            stages.append(left)
        _, y, left = up(torch.cat([y, skip], dim=2), step, up_tail, keys, mask)
        y, final = self._final_block(y, tails.final)
        return self._final_proj(y), StepTails((*stages, left), final)
