"""The flow's encoder on the codes that are new, with what it keeps of those before.

Shapes as in ``flow_encoder`` and ``flow_kept``; one sequence, so B = 1.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.flow_kept import KeptKeys, LayerKeys, seen_mask
from mosstalk.codec.flow_parts import Conv, Linear
from mosstalk.models.flow_encoder import LEAKY_SLOPE, EncoderBlock, FlowEncoder, relative_positions

_FIRST_REACH = 512


@dataclass
class EncoderState:
    """What the encoder keeps: tails of two convolutions, keys of blocks of codes and frames."""

    ahead_tail: Tensor
    codes: KeptKeys
    up_tail: Tensor
    frames: KeptKeys

    def fork(self) -> "EncoderState":
        """The same state for another stream; neither then changes the other."""
        return replace(self, codes=self.codes.fork(), frames=self.frames.fork())


class _Distances(NamedTuple):
    """Each layer's projected distances reach-1 .. -(behind-1), (H, d, reach + behind - 1)."""

    reach: int
    behind: int
    tables: list[Tensor]


class _Block(NamedTuple):
    block: EncoderBlock
    qkv: Linear

    @classmethod
    def of(cls, block: nn.Module) -> "_Block":
        assert isinstance(block, EncoderBlock)
        attention = block.self_attn
        return cls(block, Linear.of(attention.linear_q, attention.linear_k, attention.linear_v))

    def __call__(self, x: Tensor, kept: LayerKeys, table: Tensor, mask: Tensor | None) -> Tensor:
        attention = self.block.self_attn
        query = kept.put(self.qkv(self.block.norm_mha(x)))
        scale = 1 / math.sqrt(query.shape[-1])
        bias = _shift((query + attention.pos_bias_v[:, None]) @ table) * scale
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
        query = query + attention.pos_bias_u[:, None]
        mixed = F.scaled_dot_product_attention(
            query, kept.keys, kept.values, attn_mask=bias, scale=scale
        )
        x = x + attention.linear_out(mixed.transpose(1, 2).flatten(2))
        return x + self.block.feed_forward(self.block.norm_ff(x))

    def project(self, positions: Tensor) -> Tensor:
        """What (n, C) distances are to this layer's queries, (H, d, n)."""
        attention = self.block.self_attn
        heads = attention.linear_pos(positions).unflatten(-1, (attention.heads, -1))
        return heads.permute(1, 2, 0).contiguous()


def _shift(scores: Tensor) -> Tensor:
    """From scores for distances S-1 .. -(T-1), (1, H, T, S + T - 1), those of i - j, (1, H, T, S).

    New row r is row S - T + r of all, so its distance to row j stands in column T - 1 - r + j.
    """
    _, heads, new, columns = scores.shape
    size = (1, heads, new, columns - new + 1)
    strides = (heads * new * columns, new * columns, columns - 1, 1)
    scores = scores.contiguous()
    return scores.as_strided(size, strides, scores.storage_offset() + new - 1)


class StreamingBlocks:
    """A stack of encoder blocks, with the distances' share of their attention kept projected.

    Distances mean the same in every reply, so their tables are shared; they grow with the
    longest one.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self._blocks = [_Block.of(block) for block in blocks]
        self._known = _Distances(0, 0, [])

    def start(self) -> KeptKeys:
        """Keys and values of no rows."""
        like = self._blocks[0].block.self_attn.pos_bias_u
        return KeptKeys(like.new_empty(len(self._blocks), 2, 1, like.shape[0], 0, like.shape[1]))

    def __call__(self, x: Tensor, kept: KeptKeys, block: int) -> Tensor:
        """New rows (1, T, C) to the same; they attend by blocks of ``block`` rows."""
        new = x.shape[1]
        mask = seen_mask(kept.rows, new, block, x.device)
        layers = kept.extend(new)
        tables = self._distances(kept.rows, new)
        for layer, keys, table in zip(self._blocks, layers, tables, strict=True):
            x = layer(x, keys, table, mask)
        return x

    def _distances(self, rows: int, new: int) -> list[Tensor]:
        """Each layer's projected distances rows-1 .. -(new-1), (H, d, rows + new - 1)."""
        known = self._known  # read once: streams of other threads may replace it
        if rows > known.reach or new > known.behind:
            reach = max(_FIRST_REACH, known.reach, 1 << (rows - 1).bit_length())
            known = self._known = self._project(reach, max(known.behind, new))
        first = known.reach - rows
        return [table[:, :, first : first + rows + new - 1] for table in known.tables]

    def _project(self, reach: int, behind: int) -> _Distances:
        weight = self._blocks[0].qkv.weight
        positions = relative_positions(reach, weight.shape[1], weight)[: reach + behind - 1]
        return _Distances(reach, behind, [block.project(positions) for block in self._blocks])


class StreamingEncoder:
    """``FlowEncoder`` on new codes; equal to it on all codes at once with the block mask."""

    def __init__(self, encoder: FlowEncoder) -> None:
        look = encoder.pre_lookahead_layer
        self._encoder = encoder
        self._ahead, self._back = Conv.of(look.conv1), Conv.of(look.conv2)
        self._up = Conv.of(encoder.up_layer.conv)
        self._code_blocks = StreamingBlocks(encoder.encoders)
        self._frame_blocks = StreamingBlocks(encoder.up_encoders)

    def start(self) -> EncoderState:
        """The state before the first code."""
        return EncoderState(
            self._back.no_tail(1),
            self._code_blocks.start(),
            self._up.no_tail(1),
            self._frame_blocks.start(),
        )

    def __call__(
        self, codes: Tensor, ahead: Tensor | None, state: EncoderState, block_codes: int
    ) -> Tensor:
        """New embedded codes (1, T, C) to (1, 4T, C); ``ahead`` as ``FlowEncoder`` takes it.

        ``state`` moves on by T codes. Unless the reply ends with them, they must end with a
        block.
        """
        encoder = self._encoder
        x = encoder.embed(codes)
        context = self._ahead.no_tail(1) if ahead is None else encoder.embed(ahead)
        hidden = F.leaky_relu(self._ahead.slide(torch.cat([x, context], dim=1)), LEAKY_SLOPE)
        y, state.ahead_tail = self._back.slide_on(hidden, state.ahead_tail)
        x = self._code_blocks(x + y, state.codes, block_codes)
        repeated = x.repeat_interleave(encoder.up_layer.stride, dim=1)
        y, state.up_tail = self._up.slide_on(repeated, state.up_tail)
        x = self._frame_blocks(encoder.up_embed(y), state.frames, block_codes * encoder.ratio)
        return encoder.after_norm(x)
