"""A quantised checkpoint, made: calibrated where asked, measured where wanted, written whole."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mosstalk.bench.machine import machine_facts
from mosstalk.conversation import SpecialIds
from mosstalk.files import new_folder
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.offline.defaults import read_defaults
from mosstalk.prepared.default_models import NAMES, chosen_model
from mosstalk.progress import Progress
from mosstalk.quantize.calibrate import calibrate
from mosstalk.quantize.default_prompts import Speaker
from mosstalk.quantize.measure import Measured, measure, quantised_ways
from mosstalk.quantize.prompts import Prompts, read_prompts
from mosstalk.quantize.write import Source, Writer, Written, digest_of
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype


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
