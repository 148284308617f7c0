"""The speech tokenizer on rows that are new, from the keys, values and features kept before.

Rows of several streams lie one after the other; only attention and the convolutions' first
steps tell them apart. Shapes: N rows of all streams, C = d_model, H heads, d channels of a head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.tokenizer_state import FRAMES_BEFORE, LiveSegment, Pages, Places, joined
from mosstalk.models.features import WhisperBands, floored
from mosstalk.models.speech_tokenizer import (
    CONV_STRIDE,
    EncoderLayer,
    SpeechTokenizer,
    squared_distances,
)
from mosstalk.ops.attention_tokenizer import attention_numbers
from mosstalk.ops.launch import Norm, Workspace
from mosstalk.ops.linear_tf32x3 import (
    Paged,
    Precision,
    Tf32x3,
    linear_float32,
    linear_numbers,
    qkv_float32,
    takes,
)
from mosstalk.ops.norm import norm_float32


class SegmentSpan(NamedTuple):
    """Rows of a segment that are to be encoded: from ``segment.rows`` to ``end``."""

    segment: LiveSegment
    end: int

    @property
    def start(self) -> int:
        """The first of them."""
        return self.segment.rows

    @property
    def rows(self) -> int:
        """How many they are."""
        return self.end - self.segment.rows

    @property
    def frames(self) -> int:
        """Frames that they and the convolutions read, and a seam: an even number."""
        return FRAMES_BEFORE + CONV_STRIDE * self.rows

    def frame_places(self) -> Places:
        """Where those frames are kept; the seam's value is read by nothing."""
        first = CONV_STRIDE * self.start - FRAMES_BEFORE
        places = self.segment.held.frame_places(first, first + self.frames - 1)
        return np.append(places, 0)


class Attention(Protocol):
    """Mixes the values that rows see; their own keys and values have been kept."""

    def __call__(self, layer: int, query: Tensor) -> Tf32x3:
        """(N, C) to the same, as ``Tf32x3`` parts where kernels take what is given."""


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> "_Linear":
        return cls(linear.weight.detach(), linear.bias.detach())


class _Layer(NamedTuple):
    before_attention: Norm
    qkv: _Linear
    out: _Linear
    before_feeding: Norm
    first: _Linear
    second: _Linear

    @classmethod
    def of(cls, layer: nn.Module) -> "_Layer":
        assert isinstance(layer, EncoderLayer)
        attention = layer.self_attn
        return cls(
            _norm(layer.self_attn_layer_norm),
            _Linear(*attention.fused_qkv()),
            _Linear.of(attention.out_proj),
            _norm(layer.final_layer_norm),
            _Linear.of(layer.fc1),
            _Linear.of(layer.fc2),
        )


def _norm(module: nn.LayerNorm) -> Norm:
    return module.weight.detach(), module.bias.detach(), module.eps


class LiveEncoder:
    """The tokenizer's weights as streams use them, and the pages they keep things in."""

    def __init__(
        self, tokenizer: SpeechTokenizer, pages: Pages, precision: Precision = "tf32x3"
    ) -> None:
        self.precision: Precision = precision
        self.encoder = tokenizer.encoder
        self.pages = pages
        weight = self.encoder.codebook.weight
        self.device = weight.device
        heads, width = tokenizer.config.encoder_attention_heads, tokenizer.config.d_model
        room = max(linear_numbers(), attention_numbers(heads, width // heads))
        self.workspace = Workspace(room if takes(weight) else 0, self.device)
        self._how: _How = {"precision": precision, "workspace": self.workspace}
        self._layers = [_Layer.of(layer) for layer in self.encoder.layers]
        self._bands = WhisperBands.of(tokenizer.config.num_mel_bins, self.device)
        self._centres = weight.detach().float()
        self._centre_squares = self._centres.square().sum(1)

    def log_mel(self, windows: Tensor) -> Tensor:
        """Log powers (n, bins), before any floor, of the samples (n, 400) of frames."""
        return self._bands.logs(torch.fft.rfft(windows * self._bands.window).T).T

    def convolved(self, frames: Tensor, known: Tensor | None) -> Tensor:
        """Rows (..., n, C) after both convolutions of frames (..., 2n + 3, bins) with a floor.

        ``known`` (..., 2n + 3, 1) is False for the four frames of padding before a segment's
        first one; None: there is no padding.
        """
        encoder = self.encoder
        frames = frames.to(encoder.conv1.weight.dtype)
        if known is not None:
            frames = frames.masked_fill(~known, 0)
        x = self._convolve(encoder.conv1, frames, step=1)
        if known is not None:
            # What the first one gives for frames -2 and -1 is padding too.
            x = x.masked_fill(~known[..., 2:, :], 0)
        return self._convolve(encoder.conv2, x, step=CONV_STRIDE)

    def run(
        self, x: Tensor, positions: Tensor, places: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Pooled hidden states (N / 4, C) of rows ``x`` (N, C) after the convolutions.

        Their keys and values are kept at ``places``: page and row in it, both (N,).
        """
        x = x + self.encoder.embed_positions.weight[positions]
        for index, layer in enumerate(self._layers):
            paged = Paged(self.pages.kv[index], *places)
            mixed = attention(index, self._projected(x, layer, paged))
            x = linear_float32(mixed, *layer.out, residual=x, **self._how).high
            # For many rows it is as large as all else together.
            del mixed
            x = linear_float32(self._widened(x, layer), *layer.second, residual=x, **self._how).high
        return self.encoder.pooled(x[None])[0]

    def _projected(self, x: Tensor, layer: _Layer, paged: Paged) -> Tensor:
        """Queries of rows ``x`` (N, C), whose keys and values go to their pages."""
        normed = norm_float32(x, layer.before_attention, split=takes(x))
        return qkv_float32(normed, *layer.qkv, paged, **self._how)

    def _widened(self, x: Tensor, layer: _Layer) -> Tf32x3:
        """The first half of what a layer feeds rows ``x`` (N, C) through."""
        split = takes(x)
        normed = norm_float32(x, layer.before_feeding, split=split)
        return linear_float32(normed, *layer.first, activation="gelu", split=split, **self._how)

    def nearest(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest entry of each point (n, C), and how much nearer it is than the next.

        Codes (n,) int32 and leads (n,) float32 in shares of the squared norms, by which
        rounding grows.
        """
        points = pooled.float()
        distances = squared_distances(points, self._centres, self._centre_squares)
        least, codes = distances.min(dim=1)
        distances.scatter_(1, codes[:, None], torch.inf)
        norms = points.square().sum(1) + self._centre_squares[codes]
        return codes.int(), (distances.amin(dim=1) - least) / norms

    def _convolve(self, conv: nn.Conv1d, x: Tensor, step: int) -> Tensor:
        """Rows (..., T, inputs) to (..., rows, outputs) after GELU, unpadded."""
        # As a matmul, because a convolution is prepared anew for every length that it meets.
        window = x.unfold(-2, conv.kernel_size[0], step).flatten(-2)
        bias = conv.bias
        assert bias is not None
        out = linear_float32(
            Tf32x3(window.flatten(0, -2)),
            conv.weight.detach().flatten(1),
            bias.detach(),
            activation="gelu",
            **self._how,
        )
        return out.high.view(*window.shape[:-1], -1)


class _How(TypedDict):
    precision: Precision
    workspace: Workspace


def compute_features(
    live: LiveEncoder, segments: Sequence[LiveSegment], frames: Sequence[int]
) -> None:
    """Compute the features of each segment up to its number of ``frames``, all in one batch.

    Every segment must have a frame that is new, and pages for all.
    """
    spans = [(segment.frames, end) for segment, end in zip(segments, frames, strict=True)]
    each = list(zip(segments, spans, strict=True))
    windows = np.concatenate([segment.windows(*span) for segment, span in each])
    log_mel = live.log_mel(torch.from_numpy(windows).to(live.device))
    places = joined([segment.held.frame_places(*span) for segment, span in each], live.device)
    live.pages.frames()[places] = log_mel
    least, most = torch.stack(torch.aminmax(log_mel, dim=1)).cpu().numpy()
    at = 0
    for segment, (start, end) in each:
        new = slice(at, at + end - start)
        segment.put(least[new], float(most[new].max()))
        at = new.stop


def encode_rows(live: LiveEncoder, spans: Sequence[SegmentSpan], attention: Attention) -> Tensor:
    """Hidden states (codes of all spans, C); every span is whole codes, and is kept.

    Equals ``Encoder.forward`` on whole segments with each one's floor, but for rounding.
    """
    positions = joined([np.arange(s.start, s.end) for s in spans], live.device)
    places = [span.segment.held.row_places(span.start, span.end) for span in spans]
    pages, rows = (joined(part, live.device) for part in zip(*places, strict=True))
    pooled = live.run(_convolved(live, spans), positions, (pages, rows), attention)
    for span in spans:
        span.segment.rows = span.end
    return pooled


def _convolved(live: LiveEncoder, spans: Sequence[SegmentSpan]) -> Tensor:
    """Rows (N, C) after both convolutions, of all spans' frames in one sequence.

    A span of n rows is 4 + 2n frames there, the last of them a seam that no row of its own
    reads; the second convolution then gives n rows and 2 across the seam to the next.
    """
    lengths = [span.frames for span in spans]
    starts = np.cumsum([0, *lengths[:-1]])
    floors = np.repeat([span.segment.floor for span in spans], lengths)
    frames = live.pages.frames()[joined([s.frame_places() for s in spans], live.device)]
    frames = floored(frames, torch.from_numpy(floors).float().to(live.device)[:, None])
    after = np.ones(sum(lengths), dtype=bool)
    for start, span in zip(starts, spans, strict=True):
        after[start : start + FRAMES_BEFORE] = span.start > 0
    known = None if after.all() else torch.from_numpy(after).to(live.device)[:, None]
    x = live.convolved(frames, known)
    if len(spans) == 1:
        return x
    rows = [np.arange(s.rows) + at // CONV_STRIDE for at, s in zip(starts, spans, strict=True)]
    return x[joined(rows, live.device)]


class StreamByStream:
    """Torch's own attention for each stream in turn; no row is padded."""

    def __init__(self, live: LiveEncoder, spans: Sequence[SegmentSpan]) -> None:
        self._live = live
        self._kv = live.pages.kv
        self._spans = spans
        self._masks = [self._mask(span) for span in spans]

    def __call__(self, layer: int, query: Tensor) -> Tf32x3:
        """See ``Attention``."""
        kv = self._kv[layer]
        parts = query.unflatten(1, (kv.shape[3], -1)).split([s.rows for s in self._spans])
        mixed = [
            self._mix(kv, span, mask, part)
            for span, mask, part in zip(self._spans, self._masks, parts, strict=True)
        ]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return Tf32x3.of(joined, split=takes(query))

    def _mask(self, span: SegmentSpan) -> Tensor | None:
        """What is added to scores (rows, end) so that a row sees those before it and itself."""
        if span.start == 0:
            return None
        hidden = self._kv[0].new_full((span.rows, span.end), -math.inf)
        return hidden.triu(span.start + 1)

    def _mix(self, kv: Tensor, span: SegmentSpan, mask: Tensor | None, query: Tensor) -> Tensor:
        ids = span.segment.held.ids
        if span.end <= kv.shape[4]:
            kept = kv[ids[0], 0]
        else:
            kept = torch.cat([kv[page, 0] for page in ids], dim=2)
        keys, values = kept[:, None, :, : span.end]
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None
        )
        return mixed[0].transpose(0, 1).flatten(1)
