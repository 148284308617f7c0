"""``mosstalk bench step`` and ``bench prefill``: what is asked for, and what is printed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mosstalk.bench.ceilings import Ceilings, Work, measure_ceilings
from mosstalk.bench.html import tables_page
from mosstalk.bench.machine import machine_facts
from mosstalk.bench.step_baselines import APART, measure_baseline
from mosstalk.bench.step_errors import Reference, error_table, reference_of
from mosstalk.bench.step_speed import measure_prompts, measure_steps
from mosstalk.bench.step_work import Load, step_work
from mosstalk.bench.tables import Table
from mosstalk.bench.timed import Timed, timed_table
from mosstalk.cli.common import one_of
from mosstalk.cli.measured_output import Outputs, measured_document, print_found
from mosstalk.collector import lasting_objects_spared
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS
from mosstalk.conversation import Mode, SpecialIds
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.errors import OptionError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, precision_of, quantize_in_place
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.prepared.default_models import chosen_language_model
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import Progress, progress_bar
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype
from mosstalk.synthesis.direct_language import random_language_model, special_ids
from mosstalk.synthesis.sizes import named_sizes

FORMAT = "mosstalk-step-1"
_GB = 1e9


@dataclass(frozen=True)
class StepRequest:
    """Which model: a folder, or random weights of a named size; where and how it runs.

    ``precision`` "fp8" quantises the shared block's products first, unless they are; None leaves
    them as they are.
    """

    model: Path | None
    random: str | None
    device: str
    dtype: str | None
    options: EngineOptions
    precision: str | None = None


@dataclass(frozen=True)
class Loads:
    """What is measured: steps or prompts, so often; beside what; errors over so many rows."""

    loads: Sequence[Load]
    runs: int
    prompts: bool
    baselines: Sequence[str]
    error_rows: int = 0


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


def parse_loads(words: str, mode: str) -> list[Load]:
    """``SESSIONS x ROWS`` for steps: ``1x512,64x1000``.

    Raises:
        OptionError: it says something else.
    """
    chosen = _mode(mode)
    return [Load(*pair, mode=chosen) for pair in _pairs(words, "x", "--at", "1x512,64x1000")]


def parse_prompts(words: str, mode: str) -> list[Load]:
    """``ROWS[+KEPT]`` for prompts: ``512,6+1000``.

    Raises:
        OptionError: it says something else.
    """
    chosen = _mode(mode)
    parts = ",".join(part if "+" in part else f"{part}+0" for part in words.split(","))
    pairs = _pairs(parts, "+", "--rows", "512,6+1000")
    return [Load(1, kept, new, chosen) for new, kept in pairs]


def engine_options(*, graphs: bool, batch_invariant: bool) -> EngineOptions:
    """How the engine shall compute; its sizes follow from the loads."""
    return EngineOptions(graphs=graphs, batch_invariant=batch_invariant)


def _mode(word: str) -> Mode:
    if word not in ("audio", "text"):
        raise OptionError(f"--mode {word}: choose of audio, text")
    return Mode.AUDIO if word == "audio" else Mode.TEXT


def _pairs(words: str, between: str, option: str, example: str) -> list[tuple[int, int]]:
    parts = [part.split(between) for part in words.split(",")]
    if not all(len(part) == 2 and all(word.isdecimal() for word in part) for part in parts):
        raise OptionError(f"{option} {words}: give something like {example}")
    pairs = [(int(first), int(second)) for first, second in parts]
    if min(first for first, _ in pairs) < 1:
        raise OptionError(f"{option} {words}: there must be at least one")
    return pairs


def run_steps(request: StepRequest, loads: Loads, to: Outputs) -> None:
    """Measure, print tables, write the document and the page.

    Raises:
        OptionError: an option that means nothing.
        BenchError: a run whose rows were not right; no time is printed.
    """
    to.require()
    with to.text_for_people():
        model, ids = _opened(request)
        with progress_bar() as tell:
            against = reference_of(model, ids, loads.error_rows) if loads.error_rows else None
            subject = Subject(model, ids, _quantized(model, request))
            with lasting_objects_spared():
                found = _measure(subject, request, loads, against, tell)
        print_found(found.settings, found.tables)
    to.write(
        measured_document(FORMAT, found.settings, timed=found.timed, errors=found.errors),
        partial(tables_page, "mosstalk steps", found.settings, found.tables),
    )


def _opened(request: StepRequest) -> tuple[LanguageModel, SpecialIds]:
    """What cannot be measured as asked is refused before any weights are read or drawn.

    Raises:
        OptionError: an option that means nothing, or bf16 where the model is in fp8.
        DeviceError: fp8 was asked for and the device has none.
    """
    device = pick_device(request.device)
    one_of("--precision", request.precision or "bf16", "bf16", "fp8")
    if request.precision == "fp8":
        require_fp8(device)
    if request.random:
        sizes = named_sizes(request.random)
        dtype = pick_dtype(request.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
        model = random_language_model(sizes, device, dtype)
        return model, special_ids(model.config)
    folder = chosen_language_model(request.model)
    if request.precision == "bf16" and Quantization.of(LanguageModelConfig.from_folder(folder)):
        raise OptionError(f"--precision bf16: {request.model} is in fp8; name the folder before it")
    take_kernels(request.model, device)
    kind = request.dtype or ("float32" if device.type == "cpu" else None)
    model = load_language_model(folder, device=device, dtype=pick_dtype(kind) if kind else None)
    fit_threads(device, (model,))
    tokenizer = TextTokenizer.from_folder(folder, model.config.vocab_size)
    return model, SpecialIds.of(model.config, tokenizer.special)


def _quantized(model: LanguageModel, request: StepRequest) -> Quantization | None:
    """How the model is quantised, by now."""
    record = Quantization.of(model.config)
    if record is None and request.precision == "fp8":
        record = Quantization()
        quantize_in_place(model, record)
    return record


def _measure(
    subject: Subject,
    request: StepRequest,
    loads: Loads,
    against: Reference | None,
    tell: Progress,
) -> StepSpeed:
    model, ids = subject.model, subject.ids
    ceilings = measure_ceilings(model.device, model.dtype, fp8=subject.record is not None)
    found = StepSpeed(_settings(subject, request, ceilings))
    measure: Callable[..., Timed] = measure_prompts if loads.prompts else measure_steps
    rows = list[tuple[Load, Timed]]()
    ways = 1 + len(loads.baselines)
    for number, load in enumerate(loads.loads):
        tell(load.name, ways * number, ways * len(loads.loads))
        rows.append((load, measure(model, ids, request.options, load, loads.runs)))
        for place, name in enumerate(loads.baselines, 1):
            tell(f"{load.name}, {name}", ways * number + place, ways * len(loads.loads))
            rows.append((load, measure_baseline(name, model, load, loads.runs)))
    limited = [(load, _limited(row, subject, load, ceilings)) for load, row in rows]
    title = "Prompts, to their reply's first row" if loads.prompts else "Steps"
    note = f"Logits of other means need be but within {APART:.0%} of an untimed run's."
    shown = note if loads.baselines else ""
    found.tables.append(timed_table(title, [row for _, row in limited], shown))
    found.tables.append(_rates(subject, limited, loads))
    found.timed = [row.figures() for _, row in limited]
    if against:
        tell("errors", 0, 1)
        table, found.errors = error_table(model, ids, request.options, against, subject.precision)
        found.tables.append(table)
    return found


def _limited(row: Timed, subject: Subject, load: Load, ceilings: Ceilings) -> Timed:
    limit = ceilings.limit_ms(subject.work(load))
    return Timed(row.name, row.cold_ms, row.warm_ups, row.runs_ms, row.wrong, limit)


def _rates(subject: Subject, rows: Sequence[tuple[Load, Timed]], loads: Loads) -> Table:
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
                "-" if loads.prompts else f"{row.p50_ms / CODE_MS:.4f}",
            )
        )
    note = (
        "Of the median: bytes that must be moved (weights and kept rows, once), operations, time "
        "over limit, steps a second of all sessions together, and time over the 80 ms of sound "
        "that a row is."
    )
    columns = ("", "GB", "Tflop", "over limit", "GB/s", "Tflop/s", "a second", "real-time factor")
    return Table("Rates", note, columns, tuple(lines))


def _settings(subject: Subject, request: StepRequest, ceilings: Ceilings) -> dict[str, str]:
    model = subject.model
    weights = "synthetic" if request.random else model.config.weights_kind
    return machine_facts(model.device, weights) | {
        "sizes": request.random or str(request.model or "the default model's"),
        "precision": subject.precision,
        "engine": _engine_facts(model, request.options),
        "rates": ceilings.describe(),
    }


def _engine_facts(model: LanguageModel, options: EngineOptions) -> str:
    """How the engine computes here, for people."""
    if not (model.device.type == "cuda" and options.kernels):
        return "plain torch"
    graphs = "in CUDA graphs" if options.graphs else "launched one by one"
    return f"kernels {graphs}{', batch-invariant' if options.batch_invariant else ''}"
