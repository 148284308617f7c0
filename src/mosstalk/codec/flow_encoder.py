"""The flow's encoder on new codes, wherever what the codes before them left is kept.

Always float32. Shapes: I items, T codes of each, then F frames; R = I T or I F rows, C channels.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.codec.flow_weights import Conv, Linear, Transformer, packed, plain
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.flow_encoder import LEAKY_SLOPE, InputLayer
from mosstalk.ops.flow_linear import linear_add, norm_linear

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
