"""``mosstalk checkpoint quantize``: what is asked for, and what is printed."""

import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mosstalk.bench.machine import machine_facts
from mosstalk.cli.common import one_of
from mosstalk.cli.measured_output import Outputs, print_settings, print_tables
from mosstalk.conversation import SpecialIds
from mosstalk.files import new_folder
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import ACTIVATIONS, BLOCKS, SCHEMES, STATISTICS, Quantization
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.offline.defaults import read_defaults
from mosstalk.prepared.default_models import NAMES, chosen_model
from mosstalk.progress import Progress, progress_bar
from mosstalk.quantize.calibrate import Magnitudes, calibrate
from mosstalk.quantize.default_prompts import Speaker
from mosstalk.quantize.measure import Measured, measure, quantised_ways
from mosstalk.quantize.prompts import Prompts, read_prompts
from mosstalk.quantize.report import PLUMBING, document_of, page_of, tables_of
from mosstalk.quantize.write import Source, Writer, Written, digest_of
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype


@dataclass(frozen=True)
class Scheme:
    """How to quantise; ``activations`` None is calibrated where prompts are given, else by row."""

    scheme: str
    blocks: str
    activations: str | None
    statistic: str
    calibrate: Path | None

    def record(self) -> Quantization:
        """What the config will say, but for what is known later.

        Raises:
            OptionError: a word that means nothing.
        """
        one_of("--scheme", self.scheme, *SCHEMES)
        one_of("--blocks", self.blocks, *BLOCKS)
        one_of("--statistic", self.statistic, *STATISTICS)
        activations = self.activations or ("calibrated" if self.calibrate else "row")
        one_of("--activations", activations, *ACTIVATIONS)
        return Quantization(self.blocks, activations)


@dataclass(frozen=True)
class Running:
    """Where the model runs when it is calibrated or measured, and in which precision."""

    device: str
    dtype: str | None


@dataclass(frozen=True)
class Found:
    """What running the model gave: scales for the record, and figures for the report."""

    record: Quantization
    scales: dict[str, Tensor]
    settings: dict[str, Any]
    measured: Measured | None


def run_quantize(folder: Path, out: Path, scheme: Scheme, running: Running, to: Outputs) -> None:
    """Quantise a model's folder, or one that holds model and codec; print and report."""
    record = scheme.record()
    to.require()
    model, codec = _parts(folder)
    source = Source.open(model)
    with to.text_for_people():
        started = time.perf_counter()
        with new_folder(out) as part, progress_bar() as tell:
            hashes = source.hashes(tell)
            record = replace(record, source_sha256=digest_of(hashes))
            found = Found(record, {}, {}, None)
            if record.calibrated or to.wanted:
                found = _run_model(source, record, scheme, running, to, tell)
            target = part / "model" if codec else part
            target.mkdir(exist_ok=True)
            written = Writer(source, found.record, hashes, found.scales, tell).write(target)
            if codec:
                shutil.copytree(codec, part / "codec")
        _print(folder, out, found, written, time.perf_counter() - started)
    if found.measured:
        to.write(
            document_of(found.record, found.settings, found.measured),
            partial(page_of, found.settings, found.measured),
        )


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
    scheme: Scheme,
    running: Running,
    to: Outputs,
    tell: Progress,
) -> Found:
    """Load the model as it is; calibrate it, and measure it where a report is wanted."""
    device = pick_device(running.device)
    dtype = running.dtype or ("float32" if device.type == "cpu" else None)
    model = load_language_model(
        source.folder, device=device, dtype=pick_dtype(dtype) if dtype else None, progress=tell
    )
    fit_threads(device, (model,))
    prompts = _prompts(source, model, scheme, tell)
    warning = prompts.warning()
    if warning:
        print(warning)
    names = record.products(source.config)
    magnitudes = calibrate(model, names, prompts.calibrated, tell)
    scales = dict[str, Tensor]()
    if record.calibrated:
        scales = {name: each.scale(scheme.statistic) for name, each in magnitudes.items()}
        kept = {"prompts": len(prompts.calibrated), "statistic": scheme.statistic}
        record = replace(record, calibration=kept)
    measured = _measured(model, names, magnitudes, prompts, tell) if to.wanted else None
    settings = machine_facts(device, source.config.weights_kind) | {
        "precision": str(model.dtype).removeprefix("torch."),
        "quantization": record.describe(),
        "source": f"{source.folder.name}, {record.source_sha256[:16]}",
        "prompts": prompts.about,
        "calibrated on": str(len(prompts.calibrated)),
        "measured on": str(len(prompts.measured)),
    }
    return Found(record, scales, settings, measured)


def _prompts(source: Source, model: LanguageModel, scheme: Scheme, tell: Progress) -> Prompts:
    tokenizer = TextTokenizer.from_folder(source.folder, model.config.vocab_size)
    ids = SpecialIds.of(model.config, tokenizer.special)
    if scheme.calibrate:
        longest = model.config.max_position_embeddings
        return read_prompts(scheme.calibrate, ids, tokenizer.encode, longest)
    chosen = read_defaults(source.folder).of("chat")
    return Speaker(model, ids, tokenizer.encode, chosen).default_prompts(tell)


def _measured(
    model: LanguageModel,
    names: list[str],
    magnitudes: dict[str, Magnitudes],
    prompts: Prompts,
    tell: Progress,
) -> Measured:
    return measure(model, quantised_ways(model, names, magnitudes), prompts.measured, tell)


def _print(folder: Path, out: Path, found: Found, written: Written, seconds: float) -> None:
    print_settings(found.settings, width=14)
    if found.measured:
        if found.settings["weights"] == "synthetic":
            print(PLUMBING)
        print_tables(tables_of(found.measured)[:2])
        print()
    before, after = (size / 2**20 for size in (written.bytes_before, written.bytes_after))
    print(
        f"{folder} -> {out}: {found.record.describe()}; {written.products} of {written.tensors} "
        f"tensors, {before:,.1f} MiB -> {after:,.1f} MiB in {seconds:.1f} s"
    )
    print(
        f"  largest anonymous memory {written.peak_anonymous_bytes / 2**20:.0f} MiB "
        "while writing (mapped files apart)"
    )
