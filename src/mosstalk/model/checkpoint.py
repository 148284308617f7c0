"""Reading the language model's folder: config, 6 + 11 per layer tensors, tokenizer."""

from pathlib import Path

import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError
from mosstalk.model.layout import FUSED, LAYOUT_KEY, unfused
from mosstalk.model.network import LanguageModel
from mosstalk.tensors import Progress, fill, open_sharded, shapes_of


def model_shapes(config: LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all tensors: 6 + 11 per layer."""
    with torch.device("meta"):
        return shapes_of(LanguageModel(config))


def load_language_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Read the model in ``folder`` onto ``device``; ``dtype`` None keeps the stored one.

    Raises:
        ConfigError: the config is absent or asks for other arithmetic.
        CheckpointError: a tensor is missing, unexpected, misshapen, damaged or not finite.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the one that holds config.json")
    config = LanguageModelConfig.from_folder(folder)
    store = open_sharded(folder)
    layout = config.extra.get(LAYOUT_KEY)
    if layout not in (None, FUSED):
        raise CheckpointError(
            f"{folder}: has the layout {layout!r} of another version of mosstalk; convert the "
            "published checkpoint again"
        )
    if layout == FUSED:
        store = unfused(store, config, model_shapes(config))
    if dtype is None:
        probe = store.get("model.text_norm.weight")
        dtype = probe.load().dtype if probe else torch.float32
    with torch.device("meta"):
        model = LanguageModel(config)
    fill(model, store, where=str(folder), device=device, dtype=dtype, progress=progress)
    return model
