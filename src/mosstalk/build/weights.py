"""The model and codec of a built folder: converted, quantised, copied, or drawn at random."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mosstalk.checkpoints.convert import MANIFEST, convert_model
from mosstalk.checkpoints.quantize import Source, Writer, digest_of
from mosstalk.checkpoints.restartable import (
    require_space,
    save_tensors,
    sha256,
)
from mosstalk.config import LanguageModelConfig
from mosstalk.errors import CheckpointError, OptionError
from mosstalk.files import as_text, read_json
from mosstalk.models.checkpoint import open_published
from mosstalk.models.layout import FUSED, LAYOUT_KEY
from mosstalk.models.quantization import Quantization
from mosstalk.models.weights import in_shards, shard_name
from mosstalk.progress import Progress
from mosstalk.synthesis.sizes import TINY, Sizes
from mosstalk.synthesis.small_parts import write_tokenizer
from mosstalk.synthesis.weights import Synthesis, random_language_model, synthesize

PRECISIONS = ("bf16", "fp8")
_NORM = "model.text_norm.weight"
_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"


def check_source(model: Path, precision: str) -> LanguageModelConfig:
    """The config of a model that can be built in ``precision``.

    Raises:
        OptionError: it is quantised, and is asked for in bf16.
        CheckpointError, ConfigError: it is none, or was converted to another precision.
    """
    if not model.is_dir():
        raise CheckpointError(f"{model}: no such folder; give the one that holds config.json")
    config = LanguageModelConfig.from_folder(model)
    record = Quantization.of(config, str(model / "config.json"))
    if record and precision == "bf16":
        raise OptionError(
            f"{model}: is quantised ({record.describe()}); build it with --precision fp8, or build "
            "the checkpoint that it was made of"
        )
    if config.extra.get(LAYOUT_KEY) == FUSED and _dtype_of(model, config) != "bfloat16":
        raise CheckpointError(
            f"{model}: is converted to {_dtype_of(model, config)}; build the published checkpoint"
        )
    return config


def write_model(source: Path, out: Path, precision: str, tell: Progress) -> str:
    """Write the model of ``source`` to ``out`` in ``precision``; return what was done.

    In bf16 matrices are fused. FP8 is that of ``mosstalk checkpoint quantize`` without
    calibration: the shared block, inputs scaled row by row; what is quantised is copied.

    Raises:
        OptionError, ConfigError: see ``check_source``.
        CheckpointError: the source is damaged, or changes meanwhile.
        OutputError: the disk has no room.
    """
    config = check_source(source, precision)
    ready = _dtype_of(source, config) == "bfloat16"
    if Quantization.of(config) or (precision == "bf16" and config.extra.get(LAYOUT_KEY) == FUSED):
        copy_folder(source, out, tell)
        return "copied"
    if precision == "bf16":
        convert_model(source, out, torch.bfloat16, tell)
        return "converted"
    if ready:
        _quantize(source, out, tell)
        return "quantised"
    between = out.with_name(f".{out.name}-bf16")
    convert_model(source, between, torch.bfloat16, tell)
    _quantize(between, out, tell)
    shutil.rmtree(between)
    return "converted, then quantised"


def copy_folder(source: Path, out: Path, tell: Progress) -> None:
    """Copy a folder's files but hidden ones.

    Raises:
        OutputError: the disk has no room.
        CheckpointError: there is no such folder.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    names = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    files = [source / name for name in names if not any(p.startswith(".") for p in name.parts)]
    require_space(out, sum(path.stat().st_size for path in files))
    for done, path in enumerate(files):
        tell(f"copying {path.name}", done, len(files))
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def digests(folder: Path, tell: Progress) -> dict[str, str]:
    """SHA-256 of every file of a folder, those that its manifest lists not read again."""
    known: Mapping[str, dict[str, str]] = {}
    if (folder / MANIFEST).is_file():
        known = read_json(folder / MANIFEST).get("files", {})
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        listed = known.get(name, {}).get("sha256")
        found[name] = listed or sha256(path, tell)
    return found


def write_random(out: Path, sizes: Sizes, device: torch.device, tell: Progress) -> None:
    """Random weights in the published layout: ``out/model`` and ``out/codec``.

    The language model is drawn on ``device``: at full size a CPU takes minutes for it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if device.type == "cpu":
        synthesize(out, Synthesis(sizes, progress=tell))
        return
    synthesize(out, Synthesis(replace(sizes, model=TINY.model), progress=tell))
    folder = out / "model"
    shutil.rmtree(folder)
    folder.mkdir()
    write_tokenizer(folder, sizes.model)
    label = {"torch_dtype": "bfloat16", "mosstalk_weights": "synthetic"}
    (folder / "config.json").write_text(as_text(sizes.model | label))
    _write_drawn(folder, sizes, device, tell)


def _write_drawn(folder: Path, sizes: Sizes, device: torch.device, tell: Progress) -> None:
    """A shard at a time, so that the host never holds all of it."""
    weights = dict(random_language_model(sizes, device).state_dict())
    shards = list(in_shards(weights, lambda name: weights[name].nbytes, _SHARD_BYTES))
    places = dict[str, str]()
    for number, names in enumerate(shards, 1):
        tell("writing random weights", number - 1, len(shards))
        file = shard_name(number, len(shards))
        save_tensors({name: weights[name].cpu() for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / _INDEX).write_text(as_text(index))


def _quantize(source: Path, out: Path, tell: Progress) -> None:
    opened = Source.open(source)
    hashes = opened.hashes(tell)
    out.mkdir()
    Writer(opened, Quantization(source_sha256=digest_of(hashes)), hashes, {}, tell).write(out)


def _dtype_of(folder: Path, config: LanguageModelConfig) -> str:
    """Of what is never quantised."""
    store = open_published(folder, config)
    return store[_NORM].dtype if _NORM in store else "absent"
