"""Reading the language model's folder: its config, and 6 tensors and 11 of each layer."""

from pathlib import Path

import torch

from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError
from mosstalk.models.language_model import FUSED, LAYOUT_KEY, LanguageModel, unfused
from mosstalk.models.quantization import (
    Quantization,
    own_dtypes,
    prepare,
    require_scales,
    unfused_scales,
    wrong_dtypes,
)
from mosstalk.models.weights import Store, fill, open_sharded, shapes_of
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.progress import Progress


def empty_model(config: LanguageModelConfig) -> LanguageModel:
    """The network on the meta device, with the quantised linear layers that its config names."""
    record = Quantization.of(config)
    with torch.device("meta"):
        model = LanguageModel(config)
        if record:
            prepare(model, record)
    return model


def model_shapes(config: LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all tensors: 6 + 11 per layer, and scales where quantised."""
    return shapes_of(empty_model(config))


def open_published(folder: Path, config: LanguageModelConfig) -> Store:
    """List a folder's tensors under the published names, whichever layout it has.

    Raises:
        CheckpointError: it holds no weights, damaged ones, or those of another layout.
    """
    store = open_sharded(folder)
    layout = config.extra.get(LAYOUT_KEY)
    if layout not in (None, FUSED):
        raise CheckpointError(
            f"{folder}: has the layout {layout!r} of another version of mosstalk; convert the "
            "published checkpoint again"
        )
    if layout != FUSED:
        return store
    shapes = model_shapes(config)
    return unfused_scales(unfused(store, config, shapes), config, shapes)


def load_language_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Read the model in ``folder`` onto ``device``; ``dtype`` None keeps the stored one.

    The linear layers of a quantised checkpoint stay in 8 bits and the rest is in ``dtype``.

    Raises:
        ConfigError: the config is absent, asks for other arithmetic, or names a quantisation
            that is not known.
        CheckpointError: a tensor is missing, unexpected, misshapen, damaged or not finite.
        DeviceError: the checkpoint is in FP8 and ``device`` a card that has none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the one that holds config.json")
    config = LanguageModelConfig.from_folder(folder)
    record = Quantization.of(config, str(folder / "config.json"))
    if record:
        require_fp8(device)
    store = open_published(folder, config)
    if dtype is None:
        probe = store.get("model.text_norm.weight")
        dtype = probe.load().dtype if probe else torch.float32
    model, own = empty_model(config), own_dtypes(config, record)
    wrong = wrong_dtypes(store, own)
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]} ({len(wrong)} such); fetch it again")
    fill(
        model, store, where=str(folder), device=device, dtype=dtype, own=own, progress=progress
    )  # fmt: skip
    require_scales(model, str(folder))
    return model
