"""Attention of new rows over pages: stream by stream, or of all streams in one run.

Shapes: N rows of all streams, C = H d channels.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.codec.tokenizer_encoder import LiveEncoder, SegmentSpan
from mosstalk.ops.attention_tokenizer import ITEM_ROWS, Items, attention_tokenizer, splits_for
from mosstalk.ops.linear_tf32x3 import Tf32x3, takes

_ALIGNED = 4


class StreamByStream:
    """Torch's own attention for each stream in turn; no row is padded."""

    def __init__(self, live: LiveEncoder, stretches: Sequence[SegmentSpan]) -> None:
        self._live = live
        self._kv = live.pages.kv
        self._stretches = stretches
        self._masks = [self._mask(stretch) for stretch in stretches]

    def __call__(self, layer: int, query: Tensor) -> Tf32x3:
        """See ``Attention``."""
        kv = self._kv[layer]
        parts = query.unflatten(1, (kv.shape[3], -1)).split([s.rows for s in self._stretches])
        mixed = [
            self._mix(kv, stretch, mask, part)
            for stretch, mask, part in zip(self._stretches, self._masks, parts, strict=True)
        ]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return Tf32x3.of(joined, split=takes(query))

    def _mask(self, stretch: SegmentSpan) -> Tensor | None:
        """What is added to scores (rows, end) so that a row sees those before it and itself."""
        if stretch.start == 0:
            return None
        hidden = self._kv[0].new_full((stretch.rows, stretch.end), -math.inf)
        return hidden.triu(stretch.start + 1)

    def _mix(self, kv: Tensor, stretch: SegmentSpan, mask: Tensor | None, query: Tensor) -> Tensor:
        ids = stretch.segment.held.ids
        if stretch.end <= kv.shape[4]:
            kept = kv[ids[0], 0]
        else:
            kept = torch.cat([kv[page, 0] for page in ids], dim=2)
        keys, values = kept[:, None, :, : stretch.end]
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None
        )
        return mixed[0].transpose(0, 1).flatten(1)


class InItems:
    """All streams in one run of the kernel, however many rows each has, in items of up to 32."""

    def __init__(self, live: LiveEncoder, stretches: Sequence[SegmentSpan]) -> None:
        self._live = live
        pages = live.pages
        table = np.zeros((len(stretches), pages.longest), np.int32)
        first, items = 0, []
        for stream, stretch in enumerate(stretches):
            table[stream, : len(stretch.segment.held.ids)] = stretch.segment.held.ids
            for start in range(0, stretch.rows, ITEM_ROWS):
                rows = min(ITEM_ROWS, stretch.rows - start)
                items.append((stream, first + start, rows, stretch.start + start + rows))
            first += stretch.rows
        device = pages.log_mel.device
        self._table = torch.from_numpy(table).to(device)
        # Lists that begin at a multiple of 16 bytes: others would be compiled for anew.
        columns = np.zeros((4, -(-len(items) // _ALIGNED) * _ALIGNED), np.int32)
        columns[:, : len(items)] = np.array(items, np.int32).T
        self._items = Items(*torch.from_numpy(columns).to(device)[:, : len(items)])
        self._splits = splits_for(len(items), pages.kv[0].shape[3])

    def __call__(self, layer: int, query: Tensor) -> Tf32x3:
        """See ``Attention``."""
        return attention_tokenizer(
            query,
            self._live.pages.kv[layer],
            self._table,
            self._items,
            splits=self._splits,
            split=takes(query),
            precision=self._live.precision,
            workspace=self._live.workspace,
        )
