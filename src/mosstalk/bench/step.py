"""Speed of the engine's steps and prompts, beside what the hardware allows; errors if wanted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mosstalk.bench.ceilings import Ceilings, Work, measure_ceilings
from mosstalk.bench.machine import machine_facts
from mosstalk.bench.step_baselines import APART, measure_baseline
from mosstalk.bench.step_errors import Reference, error_table, reference_of
from mosstalk.bench.step_speed import measure_prompts, measure_steps
from mosstalk.bench.step_work import Load, step_work
from mosstalk.bench.tables import Table
from mosstalk.bench.timed import Timed, timed_table
from mosstalk.collector import lasting_objects_spared
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS
from mosstalk.conversation import SpecialIds
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.errors import OptionError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, precision_of, quantize_in_place
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.prepared.default_models import chosen_language_model
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import Progress
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype
from mosstalk.synthesis.direct_language import random_language_model, special_ids
from mosstalk.synthesis.sizes import named_sizes

FORMAT = "mosstalk-step-1"
_GB = 1e9


@dataclass(frozen=True)
class Measurement:
    """What is measured of a model called ``name``, and how the engine computes it.

    ``prompts``: prompts, not steps; ``runs`` times each; ``baselines``: other means beside it;
    ``error_rows``: compare the logits of so many rows with float32's. ``quantise`` quantises the
    shared block's products to FP8 first, unless they are.
    """

    name: str
    options: EngineOptions
    loads: Sequence[Load]
    runs: int
    prompts: bool
    baselines: Sequence[str]
    error_rows: int = 0
    quantise: bool = False


@dataclass(frozen=True)
class Subject:
    """The model that is measured; ``record``: how it is quantised."""

    model: LanguageModel
    ids: SpecialIds
    record: Quantization | None

    @property
    def precision(self) -> str:
        """Of its weights, for people."""
        return precision_of(self.model.dtype, self.record)

    def work(self, load: Load) -> Work:
        """What a step must move and compute."""
        return step_work(self.model.config, self.model.dtype, load, self.record)


@dataclass
class StepSpeed:
    """What was found."""

    settings: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    timed: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, float | str]] = field(default_factory=list)


def open_model(
    folder: Path | None, random: str | None, device: str, dtype: str | None, precision: str | None
) -> tuple[LanguageModel, SpecialIds]:
    """A folder's model, or random weights of a named size; ``precision``: it shall run in.

    What cannot be measured as asked is refused before any weights are read or drawn.

    Raises:
        OptionError: bf16 was asked for and the model is in fp8.
        DeviceError: fp8 was asked for and the device has none.
    """
    where = pick_device(device)
    if precision == "fp8":
        require_fp8(where)
    if random:
        kind = pick_dtype(dtype or ("float32" if where.type == "cpu" else "bfloat16"))
        model = random_language_model(named_sizes(random), where, kind)
        return model, special_ids(model.config)
    chosen = chosen_language_model(folder)
    if precision == "bf16" and Quantization.of(LanguageModelConfig.from_folder(chosen)):
        raise OptionError(f"--precision bf16: {folder} is in fp8; name the folder before it")
    take_kernels(folder, where)
    stored = dtype or ("float32" if where.type == "cpu" else None)
    model = load_language_model(chosen, device=where, dtype=pick_dtype(stored) if stored else None)
    fit_threads(where, (model,))
    tokenizer = TextTokenizer.from_folder(chosen, model.config.vocab_size)
    return model, SpecialIds.of(model.config, tokenizer.special)


def measure(
    model: LanguageModel, ids: SpecialIds, asked: Measurement, weights: str, tell: Progress
) -> StepSpeed:
    """Time what is asked for; ``weights``: their kind, for the settings.

    Raises:
        BenchError: a run whose rows were not right; no time is told.
    """
    against = reference_of(model, ids, asked.error_rows) if asked.error_rows else None
    subject = Subject(model, ids, _quantized(model, asked))
    with lasting_objects_spared():
        return _measured(subject, asked, weights, against, tell)


def _quantized(model: LanguageModel, asked: Measurement) -> Quantization | None:
    """How the model is quantised, by now."""
    record = Quantization.of(model.config)
    if record is None and asked.quantise:
        record = Quantization()
        quantize_in_place(model, record)
    return record


def _measured(
    subject: Subject,
    asked: Measurement,
    weights: str,
    against: Reference | None,
    tell: Progress,
) -> StepSpeed:
    model, ids = subject.model, subject.ids
    ceilings = measure_ceilings(model.device, model.dtype, fp8=subject.record is not None)
    found = StepSpeed(_settings(subject, asked, weights, ceilings))
    measure: Callable[..., Timed] = measure_prompts if asked.prompts else measure_steps
    rows = list[tuple[Load, Timed]]()
    ways = 1 + len(asked.baselines)
    for number, load in enumerate(asked.loads):
        tell(load.name, ways * number, ways * len(asked.loads))
        rows.append((load, measure(model, ids, asked.options, load, asked.runs)))
        for place, name in enumerate(asked.baselines, 1):
            tell(f"{load.name}, {name}", ways * number + place, ways * len(asked.loads))
            rows.append((load, measure_baseline(name, model, load, asked.runs)))
    limited = [(load, _limited(row, subject, load, ceilings)) for load, row in rows]
    title = "Prompts, to their reply's first row" if asked.prompts else "Steps"
    note = f"Logits of other means need be but within {APART:.0%} of an untimed run's."
    shown = note if asked.baselines else ""
    found.tables.append(timed_table(title, [row for _, row in limited], shown))
    found.tables.append(_rates(subject, limited, asked))
    found.timed = [row.figures() for _, row in limited]
    if against:
        tell("errors", 0, 1)
        table, found.errors = error_table(model, ids, asked.options, against, subject.precision)
        found.tables.append(table)
    return found


def _limited(row: Timed, subject: Subject, load: Load, ceilings: Ceilings) -> Timed:
    limit = ceilings.limit_ms(subject.work(load))
    return Timed(row.name, row.cold_ms, row.warm_ups, row.runs_ms, row.wrong, limit)


def _rates(subject: Subject, rows: Sequence[tuple[Load, Timed]], asked: Measurement) -> Table:
    """What a median step moves and computes in a second, and how near it is to the limit."""
    lines = []
    for load, row in rows:
        work, seconds = subject.work(load), row.p50_ms / 1000
        lines.append(
            (
                row.name,
                f"{work.moved_bytes / _GB:.2f}",
                f"{work.operations / 1e12:.3f}",
                f"{row.p50_ms / (row.limit_ms or 1):.2f}",
                f"{work.moved_bytes / _GB / seconds:,.0f}",
                f"{work.operations / 1e12 / seconds:,.1f}",
                f"{1 / seconds:,.1f}",
                "-" if asked.prompts else f"{row.p50_ms / CODE_MS:.4f}",
            )
        )
    note = (
        "Of the median: bytes that must be moved (weights and kept rows, once), operations, time "
        "over limit, steps a second of all sessions together, and time over the 80 ms of sound "
        "that a row is."
    )
    columns = ("", "GB", "Tflop", "over limit", "GB/s", "Tflop/s", "a second", "real-time factor")
    return Table("Rates", note, columns, tuple(lines))


def _settings(
    subject: Subject, asked: Measurement, weights: str, ceilings: Ceilings
) -> dict[str, str]:
    model = subject.model
    return machine_facts(model.device, weights) | {
        "sizes": asked.name,
        "precision": subject.precision,
        "engine": _engine_facts(model, asked.options),
        "rates": ceilings.describe(),
    }


def _engine_facts(model: LanguageModel, options: EngineOptions) -> str:
    """How the engine computes here, for people."""
    if not (model.device.type == "cuda" and options.kernels):
        return "plain torch"
    graphs = "in CUDA graphs" if options.graphs else "launched one by one"
    return f"kernels {graphs}{', batch-invariant' if options.batch_invariant else ''}"
