"""Speed of the engine's steps and prompts, beside what the hardware allows; errors if wanted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mosstalk.bench.step_baselines import APART, measure_baseline, require_baseline
from mosstalk.bench.step_errors import Reference, error_table, reference_of
from mosstalk.bench.timed import Timed, measure_ceilings, timed_table
from mosstalk.collector import lasting_objects_spared
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS
from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Sequence as EngineSequence
from mosstalk.errors import BenchError, OptionError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, precision_of, quantize_in_place
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.plan.limits import Ceilings, Load, Work, step_work
from mosstalk.prepared.default_models import chosen_language_model
from mosstalk.prepared.machine import machine_facts
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import Progress
from mosstalk.reporting.tables import Table
from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype, synchronize
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script
from mosstalk.synthesis.sizes import named_sizes
from mosstalk.synthesis.weights import random_language_model, random_rows, special_ids

_SEED = 11
_WARM_UPS = 4
FORMAT = "mosstalk-step-1"
_GB = 1e9


@dataclass(frozen=True)
class Walk:
    """What one run took and gave: its very first step or prompt, each of the timed ones, and all
    rows drawn.
    """

    cold_ms: float
    times_ms: list[float]
    rows: list[list[Row]]


def measure_steps(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, load: Load, steps: int
) -> Timed:
    """Each of ``steps`` steps in which every session draws a row, one right after the other.

    An untimed run comes first, whose rows the timed one must repeat.
    """
    core = EngineCore(model, ids, _sized(options, load, steps))
    expected = _walk(core, load, steps)
    found = _walk(core, load, steps)
    return _timed(load.name, expected, found, _WARM_UPS + steps)


def measure_prompts(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, load: Load, runs: int
) -> Timed:
    """From asking for a reply to its first row, for a prompt of ``load.new`` unread rows."""
    core = EngineCore(model, ids, _sized(options, load, 1))
    expected = _prompts(core, load, runs)
    found = _prompts(core, load, runs)
    return _timed(load.name, expected, found, runs)


def _timed(name: str, expected: Walk, found: Walk, warm_ups: int) -> Timed:
    wrong = [
        f"rows of session {place} unlike those of an untimed run"
        for place, (rows, wanted) in enumerate(zip(found.rows, expected.rows, strict=True))
        if rows != wanted or not rows
    ]
    faults = tuple(wrong[: len(found.times_ms)])
    return Timed(name, expected.cold_ms, warm_ups, tuple(found.times_ms), faults)


def _sized(options: EngineOptions, load: Load, steps: int) -> EngineOptions:
    """A pool that holds all sessions to their end, none of which begins like another."""
    rows = load.kept + load.new + steps + _WARM_UPS + 8
    blocks = load.sessions * (-(-rows // options.block_rows) + 1)
    limits = replace(options.limits, slots=max(load.sessions, options.limits.slots))
    if load.new > limits.step_rows:
        limits = replace(limits, step_rows=load.new)
    return replace(options, blocks=blocks, share_prefixes=False, limits=limits)


def _walk(core: EngineCore, load: Load, steps: int) -> Walk:
    """All sessions read their rows; once all have been read, they step together."""
    rows = random_rows(core.model, core.ids, load.mode, load.sessions, load.kept)
    sequences = [core.open(part) for part in rows]
    for sequence in sequences:
        core.prefill_ahead(sequence)
    cold_ms = _step_ms(core)
    while any(sequence.unread for sequence in sequences):
        core.step()
    asked = [_ask(core, part, load.mode, steps, seed) for seed, part in enumerate(sequences)]
    while min(len(request.reply.rows) for request in asked) < _WARM_UPS:
        core.step()
    # No pause before the clock begins: each step launches the next one before it ends, so that
    # the first one after a pause would be done before it is waited for.
    times = [_step_ms(core) for _ in range(steps)]
    if any(request.state is not State.RUNNING for request in asked):
        raise BenchError(f"{load.name}: a reply ended before the last timed step")
    core.run()
    for request in asked:
        core.close(request.sequence)
    return Walk(cold_ms, times, [_rows_of(request) for request in asked])


def _step_ms(core: EngineCore) -> float:
    start = time.perf_counter()
    core.step()
    return 1000 * (time.perf_counter() - start)


def _prompts(core: EngineCore, load: Load, runs: int) -> Walk:
    times, rows = list[float](), list[list[Row]]()
    every = random_rows(core.model, core.ids, load.mode, runs, load.kept + load.new)
    for prompt in every:
        sequence = core.open(prompt[: load.kept])
        if load.kept:
            core.submit(sequence, ReplyParams(limits=Limits(1)))
            core.run()
            sequence.truncate(load.kept)
        sequence.rows += prompt[load.kept :]
        options = SamplingOptions(seed=_SEED)
        synchronize(core.model.device)
        start = time.perf_counter()
        request = core.submit(sequence, ReplyParams(options, Limits(1)))
        core.run()
        times.append(1000 * (time.perf_counter() - start))
        rows.append(_rows_of(request))
        core.close(sequence)
    return Walk(times[0], times, rows)


def _ask(core: EngineCore, sequence: EngineSequence, mode: Mode, steps: int, seed: int) -> Request:
    """A reply that stays in ``mode`` for long enough."""
    part = "speech" if mode is Mode.AUDIO else "text"
    length = steps + _WARM_UPS + 4
    ask = ReplyParams(SamplingOptions(seed=seed), Limits(length), Script.parse(f"{part}:{length}"))
    return core.submit(sequence, ask)


def _rows_of(request: Request) -> list[Row]:
    return [] if request.error else list(request.reply.rows)


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
        OptionError: a baseline that there is not, or not on this device.
        BenchError: a run whose rows were not right; no time is told.
    """
    for name in asked.baselines:
        require_baseline(name, model.device)
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
    limited = [
        (load, replace(row, limit_ms=ceilings.limit_ms(subject.work(load)))) for load, row in rows
    ]
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
