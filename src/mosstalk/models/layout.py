"""Names of the language model's tensors: the published ones and this project's fused ones.

The published checkpoint keeps q, k, v and gate, up apart. A converted one holds each group
as one matrix, rows one after the other, so that a step reads it in one matmul.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mosstalk.config import LanguageModelConfig
from mosstalk.models.weights import Store

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
