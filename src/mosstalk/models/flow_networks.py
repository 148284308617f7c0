"""The flow decoder's two networks: codes to mu, and the velocity that carries noise to a mel.

``FlowEncoder`` makes mu, the mean that the flow starts from: CosyVoice2's upsampling conformer
without its convolution module (Du et al. 2024). Every position sees all earlier blocks and its own,
and three codes ahead through one convolution. Shapes: B sequences, T codes (or 4 T frames after
upsampling), C = input_size, H heads.

``Estimator`` gives the velocity: Matcha-TTS's U-Net (Mehta et al. 2023) as CosyVoice2 made it
causal: one down, several mid and one up stage at one resolution. Shapes: B sequences, T frames,
W = estimator_channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import FlowConfig

_BLOCK_NORM_EPS = 1e-12
LEAKY_SLOPE = 0.01
_UPSAMPLE_KERNEL_PER_STRIDE = 2
_POSITION_BASE = 10000.0


def block_mask(length: int, block: int | None, device: torch.device) -> Tensor | None:
    """(length, length) mask, True to see: a position sees its own and all earlier blocks.

    None, everything is seen, where ``block`` is None.
    """
    if block is None:
        return None
    index = torch.arange(length, device=device) // block
    return index[None, :] <= index[:, None]


def relative_positions(length: int, width: int, like: Tensor) -> Tensor:
    """Interleaved sin, cos of the distances length-1 .. -(length-1), (2 length - 1, width)."""
    distance = torch.arange(length - 1, -length, -1, device=like.device).float()
    half = torch.arange(0, width, 2, device=like.device).float()
    angles = distance[:, None] * torch.exp(half * -(math.log(_POSITION_BASE) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(like.dtype)


class InputLayer(nn.Module):
    """Linear and LayerNorm, times sqrt(C); the positions act in the attention alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to the same."""
        return self.out(x) * self.scale


class LookAhead(nn.Module):
    """Two convolutions over the codes, the first reaching three codes into the future."""

    def __init__(self, width: int, ahead: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, ahead + 1)
        self.conv2 = nn.Conv1d(width, width, 3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """``x`` (B, T, C) with ``context`` (B, ahead, C) on its right, to (B, T, C)."""
        y = self.conv1(torch.cat([x, context], dim=1).transpose(1, 2))
        y = self.conv2(F.pad(F.leaky_relu(y, LEAKY_SLOPE), (2, 0)))
        return x + y.transpose(1, 2)


class RelativeAttention(nn.Module):
    """Transformer-XL attention (Dai et al. 2019).

    Scores are ((q + pos_bias_u) k + (q + pos_bias_v) p[i - j]) / sqrt(d).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = nn.Linear(width, width)
        self.linear_k = nn.Linear(width, width)
        self.linear_v = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, width // heads))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, C) to the same; ``positions`` (2T-1, C) as ``relative_positions`` gives them."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1))
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        by_content = (query + self.pos_bias_u).transpose(1, 2) @ key.permute(0, 2, 3, 1)
        table = self.linear_pos(positions).unflatten(-1, (self.heads, -1)).permute(1, 2, 0)
        by_distance = _pick_distances((query + self.pos_bias_v).transpose(1, 2) @ table)
        scores = (by_content + by_distance) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed = scores.softmax(dim=-1) @ value.transpose(1, 2)
        return self.linear_out(mixed.transpose(1, 2).flatten(2))


def _pick_distances(scores: Tensor) -> Tensor:
    """From scores for every distance (B, H, T, 2T-1) take those of i - j, (B, H, T, T)."""
    length = scores.shape[2]
    index = torch.arange(length, device=scores.device)
    column = length - 1 - (index[:, None] - index[None, :])
    return scores.gather(-1, column.expand(*scores.shape[:2], -1, -1))


class FeedForward(nn.Module):
    """Linear, SiLU, linear."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, inner)
        self.w_2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to the same."""
        return self.w_2(F.silu(self.w_1(x)))


class EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width = config.input_size
        self.self_attn = RelativeAttention(width, config.attention_heads)
        self.feed_forward = FeedForward(width, config.linear_units)
        self.norm_mha = nn.LayerNorm(width, eps=_BLOCK_NORM_EPS)
        self.norm_ff = nn.LayerNorm(width, eps=_BLOCK_NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, C) to the same."""
        x = x + self.self_attn(self.norm_mha(x), positions, mask)
        return x + self.feed_forward(self.norm_ff(x))


class Upsample(nn.Module):
    """Repeat each code ``stride`` times, then a causal convolution."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv1d(width, width, _UPSAMPLE_KERNEL_PER_STRIDE * stride + 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T x stride, C)."""
        repeated = x.repeat_interleave(self.stride, dim=1).transpose(1, 2)
        left = _UPSAMPLE_KERNEL_PER_STRIDE * self.stride
        return self.conv(F.pad(repeated, (left, 0))).transpose(1, 2)


class FlowEncoder(nn.Module):
    """Embedded codes to hidden frames, four for each code."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width = config.input_size
        self.ratio = config.token_mel_ratio
        self.embed = InputLayer(width)
        self.pre_lookahead_layer = LookAhead(width, config.pre_lookahead_len)
        self.encoders = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_blocks))
        self.up_layer = Upsample(width, config.token_mel_ratio)
        self.up_embed = InputLayer(width)
        self.up_encoders = nn.ModuleList(
            EncoderBlock(config) for _ in range(config.up_encoder_blocks)
        )
        self.after_norm = nn.LayerNorm(width)

    def forward(self, codes: Tensor, ahead: Tensor | None, block_codes: int | None) -> Tensor:
        """Embedded codes (B, T, C) to (B, 4T, C).

        ``ahead`` (B, 3, C) are the embedded codes that follow, None at the reply's end: then
        zeros stand there. ``block_codes`` is the attention's block, None for full attention.
        """
        x = self.embed(codes)
        if ahead is None:
            context = x.new_zeros(
                x.shape[0], self.pre_lookahead_layer.conv1.kernel_size[0] - 1, x.shape[2]
            )
        else:
            context = self.embed(ahead)
        x = _stack(self.encoders, self.pre_lookahead_layer(x, context), block_codes)
        x = self.up_embed(self.up_layer(x))
        x = _stack(self.up_encoders, x, block_codes and block_codes * self.ratio)
        return self.after_norm(x)


def _stack(blocks: nn.ModuleList, x: Tensor, block: int | None) -> Tensor:
    positions = relative_positions(x.shape[1], x.shape[2], x)
    mask = block_mask(x.shape[1], block, x.device)
    for layer in blocks:
        x = layer(x, positions, mask)
    return x


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
