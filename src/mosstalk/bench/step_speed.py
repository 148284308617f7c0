"""How long the engine's steps take: rows one by one, and prompts."""

import time
from dataclasses import dataclass, replace

import torch

from mosstalk.bench.step_work import Load
from mosstalk.bench.timed import Timed
from mosstalk.conversation import Mode, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Sequence
from mosstalk.errors import BenchError
from mosstalk.models.language_model import LanguageModel
from mosstalk.runtime.device import synchronize
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script

_SEED = 11
_WARM_UPS = 4


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
    rows = prompts(core.model, core.ids, load, load.sessions, load.kept)
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
    every = prompts(core.model, core.ids, load, runs, load.kept + load.new)
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


def _ask(core: EngineCore, sequence: Sequence, mode: Mode, steps: int, seed: int) -> Request:
    """A reply that stays in ``mode`` for long enough."""
    part = "speech" if mode is Mode.AUDIO else "text"
    length = steps + _WARM_UPS + 4
    ask = ReplyParams(SamplingOptions(seed=seed), Limits(length), Script.parse(f"{part}:{length}"))
    return core.submit(sequence, ask)


def _rows_of(request: Request) -> list[Row]:
    return [] if request.error else list(request.reply.rows)


def prompts(
    model: LanguageModel, ids: SpecialIds, load: Load, count: int, rows: int
) -> list[list[Row]]:
    """Random rows in the load's mode, those of each its own."""
    random = torch.Generator().manual_seed(_SEED)
    if load.mode is Mode.AUDIO:
        codes = torch.randint(ids.eosp, (count, rows), generator=random)
        codes[codes == ids.audio_pad] = 0
        return [[(ids.modality_pad, code) for code in part] for part in codes.tolist()]
    most = min(*ids.stop, ids.sosp, ids.modality_pad, model.config.vocab_size)
    texts = torch.randint(most, (count, rows), generator=random)
    return [[(text, ids.audio_pad) for text in part] for part in texts.tolist()]
