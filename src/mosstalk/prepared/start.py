"""Starting from a built folder: its kernels and tiles, and the configs that a plan is made for.

Compiled kernels lie in Triton's own cache. It looks a kernel up by a hash of its source, its
options, the card's capability and its own version, so a cache of another card or version is never
wrong: it only holds nothing of use. But the list of a kernel's files has absolute paths, and with
the folder under another name Triton would compile again all that lies there.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mosstalk.config import FlowConfig, HiftConfig, LanguageModelConfig, SpeechTokenizerConfig
from mosstalk.environment import cache_folder, keep_kernels_in
from mosstalk.errors import ConfigError
from mosstalk.files import read_json, write_whole
from mosstalk.models.codec_folder import STREAMING_FLOW, read_flow_config, read_hift_config
from mosstalk.ops.launch import forget_compiled, triton
from mosstalk.ops.linear_tiles import use_tuned
from mosstalk.plan.sizes import Configs
from mosstalk.prepared.default_models import (
    BuiltEngine,
    built_engine,
    chosen_codec,
    chosen_language_model,
)
from mosstalk.prepared.machine import foreign, machine_of
from mosstalk.prepared.tiles import TILES_FILE, tiles_for
from mosstalk.synthesis.sizes import FULL

_LISTS = "*/__grp__*"
_BINARY = "*/*.cubin"
_NAME_DIGITS = 16
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """How many compiled kernels a cache holds, and the bytes of all its files."""

    count: int
    bytes: int


def kernels_in(cache: Path) -> Kernels:
    """Count; nothing where there is no such folder."""
    sizes = [path.stat().st_size for path in cache.rglob("*") if path.is_file()]
    return Kernels(sum(1 for _ in cache.glob(_BINARY)), sum(sizes))


def use_kernels(cache: Path) -> Path:
    """Have Triton look in ``cache`` and compile into it, from now on in this process.

    Returns the folder used: another one, in the user's cache, where this one cannot be written.
    """
    cache = cache.resolve()
    if not _writable(cache):
        cache = _own_copy(cache)
    relocate(cache, cache)
    keep_kernels_in(cache)
    return cache


@contextmanager
def kernels_apart(cache: Path) -> Iterator[None]:
    """What is compiled within the block goes to a folder of its own, beside ``cache`` and removed
    after it, and is forgotten in this process: from then on Triton keeps kernels in ``cache``.
    """
    if torch.cuda.is_available():
        triton.runtime.driver.active.get_current_target()  # its library is made once a process
    with TemporaryDirectory(dir=cache.parent, prefix=f".{cache.name}-") as apart:
        keep_kernels_in(Path(apart))
        try:
            yield
        finally:
            forget_compiled()
            keep_kernels_in(cache)


def relocate(cache: Path, to: Path) -> int:
    """Have all lists of files in ``cache`` name the place ``to``; return how many were changed."""
    changed = 0
    for path, files in _lists(cache):
        own = {name: str(to / path.parent.name / name) for name in files}
        if own != files:
            write_whole(path, json.dumps({"child_paths": own}).encode())
            changed += 1
    return changed


def _lists(cache: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in sorted(cache.glob(_LISTS)):
        try:
            files = read_json(path).get("child_paths")
        except ConfigError:
            continue  # Triton takes what it cannot read for absent, too
        if isinstance(files, dict):
            yield path, files


def _writable(cache: Path) -> bool:
    try:
        cache.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(cache, os.W_OK)


def _own_copy(cache: Path) -> Path:
    """A copy that can be written, made anew where the original is another one by now."""
    name = hashlib.sha256(str(cache).encode()).hexdigest()[:_NAME_DIGITS]
    own = cache_folder() / "kernels" / name
    if kernels_in(cache).count > kernels_in(own).count:
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(cache, own, copy_function=shutil.copyfile)
    own.mkdir(parents=True, exist_ok=True)
    return own


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
