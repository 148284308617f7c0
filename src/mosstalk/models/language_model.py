"""The reference network: Qwen3 decoder layers, one trunk, two modality blocks, two heads.

Everything faster is measured against this file, so it is written to be read. Parameter
names are the published checkpoint's. Dimension letters: B sequences, T new rows,
S kept rows plus new ones, H query heads, G key/value heads, D head_dim, C hidden_size.

Of its tensors there are two layouts. The published checkpoint keeps q, k, v and gate, up apart. A
converted one holds each group as one matrix, rows one after the other, so that a step reads it in
one matmul. ``KVCache`` holds keys and values of every layer, growing row by row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import LanguageModelConfig
from mosstalk.models.weights import Store, embedding
from mosstalk.numerics.rope import rotary_tables, rotate

LAYOUT_KEY = "mosstalk_layout"
FUSED = "fused-1"

IN_LAYER = {
    "self_attn.qkv_proj.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "self_attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "self_attn.o_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight": ("mlp.down_proj.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "post_attention_layernorm.weight": ("post_attention_layernorm.weight",),
}
"""Fused names inside a layer, with the published ones whose rows they hold in order."""
OUTSIDE_LAYERS = (
    "model.embed_tokens.weight",
    "model.audio_embed.weight",
    "model.text_norm.weight",
    "model.audio_norm.weight",
    "text_lm_head.weight",
    "audio_lm_head.weight",
)


@dataclass(frozen=True)
class FusedTensor:
    """A tensor of the converted layout and the published ones whose rows it holds in order."""

    name: str
    sources: tuple[str, ...]


def fused_tensors(config: LanguageModelConfig) -> Iterator[FusedTensor]:
    """All tensors of the converted layout, in the order in which they are written."""
    for name in OUTSIDE_LAYERS[:2]:
        yield FusedTensor(name, (name,))
    for block, layers in blocks(config).items():
        for layer in range(layers):
            stem = f"model.{block}.layers.{layer}."
            for ours, published in IN_LAYER.items():
                yield FusedTensor(stem + ours, tuple(stem + name for name in published))
    for name in OUTSIDE_LAYERS[2:]:
        yield FusedTensor(name, (name,))


def blocks(config: LanguageModelConfig) -> dict[str, int]:
    """Blocks of the model and how many layers each has."""
    modality = config.num_modality_layers
    return {
        "shared_block": config.num_shared_layers,
        "text_block": modality,
        "audio_block": modality,
    }


def unfused(
    store: Store, config: LanguageModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Store:
    """See a converted store under the published names; ``shapes`` are the published ones.

    A fused tensor that is absent or misshapen is left as it is, for the inventory to name.
    """
    published = dict(store)
    for fused in fused_tensors(config):
        stored = store.get(fused.name)
        if stored is None or len(fused.sources) == 1:
            continue
        parts = [shapes[name] for name in fused.sources]
        rows = sum(shape[0] for shape in parts)
        if stored.shape != (rows, *parts[0][1:]):
            continue
        del published[fused.name]
        start = 0
        for name, shape in zip(fused.sources, parts, strict=True):
            published[name] = stored.part(start, shape)
            start += shape[0]
    return published


_FIRST_CAPACITY_ROWS = 256


class KVCache:
    """K and V of ``layers`` layers for B sequences of equal length.

    ``rows`` counts the rows all layers have; ``truncate`` forgets the latest of them, after
    which the next rows are written in their place.
    """

    def __init__(self, layers: int) -> None:
        self.rows = 0
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put new ``key`` and ``value`` (B, G, T, D) after the kept rows; return all (B, G, S, D).

        The rows count only once ``advance`` was called, so every layer writes at one place.
        """
        end = self.rows + key.shape[2]
        keys = self._keys[layer] = _with_room(self._keys[layer], key, self.rows, end)
        values = self._values[layer] = _with_room(self._values[layer], value, self.rows, end)
        keys[:, :, self.rows : end] = key
        values[:, :, self.rows : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, rows: int) -> None:
        """Count ``rows`` newly written rows as kept."""
        self.rows += rows

    def truncate(self, rows: int) -> None:
        """Keep only the first ``rows`` rows."""
        assert 0 <= rows <= self.rows, f"cannot keep {rows} of {self.rows} rows"
        self.rows = rows


def _with_room(kept: Tensor | None, like: Tensor, rows: int, needed: int) -> Tensor:
    """Return ``kept`` itself, or a copy at least twice as long when ``needed`` rows do not fit."""
    if kept is not None and kept.shape[2] >= needed:
        return kept
    capacity = max(_FIRST_CAPACITY_ROWS, 1 << (needed - 1).bit_length())
    batch, heads, _, head_dim = like.shape
    grown = torch.empty((batch, heads, capacity, head_dim), dtype=like.dtype, device=like.device)
    if kept is not None:
        grown[:, :, :rows] = kept[:, :, :rows]
    return grown


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
        """An empty cache for one batch of sequences of this model."""
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
