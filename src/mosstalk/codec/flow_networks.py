"""The flow's networks on new codes and frames, wherever what those before them left is kept.

The encoder is always float32. Shapes: I items, T codes of each, then F frames; R = I T or I F rows,
C channels. In the estimator R rows are one for each (guidance branch, item, frame), or (I, R, C)
where each of I replies has matmuls of its own. The Euler steps' times are fixed, so what they add
is too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.codec.flow_pages import BRANCHES, PageLayout
from mosstalk.codec.flow_weights import (
    Conv,
    EstimatorWeights,
    Linear,
    Norm,
    Stage,
    Transformer,
    packed,
    plain,
)
from mosstalk.models.flow import ConditionalFlow, FlowDecoder
from mosstalk.models.flow_networks import LEAKY_SLOPE, InputLayer
from mosstalk.ops.flow_linear import close_residual, euler, linear_add, norm_linear
from mosstalk.ops.norm import norm_act
from mosstalk.ops.tiles import norms_apart

Attend = Callable[[int, Transformer, Tensor], Tensor]
"""Of a stack's block by number: what the queries of its rows (R, C) mix of all values they see."""


class KeptCodes(Protocol):
    """What one pass finds of earlier codes, and where it leaves its own for later ones."""

    def conv(self, x: Tensor, layer: Linear) -> Tensor:
        """The causal kernel-3 convolution of new rows (R, C)."""

    def after_earlier(self, x: Tensor) -> Tensor:
        """New codes (I, T, C) after the two before them, (I, 2 + T, C)."""

    def codes(self) -> Attend:
        """Attention of the blocks before upsampling."""

    def frames(self) -> Attend:
        """Attention of the blocks after it."""


def linear(x: Tensor, layer: Linear) -> Tensor:
    """(R, K) to (R, N)."""
    return norm_linear(x, None, *layer)


class _Input:
    """``InputLayer`` on rows (R, C)."""

    def __init__(self, layer: InputLayer) -> None:
        projection, norm = layer.out.children()
        self._linear = packed(Linear.of(projection), torch.float32)
        self._norm, self._scale = plain(norm), layer.scale

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(linear(x, self._linear)) * self._scale


class Encoder:
    """Codes of new blocks to mu."""

    def __init__(self, flow: FlowDecoder) -> None:
        encoder, look = flow.encoder, flow.encoder.pre_lookahead_layer
        self._config = flow.config
        self._embedding = flow.input_embedding.weight.detach()
        self._embed, self._up_embed = _Input(encoder.embed), _Input(encoder.up_embed)
        self._ahead, self._back, self._up = (
            packed(Conv.of(conv), torch.float32)
            for conv in (look.conv1, look.conv2, encoder.up_layer.conv)
        )
        self._codes = list(map(Transformer.of_encoder, encoder.encoders))
        self._frames = list(map(Transformer.of_encoder, encoder.up_encoders))
        self._after = plain(encoder.after_norm)
        self._proj = packed(Linear.of(flow.encoder_proj), torch.float32)

    @property
    def weights(self) -> tuple[object, ...]:
        """All packed weights but those of the embeddings."""
        return self._ahead, self._back, self._up, self._proj, self._codes, self._frames

    def __call__(self, codes: Tensor, ahead: Tensor, kept: KeptCodes) -> Tensor:
        """mu (I F, 80) of ``codes`` (I, T); ``ahead`` (I, at most 3) follow them; -1 is no code."""
        x = self._look_ahead(codes, ahead, kept)
        x = _stack(self._codes, x, kept.codes())
        x = self._up_embed(self._upsample(x.unflatten(0, codes.shape), kept))
        x = _stack(self._frames, x, kept.frames())
        return norm_linear(x, self._after, *self._proj)

    def _look_ahead(self, codes: Tensor, ahead: Tensor, kept: KeptCodes) -> Tensor:
        """Embedded codes after the two convolutions, (I T, C)."""
        x, context = self._embedded(codes), self._embedded(ahead)
        unknown = self._config.pre_lookahead_len - ahead.shape[1]
        whole = F.pad(torch.cat([x, context], dim=1), (0, 0, 0, unknown))
        windows = _windows(whole, codes.shape[1])
        hidden = F.leaky_relu(linear(windows, self._ahead), LEAKY_SLOPE)
        return x.flatten(0, 1) + kept.conv(hidden, self._back)

    def _embedded(self, ids: Tensor) -> Tensor:
        """(I, T, C), zeros where there is no code."""
        vectors = F.embedding(ids.clamp(min=0), self._embedding).float().flatten(0, 1)
        return self._embed(vectors).unflatten(0, ids.shape).masked_fill((ids < 0)[:, :, None], 0)

    def _upsample(self, x: Tensor, kept: KeptCodes) -> Tensor:
        """Each code (I, T, C) repeated, then the causal convolution, (I F, C)."""
        ratio = self._config.token_mel_ratio
        repeated = kept.after_earlier(x).repeat_interleave(ratio, dim=1)
        return linear(_windows(repeated, x.shape[1] * ratio), self._up)


def _stack(blocks: list[Transformer], x: Tensor, attend: Attend) -> Tensor:
    """New rows (R, C) through a stack of blocks, in place."""
    for number, block in enumerate(blocks):
        linear_add(x, attend(number, block, x), *block.out, out=x)
        wide = norm_linear(x, block.wide_norm, *block.widen, activation="silu")
        linear_add(x, wide, *block.narrow, out=x)
    return x


def _windows(x: Tensor, rows: int) -> Tensor:
    """The first ``rows`` windows over all else of (I, T, C), side by side, (I rows, k C)."""
    items, length, channels = x.shape
    size = (items, rows, (length - rows + 1) * channels)
    strides = (length * channels, channels, 1)
    return x.contiguous().as_strided(size, strides).contiguous().flatten(0, 1)


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
