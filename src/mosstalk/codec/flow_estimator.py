"""The flow's estimator on new frames, wherever what the frames before them left is kept.

Shapes: R rows, one for each (guidance branch, item, frame), or (I, R, C) where each of I replies
has matmuls of its own; C channels. The Euler steps' times are fixed, so what they add is too.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mosstalk.codec.flow_pages import BRANCHES, PageLayout
from mosstalk.codec.flow_weights import EstimatorWeights, Linear, Norm, Stage, Transformer
from mosstalk.models.flow import ConditionalFlow
from mosstalk.ops.euler import euler
from mosstalk.ops.flow_linear import close_residual, linear_add, norm_linear
from mosstalk.ops.norm import norm_act
from mosstalk.ops.tiles import norms_apart


class KeptFrames(Protocol):
    """What one pass finds of earlier frames, and where it leaves its own for later ones.

    Convolutions and transformer blocks come in the order in which each Euler step runs them.
    """

    def begin(self, step: int) -> None:
        """Euler step number ``step`` comes next."""

    def conv(self, x: Tensor, layer: Linear, out: Tensor | None) -> Tensor:
        """The next causal kernel-3 convolution of new rows ``x``, in ``out`` where it is given."""

    def attend(self, x: Tensor, norm: Norm | None, qkv: Linear) -> Tensor:
        """What the next block's queries of LN(x) mix of all values they see, (R, H d)."""


@dataclass(frozen=True)
class EstimatorBuffers:
    """Where a pass of I items works, (R, ...) each; passes of fewer use the first rows.

    ``given`` is the estimator's input: x, mu, speaker, condition; in the end its first columns
    are the mel. ``entry``, ``both``, ``active``, ``query``, ``mixed`` and ``wide`` are what
    matmuls read, in their dtype: ``entry`` is ``given`` again, ``both`` the up stage's input, the
    stream in its first half and the down stage's output in its second. ``raw``, ``stream`` and
    ``velocity`` are float32. Those that are None are made anew wherever they are written.
    """

    given: Tensor
    entry: Tensor
    raw: Tensor | None = None
    stream: Tensor | None = None
    active: Tensor | None = None
    both: Tensor | None = None
    query: Tensor | None = None
    mixed: Tensor | None = None
    wide: Tensor | None = None
    velocity: Tensor | None = None

    @classmethod
    def allocate(cls, layout: PageLayout, items: int, device: torch.device) -> "EstimatorBuffers":
        """Room for ``items`` items."""
        config, rows = layout.config, BRANCHES * items * layout.frames
        width, bins, dtype = config.estimator_channels, config.mel_bins, layout.dtype
        inner = config.estimator_heads * config.estimator_head_dim

        def room(channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((rows, channels), dtype=dtype, device=device)

        given = room(4 * bins)
        return cls(
            given=given,
            entry=given if dtype == torch.float32 else room(4 * bins, dtype),
            raw=room(width),
            stream=room(width),
            active=room(width, dtype),
            both=room(2 * width, dtype),
            query=room(inner, dtype),
            mixed=room(inner, dtype),
            wide=room(4 * width, dtype),
            velocity=room(bins),
        )

    def first(self, rows: int) -> "EstimatorBuffers":
        """The same memory's first ``rows`` rows."""
        return EstimatorBuffers(**{name: value[:rows] for name, value in vars(self).items()})

    @property
    def rounded(self) -> Tensor | None:
        """``entry``, where it is not the same memory as ``given``."""
        return None if self.entry.dtype == torch.float32 else self.entry


class Estimator:
    """Euler steps over new frames."""

    def __init__(self, flow: ConditionalFlow, dtype: torch.dtype) -> None:
        """Pack the weights of ``flow``, those of matmuls in ``dtype``."""
        times = flow.times(flow.estimator.final_proj.weight.device)
        self.weights = EstimatorWeights.of(flow.estimator, times[:-1], dtype)
        self._durations: list[float] = times.diff().tolist()
        self._guidance = flow.config.cfg_rate

    def integrate(self, buffers: EstimatorBuffers, kept: KeptFrames) -> None:
        """From noise to mel, in the first columns of ``buffers.given``."""
        rounded = buffers.rounded
        if rounded is not None:
            rounded.copy_(buffers.given)
        run = _Step(self.weights, buffers, kept)
        for step, duration in enumerate(self._durations):
            kept.begin(step)
            euler(buffers.given, run.velocity(step), self._guidance, duration, rounded)


class _Step:
    """One Euler step's velocity after the other."""

    def __init__(
        self, weights: EstimatorWeights, buffers: EstimatorBuffers, kept: KeptFrames
    ) -> None:
        self.weights, self.buffers, self.kept = weights, buffers, kept
        width, both = weights.final_norm.weight.shape[0], buffers.both
        self.half = None if both is None else both[:, :width]
        self.skip = None if both is None else both[:, width:]
        self.apart = norms_apart(buffers.given.shape[0], weights.final.weight.dtype)

    def velocity(self, step: int) -> Tensor:
        """d x / d t (R, 80) in Euler step ``step``."""
        buffers, weights = self.buffers, self.weights
        down, *mids, up = weights.stages
        skip = self._stage(down, step, buffers.entry, self.skip)
        y = self._close(down, skip, self.half)
        for mid in mids:
            y = self._stage(mid, step, y, self.half)
        both = torch.cat([y, skip], dim=-1) if buffers.both is None else buffers.both
        y = self._close(up, self._stage(up, step, both, buffers.active), self.half)
        y = self.kept.conv(y, weights.final, buffers.raw)
        if not self.apart:
            return norm_linear(y, weights.final_norm, *weights.proj, buffers.velocity, mish=True)
        y = norm_act(y, weights.final_norm, buffers.active, activation="mish")
        return norm_linear(y, None, *weights.proj, buffers.velocity)

    def _stage(self, stage: Stage, step: int, x: Tensor, out: Tensor | None) -> Tensor:
        """All of a stage but its closing convolution, into ``out``."""
        buffers, time = self.buffers, stage.times[step]
        y = self.kept.conv(x, stage.conv1, buffers.raw)
        y = norm_act(y, stage.norm1, buffers.active, activation="mish", add=time)
        y = self.kept.conv(y, stage.conv2, buffers.raw)
        y = close_residual(y, stage.norm2, x, *stage.beside, buffers.stream)
        *blocks, last = stage.transformers
        for block in blocks:
            y = self._transform(block, y, buffers.stream)
        return self._transform(last, y, out)

    def _close(self, stage: Stage, x: Tensor, out: Tensor | None) -> Tensor:
        assert stage.closing is not None
        return self.kept.conv(x, stage.closing, out)

    def _transform(self, block: Transformer, x: Tensor, out: Tensor | None) -> Tensor:
        """A transformer block of the stream ``x``, into ``out``."""
        mixed = self.kept.attend(*self._normed(x, block.norm), block.qkv)
        x = linear_add(x, mixed, *block.out, self.buffers.stream)
        read = self._normed(x, block.wide_norm)
        wide = norm_linear(*read, *block.widen, self.buffers.wide, activation="gelu")
        return linear_add(x, wide, *block.narrow, out)

    def _normed(self, x: Tensor, norm: Norm) -> tuple[Tensor, Norm | None]:
        """What a matmul reads of the stream, and the norm that it still has to take of it."""
        return (norm_act(x, norm, self.buffers.active), None) if self.apart else (x, norm)
