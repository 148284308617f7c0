"""Audio to codes: a causal Whisper-large-v3 encoder with a codebook, 12.5 codes a second.

Parameter names are the published checkpoint's (under ``encoder.``). Shapes: B segments,
T frames, C = d_model.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.codec.features import WHISPER_HOP, whisper_log_mel
from mosstalk.config import SpeechTokenizerConfig

CONV_STRIDE = 2
"""Frames of the features in one row of the encoder, which is thus 20 ms."""
_UNUSED = re.compile(r"encoder\.(embed_positions2\.|ema_|layer_norm\.|codebook_)")
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What mixes values (B, H, T, d) by queries and keys of the same shape."""


def attend_whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention of whole segments, all (B, H, T, d)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class EncoderAttention(nn.Module):
    """Plain causal multi-head attention; ``k_proj`` has no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Attend = attend_whole) -> Tensor:
        """(B, T, C) to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


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

    def forward(self, x: Tensor, attend: Attend = attend_whole) -> Tensor:
        """(B, T, C) to the same."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), attend)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Encoder(nn.Module):
    """The layers below the cut and the codebook."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3)
        self.conv2 = nn.Conv1d(width, width, 3, stride=CONV_STRIDE)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.quantize_position))
        self.codebook = nn.Embedding(config.quantize_vocab_size, width)
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


def squared_distances(points: Tensor, centres: Tensor, centre_squares: Tensor) -> Tensor:
    """Squared L2 distances (n, m) of points (n, C) and centres (m, C) of squared norms (m,)."""
    cross = points @ centres.T
    return points.square().sum(1, keepdim=True) - 2 * cross + centre_squares
