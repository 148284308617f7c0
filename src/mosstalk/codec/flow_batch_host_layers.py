"""The flow's layers on a CPU for several replies at once, and what they keep of each.

Shapes: I replies, B = 2 I sequences (reply, guidance branch), T new frames, C channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.codec.flow_batch_weights import EstimatorWeights, Stage, Transformer
from mosstalk.codec.flow_encoder_stream import EncoderState, StreamingEncoder
from mosstalk.codec.flow_kept import KeptKeys, LayerKeys
from mosstalk.codec.flow_pages import BRANCHES, TAIL
from mosstalk.codec.flow_parts import Linear, Norm
from mosstalk.models.flow import ConditionalFlow
from mosstalk.models.flow_encoder import LEAKY_SLOPE

Tails = list[list[Tensor]]
"""Of each Euler step, the tail (2, 2, C) of each convolution in the order they run."""


@dataclass
class HostKept:
    """What the flow keeps of a reply; the first ``fixed`` frames are its voice's."""

    encoder: EncoderState
    tails: Tails
    keys: KeptKeys
    fixed: int = 0
    blocks: int = 0

    def fork(self, room: int | None) -> "HostKept":
        """The same for another reply, all frames so far fixed, with ``room`` for more.

        None: there will be ever more; what is kept doubles when it is full.
        """
        keys = self.keys.fork()
        if room is not None:
            *outer, rows, size = keys.buffer.shape
            whole = keys.buffer.new_empty(*outer, rows + room, size)
            whole[..., :rows, :] = keys.buffer
            keys.buffer = whole
        return HostKept(self.encoder.fork(), list(self.tails), keys, keys.rows)

    def place(self, new: int, block: int, limit: int | None) -> list[LayerKeys]:
        """Room for ``new`` frames; past ``limit`` blocks of its own over the oldest.

        The estimator has no positions, so its frames need no order. A block that is cut short
        ends its reply; it takes the last place, so that nothing of the block that goes is seen.
        """
        keys, number = self.keys, self.blocks
        self.blocks += 1
        if limit is None or number < limit:
            return keys.extend(new)
        at, last = (self.fixed + place * block for place in (number % limit, limit - 1))
        if new < block:
            if at != last:
                keys.buffer[..., at : at + block, :] = keys.buffer[..., last : last + block, :]
            at, keys.rows = last, last + new
        seen = keys.buffer[..., : keys.rows, :].flatten(0, 1).unbind()
        placed = keys.buffer[..., at : at + new, :].unbind()
        return list(map(LayerKeys, seen[::2], seen[1::2], placed))

    def forget_codes(self, limit: int | None, block: int, frames: int) -> None:
        """Drop the encoder's oldest own block where another comes past ``limit``."""
        if limit is None or self.blocks < limit:
            return
        fixed = self.fixed // frames
        for keys, rows in ((self.encoder.codes, block), (self.encoder.frames, frames)):
            first = fixed * rows
            later = keys.buffer[..., first + rows : keys.rows, :].clone()
            keys.rows -= rows
            keys.buffer[..., first : keys.rows, :] = later


class HostEncoder(StreamingEncoder):
    """``StreamingEncoder`` where fewer than three codes may be known ahead."""

    def encode(self, codes: Tensor, ahead: Tensor, state: EncoderState, block_codes: int) -> Tensor:
        """Embedded codes (1, T, C), and those known ahead (1, 0 .. 3, C), to (1, 4T, C)."""
        encoder, x = self._encoder, self._encoder.embed(codes)
        context = self._ahead.no_tail(1)
        if ahead.shape[1]:
            context[:, : ahead.shape[1]] = encoder.embed(ahead)
        hidden = F.leaky_relu(self._ahead.slide(torch.cat([x, context], dim=1)), LEAKY_SLOPE)
        y, state.ahead_tail = self._back.slide_on(hidden, state.ahead_tail)
        x = self._code_blocks(x + y, state.codes, block_codes)
        repeated = x.repeat_interleave(encoder.up_layer.stride, dim=1)
        y, state.up_tail = self._up.slide_on(repeated, state.up_tail)
        x = self._frame_blocks(encoder.up_embed(y), state.frames, block_codes * encoder.ratio)
        return encoder.after_norm(x)


class HostEstimator:
    """Euler steps over new frames of several replies."""

    def __init__(self, flow: ConditionalFlow) -> None:
        times = flow.times(flow.estimator.final_proj.weight.device)
        self._weights = EstimatorWeights.of(flow.estimator, times[:-1], torch.float32)
        self._durations: list[float] = times.diff().tolist()
        self._config = flow.config

    def start(self) -> tuple[Tails, KeptKeys]:
        """What is kept before the first frame."""
        config, weights = self._config, self._weights
        convs = [(stage.conv1, stage.conv2, stage.closing) for stage in weights.stages]
        inputs = [c.weight.shape[1] // (TAIL + 1) for c in (*chain(*convs), weights.final) if c]
        tails = [weights.final.weight.new_zeros(BRANCHES, TAIL, size) for size in inputs]
        layers = sum(len(stage.transformers) for stage in weights.stages)
        shape = (BRANCHES, config.estimator_heads, 0, config.estimator_head_dim)
        buffer = weights.final.weight.new_empty(len(self._durations) * layers, 2, *shape)
        return [tails] * len(self._durations), KeptKeys(buffer)

    def integrate(
        self,
        x: Tensor,
        given: Tensor,
        kept: list[HostKept],
        keys: list[list[LayerKeys]],
        masks: list[Tensor | None],
    ) -> Tensor:
        """From noise (I, T, 80) to mel; ``given`` (I, 2, T, 240) is mu, speaker and condition.

        ``keys`` are each reply's places, all steps' layers in turn; ``masks`` (T, S) or None.
        """
        guidance = self._config.cfg_rate
        layers = iter(zip(*keys, strict=True))
        for step, duration in enumerate(self._durations):
            both = torch.cat([x[:, None].expand(-1, BRANCHES, -1, -1), given], dim=3)
            tails = iter(zip(*(each.tails[step] for each in kept), strict=True))
            run = _Step(self._weights, step, layers, tails, masks)
            velocity = run.velocity(both.flatten(0, 1)).unflatten(0, (-1, BRANCHES))
            for each, left in zip(kept, zip(*run.left, strict=True), strict=True):
                each.tails[step] = list(left)
            x = x + duration * ((1 + guidance) * velocity[:, 0] - guidance * velocity[:, 1])
        return x


class _Step:
    """One Euler step's velocity; ``left`` collects the tails of each convolution."""

    def __init__(
        self,
        weights: EstimatorWeights,
        step: int,
        keys: Iterator[Sequence[LayerKeys]],
        tails: Iterator[Sequence[Tensor]],
        masks: list[Tensor | None],
    ) -> None:
        self.weights, self.step, self.masks = weights, step, masks
        self.keys, self.tails = keys, tails
        self.left: list[Sequence[Tensor]] = []

    def velocity(self, x: Tensor) -> Tensor:
        """d x / d t (B, T, 80) of (B, T, 320)."""
        down, *mids, up = self.weights.stages
        skip = self._stage(down, x)
        y = self._close(down, skip)
        for mid in mids:
            y = self._stage(mid, y)
        y = self._close(up, self._stage(up, torch.cat([y, skip], dim=2)))
        y = F.mish(_norm(self._conv(y, self.weights.final), self.weights.final_norm))
        return self._product(y, self.weights.proj)

    def _stage(self, stage: Stage, x: Tensor) -> Tensor:
        y = F.mish(_norm(self._conv(x, stage.conv1), stage.norm1)) + stage.times[self.step]
        y = F.mish(_norm(self._conv(y, stage.conv2), stage.norm2))
        y = y + self._product(x, stage.beside)
        for block in stage.transformers:
            y = self._transform(block, y)
        return y

    def _close(self, stage: Stage, x: Tensor) -> Tensor:
        assert stage.closing is not None
        return self._conv(x, stage.closing)

    def _conv(self, x: Tensor, layer: Linear) -> Tensor:
        tails = next(self.tails)
        window = torch.cat([tails[0] if len(tails) == 1 else torch.cat(list(tails)), x], dim=1)
        left = window[:, x.shape[1] :].clone()
        self.left.append(self._each(left))
        batch, rows, channels = x.shape
        strides = ((rows + TAIL) * channels, channels, 1)
        wide = window.as_strided((batch, rows, (TAIL + 1) * channels), strides).contiguous()
        return self._product(wide, layer)

    def _transform(self, block: Transformer, x: Tensor) -> Tensor:
        projected = self._each(self._product(_norm(x, block.norm), block.qkv))
        mixed = [
            F.scaled_dot_product_attention(
                kept.put(part), kept.keys, kept.values, attn_mask=mask
            ).transpose(1, 2)
            for part, kept, mask in zip(projected, next(self.keys), self.masks, strict=True)
        ]
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        x = x + self._product(together.flatten(2), block.out)
        wide = F.gelu(self._product(_norm(x, block.wide_norm), block.widen))
        return x + self._product(wide, block.narrow)

    def _each(self, x: Tensor) -> Sequence[Tensor]:
        """Each reply's two sequences."""
        return [x] if len(self.masks) == 1 else x.split(BRANCHES)

    def _product(self, x: Tensor, layer: Linear) -> Tensor:
        """(B, T, K) to (B, T, N), each reply's rows in a product of their own."""
        if len(self.masks) == 1:
            return F.linear(x, *layer)
        out = x.new_empty(*x.shape[:2], layer.weight.shape[0])
        parts = zip(*(each.flatten(0, 1).chunk(len(self.masks)) for each in (x, out)), strict=True)
        turned = layer.weight.T
        for rows, place in parts:
            if layer.bias is None:
                torch.mm(rows, turned, out=place)
            else:
                torch.addmm(layer.bias, rows, turned, out=place)
        return out


def _norm(x: Tensor, norm: Norm) -> Tensor:
    return torch.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)
