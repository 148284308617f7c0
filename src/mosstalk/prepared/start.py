"""Starting from a built folder: its kernels and tiles, and the configs that a plan is made for."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mosstalk.config import FlowConfig, HiftConfig, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.models.codec_folder import STREAMING_FLOW, read_flow_config, read_hift_config
from mosstalk.ops.linear_tiles import use_tuned
from mosstalk.plan.sizes import Configs
from mosstalk.prepared.default_models import chosen_codec, chosen_language_model
from mosstalk.prepared.folder import BuiltEngine, built_engine
from mosstalk.prepared.kernel_cache import use_kernels
from mosstalk.prepared.machine import foreign, machine_of
from mosstalk.prepared.tiles import TILES_FILE, tiles_for
from mosstalk.synthesis.sizes import FULL

_LOG = logging.getLogger(__name__)


def take_kernels(model: Path | None, device: torch.device) -> BuiltEngine | None:
    """Use the compiled kernels of a built folder, and the tiles that were found for them; what it
    is, None for any other folder.

    Kernels of another card or version are of no use, and are compiled anew beside them; nor are
    its tiles, in place of which the package's are used. To be called before a model is loaded.

    Raises:
        CheckpointError: the folder is damaged.
    """
    built = built_engine(model)
    use_tuned({})
    if built and device.type == "cuda":
        use_kernels(built.cache)
        here = machine_of(device, str(built.values["weights"]))
        for line in foreign(built.values["machine"], here):
            _LOG.warning("%s: %s; kernels are compiled anew", built.folder, line)
        take_tiles(built.folder / TILES_FILE, here)
    return built


def take_tiles(path: Path, here: Mapping[str, Any]) -> None:
    """Divide products as the file says, where it was made for the machine ``here``.

    Raises:
        CheckpointError: the file is damaged.
    """
    divisions, strange = tiles_for(path, here)
    if strange:
        _LOG.warning("%s: %s; the package's tiles are used", path, strange)
    use_tuned(divisions)


def configs_of(model: Path | None = None, codec: Path | None = None) -> Configs:
    """What a plan is made for: configs of these folders (or of pocket or synthetic), no weights.

    Of what is None, the published sizes.

    Raises:
        ConfigError, CheckpointError: a folder is none, or asks for other arithmetic.
    """
    if model is None:
        language = LanguageModelConfig.from_dict(FULL.model)
    else:
        language = LanguageModelConfig.from_folder(chosen_language_model(model))
    if codec is None:
        speech = SpeechTokenizerConfig.from_dict(FULL.codec)
        return Configs(language, speech, FlowConfig.from_dict(FULL.flow), HiftConfig())
    folder = chosen_codec(codec)
    return Configs(
        language,
        SpeechTokenizerConfig.from_folder(folder),
        read_flow_config(folder, STREAMING_FLOW),
        read_hift_config(folder),
    )
