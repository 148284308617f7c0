"""The reference network: Qwen3 decoder layers, one trunk, two modality blocks, two heads.

Everything faster is measured against this file, so it is written to be read. Parameter
names are the published checkpoint's. Dimension letters: B sequences, T new rows,
S kept rows plus new ones, H query heads, G key/value heads, D head_dim, C hidden_size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import LanguageModelConfig
from mosstalk.models.kv_cache import KVCache
from mosstalk.models.weights import embedding
from mosstalk.numerics.rope import rotary_tables, rotate


class Logits(NamedTuple):
    """Raw logits of both heads: text (B, T, vocab_size), audio (B, T, audio_vocab_size)."""

    text: Tensor
    audio: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019): float32 inside, then times the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``; same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head before RoPE."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        """Attend from new rows ``x`` (B, T, C) to all kept rows; ``mask`` (T, S) is True to see.

        ``mask`` None is plain causal attention among the new rows, none being kept.
        """
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), tables)
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), tables)
        value = self._heads(self.v_proj(x))
        key, value = cache.write(layer, key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads x D) to (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm Qwen3 layer."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        """(B, T, C) to the same; K and V of the new rows go into ``cache`` at ``layer``."""
        x = x + self.self_attn(self.input_layernorm(x), tables, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(nn.Module):
    """A stack of layers whose K and V start at layer ``first`` of the cache."""

    def __init__(self, config: LanguageModelConfig, layers: int, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        self.first = first

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """(B, T, C) to the same."""
        for index, layer in enumerate(self.layers):
            x = layer(x, tables, mask, cache, self.first + index)
        return x


class Backbone(nn.Module):
    """Embeddings, trunk, modality blocks and final norms: the tensors under ``model.``."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        shared, modality = config.num_shared_layers, config.num_modality_layers
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.audio_embed = embedding(config.audio_vocab_size, config.hidden_size)
        self.shared_block = Block(config, shared, 0)
        self.text_block = Block(config, modality, shared)
        self.audio_block = Block(config, modality, shared + modality)
        self.text_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.audio_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LanguageModel(nn.Module):
    """``MossSpeechForCausalLM``: a grid of (text, audio) rows in, logits of both heads out."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.text_lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.audio_lm_head = nn.Linear(config.hidden_size, config.audio_vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, to which logits are rounded."""
        return self.model.embed_tokens.weight.dtype

    def new_cache(self) -> KVCache:
        """An empty cache for one batch of sequences, on the model's device and dtype."""
        return KVCache(self.config.num_kv_layers)

    def embed(self, rows: Tensor) -> Tensor:
        """Embed ``rows`` (B, T, 2): the text's, or the audio's where the text is modality_pad."""
        text, audio = rows.unbind(-1)
        is_audio = text == self.config.modality_pad_token_id
        return torch.where(
            is_audio[..., None], self.model.audio_embed(audio), self.model.embed_tokens(text)
        )

    def trunk(self, rows: Tensor, cache: KVCache) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Run the shared block; return its output (B, T, C), the rotary tables and the mask."""
        start, new = cache.rows, rows.shape[1]
        positions = torch.arange(start, start + new, device=rows.device)
        mask = torch.arange(start + new, device=rows.device)[None, :] <= positions[:, None]
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        hidden = self.model.shared_block(self.embed(rows), tables, mask, cache)
        return hidden, tables, mask

    def forward(self, rows: Tensor, cache: KVCache, *, last_only: bool = False) -> Logits:
        """Append ``rows`` (B, T, 2) to ``cache`` and return the logits that follow each of them.

        The trunk's output feeds both modality blocks at every position. With ``last_only``
        the heads run on the last row alone (T becomes 1).
        """
        hidden, tables, mask = self.trunk(rows, cache)
        text = self.model.text_block(hidden, tables, mask, cache)
        audio = self.model.audio_block(hidden, tables, mask, cache)
        cache.advance(rows.shape[1])
        if last_only:
            text, audio = text[:, -1:], audio[:, -1:]
        return Logits(
            self.text_lm_head(self.model.text_norm(text)),
            self.audio_lm_head(self.model.audio_norm(audio)),
        )
