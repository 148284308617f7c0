"""Language-model cases, prompts, greedy runs and warpers, by the plain network and the engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mosstalk.conversation import Mode, Reply, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.sampler import warp_rows
from mosstalk.engine.sequence import Sequence
from mosstalk.engine.step_plan import QuerySpan
from mosstalk.errors import CaseError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.generation import Generation, warp
from mosstalk.models.language_model import LanguageModel, Logits
from mosstalk.reply_options import Limits, SamplingOptions
from mosstalk.synthesis.weights import special_ids
from mosstalk.verify.compare import Case, Check, Comparer

Warper = Callable[..., Tensor]
"""``models.generation.warp``, or what does the same."""
PREFILL = ("trunk_hidden", "prefill_text_logits", "prefill_audio_logits")
_BLOCK_ROWS = 16
assert [int(mode) for mode in Mode] == [0, 1], "cases count text as mode 0 and audio as 1"


def check_language_model(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Run every prompt and greedy run of a case through the reference network.

    States and logits are compared where the case has them, of as many steps as it has.
    """
    model = load_language_model(case.weights, device=device, dtype=compare.dtype)
    network = PlainNetwork(model, case_ids(case, model))
    yield from _check(case, network, compare)
    yield from check_warpers(case, device, warp)


def check_language_model_fast(
    case: Case, device: torch.device, compare: Comparer
) -> Iterator[Check]:
    """Compare what ``check_language_model`` does, computed by the engine.

    Whole rows are asked for, so that audio ids of text rows are compared too; they are put
    off and made up. In the mixed batch one run arrives at each step.
    """
    model = load_language_model(case.weights, device=device, dtype=compare.dtype)
    runs: list[dict[str, Any]] = case.get("runs")
    asked = [RunSettings.of(case, run) for run in runs]
    room = sum(len(each.rows) + each.limits.max_new_rows for each in asked)
    options = EngineOptions(blocks=room // _BLOCK_ROWS + len(runs) + 1, block_rows=_BLOCK_ROWS)
    engine = WholeEngine(EngineCore(model, case_ids(case, model), options))
    yield from _check(case, engine, compare)
    for run, reply in zip(runs, engine.replies(asked), strict=True):
        yield from compare_reply(case, run, reply, compare, suffix=" mixed")
    yield from check_warpers(case, device, _warp)


def case_ids(case: Case, model: LanguageModel) -> SpecialIds:
    """The special ids that a case's model and settings name; cases need no others."""
    return replace(special_ids(model.config), stop=frozenset(case.get("stop_token_ids")))


@dataclass(frozen=True)
class RunSettings:
    """What a run of a case asks for: ``stem`` begins the names of its tensors."""

    stem: str
    rows: list[Row]
    options: SamplingOptions
    limits: Limits

    @classmethod
    def of(cls, case: Case, run: dict[str, Any]) -> "RunSettings":
        """Read a run's prompt and settings."""
        return cls(
            f"{run['prompt']}.{run['run']}",
            _rows(case.tensor(f"{run['prompt']}.prompt")),
            SamplingOptions(temperature=0, repetition_penalty=run["repetition_penalty"]),
            Limits(run["max_new_tokens"], run["min_new_tokens"]),
        )


class PlainNetwork:
    """The plain network with a cache, one reply after the other."""

    def __init__(self, model: LanguageModel, ids: SpecialIds) -> None:
        self.model, self.ids = model, ids

    @torch.inference_mode()
    def states(self, rows: list[Row]) -> tuple[Tensor, ...]:
        """The trunk's output (T, C), and the logits (T, V) of both heads."""
        grid = torch.tensor([rows], device=self.model.device)
        hidden, *_ = self.model.trunk(grid, self.model.new_cache())
        logits = self.model(grid, self.model.new_cache())
        return hidden[0], logits.text[0], logits.audio[0]

    @torch.inference_mode()
    def logits(self, prompt: list[Row], rows: list[Row]) -> Logits:
        """Raw logits (N, V) of each step, decoded one row at a time along the expected rows."""
        cache, found = self.model.new_cache(), list[Logits]()
        for new in (prompt, *([row] for row in rows[:-1])):
            grid = torch.tensor([new], device=self.model.device)
            found.append(self.model(grid, cache, last_only=True))
        return Logits(torch.cat([s.text[0] for s in found]), torch.cat([s.audio[0] for s in found]))

    def replies(self, asked: list[RunSettings]) -> list[Reply]:
        """Replies to what was asked."""
        model, made = self.model, list[Reply]()
        for each in asked:
            cache = model.new_cache()
            reply = Generation(model, cache, each.rows, self.ids, each.options, each.limits)
            for _ in reply:
                pass
            made.append(reply.reply)
        return made


class WholeEngine:
    """The engine; what ``PlainNetwork`` does."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def _opened(self, rows: list[Row], more: int = 0) -> Sequence:
        sequence = self.core.open(rows)
        assert sequence.make_room(len(rows) + more), "the pool was made for every run at once"
        return sequence

    def states(self, rows: list[Row]) -> tuple[Tensor, ...]:
        """The trunk's output (T, C), and the logits (T, V) of both heads."""
        sequence = self._opened(rows)
        logits = self.core.runner.logits(sequence)
        hidden = self.core.runner.store.hidden[QuerySpan(sequence, 0, len(rows)).places()]
        self.core.close(sequence)
        return hidden, logits.text, logits.audio

    def logits(self, prompt: list[Row], rows: list[Row]) -> Logits:
        """Raw logits (N, V) of each step, read one row at a time along the expected rows."""
        sequence = self._opened(prompt, len(rows))
        found = [self.core.runner.logits(sequence)]
        for row in rows[:-1]:
            sequence.rows.append(row)
            found.append(self.core.runner.logits(sequence))
        self.core.close(sequence)
        text, audio = (torch.cat([step[head][-1:] for step in found]) for head in (0, 1))
        return Logits(text, audio)

    def replies(self, asked: list[RunSettings]) -> list[Reply]:
        """One arrives at each step."""
        requests = []
        for each in asked:
            ask = ReplyParams(each.options, each.limits, whole_rows=True)
            requests.append(self.core.submit(self.core.open(each.rows), ask))
            self.core.step()
        self.core.run()
        for request in requests:
            self.core.close(request.sequence)
            if request.error:
                raise CaseError(str(request.error))
        return [request.reply for request in requests]


def _check(case: Case, by: PlainNetwork | WholeEngine, compare: Comparer) -> Iterator[Check]:
    """Every prompt, then every run alone."""
    runs: list[dict[str, Any]] = case.get("runs")
    for prompt in dict.fromkeys(run["prompt"] for run in runs):
        names = [f"{prompt}.{name}" for name in PREFILL]
        if any(map(case.wants, names)):
            states = by.states(_rows(case.tensor(f"{prompt}.prompt")))
            for name, found in zip(names, states, strict=True):
                if case.wants(name):
                    yield compare.tensor(name, found, case.tensor(name))
    for run in runs:
        asked = RunSettings.of(case, run)
        yield from compare_reply(case, run, by.replies([asked])[0], compare)
        if case.has(f"{asked.stem}.text_logits"):
            steps = len(case.tensor(f"{asked.stem}.text_logits"))
            rows = _rows(case.tensor(f"{asked.stem}.rows"))[:steps]
            yield from compare_logits(case, asked.stem, by.logits(asked.rows, rows), compare)


def _rows(grid: Tensor) -> list[Row]:
    """Rows of ids (T, 2) as pairs."""
    return [(text, audio) for text, audio in grid.tolist()]


def compare_reply(
    case: Case, run: dict[str, Any], reply: Reply, compare: Comparer, suffix: str = ""
) -> Iterator[Check]:
    """Compare a reply's rows, modes, finish reason and counts; ``suffix`` ends the names."""
    stem = f"{run['prompt']}.{run['run']}"
    found_rows, modes = [list(row) for row in reply.rows], [int(mode) for mode in reply.modes]
    yield compare.ids(f"{stem}.rows{suffix}", found_rows, case.tensor(f"{stem}.rows"))
    yield compare.ids(f"{stem}.modes{suffix}", modes, case.tensor(f"{stem}.modes"))
    switches = sum(a is not b for a, b in zip(reply.modes, reply.modes[1:], strict=False))
    for name, found in (
        ("finish_reason", str(reply.finish_reason)),
        ("steps", len(reply.rows)),
        ("transitions", switches),
    ):
        if name in run:
            yield compare.value(f"{stem}.{name}{suffix}", found, run[name])


def compare_logits(case: Case, stem: str, found: Logits, compare: Comparer) -> Iterator[Check]:
    """Compare raw logits (N, V) of a run's steps."""
    for name, logits in (("text_logits", found.text), ("audio_logits", found.audio)):
        yield compare.tensor(f"{stem}.{name}", logits, case.tensor(f"{stem}.{name}"))


def check_warpers(case: Case, device: torch.device, warped: Warper) -> Iterator[Check]:
    """Compare what is left of logits (R, V) by temperature, top-k and top-p."""
    for index, settings in enumerate(case.settings.get("warpers", [])):
        logits = case.tensor("warpers.logits").to(device)
        probabilities = warped(logits, **settings).softmax(dim=-1)
        name = f"warpers.probs_{index}"
        yield Comparer(torch.float32).tensor(name, probabilities, case.tensor(name))


def _warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """``warp_rows`` with the same settings for every row."""
    like = torch.ones(len(logits), device=logits.device)
    return warp_rows(logits, like * temperature, (like * top_k).long(), like * (1 - top_p))
