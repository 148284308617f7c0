"""What a built engine is: sizes, dtypes, and what this engine always does."""

from pathlib import Path
from typing import Any

import torch

from mosstalk.checkpoint.inspect import inspect
from mosstalk.config import LanguageModelConfig
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.prepared.folder import CODEC, MODEL

_SOUND = {"cuda": "float16", "cpu": "float32"}
_KERNELS = {
    "attention": "kernels over blocks, scores never in memory: splits of keys for single rows, "
    "tiles of rows for prompts",
    "mlp": "fused: norm, gate, up and their activation in one kernel",
}
_HEARD = "speech tokenizer"


def architecture(config: LanguageModelConfig) -> dict[str, Any]:
    """Sizes of the language model, for people who know other engines."""
    return {
        "shared_layers": config.num_shared_layers,
        "text_layers": config.num_modality_layers,
        "audio_layers": config.num_modality_layers,
        "kv_layers": config.num_kv_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "text_ids": config.vocab_size,
        "audio_ids": config.audio_vocab_size,
        "context_rows": config.max_position_embeddings,
    }


def dtypes(folder: Path, device: torch.device) -> dict[str, str]:
    """Of every part of the model as stored, and of the codec as it is going to be run there."""
    found = dict[str, str]()
    for report in inspect(folder / MODEL, hashes=False):
        found |= {name: ", ".join(sorted(group.dtypes)) for name, group in report.groups.items()}
    for report in inspect(folder / CODEC, hashes=False):
        if _HEARD in report.groups:
            found[_HEARD] = "float32"
    return found | dict.fromkeys(("flow", "vocoder"), _SOUND[device.type])


def engine_facts(*, fast: bool) -> dict[str, str]:
    """What the engine does, in the words of other engines; ``fast``: by its kernels."""
    rows = EngineOptions.block_rows
    return {
        "kv": f"paged, always: blocks of {rows} rows in one pool for all layers, shared where "
        "rows begin alike",
        "input": "packed, always: rows of all conversations side by side, without padding",
        "attention": _KERNELS["attention"] if fast else "torch, over the blocks of each stretch",
        "mlp": _KERNELS["mlp"] if fast else "torch, one product after the other",
        "modes": "each conversation's own, in one batch; blocks and draws that no row needs wait",
    }
