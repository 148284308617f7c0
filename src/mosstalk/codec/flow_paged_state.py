"""What the flow's networks keep in pages on a device, found and left by the kernels.

Shapes: I items (blocks), T rows of each (codes, or F frames), C channels, H heads, D distances. A
row's distance to a key is counted over the rows that its reply keeps. Rows stand in the order
(guidance branch, item, row).
"""

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mosstalk.codec.flow_networks import Attend, Encoder, Estimator, EstimatorBuffers, linear
from mosstalk.codec.flow_pages import TAIL, PageLayout, PageStore, PassInputs
from mosstalk.codec.flow_weights import Linear, Norm, Transformer, held_bytes, packed
from mosstalk.models.flow import ConditionalFlow, FlowDecoder
from mosstalk.models.flow_networks import EncoderBlock, relative_positions
from mosstalk.ops.attention_flow import attention_flow, attention_workspace
from mosstalk.ops.conv1d import conv1d
from mosstalk.ops.flow_linear import norm_qkv

_TILE = 512
"""Distances in one matmul. Matmuls of other sizes round otherwise, and how many distances
a pass covers depends on its longest reply: tiles of one size keep the others' bits."""
_FEW = 8
"""Items for whose scores of distances there is room twice."""
_MOST_SPLITS, _SPLIT_PROGRAMS = 8, 16
_LEAST_KEYS, _LEAST_FLOAT32_KEYS = 512, 128
"""What a program that shares an item's keys takes at least: joining costs as much as some 400. In
float32, which the encoder always computes in, it takes them slowly."""


def splits_for(items: int) -> int:
    """Programs that may share the keys of one item and head when there are ``items``."""
    return min(_MOST_SPLITS, max(1, _SPLIT_PROGRAMS // items))


class _Distances:
    """What an encoder block's attention needs besides its weights' matmuls."""

    def __init__(self, block: nn.Module) -> None:
        assert isinstance(block, EncoderBlock)
        attention = block.self_attn
        self.heads = attention.heads
        self._positions = packed(Linear.of(attention.linear_pos), torch.float32)
        by_content = attention.pos_bias_u.detach().float()
        self.by_distance = attention.pos_bias_v.detach().float() - by_content
        bias = Transformer.of_encoder(block).qkv.bias
        assert bias is not None
        self.bias = bias.clone()
        self.bias[: by_content.numel()] += by_content.flatten()

    def project(self, positions: Tensor) -> Tensor:
        """What distances (D, C) are to this layer's queries, in tiles (D / tile, H, d, tile)."""
        tiles = [linear(tile.contiguous(), self._positions) for tile in positions.split(_TILE)]
        heads = torch.stack(tiles).unflatten(2, (self.heads, -1))
        return heads.permute(0, 2, 3, 1).contiguous()

    def scores(self, query: Tensor, tiles: Tensor, items: int) -> Tensor:
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


class _PagedStack:
    """A stack of encoder blocks whose keys and values lie in pages of T rows."""

    def __init__(self, blocks: nn.ModuleList, kv: Tensor) -> None:
        self._layers = list(map(_Distances, blocks))
        self._kv = kv.unbind(1)
        self._rows = kv.shape[5]
        self._known: dict[int, list[Tensor]] = {}
        self._work: dict[int, Tensor] = {}

    @property
    def table_bytes(self) -> int:
        """Memory of the projected distances."""
        return held_bytes(self._known)

    def beside(self) -> "_PagedStack":
        """The same tables and pages with a workspace of its own."""
        other = copy.copy(self)
        other._work = {}
        return other

    def reserve(self, items: int, span: int) -> None:
        """Compute and allocate what passes of ``items`` over ``span`` pages need."""
        if span not in self._known:
            rows, width = self._rows, self._kv[0].shape[3] * self._kv[0].shape[5]
            columns = -(-(span * rows + rows - 1) // _TILE) * _TILE
            positions = relative_positions(columns - rows + 1, width, self._kv[0])[:columns]
            self._known[span] = [layer.project(positions) for layer in self._layers]
        if items not in self._work:
            splits = splits_for(items)
            self._work[items] = attention_workspace(items, self._kv[0], self._rows, splits)

    def over(self, inputs: PassInputs, visible: Tensor) -> Attend:
        """Attention of a pass in which an item sees its first ``visible`` (I,) kept rows."""
        self.reserve(inputs.items, inputs.span)
        tables = self._known[inputs.span]

        def attend(number: int, block: Transformer, x: Tensor) -> Tensor:
            query = torch.empty_like(x)
            layer, kv, weight = self._layers[number], self._kv[number], block.qkv.weight
            page, frames = inputs.page, self._rows
            norm_qkv(x, block.norm, weight, query, kv, page, frames=frames, bias=layer.bias)
            return attention_flow(
                query,
                kv,
                inputs.table,
                visible,
                torch.empty_like(x),
                frames=frames,
                bias=layer.scores(query, tables[number], inputs.items),
                splits=splits_for(inputs.items),
                least=_LEAST_FLOAT32_KEYS,
                workspace=self._work[inputs.items],
            )

        return attend


class PagedEncoder:
    """Codes of new blocks to mu; what they leave lies in the pages."""

    def __init__(self, flow: FlowDecoder, store: PageStore) -> None:
        self._network, self._store = Encoder(flow), store
        self._chunk = flow.config.chunk_size
        self._codes = _PagedStack(flow.encoder.encoders, store.code_kv)
        self._frames = _PagedStack(flow.encoder.up_encoders, store.frame_kv)

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return held_bytes(self._network.weights)

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
        codes, ahead = inputs.codes.tensor_split([self._chunk], dim=1)
        return self._network(codes, ahead, _PagedCodes(self, inputs))


class _PagedCodes:
    """``KeptCodes`` of one pass."""

    def __init__(self, owner: PagedEncoder, inputs: PassInputs) -> None:
        self._owner, self._store, self._inputs = owner, owner._store, inputs

    def conv(self, x: Tensor, layer: Linear) -> Tensor:
        given, tails = self._inputs, self._store.ahead_tails
        return _conv(x, layer, torch.empty_like(x), given, tails, given.valid_codes)

    def after_earlier(self, x: Tensor) -> Tensor:
        given, store = self._inputs, self._store.up_tails
        in_batch = (given.before_item >= 0)[:, None, None]
        in_page = (given.before_page >= 0)[:, None, None]
        kept = store[given.before_page.clamp(min=0).long(), 0].masked_fill(~in_page, 0)
        earlier = x[given.before_item.clamp(min=0).long(), -TAIL:]
        whole = torch.cat([torch.where(in_batch, earlier, kept), x], dim=1)
        store[given.page.long(), 0] = x[:, -TAIL:]
        return whole

    def codes(self) -> Attend:
        return self._owner._codes.over(self._inputs, self._inputs.visible_codes)

    def frames(self) -> Attend:
        return self._owner._frames.over(self._inputs, self._inputs.visible_frames)


class PagedEstimator:
    """Euler steps over new blocks; what they leave lies in the pages.

    Nothing is allocated in a pass but what ``EstimatorBuffers`` holds.
    """

    def __init__(self, flow: ConditionalFlow, layout: PageLayout, store: PageStore) -> None:
        self._network = Estimator(flow, layout.dtype)
        self._layout = layout
        # (pages, branch, 2, H, F, d) of each step and layer.
        self._kv = [list(step.unbind(1)) for step in store.kv.unbind(1)]
        self._tails = store.conv_tails(layout)
        self._work: dict[int, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return held_bytes(self._network.weights)

    def beside(self) -> "PagedEstimator":
        """The same weights and pages with a workspace of its own, for passes at the same time."""
        other = copy.copy(self)
        other._work = {}
        return other

    def reserve(self, items: int) -> None:
        """Allocate what a pass of ``items`` needs besides its buffers."""
        if items not in self._work:
            kv, frames = self._kv[0][0], self._layout.frames
            self._work[items] = attention_workspace(items, kv, frames, splits_for(items))

    def integrate(self, buffers: EstimatorBuffers, inputs: PassInputs) -> None:
        """From noise to mel, in the first columns of ``buffers.given``."""
        self.reserve(inputs.items)
        self._network.integrate(buffers, _PagedFrames(self, buffers, inputs))


class _PagedFrames:
    """``KeptFrames`` of one pass."""

    _kv: Iterator[Tensor]
    _tails: Iterator[Tensor]

    def __init__(
        self, owner: PagedEstimator, buffers: EstimatorBuffers, inputs: PassInputs
    ) -> None:
        self._owner, self._buffers, self._inputs = owner, buffers, inputs

    def begin(self, step: int) -> None:
        self._kv, self._tails = iter(self._owner._kv[step]), iter(self._owner._tails[step])

    def conv(self, x: Tensor, layer: Linear, out: Tensor | None) -> Tensor:
        assert out is not None
        given = self._inputs
        return _conv(x, layer, out, given, next(self._tails), given.valid_frames)

    def attend(self, x: Tensor, norm: Norm | None, qkv: Linear) -> Tensor:
        owner, given, kv = self._owner, self._inputs, next(self._kv)
        query, mixed, frames = self._buffers.query, self._buffers.mixed, owner._layout.frames
        assert query is not None
        assert mixed is not None
        norm_qkv(x, norm, qkv.weight, query, kv, given.page, frames=frames)
        return attention_flow(
            query,
            kv,
            given.table,
            given.visible_frames,
            mixed,
            frames=frames,
            packs=given.packs,
            splits=splits_for(given.items),
            least=_LEAST_KEYS,
            workspace=owner._work[given.items],
        )


def _conv(
    x: Tensor, layer: Linear, out: Tensor, given: PassInputs, tails: Tensor, valid: Tensor
) -> Tensor:
    return conv1d(
        x,
        *layer,
        out,
        before_item=given.before_item,
        before_page=given.before_page,
        tails=tails,
        page=given.page,
        frames=x.shape[0] // (tails.shape[1] * given.items),
        valid=valid,
    )


def spans(pages: Sequence[int], smallest: int) -> int:
    """The power of two of pages, from ``smallest`` on, that holds the longest of ``pages``."""
    return max(smallest, 1 << (max(pages, default=1) - 1).bit_length())
