"""Speed of the engine's steps and prompts, beside what the hardware allows; errors if wanted.

Errors: how far logits lie from those of float32, the engine's and plain torch's in the same
precision. All get the same rows and the same weights, of which the float32 reference has an exact
copy, taken before they are quantised.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosstalk.bench.step_baselines import APART, measure_baseline, require_baseline
from mosstalk.bench.timed import Timed, measure_ceilings, timed_table
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS
from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Sequence as EngineSequence
from mosstalk.errors import BenchError, OptionError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel, Logits
from mosstalk.models.quantization import Quantization, precision_of, quantize_in_place
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.numerics.fp8 import require_fp8
from mosstalk.plan.limits import Ceilings, Load, Work, step_work
from mosstalk.prepared.default_models import chosen_language_model
from mosstalk.prepared.machine import machine_facts
from mosstalk.prepared.start import take_kernels
from mosstalk.progress import Progress
from mosstalk.reply_options import Limits, SamplingOptions, Script
from mosstalk.reporting.tables import Table
from mosstalk.runtime.device import (
    fit_threads,
    gc_frozen,
    pick_device,
    pick_dtype,
    synchronize,
)
from mosstalk.synthesis.sizes import named_sizes
from mosstalk.synthesis.weights import random_language_model, random_rows, special_ids

_SEED = 11
_WARM_UPS = 4
_ONE_BY_ONE = 16
"""Rows at the end that the engine reads one by one for their errors, as it does when it replies."""
_GB = 1e9


class Walk(NamedTuple):
    """What one run took and gave: its very first step or prompt, each of the timed ones, and all
    rows drawn.
    """

    cold_ms: float
    times_ms: list[float]
    rows: list[list[Row]]


def measure_engine(
    model: LanguageModel,
    ids: SpecialIds,
    options: EngineOptions,
    load: Load,
    runs: int,
    *,
    prompts: bool,
) -> Timed:
    """Each of ``runs`` steps in which every session draws a row, one right after the other.

    Of ``prompts``: from asking for a reply to its first row, for ``load.new`` unread rows. An
    untimed walk comes first, whose rows the timed one must repeat.
    """
    core = EngineCore(model, ids, _sized(options, load, 1 if prompts else runs))
    walk = _prompts if prompts else _steps
    expected, found = walk(core, load, runs), walk(core, load, runs)
    wrong = [
        f"rows of session {place} unlike those of an untimed run"
        for place, (rows, wanted) in enumerate(zip(found.rows, expected.rows, strict=True))
        if rows != wanted or not rows
    ]
    warm_ups = runs if prompts else _WARM_UPS + runs
    return Timed(load.name, expected.cold_ms, warm_ups, tuple(found.times_ms), tuple(wrong[:runs]))


def _sized(options: EngineOptions, load: Load, steps: int) -> EngineOptions:
    """A pool that holds all sessions to their end, none of which begins like another."""
    rows = load.kept + load.new + steps + _WARM_UPS + 8
    blocks = load.sessions * (-(-rows // options.block_rows) + 1)
    limits = replace(options.limits, slots=max(load.sessions, options.limits.slots))
    if load.new > limits.step_rows:
        limits = replace(limits, step_rows=load.new)
    return replace(options, blocks=blocks, share_prefixes=False, limits=limits)


def _steps(core: EngineCore, load: Load, steps: int) -> Walk:
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


@dataclass
class StepBench:
    """A model, what is measured of it and how the engine computes it; then what was found.

    Attributes:
        name: what the model is called, ``weights``: their kind.
        runs: steps, or runs of each prompt; ``prompts``: prompts are timed, not steps.
        baselines: other means beside the engine.
        error_rows: compare the logits of so many rows with float32's.
        record: how the model is quantised; ``quantise`` quantises the shared block's products to
            FP8 first, unless they are.
        settings, tables, timed, errors: for people, and for the document.
    """

    name: str
    weights: str
    model: LanguageModel
    ids: SpecialIds
    options: EngineOptions
    loads: Sequence[Load]
    runs: int
    prompts: bool
    baselines: Sequence[str]
    error_rows: int = 0
    quantise: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    timed: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, float | str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = Quantization.of(self.model.config)

    def measure(self, tell: Progress) -> None:
        """Time what is asked for.

        Raises:
            OptionError: a baseline that there is not, or not on this device.
            BenchError: a run whose rows were not right; no time is told.
        """
        for name in self.baselines:
            require_baseline(name, self.model.device)
        against = reference_of(self.model, self.ids, self.error_rows) if self.error_rows else None
        if self.record is None and self.quantise:
            self.record = Quantization()
            quantize_in_place(self.model, self.record)
        with gc_frozen():
            ceilings = measure_ceilings(
                self.model.device, self.model.dtype, fp8=self.record is not None
            )
            self.settings = self._settings(ceilings)
            self._time(ceilings, tell)
            if against:
                tell("errors", 0, 1)
                self._compare(against)

    @property
    def precision(self) -> str:
        """Of the weights, for people."""
        return precision_of(self.model.dtype, self.record)

    def _time(self, ceilings: Ceilings, tell: Progress) -> None:
        model, rows = self.model, list[tuple[Work, Timed]]()
        ways = 1 + len(self.baselines)
        for number, load in enumerate(self.loads):
            tell(load.name, ways * number, ways * len(self.loads))
            found = [
                measure_engine(model, self.ids, self.options, load, self.runs, prompts=self.prompts)
            ]
            for place, name in enumerate(self.baselines, 1):
                tell(f"{load.name}, {name}", ways * number + place, ways * len(self.loads))
                found.append(measure_baseline(name, model, load, self.runs))
            work = step_work(model.config, model.dtype, load, self.record)
            limit_ms = ceilings.limit_ms(work)
            rows += [(work, replace(row, limit_ms=limit_ms)) for row in found]
        title = "Prompts, to their reply's first row" if self.prompts else "Steps"
        note = f"Logits of other means need be but within {APART:.0%} of an untimed run's."
        shown = note if self.baselines else ""
        self.tables += [timed_table(title, [row for _, row in rows], shown), self._rates(rows)]
        self.timed = [row.figures() for _, row in rows]

    def _rates(self, rows: Sequence[tuple[Work, Timed]]) -> Table:
        """What a median step moves and computes in a second, and how near it is to the limit."""
        lines = []
        for work, row in rows:
            seconds = row.p50_ms / 1000
            lines.append(
                (
                    row.name,
                    f"{work.moved_bytes / _GB:.2f}",
                    f"{work.operations / 1e12:.3f}",
                    f"{row.p50_ms / (row.limit_ms or 1):.2f}",
                    f"{work.moved_bytes / _GB / seconds:,.0f}",
                    f"{work.operations / 1e12 / seconds:,.1f}",
                    f"{1 / seconds:,.1f}",
                    "-" if self.prompts else f"{row.p50_ms / CODE_MS:.4f}",
                )
            )
        note = (
            "Of the median: bytes that must be moved (weights and kept rows, once), operations, "
            "time over limit, steps a second of all sessions together, and time over the 80 ms of "
            "sound that a row is."
        )
        columns = "GB", "Tflop", "over limit", "GB/s", "Tflop/s", "a second", "real-time factor"
        return Table("Rates", note, ("", *columns), tuple(lines))

    def _settings(self, ceilings: Ceilings) -> dict[str, str]:
        engine = "plain torch"
        if self.model.device.type == "cuda" and self.options.kernels:
            graphs = "in CUDA graphs" if self.options.graphs else "launched one by one"
            engine = f"kernels {graphs}{', batch-invariant' * self.options.batch_invariant}"
        return machine_facts(self.model.device, self.weights) | {
            "sizes": self.name,
            "precision": self.precision,
            "engine": engine,
            "rates": ceilings.describe(),
        }

    @torch.inference_mode()
    def _compare(self, against: "Reference") -> None:
        """Errors of each head and way of computing, by the model as it is now."""
        kind = self.precision
        ways = {f"plain torch, {against.kind}": against.plain}
        if kind != against.kind:
            ways[f"plain torch, {kind}"] = _plain(self.model, against.rows)
        ways[f"the engine, {kind}"] = _engine(self.model, self.ids, self.options, against.rows)
        self.errors = [
            _errors(getattr(logits, head), getattr(against.truth, head)) | {"head": head, "by": by}
            for head in Logits._fields
            for by, logits in ways.items()
        ]
        cells = tuple(
            (
                f"{row['head']} head, {row['by']}",
                f"{row['rms']:.2e}",
                f"{row['max']:.3f}",
                f"{100 * float(row['top1']):.1f}",
            )
            for row in self.errors
        )
        note = (
            f"{len(against.rows)} rows, the last {_ONE_BY_ONE} of them read one by one by the "
            "engine. rms: of the error over that of the float32 logits about their mean; max: "
            "largest error; top-1: share of rows whose largest logit is float32's."
        )
        columns = ("", "rms", "max", "top-1 %")
        self.tables.append(Table("Logits against float32", note, columns, cells))


class Reference(NamedTuple):
    """``rows`` of a conversation, their logits in float32, and plain torch's in ``kind``."""

    rows: list[Row]
    truth: Logits
    plain: Logits
    kind: str


@torch.inference_mode()
def reference_of(model: LanguageModel, ids: SpecialIds, rows: int) -> Reference:
    """Before the model's weights are packed or quantised."""
    given = random_rows(model, ids, Mode.AUDIO, 1, rows)[0]
    truth = _plain(copy.deepcopy(model).float(), given)
    return Reference(given, truth, _plain(model, given), str(model.dtype).removeprefix("torch."))


def _plain(model: LanguageModel, rows: list[Row]) -> Logits:
    logits = model(torch.tensor([rows], device=model.device), model.new_cache())
    return Logits(*(part[0].float() for part in logits))


def _engine(
    model: LanguageModel, ids: SpecialIds, options: EngineOptions, rows: list[Row]
) -> Logits:
    core = EngineCore(model, ids, options)
    alone = min(_ONE_BY_ONE, len(rows) - 1)
    sequence = core.open(rows[: len(rows) - alone])
    assert sequence.make_room(len(rows))
    found = [_kept(core.runner.logits(sequence))]
    for row in rows[len(rows) - alone :]:
        sequence.rows.append(row)
        found.append(_kept(core.runner.logits(sequence)))
    core.close(sequence)
    return Logits(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _kept(logits: Logits) -> Logits:
    """A copy: what is computed next may lie in the same place."""
    return Logits(logits.text.clone(), logits.audio.clone())


def _errors(found: Tensor, truth: Tensor) -> dict[str, float | str]:
    apart = found - truth
    centred = truth - truth.mean(dim=1, keepdim=True)
    agree = found.argmax(dim=1) == truth.argmax(dim=1)
    return {
        "rms": float(apart.square().mean().sqrt() / centred.square().mean().sqrt()),
        "max": float(apart.abs().max()),
        "top1": float(agree.float().mean()),
    }
