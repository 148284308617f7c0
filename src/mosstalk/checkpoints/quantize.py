"""A quantised checkpoint, made: calibrated where asked, measured where wanted, written whole."""

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosstalk.checkpoints.calibrate import Measured, calibrate, measure, quantised_ways
from mosstalk.checkpoints.convert import anonymous_bytes
from mosstalk.checkpoints.prompts import Prompts, Speaker, read_prompts
from mosstalk.checkpoints.restartable import (
    INDEX,
    MANIFEST,
    fingerprint,
    require_space,
    save_tensors,
    sha256,
)
from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import SpecialIds
from mosstalk.errors import CheckpointError
from mosstalk.files import as_text, new_folder, read_json
from mosstalk.models.checkpoint import load_language_model, model_shapes, open_published
from mosstalk.models.language_model import FUSED, LAYOUT_KEY, LanguageModel, fused_tensors
from mosstalk.models.quantization import INPUT_SCALE, KEY, WEIGHT, WEIGHT_SCALE, Quantization
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.weights import (
    Store,
    StoredTensor,
    check_inventory,
    in_shards,
    open_sharded,
    shard_name,
)
from mosstalk.numerics.fp8 import Fp8Weight
from mosstalk.offline.defaults import read_defaults
from mosstalk.prepared.default_models import NAMES, chosen_model
from mosstalk.prepared.machine import machine_facts
from mosstalk.progress import Progress, no_progress
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype

SHARD_GIB = 2.0
"""Largest shard written; with the tensor being read it bounds the memory that writing takes."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Source:
    """A folder to quantise: its config, and its tensors by the names that they have there."""

    folder: Path
    config: LanguageModelConfig
    store: Store

    @classmethod
    def open(cls, folder: Path) -> "Source":
        """List a published or converted model folder.

        Raises:
            CheckpointError: it is quantised already, incomplete or damaged.
            ConfigError: its config is absent or asks for other arithmetic.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give the one that holds config.json")
        config = LanguageModelConfig.from_folder(folder)
        record = Quantization.of(config, str(folder / "config.json"))
        if record:
            raise CheckpointError(
                f"{folder}: is quantised already ({record.describe()}); quantise the checkpoint "
                "that it was made of"
            )
        check_inventory(model_shapes(config), open_published(folder, config), str(folder))
        return cls(folder, config, open_sharded(folder))

    @property
    def files(self) -> list[Path]:
        """The files of the folder itself; hidden ones and folders in it are none of the model's."""
        found = (path for path in self.folder.iterdir() if path.is_file())
        return sorted(path for path in found if not path.name.startswith("."))

    def hashes(self, tell: Progress = no_progress) -> dict[str, str]:
        """SHA-256 of every file."""
        return {path.name: sha256(path, tell) for path in self.files}

    def products(self, record: Quantization) -> dict[str, str]:
        """Stored names of what is quantised, without ``.weight``, each with a published one of it.

        All published products of a fused matrix have the same input.
        """
        wanted = record.linears(self.config)
        if self.config.extra.get(LAYOUT_KEY) != FUSED:
            return {name: name for name in wanted}
        first = (
            (fused.name.removesuffix(f".{WEIGHT}"), fused.sources[0].removesuffix(f".{WEIGHT}"))
            for fused in fused_tensors(self.config)
        )
        return {stored: published for stored, published in first if published in set(wanted)}


def digest_of(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for a folder: of its files' names and hashes, in order."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass
class Written:
    """What was written: tensors as stored, products among them, bytes before and after."""

    tensors: int = 0
    products: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    peak_anonymous_bytes: int = 0


@dataclass
class Writer:
    """Writes ``source`` as ``record`` says; ``input_scales`` () by published product."""

    source: Source
    record: Quantization
    hashes: Mapping[str, str]
    input_scales: Mapping[str, Tensor]
    tell: Progress = no_progress
    shard_gib: float = SHARD_GIB

    def write(self, out: Path) -> Written:
        """Write everything into ``out``, a folder that is there and empty.

        Raises:
            CheckpointError: a tensor is damaged or not finite, or the source changes meanwhile.
            OutputError: the disk has no room.
        """
        before = fingerprint(self.source.files)
        products = self.source.products(self.record)
        sizes = {name: self._bytes(name, products) for name in self.source.store}
        require_space(out, sum(sizes.values()))
        limit = int(self.shard_gib * 2**30)
        shards = list(in_shards(sizes, sizes.__getitem__, limit))
        written = Written(tensors=len(self.source.store), products=len(products))
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = shard_name(number, len(shards)) if len(shards) > 1 else "model.safetensors"
            tensors = self._quantised(names, products, written)
            weight_map |= dict.fromkeys(tensors, file)
            save_tensors(tensors, out / file)
        self._write_others(out, weight_map, sum(sizes.values()), single=len(shards) == 1)
        if fingerprint(self.source.files) != before:
            raise CheckpointError(f"{self.source.folder}: changed while it was read; run it again")
        written.bytes_before = sum(_stored_bytes(each) for each in self.source.store.values())
        written.bytes_after = sum(sizes.values())
        return written

    def _bytes(self, name: str, products: Mapping[str, str]) -> int:
        stored = self.source.store[name]
        if name.removesuffix(f".{WEIGHT}") not in products:
            return _stored_bytes(stored)
        scales = stored.shape[0] + self.record.calibrated
        return prod(stored.shape) + _FLOAT32_BYTES * scales

    def _quantised(
        self, names: list[str], products: Mapping[str, str], written: Written
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        order = {name: place for place, name in enumerate(self.source.store)}
        for name in names:
            self.tell("quantising", order[name], len(order))
            value = self.source.store[name].load()
            if not bool(torch.isfinite(value).all()):
                raise CheckpointError(f"{self.source.folder}: {name} holds NaN or infinity")
            stem = name.removesuffix(f".{WEIGHT}")
            if stem in products:
                weight = Fp8Weight.of(value)
                tensors |= {name: weight.q, f"{stem}.{WEIGHT_SCALE}": weight.scale}
                if self.record.calibrated:
                    tensors[f"{stem}.{INPUT_SCALE}"] = self.input_scales[products[stem]].cpu()
            else:
                tensors[name] = value.contiguous()
            written.peak_anonymous_bytes = max(written.peak_anonymous_bytes, anonymous_bytes())
        return tensors

    def _write_others(
        self, out: Path, weight_map: Mapping[str, str], size: int, *, single: bool
    ) -> None:
        """Config, index and manifest; everything else that lay beside the weights is copied."""
        if not single:
            index = {"metadata": {"total_size": size}, "weight_map": dict(weight_map)}
            (out / INDEX).write_text(as_text(index))
        config = read_json(self.source.folder / "config.json") | {KEY: self.record.as_dict()}
        (out / "config.json").write_text(as_text(config))
        for path in self.source.files:
            if path.suffix != ".safetensors" and path.name not in ("config.json", INDEX, MANIFEST):
                shutil.copyfile(path, out / path.name)
        (out / MANIFEST).write_text(as_text(self._manifest(out)))

    def _manifest(self, out: Path) -> dict[str, Any]:
        from mosstalk import __version__

        files = sorted(path for path in out.iterdir() if path.is_file())
        return {
            "kind": "model",
            KEY: self.record.as_dict(),
            "quantized_by": f"mosstalk {__version__}",
            "sources": {name: {"sha256": value} for name, value in self.hashes.items()},
            "files": {path.name: {"sha256": sha256(path, self.tell)} for path in files},
        }


def _stored_bytes(stored: StoredTensor) -> int:
    itemsize: int = getattr(torch, stored.dtype).itemsize
    return prod(stored.shape) * itemsize


@dataclass(frozen=True)
class Request:
    """What to quantise and how: ``record`` is what the config will say, but for what is found.

    ``calibrate``: a file of prompts, None for those that the model makes itself. The model runs on
    ``device`` in ``dtype``, and only to be calibrated or if figures are ``wanted``.
    """

    folder: Path
    out: Path
    record: Quantization
    calibrate: Path | None
    statistic: str
    device: str
    dtype: str | None
    wanted: bool


@dataclass(frozen=True)
class Found:
    """What running the model gave: scales for the record, and figures for the report."""

    record: Quantization
    scales: dict[str, Tensor]
    settings: dict[str, Any]
    measured: Measured | None
    seconds: float = 0.0


def quantize(request: Request, tell: Progress) -> tuple[Found, Written]:
    """Quantise a model's folder, or one that holds model and codec, into a new folder."""
    model, codec = _parts(request.folder)
    source = Source.open(model)
    started = time.perf_counter()
    with new_folder(request.out) as part:
        hashes = source.hashes(tell)
        record = replace(request.record, source_sha256=digest_of(hashes))
        found = Found(record, {}, {}, None)
        if record.calibrated or request.wanted:
            found = _run_model(source, record, request, tell)
        target = part / "model" if codec else part
        target.mkdir(exist_ok=True)
        written = Writer(source, found.record, hashes, found.scales, tell).write(target)
        if codec:
            shutil.copytree(codec, part / "codec")
    return replace(found, seconds=time.perf_counter() - started), written


def _parts(folder: Path) -> tuple[Path, Path | None]:
    """The model's folder, and the codec's where both are meant."""
    if str(folder) in NAMES and not folder.exists():
        return chosen_model(folder, None)
    if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
        codec = folder / "codec"
        return folder / "model", codec if codec.is_dir() else None
    return folder, None


def _run_model(
    source: Source,
    record: Quantization,
    request: Request,
    tell: Progress,
) -> Found:
    """Load the model as it is; calibrate it, and measure it where a report is wanted."""
    device = pick_device(request.device)
    dtype = request.dtype or ("float32" if device.type == "cpu" else None)
    model = load_language_model(
        source.folder, device=device, dtype=pick_dtype(dtype) if dtype else None, progress=tell
    )
    fit_threads(device, (model,))
    prompts = _prompts(source, model, request.calibrate, tell)
    warning = prompts.warning()
    if warning:
        print(warning)
    names = record.linears(source.config)
    magnitudes = calibrate(model, names, prompts.calibrated, tell)
    scales = dict[str, Tensor]()
    if record.calibrated:
        scales = {name: each.scale(request.statistic) for name, each in magnitudes.items()}
        kept = {"prompts": len(prompts.calibrated), "statistic": request.statistic}
        record = replace(record, calibration=kept)
    measured = None
    if request.wanted:
        ways = quantised_ways(model, names, magnitudes)
        measured = measure(model, ways, prompts.measured, tell)
    settings = machine_facts(device, source.config.weights_kind) | {
        "precision": str(model.dtype).removeprefix("torch."),
        "quantization": record.describe(),
        "source": f"{source.folder.name}, {record.source_sha256[:16]}",
        "prompts": prompts.about,
        "calibrated on": str(len(prompts.calibrated)),
        "measured on": str(len(prompts.measured)),
    }
    return Found(record, scales, settings, measured)


def _prompts(source: Source, model: LanguageModel, file: Path | None, tell: Progress) -> Prompts:
    tokenizer = TextTokenizer.from_folder(source.folder, model.config.vocab_size)
    ids = SpecialIds.of(model.config, tokenizer.special)
    if file:
        longest = model.config.max_position_embeddings
        return read_prompts(file, ids, tokenizer.encode, longest)
    chosen = read_defaults(source.folder).of("chat")
    return Speaker(model, ids, tokenizer.encode, chosen).default_prompts(tell)
