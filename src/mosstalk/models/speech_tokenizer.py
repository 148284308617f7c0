"""Audio to codes: a causal Whisper-large-v3 encoder with a codebook, 12.5 codes a second.

Parameter names are the published checkpoint's (under ``encoder.``). Shapes: B segments,
T frames, C = d_model.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import SpeechTokenizerConfig
from mosstalk.models.features import WHISPER_HOP, whisper_log_mel
from mosstalk.models.weights import embedding

CONV_STRIDE = 2
"""Frames of the features in one row of the encoder, which is thus 20 ms."""
_UNUSED = re.compile(r"encoder\.(embed_positions2\.|ema_|layer_norm\.|codebook_)")
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


class EncoderAttention(nn.Module):
    """Plain causal multi-head attention; ``k_proj`` has no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of whole segments: (B, T, C) to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def fused_qkv(self) -> tuple[Tensor, Tensor]:
        """Weights (3C, C) and biases (3C,) of queries, keys and values in one matmul.

        The projections' own weights become views of them, so that nothing is kept twice.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weights = [projection.weight.detach() for projection in projections]
        joined = _as_one(weights)
        if joined is None:
            joined = torch.cat(weights)
            for projection, view in zip(projections, joined.chunk(3), strict=True):
                projection.weight = nn.Parameter(view, requires_grad=False)
        query, value = self.q_proj.bias.detach(), self.v_proj.bias.detach()
        return joined, torch.cat([query, torch.zeros_like(query), value])


class EncoderLayer(nn.Module):
    """A pre-LayerNorm transformer layer with exact GELU."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        width = config.d_model
        self.self_attn = EncoderAttention(width, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Whole segments: (B, T, C) to the same."""
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the second half of the layer adds to ``x`` (..., C)."""
        return self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Encoder(nn.Module):
    """The layers below the cut and the codebook."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3)
        self.conv2 = nn.Conv1d(width, width, 3, stride=CONV_STRIDE)
        self.embed_positions = embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.quantize_position))
        self.codebook = embedding(config.quantize_vocab_size, width)
        self.pool = config.pooling_kernel_size

    def forward(self, log_mel: Tensor) -> Tensor:
        """Log-mel (B, bins, frames) to pooled hidden states (B, codes, C)."""
        x = F.gelu(self.conv1(F.pad(log_mel, (2, 0))))
        x = F.gelu(self.conv2(F.pad(x, (2, 0)))).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.pooled(x)

    def pooled(self, x: Tensor) -> Tensor:
        """Means of the rows of each code: (B, T, C) to (B, codes, C)."""
        return F.avg_pool1d(x.transpose(1, 2), self.pool).transpose(1, 2)


@dataclass(frozen=True)
class EncodedSegment:
    """What one segment of at most 30 s became.

    ``log_mel`` (bins, frames), ``pooled`` (codes, C), ``distances`` (codes, codebook) squared
    L2, ``codes`` (codes,) int64.
    """

    log_mel: Tensor
    pooled: Tensor
    distances: Tensor
    codes: Tensor


class SpeechTokenizer(nn.Module):
    """16 kHz mono audio to codes: each the nearest codebook entry of 80 ms of sound."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)

    @property
    def samples_per_code(self) -> int:
        """Input samples that one code stands for [1280]."""
        return WHISPER_HOP * CONV_STRIDE * self.config.pooling_kernel_size

    @property
    def segment_samples(self) -> int:
        """Longest stretch that is encoded as one: 30 s in the published model."""
        return WHISPER_HOP * CONV_STRIDE * self.config.max_source_positions

    def unused(self, name: str) -> bool:
        """Whether a published tensor plays no part: layers past the cut, training state."""
        layer = _LAYER.match(name)
        past_cut = layer is not None and int(layer[1]) >= self.config.quantize_position
        return past_cut or _UNUSED.match(name) is not None

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> list[int]:
        """Codes of ``pcm`` (samples,) float at 16 kHz: ceil(samples / 1280) in each segment."""
        if pcm.shape[0] == 0:
            return []
        segments = pcm.split(self.segment_samples)
        return [code for part in segments for code in self.encode_segment(part).codes.tolist()]

    @torch.inference_mode()
    def encode_segment(self, pcm: Tensor) -> EncodedSegment:
        """Encode one segment, zero-padded to whole codes; see ``EncodedSegment``."""
        weight = self.encoder.conv1.weight
        padding = -pcm.shape[0] % self.samples_per_code
        log_mel = whisper_log_mel(
            F.pad(pcm.to(weight.device), (0, padding)), self.config.num_mel_bins
        )
        pooled = self.encoder(log_mel[None].to(weight.dtype))[0]
        centres = self.encoder.codebook.weight.float()
        distances = squared_distances(pooled.float(), centres, centres.square().sum(1))
        return EncodedSegment(log_mel, pooled, distances, distances.argmin(dim=-1))


def _as_one(parts: list[Tensor]) -> Tensor | None:
    """All (n, C) as one (parts n, C), if each follows the one before it in memory."""
    first = parts[0]
    for place, part in enumerate(parts):
        together = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not together or part.data_ptr() - first.data_ptr() != place * first.nbytes:
            return None
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), first.stride())


def squared_distances(points: Tensor, centres: Tensor, centre_squares: Tensor) -> Tensor:
    """Squared L2 distances (n, m) of points (n, C) and centres (m, C) of squared norms (m,)."""
    # In place: for many points each further copy would be as large as all they are found from.
    distances = points @ centres.T
    return distances.mul_(-2).add_(points.square().sum(1, keepdim=True)).add_(centre_squares)
