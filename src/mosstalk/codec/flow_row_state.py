"""What the flow's networks keep on a CPU: each reply's rows side by side, unpadded.

Gathering pages would cost more than the matmuls. Matmuls are computed reply by reply: of other
sizes they would round otherwise, and a reply's frames must not depend on its company. Norms,
activations and windows are shared work. Shapes: I replies, B = 2 I sequences (reply, guidance
branch), T new rows, S all rows, L layers, H heads, d channels of a head, C channels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.flow_networks import Attend, Encoder
from mosstalk.codec.flow_pages import BRANCHES, TAIL
from mosstalk.codec.flow_weights import EstimatorWeights, Linear, Norm, Transformer, packed
from mosstalk.config import FlowConfig
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.flow_networks import EncoderBlock, relative_positions
from mosstalk.ops.flow_linear import norm_linear
from mosstalk.ops.launch import linear

_GROWTH = 2
_FIRST_REACH = 512

Tails = list[list[Tensor]]
"""Of each Euler step, the last rows (2, 2, C) that each convolution read, in the order they run."""


def seen_mask(done: int, new: int, block: int, device: torch.device) -> Tensor | None:
    """Which of ``done + new`` rows the new ones see, (new, done + new), True to see.

    A row sees its own block and all earlier ones, as in ``block_mask``. None, everything is
    seen, where the new rows lie in one block.
    """
    if done // block == (done + new - 1) // block:
        return None
    index = torch.arange(done + new, device=device) // block
    return index[None, :] <= index[done:, None]


class LayerKeys(NamedTuple):
    """One layer's kept keys and values (B, H, S, d), and the place of the new (2, B, H, T, d)."""

    keys: Tensor
    values: Tensor
    new: Tensor

    def put(self, projected: Tensor) -> Tensor:
        """Of q, k and v side by side (B T, 3 H d) keep k and v; return q (B, H, T, d)."""
        _, batch, heads, rows, size = self.new.shape
        parts = projected.view(batch, rows, 3, heads, size).permute(2, 0, 3, 1, 4)
        self.new.copy_(parts[1:])
        return parts[0]


@dataclass
class KeptKeys:
    """Keys and values of L attention layers; the first ``rows`` of ``buffer`` are in use.

    ``buffer`` (L, 2, B, H, capacity, d) at least doubles when it is full, so a row is moved
    a constant number of times however long a reply becomes.
    """

    buffer: Tensor
    rows: int = 0

    def fork(self, room: int = 0) -> "KeptKeys":
        """The same rows for another reply, with ``room`` for more; without, its first moves it."""
        kept = self.buffer[..., : self.rows, :]
        if room:
            *outer, rows, size = kept.shape
            kept = kept.new_empty(*outer, rows + room, size)
            kept[..., :rows, :] = self.buffer[..., :rows, :]
        return KeptKeys(kept, self.rows)

    def extend(self, rows: int) -> list[LayerKeys]:
        """Make room for ``rows`` more; every layer must then put its own."""
        start, self.rows = self.rows, self.rows + rows
        if self.rows > self.buffer.shape[-2]:
            self._grow(start)
        return self.over(self.buffer[..., start : self.rows, :])

    def over(self, new: Tensor) -> list[LayerKeys]:
        """Each layer's rows in use, of which ``new`` (L, 2, B, H, T, d) are to be put."""
        kept = self.buffer[..., : self.rows, :].flatten(0, 1).unbind()
        return list(map(LayerKeys, kept[::2], kept[1::2], new.unbind()))

    def drop(self, start: int, rows: int) -> None:
        """Forget ``rows`` rows from ``start`` on; the later ones move up."""
        later = self.buffer[..., start + rows : self.rows, :].clone()
        self.rows -= rows
        self.buffer[..., start : self.rows, :] = later

    def _grow(self, kept_rows: int) -> None:
        *outer, capacity, size = self.buffer.shape
        grown = self.buffer.new_empty(*outer, max(self.rows, _GROWTH * capacity), size)
        grown[..., :kept_rows, :] = self.buffer[..., :kept_rows, :]
        self.buffer = grown


@dataclass
class RowState:
    """What the flow keeps of a reply; the first ``fixed`` frames are its voice's.

    ``speaker`` (80,) is its voice as the estimator reads it. ``ahead_tail`` and ``up_tail``
    (2, C), ``codes`` and ``frames`` are the encoder's, ``tails`` and ``keys`` the estimator's.
    """

    speaker: Tensor
    ahead_tail: Tensor
    up_tail: Tensor
    codes: KeptKeys
    frames: KeptKeys
    tails: Tails
    keys: KeptKeys
    fixed: int = 0
    blocks: int = 0

    @classmethod
    def empty(cls, config: FlowConfig, weights: EstimatorWeights, speaker: Tensor) -> "RowState":
        """What is kept before the first code."""
        like = weights.final.weight
        heads, width = config.attention_heads, config.input_size
        codes, frames = (
            KeptKeys(like.new_empty(layers, 2, 1, heads, 0, width // heads))
            for layers in (config.encoder_blocks, config.up_encoder_blocks)
        )
        convs = [(stage.conv1, stage.conv2, stage.closing) for stage in weights.stages]
        inputs = [c.weight.shape[1] // (TAIL + 1) for c in (*chain(*convs), weights.final) if c]
        tails = [like.new_zeros(BRANCHES, TAIL, size) for size in inputs]
        layers = config.n_timesteps * sum(len(stage.transformers) for stage in weights.stages)
        shape = (layers, 2, BRANCHES, config.estimator_heads, 0, config.estimator_head_dim)
        none = like.new_zeros(TAIL, width)
        steps = [list(tails) for _ in range(config.n_timesteps)]
        return cls(speaker, none, none, codes, frames, steps, KeptKeys(like.new_empty(shape)))

    def fork(self, room: int | None) -> "RowState":
        """The same for another reply, all frames so far fixed, with ``room`` for more.

        None: there will be ever more; what is kept doubles when it is full.
        """
        return RowState(
            self.speaker,
            self.ahead_tail,
            self.up_tail,
            self.codes.fork(),
            self.frames.fork(),
            list(map(list, self.tails)),
            self.keys.fork(room or 0),
            self.keys.rows,
        )

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
        return keys.over(keys.buffer[..., at : at + new, :])

    def forget_codes(self, limit: int | None, block: int, frames: int) -> None:
        """Drop the encoder's oldest own block where another comes past ``limit``."""
        if limit is not None and self.blocks >= limit:
            for keys, rows in ((self.codes, block), (self.frames, frames)):
                keys.drop(self.fixed // frames * rows, rows)


class _Distances(NamedTuple):
    """Each layer's projected distances reach-1 .. -(behind-1), (H, d, reach + behind - 1)."""

    reach: int
    behind: int
    tables: list[Tensor]


class _Relative:
    """What an encoder block's attention needs besides its weights' matmuls."""

    def __init__(self, block: nn.Module) -> None:
        assert isinstance(block, EncoderBlock)
        attention = block.self_attn
        self.by_content = attention.pos_bias_u.detach().float()[:, None]
        self.by_distance = attention.pos_bias_v.detach().float()[:, None]
        self.positions = packed(Linear.of(attention.linear_pos), torch.float32)

    def project(self, positions: Tensor) -> Tensor:
        """What (n, C) distances are to this layer's queries, (H, d, n)."""
        heads = linear(positions, *self.positions).unflatten(-1, (self.by_content.shape[0], -1))
        return heads.permute(1, 2, 0).contiguous()

    def mix(self, query: Tensor, kept: LayerKeys, table: Tensor, mask: Tensor | None) -> Tensor:
        """What queries (1, H, T, d) mix of all values, (T, H d)."""
        scale = 1 / math.sqrt(query.shape[-1])
        bias = _shift((query + self.by_distance) @ table) * scale
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
        mixed = F.scaled_dot_product_attention(
            query + self.by_content, kept.keys, kept.values, attn_mask=bias, scale=scale
        )
        return mixed[0].transpose(0, 1).flatten(1)


def _shift(scores: Tensor) -> Tensor:
    """From scores for distances S-1 .. -(T-1), (1, H, T, S + T - 1), those of i - j, (1, H, T, S).

    New row r is row S - T + r of all, so its distance to row j stands in column T - 1 - r + j.
    """
    _, heads, new, columns = scores.shape
    size = (1, heads, new, columns - new + 1)
    strides = (heads * new * columns, new * columns, columns - 1, 1)
    scores = scores.contiguous()
    return scores.as_strided(size, strides, scores.storage_offset() + new - 1)


class _RowStack:
    """A stack of encoder blocks' distances, projected.

    They mean the same in every reply, so their tables are shared; they grow with the longest one.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self._layers = list(map(_Relative, blocks))
        self._known = _Distances(0, 0, [])

    def over(self, kept: KeptKeys, new: int, block: int) -> Attend:
        """Attention of ``new`` rows, by blocks of ``block``; ``kept`` has them from now on."""
        mask = seen_mask(kept.rows, new, block, kept.buffer.device)
        keys = kept.extend(new)
        tables = self._tables(kept.rows, new)

        def attend(number: int, layer: Transformer, x: Tensor) -> Tensor:
            query = keys[number].put(norm_linear(x, layer.norm, *layer.qkv))
            return self._layers[number].mix(query, keys[number], tables[number], mask)

        return attend

    def _tables(self, rows: int, new: int) -> list[Tensor]:
        """Each layer's projected distances rows-1 .. -(new-1), (H, d, rows + new - 1)."""
        known = self._known
        if rows > known.reach or new > known.behind:
            reach = max(_FIRST_REACH, known.reach, 1 << (rows - 1).bit_length())
            known = self._known = self._project(reach, max(known.behind, new))
        first = known.reach - rows
        return [table[:, :, first : first + rows + new - 1] for table in known.tables]

    def _project(self, reach: int, behind: int) -> _Distances:
        weight = self._layers[0].positions.weight
        positions = relative_positions(reach, weight.shape[1], weight)[: reach + behind - 1]
        return _Distances(reach, behind, [layer.project(positions) for layer in self._layers])


class RowEncoder:
    """One reply's new codes to mu; what they leave lies in its state."""

    def __init__(self, flow: FlowDecoder) -> None:
        self._network, self.config = Encoder(flow), flow.config
        self._codes = _RowStack(flow.encoder.encoders)
        self._frames = _RowStack(flow.encoder.up_encoders)

    def __call__(self, codes: list[int], ahead: list[int], state: RowState) -> Tensor:
        """mu (T, 80) of ``codes`` and those known of the three that follow."""
        kept = _RowCodes(self, state, len(codes))
        return self._network(torch.tensor([codes]), torch.tensor([ahead], dtype=torch.int64), kept)


class _RowCodes:
    """``KeptCodes`` of one reply's ``new`` codes."""

    def __init__(self, owner: RowEncoder, state: RowState, new: int) -> None:
        self._owner, self._state, self._new = owner, state, new

    def conv(self, x: Tensor, layer: Linear) -> Tensor:
        window = torch.cat([self._state.ahead_tail, x])
        self._state.ahead_tail = window[-TAIL:].clone()
        return linear(_side_by_side(window[None])[0], *layer)

    def after_earlier(self, x: Tensor) -> Tensor:
        whole = torch.cat([self._state.up_tail[None], x], dim=1)
        self._state.up_tail = whole[0, -TAIL:].clone()
        return whole

    def codes(self) -> Attend:
        chunk = self._owner.config.chunk_size
        return self._owner._codes.over(self._state.codes, self._new, chunk)

    def frames(self) -> Attend:
        config, ratio = self._owner.config, self._owner.config.token_mel_ratio
        block = config.chunk_size * ratio
        return self._owner._frames.over(self._state.frames, self._new * ratio, block)


def _side_by_side(window: Tensor) -> Tensor:
    """The kernel-3 windows of (B, 2 + T, C), (B, T, 3 C)."""
    batch, rows, channels = window.shape
    size = (batch, rows - TAIL, (TAIL + 1) * channels)
    return window.as_strided(size, (rows * channels, channels, 1)).contiguous()


class RowFrames:
    """``KeptFrames`` of several replies that have equally many new frames.

    ``keys`` are each reply's places, all steps' layers in turn; ``masks`` (T, S) or None.
    """

    _tails: Sequence[list[Tensor]]
    _convs: Iterator[int]

    def __init__(
        self,
        states: Sequence[RowState],
        keys: Sequence[list[LayerKeys]],
        masks: Sequence[Tensor | None],
    ) -> None:
        self._states, self._masks = states, masks
        self._keys = iter(zip(*keys, strict=True))

    def begin(self, step: int) -> None:
        """Euler step number ``step`` comes next."""
        self._tails = [state.tails[step] for state in self._states]
        self._convs = iter(range(len(self._tails[0])))

    def conv(self, x: Tensor, layer: Linear, out: Tensor | None) -> Tensor:
        """The next convolution of new rows (R, C) or (I, R, C); ``out`` is None."""
        number, replies = next(self._convs), self._tails
        tails = [each[number] for each in replies]
        rows = x.view(BRANCHES * len(replies), -1, x.shape[-1])
        window = torch.cat([*tails, rows] if len(tails) == 1 else [torch.cat(tails), rows], dim=1)
        left = window[:, -TAIL:].clone()
        for each, tail in zip(replies, _each(left, len(replies)), strict=True):
            each[number] = tail
        assert out is None
        return linear(_side_by_side(window).view(*x.shape[:-1], -1), *layer)

    def attend(self, x: Tensor, norm: Norm | None, qkv: Linear) -> Tensor:
        """What the next block's queries of LN(x) mix of the rows they see, by reply."""
        projected = norm_linear(x, norm, *qkv)
        parts = [projected] if len(self._states) == 1 else projected.unbind()
        mixed = [
            F.scaled_dot_product_attention(
                kept.put(part), kept.keys, kept.values, attn_mask=mask
            ).transpose(1, 2)
            for part, kept, mask in zip(parts, next(self._keys), self._masks, strict=True)
        ]
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return together.flatten(2).view(*x.shape[:-1], -1)


def _each(x: Tensor, replies: int) -> Sequence[Tensor]:
    """Each reply's sequences (2, T, C)."""
    return [x] if replies == 1 else x.split(BRANCHES)
