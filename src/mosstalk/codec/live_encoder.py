"""The speech tokenizer's encoder on rows that are new, from the keys and values kept before.

Rows of several streams lie one after the other; only attention and the convolutions' first
steps tell them apart. Shapes: N rows of all streams, C = d_model, H heads, d channels of a head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.features import floored
from mosstalk.codec.live_segment import FRAMES_BEFORE, LiveSegment
from mosstalk.codec.speech_tokenizer import CONV_STRIDE, Encoder


class Stretch(NamedTuple):
    """Rows of a segment that are to be encoded: from ``segment.rows`` to ``end``."""

    segment: LiveSegment
    end: int

    @property
    def rows(self) -> int:
        """How many they are."""
        return self.end - self.segment.rows

    def log_mel(self) -> Tensor:
        """The frames that they read, and those the convolutions do: (4 + 2 rows - 1, bins)."""
        start = CONV_STRIDE * self.segment.rows
        return self.segment.log_mel[start : FRAMES_BEFORE + CONV_STRIDE * self.end - 1]

    def mask(self) -> Tensor | None:
        """What is added to scores (rows, end) so that a row sees those before it and itself.

        None where nothing was kept: plain causal.
        """
        keys, start = self.segment.keys, self.segment.rows
        if start == 0:
            return None
        return keys.new_full((self.rows, self.end), -math.inf).triu(start + 1)


def encode_rows(encoder: Encoder, stretches: Sequence[Stretch]) -> Tensor:
    """Hidden states (codes of all stretches, C); every stretch is whole codes, and is kept.

    Equals ``Encoder.forward`` on whole segments with each one's floor, but for rounding.
    """
    x = _convolved(encoder, stretches) + _positions(encoder, stretches)
    masks = [stretch.mask() for stretch in stretches]
    x = x[None]
    for index, layer in enumerate(encoder.layers):
        x = layer(x, _Attention(stretches, masks, index))
    for stretch in stretches:
        stretch.segment.rows = stretch.end
    return encoder.pooled(x)[0]


class _Attention(NamedTuple):
    """Attention in one layer: each stretch to the rows kept of its own segment."""

    stretches: Sequence[Stretch]
    masks: Sequence[Tensor | None]
    layer: int

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        counts = [stretch.rows for stretch in self.stretches]
        parts = (part.split(counts, dim=2) for part in (query, key, value))
        mixed = [
            self._mix(stretch, mask, *new)
            for stretch, mask, *new in zip(self.stretches, self.masks, *parts, strict=True)
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)

    def _mix(
        self, stretch: Stretch, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        kept = stretch.segment.keys[self.layer, :, :, : stretch.end]
        kept[:, :, stretch.segment.rows :] = torch.cat([key, value])
        keys, values = kept[:, None]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None
        )


def _positions(encoder: Encoder, stretches: Sequence[Stretch]) -> Tensor:
    table = encoder.embed_positions.weight
    return torch.cat([table[stretch.segment.rows : stretch.end] for stretch in stretches])


def _convolved(encoder: Encoder, stretches: Sequence[Stretch]) -> Tensor:
    """Rows (N, C) after both convolutions, of all stretches' frames in one sequence.

    A stretch of n rows is 4 + 2n frames there, the last of them a seam that no row of its own
    reads; the second convolution then gives n rows and 2 across the seam to the next.
    """
    frames, starts = _read(stretches, encoder.conv1.weight.dtype)
    firsts = [at for at, stretch in zip(starts, stretches, strict=True) if not stretch.segment.rows]
    for at in firsts:
        frames[at : at + FRAMES_BEFORE] = 0
    x = _convolve(encoder.conv1, frames, step=1)
    for at in firsts:
        x[at : at + CONV_STRIDE] = 0
    x = _convolve(encoder.conv2, x, step=CONV_STRIDE)
    rows = [
        x[at // CONV_STRIDE : at // CONV_STRIDE + stretch.rows]
        for at, stretch in zip(starts, stretches, strict=True)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _read(stretches: Sequence[Stretch], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Frames (4 + 2n of each stretch, bins) as the encoder reads them, and where each begins."""
    seam = stretches[0].segment.log_mel.new_zeros(1, stretches[0].segment.log_mel.shape[1])
    parts: list[Tensor] = []
    starts: list[int] = []
    lengths: list[int] = []
    for stretch in stretches:
        starts.append(sum(lengths))
        parts += [stretch.log_mel(), seam]
        lengths.append(FRAMES_BEFORE + CONV_STRIDE * stretch.rows)
    floors = torch.tensor([stretch.segment.floor for stretch in stretches])
    each = floors.repeat_interleave(torch.tensor(lengths))[:, None]
    return floored(torch.cat(parts), each.to(seam.device)).to(dtype), starts


def _convolve(conv: nn.Conv1d, x: Tensor, step: int) -> Tensor:
    """Rows (T, inputs) to (rows, outputs) after GELU, unpadded."""
    # As a product, because a convolution is prepared anew for every length that it meets.
    window = x.unfold(0, conv.kernel_size[0], step).flatten(1)
    return F.gelu(F.linear(window, conv.weight.flatten(1), conv.bias))
