"""The flow's encoder on blocks of many replies at once; always float32.

Shapes: I items (blocks), T rows of each (codes, or frames after upsampling), C channels, H
heads, D distances. A row's distance to a key is counted over the rows that its reply keeps.
"""

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.flow_batch_estimator import splits_for
from mosstalk.codec.flow_batch_weights import Transformer, held_bytes, packed, plain
from mosstalk.codec.flow_items import PassInputs
from mosstalk.codec.flow_pages import TAIL, PageStore
from mosstalk.codec.flow_parts import Conv, Linear
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.flow_encoder import (
    LEAKY_SLOPE,
    EncoderBlock,
    InputLayer,
    relative_positions,
)
from mosstalk.ops.attention_flow import attend_workspace, attention_flow
from mosstalk.ops.conv1d import conv1d
from mosstalk.ops.flow_linear import linear_add, norm_linear, norm_qkv

_TILE = 512
"""Distances in one product. Products of other sizes round otherwise, and how many distances
a pass covers depends on its longest reply: tiles of one size keep the others' bits."""

_FEW = 8
"""Items for whose scores of distances there is room twice."""
_LEAST_KEYS = 128
"""What a program that shares an item's keys takes at least; in float32 it takes them slowly."""


def _linear(x: Tensor, layer: Linear) -> Tensor:
    """(R, K) to (R, N) by the kernel, whose sums do not depend on R."""
    return norm_linear(x, None, *layer, x.new_empty(x.shape[0], layer.weight.shape[0]))


class _Input:
    """``InputLayer`` on rows (R, C)."""

    def __init__(self, layer: InputLayer) -> None:
        linear, norm = layer.out.children()
        self._linear = packed(Linear.of(linear), torch.float32)
        self._norm, self._scale = plain(norm), layer.scale

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(_linear(x, self._linear)) * self._scale


class _Attention:
    """What an encoder block's attention needs besides its weights' products."""

    def __init__(self, block: nn.Module) -> None:
        assert isinstance(block, EncoderBlock)
        attention = block.self_attn
        self.heads = attention.heads
        self._positions = packed(Linear.of(attention.linear_pos), torch.float32)
        self.by_distance = (attention.pos_bias_v - attention.pos_bias_u).detach().float()

    def project(self, positions: Tensor) -> Tensor:
        """What distances (D, C) are to this layer's queries, in tiles (D / tile, H, d, tile)."""
        tiles = [_linear(tile.contiguous(), self._positions) for tile in positions.split(_TILE)]
        heads = torch.stack(tiles).unflatten(2, (self.heads, -1))
        return heads.permute(0, 2, 3, 1).contiguous()

    def bias(self, query: Tensor, tiles: Tensor, items: int) -> Tensor:
        """Scaled scores (I, H, T, D) of the distances; ``query`` (R, H d) has pos_bias_u added."""
        heads = (query.unflatten(1, (self.heads, -1)) + self.by_distance).transpose(0, 1)
        heads = (heads / math.sqrt(heads.shape[2])).contiguous()
        columns, rows = tiles.shape[0] * _TILE, heads.shape[1]
        if items <= _FEW:
            scores = heads.new_empty(self.heads, rows, columns)
            for place, tile in zip(scores.split(_TILE, dim=2), tiles, strict=True):
                torch.bmm(heads, tile, out=place)
            return scores.unflatten(1, (items, -1)).transpose(0, 1).contiguous()
        # Tile by tile: all of it twice would be the most that a pass holds.
        found = heads.new_empty(items, self.heads, rows // items, columns)
        scores = heads.new_empty(self.heads, rows, _TILE)
        for place, tile in zip(found.split(_TILE, dim=3), tiles, strict=True):
            torch.bmm(heads, tile, out=scores)
            place.copy_(scores.unflatten(1, (items, -1)).transpose(0, 1))
        return found


class PagedBlocks:
    """A stack of encoder blocks whose keys and values lie in pages of T rows."""

    def __init__(self, blocks: nn.ModuleList, kv: Tensor) -> None:
        self._layers = [(Transformer.of_encoder(block), _Attention(block)) for block in blocks]
        self._kv = kv.unbind(1)
        self._rows = kv.shape[5]
        self._known: dict[int, list[Tensor]] = {}
        self._work: dict[int, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(held_bytes(weights) for weights, _ in self._layers)

    @property
    def table_bytes(self) -> int:
        """Memory of the projected distances."""
        return held_bytes(self._known)

    def beside(self) -> "PagedBlocks":
        """The same weights, tables and pages with a workspace of its own."""
        other = copy.copy(self)
        other._work = {}
        return other

    def _distances(self, span: int) -> list[Tensor]:
        """Each layer's projected distances for replies of ``span`` pages."""
        if span not in self._known:
            rows, weight = self._rows, self._layers[0][0].qkv.weight
            columns = -(-(span * rows + rows - 1) // _TILE) * _TILE
            positions = relative_positions(columns - rows + 1, weight.shape[1], weight)[:columns]
            self._known[span] = [attention.project(positions) for _, attention in self._layers]
        return self._known[span]

    def reserve(self, items: int, span: int) -> None:
        """Compute and allocate what passes of ``items`` over ``span`` pages need."""
        self._distances(span)
        if items not in self._work:
            splits = splits_for(items)
            self._work[items] = attend_workspace(items, self._kv[0], self._rows, splits)

    def __call__(self, x: Tensor, inputs: PassInputs, visible: Tensor) -> Tensor:
        """New rows (I T, C), in place; an item sees its first ``visible`` (I,) kept rows."""
        query, mixed = torch.empty_like(x), torch.empty_like(x)
        self.reserve(inputs.items, inputs.span)
        distances = self._known[inputs.span]
        for (block, attention), kv, tiles in zip(self._layers, self._kv, distances, strict=True):
            norm_qkv(
                x,
                block.norm,
                block.qkv.weight,
                query,
                kv,
                inputs.page,
                frames=self._rows,
                bias=block.qkv.bias,
            )
            attention_flow(
                query,
                kv,
                inputs.table,
                visible,
                mixed,
                frames=self._rows,
                bias=attention.bias(query, tiles, inputs.items),
                splits=splits_for(inputs.items),
                least=_LEAST_KEYS,
                workspace=self._work[inputs.items],
            )
            linear_add(x, mixed, *block.out, out=x)
            wide = x.new_empty(x.shape[0], block.widen.weight.shape[0])
            norm_linear(x, block.wide_norm, *block.widen, wide, activation="silu")
            linear_add(x, wide, *block.narrow, out=x)
        return x


class PagedEncoder:
    """Codes of new blocks to mu; what they leave lies in the pages."""

    def __init__(self, flow: FlowDecoder, store: PageStore) -> None:
        encoder, look = flow.encoder, flow.encoder.pre_lookahead_layer
        self._store, self._config = store, flow.config
        self._embedding = flow.input_embedding.weight.detach()
        self._embed, self._up_embed = _Input(encoder.embed), _Input(encoder.up_embed)
        self._ahead, self._back, self._up = (
            packed(Conv.of(conv), torch.float32)
            for conv in (look.conv1, look.conv2, encoder.up_layer.conv)
        )
        self._codes = PagedBlocks(encoder.encoders, store.code_kv)
        self._frames = PagedBlocks(encoder.up_encoders, store.frame_kv)
        self._after = plain(encoder.after_norm)
        self._proj = packed(Linear.of(flow.encoder_proj), torch.float32)

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        layers = [self._ahead, self._back, self._up, self._proj]
        stacks = (self._codes, self._frames)
        return held_bytes(layers) + sum(stack.weight_bytes for stack in stacks)

    @property
    def table_bytes(self) -> int:
        """Memory of the projected distances."""
        return self._codes.table_bytes + self._frames.table_bytes

    def beside(self) -> "PagedEncoder":
        """The same weights and pages with a workspace of its own, for passes at the same time."""
        other = copy.copy(self)
        other._codes, other._frames = self._codes.beside(), self._frames.beside()
        return other

    def reserve(self, items: int, span: int) -> None:
        """Compute and allocate what passes of ``items`` over ``span`` pages need."""
        self._codes.reserve(items, span)
        self._frames.reserve(items, span)

    def __call__(self, inputs: PassInputs) -> Tensor:
        """mu (I F, 80) of the blocks in ``inputs``."""
        x = self._look_ahead(inputs)
        x = self._codes(x, inputs, inputs.visible_codes)
        x = self._up_embed(self._upsample(x, inputs))
        x = self._frames(x, inputs, inputs.visible_frames)
        mu = x.new_empty(x.shape[0], self._config.mel_bins)
        return norm_linear(x, self._after, *self._proj, mu)

    def _look_ahead(self, inputs: PassInputs) -> Tensor:
        """Embedded codes after the two convolutions, (I T, C)."""
        ids, chunk = inputs.codes, self._config.chunk_size
        embedded = F.embedding(ids.clamp(min=0), self._embedding).float().flatten(0, 1)
        x = self._embed(embedded).unflatten(0, ids.shape)
        x = x.masked_fill((ids < 0)[:, :, None], 0)
        windows = _windows(x, chunk)
        hidden = F.leaky_relu(_linear(windows, self._ahead), LEAKY_SLOPE)
        back = conv1d(
            hidden,
            *self._back,
            torch.empty_like(hidden),
            before_item=inputs.before_item,
            before_page=inputs.before_page,
            tails=self._store.ahead_tails,
            page=inputs.page,
            frames=chunk,
            valid=inputs.valid_codes,
        )
        return x[:, :chunk].flatten(0, 1) + back

    def _upsample(self, x: Tensor, inputs: PassInputs) -> Tensor:
        """Each code repeated, then the causal convolution: (I T, C) to (I F, C)."""
        ratio, store = self._config.token_mel_ratio, self._store.up_tails
        codes = x.unflatten(0, (inputs.items, -1))
        in_batch = (inputs.before_item >= 0)[:, None, None]
        in_page = (inputs.before_page >= 0)[:, None, None]
        kept = store[inputs.before_page.clamp(min=0).long(), 0].masked_fill(~in_page, 0)
        earlier = codes[inputs.before_item.clamp(min=0).long(), -TAIL:]
        whole = torch.cat([torch.where(in_batch, earlier, kept), codes], dim=1)
        store[inputs.page.long(), 0] = codes[:, -TAIL:]
        repeated = whole.repeat_interleave(ratio, dim=1)
        return _linear(_windows(repeated, codes.shape[1] * ratio), self._up)


def _windows(x: Tensor, rows: int) -> Tensor:
    """The first ``rows`` windows over all else of (I, T, C), side by side, (I rows, k C)."""
    items, length, channels = x.shape
    size = (items, rows, (length - rows + 1) * channels)
    strides = (length * channels, channels, 1)
    return x.contiguous().as_strided(size, strides).contiguous().flatten(0, 1)


def spans(pages: Sequence[int], smallest: int) -> int:
    """The power of two of pages, from ``smallest`` on, that holds the longest of ``pages``."""
    return max(smallest, 1 << (max(pages, default=1) - 1).bit_length())
