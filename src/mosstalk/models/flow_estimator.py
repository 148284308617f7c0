"""The flow decoder's estimator: the velocity that carries noise to a mel.

Matcha-TTS's U-Net (Mehta et al. 2023) as CosyVoice2 made it causal: one down, several mid
and one up stage at one resolution. Shapes: B sequences, T frames, W = estimator_channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import FlowConfig
from mosstalk.models.flow_encoder import block_mask

_TIME_SCALE = 1000.0
_TIME_BASE = 10000.0
_FF_MULTIPLE = 4
_TIME_MULTIPLE = 4


class CausalConv(nn.Conv1d):
    """A kernel-3 convolution that looks only back."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, T) to (B, outputs, T)."""
        return super().forward(F.pad(x, (2, 0)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, W, T)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, W, T) to the same."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ConvBlock(nn.Module):
    """Causal convolution, channel norm, Mish; indices 0 and 2 are the published ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            CausalConv(inputs, outputs),
            nn.Identity(),
            ChannelNorm(outputs),
            nn.Identity(),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, T) to (B, outputs, T)."""
        return self.block(x)


class ResidualBlock(nn.Module):
    """Two convolution blocks with the time added between them."""

    def __init__(self, inputs: int, width: int, time_width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_width, width))
        self.block1 = ConvBlock(inputs, width)
        self.block2 = ConvBlock(width, width)
        self.res_conv = nn.Conv1d(inputs, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x`` (B, inputs, T), ``time`` (B, 4W), to (B, W, T)."""
        hidden = self.block1(x) + self.mlp(time)[:, :, None]
        return self.block2(hidden) + self.res_conv(x)


class EstimatorAttention(nn.Module):
    """Multi-head attention whose heads together may be wider than the stream."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_k = nn.Linear(width, inner, bias=False)
        self.to_v = nn.Linear(width, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, W) to the same."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.to_out[0](mixed.transpose(1, 2).flatten(2))


class GeluProjection(nn.Module):
    """Linear and exact GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, inner)."""
        return F.gelu(self.proj(x))


class EstimatorFeedForward(nn.Module):
    """Linear x4, GELU, linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = _FF_MULTIPLE * width
        self.net = nn.Sequential(
            GeluProjection(width, inner), nn.Identity(), nn.Linear(inner, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to the same."""
        return self.net(x)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attn1 = EstimatorAttention(width, heads, head_dim)
        self.ff = EstimatorFeedForward(width)
        self.norm1 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, W) to the same."""
        x = x + self.attn1(self.norm1(x), mask)
        return x + self.ff(self.norm3(x))


class TimeEmbedding(nn.Module):
    """Sinusoids of 1000 t (sin first, then cos), linear, SiLU, linear."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.waves = inputs // 2
        self.linear_1 = nn.Linear(inputs, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        """``t`` (B,) in [0, 1] to (B, 4W)."""
        steps = torch.arange(self.waves, device=t.device).float()
        frequencies = torch.exp(steps * -(math.log(_TIME_BASE) / (self.waves - 1)))
        angles = _TIME_SCALE * t.float()[:, None] * frequencies
        wave = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(wave)))


def _stage(inputs: int, config: FlowConfig, closing: bool) -> nn.ModuleList:
    """A residual block, its transformer blocks and, in the outer stages, a closing convolution."""
    width = config.estimator_channels
    parts: list[nn.Module] = [
        ResidualBlock(inputs, width, _TIME_MULTIPLE * width),
        nn.ModuleList(
            TransformerBlock(width, config.estimator_heads, config.estimator_head_dim)
            for _ in range(config.estimator_transformer_blocks)
        ),
    ]
    return nn.ModuleList([*parts, CausalConv(width, width)] if closing else parts)


def _run(stage: nn.Module, x: Tensor, time: Tensor, mask: Tensor | None) -> Tensor:
    """Residual block and transformer blocks of a stage, (B, inputs, T) to (B, W, T)."""
    residual, transformers, *_ = stage.children()
    y = residual(x, time).transpose(1, 2)
    for block in transformers.children():
        y = block(y, mask)
    return y.transpose(1, 2)


class Estimator(nn.Module):
    """Velocity of the flow at time t for mel frames x."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width, bins = config.estimator_channels, config.mel_bins
        self.time_mlp = TimeEmbedding(4 * bins, _TIME_MULTIPLE * width)
        self.down_blocks = nn.ModuleList([_stage(4 * bins, config, closing=True)])
        self.mid_blocks = nn.ModuleList(
            _stage(width, config, closing=False) for _ in range(config.estimator_mid_blocks)
        )
        self.up_blocks = nn.ModuleList([_stage(2 * width, config, closing=True)])
        self.final_block = ConvBlock(width, width)
        self.final_proj = nn.Conv1d(width, bins, 1)

    def forward(
        self,
        x: Tensor,
        mu: Tensor,
        t: Tensor,
        speaker: Tensor,
        condition: Tensor,
        block_frames: int | None,
    ) -> Tensor:
        """Return d x / d t, (B, 80, T).

        ``x``, ``mu`` and ``condition`` (B, 80, T), ``t`` (B,), ``speaker`` (B, 80);
        ``block_frames`` is the attention's block, None for full attention.
        """
        frames = x.shape[2]
        mask = block_mask(frames, block_frames, x.device)
        time = self.time_mlp(t)
        speakers = speaker[:, :, None].expand(-1, -1, frames)
        down, up = self.down_blocks[0], self.up_blocks[0]
        skip = _run(down, torch.cat([x, mu, speakers, condition], dim=1), time, mask)
        y = _closing(down)(skip)
        for stage in self.mid_blocks:
            y = _run(stage, y, time, mask)
        y = _closing(up)(_run(up, torch.cat([y, skip], dim=1), time, mask))
        return self.final_proj(self.final_block(y))


def _closing(stage: nn.Module) -> nn.Module:
    return list(stage.children())[2]
