"""Language-model cases: prompts, greedy runs and warpers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosstalk.conversation import Mode, Reply, Row, SpecialIds
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.engine.sampler import warp_rows
from mosstalk.engine.sequence import Sequence
from mosstalk.engine.step_plan import QuerySpan
from mosstalk.errors import CaseError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.generation import Generation
from mosstalk.models.language_model import LanguageModel, Logits
from mosstalk.models.sampling import warp
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.verify.compare import Case, Check, Comparer

Warper = Callable[..., Tensor]
"""``warp`` of ``model.sampling``, or what does the same."""
_NO_ID = -1
PREFILL = ("trunk_hidden", "prefill_text_logits", "prefill_audio_logits")


def check_language_model(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Run every prompt and greedy run of a case through the reference network.

    States and logits are compared where the case has them, of as many steps as it has.
    """
    model = load_language_model(case.weights, device=device, dtype=compare.dtype)
    ids = special_ids(model, case.get("stop_token_ids"))
    runs: list[dict[str, Any]] = case.get("runs")
    for prompt in dict.fromkeys(run["prompt"] for run in runs):
        yield from _check_prompt(case, model, prompt, compare)
    for run in runs:
        yield from _check_run(case, model, ids, run, compare)
    yield from check_warpers(case, device, warp)


def special_ids(model: LanguageModel, stop: list[int]) -> SpecialIds:
    """The special ids that a case's model and settings name; cases need no others."""
    config = model.config
    return SpecialIds(
        endoftext=_NO_ID,
        im_start=_NO_ID,
        im_end=_NO_ID,
        sosp=config.sosp_token_id,
        modality_pad=config.modality_pad_token_id,
        eosp=config.eosp_token_id,
        audio_pad=config.audio_pad_token_id,
        stop=frozenset(stop),
    )


def _check_prompt(
    case: Case, model: LanguageModel, prompt: str, compare: Comparer
) -> Iterator[Check]:
    if not any(case.wants(f"{prompt}.{name}") for name in PREFILL):
        return
    rows = case.tensor(f"{prompt}.prompt").to(model.device)[None]
    with torch.inference_mode():
        hidden, *_ = model.trunk(rows, model.new_cache())
        logits = model(rows, model.new_cache())
    for name, found in zip(PREFILL, (hidden, logits.text, logits.audio), strict=True):
        if case.wants(f"{prompt}.{name}"):
            yield compare.tensor(f"{prompt}.{name}", found[0], case.tensor(f"{prompt}.{name}"))


def _check_run(
    case: Case, model: LanguageModel, ids: SpecialIds, run: dict[str, Any], compare: Comparer
) -> Iterator[Check]:
    asked = Asked.of(case, run)
    generation = Generation(model, model.new_cache(), asked.rows, ids, asked.options, asked.limits)
    for _ in generation:
        pass
    yield from compare_reply(case, run, generation.reply, compare)
    if case.has(f"{asked.stem}.text_logits"):
        rows = case.tensor(f"{asked.stem}.rows")[: len(case.tensor(f"{asked.stem}.text_logits"))]
        found = _follow(model, case.tensor(f"{run['prompt']}.prompt"), rows)
        yield from compare_logits(case, asked.stem, found, compare)


@dataclass(frozen=True)
class Asked:
    """What a run of a case asks for: ``stem`` begins the names of its tensors."""

    stem: str
    rows: list[Row]
    options: SamplingOptions
    limits: Limits

    @classmethod
    def of(cls, case: Case, run: dict[str, Any]) -> "Asked":
        """Read a run's prompt and settings."""
        prompt = case.tensor(f"{run['prompt']}.prompt").tolist()
        return cls(
            f"{run['prompt']}.{run['run']}",
            [(text, audio) for text, audio in prompt],
            SamplingOptions(temperature=0, repetition_penalty=run["repetition_penalty"]),
            Limits(run["max_new_tokens"], run["min_new_tokens"]),
        )


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


def _follow(model: LanguageModel, prompt: Tensor, rows: Tensor) -> Logits:
    """Raw logits (N, V) of each step, decoded one row at a time along the expected rows."""
    cache, found = model.new_cache(), []
    steps = [prompt, *rows[:-1].split(1)]
    with torch.inference_mode():
        for new in steps:
            found.append(model(new.to(model.device)[None], cache, last_only=True))
    return Logits(torch.cat([s.text[0] for s in found]), torch.cat([s.audio[0] for s in found]))


assert [int(mode) for mode in Mode] == [0, 1], "cases count text as mode 0 and audio as 1"

_BLOCK_ROWS = 16


def check_language_model_fast(
    case: Case, device: torch.device, compare: Comparer
) -> Iterator[Check]:
    """Compare what ``check_language_model`` does, computed by the engine.

    Whole rows are asked for, so that audio ids of text rows are compared too; they are put
    off and made up. In the mixed batch one run arrives at each step.
    """
    model = load_language_model(case.weights, device=device, dtype=compare.dtype)
    runs: list[dict[str, Any]] = case.get("runs")
    asked = [Asked.of(case, run) for run in runs]
    room = sum(len(each.rows) + each.limits.max_new_rows for each in asked)
    options = EngineOptions(blocks=room // _BLOCK_ROWS + len(runs) + 1, block_rows=_BLOCK_ROWS)
    core = EngineCore(model, special_ids(model, case.get("stop_token_ids")), options)
    for prompt in dict.fromkeys(run["prompt"] for run in runs):
        yield from _check_prompt_fast(case, core, prompt, compare)
    for run, each in zip(runs, asked, strict=True):
        yield from compare_reply(case, run, _played(core, [each])[0].reply, compare)
        yield from _check_logits(case, core, each, compare)
    for run, request in zip(runs, _played(core, asked), strict=True):
        yield from compare_reply(case, run, request.reply, compare, suffix=" mixed")
    yield from check_warpers(case, device, _warp)


def _played(core: EngineCore, asked: list[Asked]) -> list[Request]:
    """Replies to what was asked, one arriving at each step."""
    requests = []
    for each in asked:
        ask = ReplyParams(each.options, each.limits, whole_rows=True)
        requests.append(core.submit(core.open(each.rows), ask))
        core.step()
    core.run()
    for request in requests:
        core.close(request.sequence)
        if request.error:
            raise CaseError(str(request.error))
    return requests


def _opened(core: EngineCore, rows: list[Row], more: int = 0) -> Sequence:
    sequence = core.open(rows)
    assert sequence.make_room(len(rows) + more), "the pool was made for every run at once"
    return sequence


def _check_prompt_fast(
    case: Case, core: EngineCore, prompt: str, compare: Comparer
) -> Iterator[Check]:
    names = [f"{prompt}.{name}" for name in PREFILL]
    if not any(map(case.wants, names)):
        return
    rows = [(text, audio) for text, audio in case.tensor(f"{prompt}.prompt").tolist()]
    sequence = _opened(core, rows)
    logits = core.runner.logits(sequence)
    hidden = core.runner.store.hidden[QuerySpan(sequence, 0, len(rows)).places()]
    core.close(sequence)
    for name, found in zip(names, (hidden, logits.text, logits.audio), strict=True):
        if case.wants(name):
            yield compare.tensor(name, found, case.tensor(name))


def _check_logits(case: Case, core: EngineCore, asked: Asked, compare: Comparer) -> Iterator[Check]:
    """Logits of each step, decoded one row at a time along the expected rows."""
    if not case.has(f"{asked.stem}.text_logits"):
        return
    steps = len(case.tensor(f"{asked.stem}.text_logits"))
    rows = [(text, audio) for text, audio in case.tensor(f"{asked.stem}.rows").tolist()][:steps]
    sequence = _opened(core, asked.rows, len(rows))
    found = [core.runner.logits(sequence)]
    for row in rows[:-1]:
        sequence.rows.append(row)
        found.append(core.runner.logits(sequence))
    core.close(sequence)
    text, audio = (torch.cat([step[head][-1:] for step in found]) for head in (0, 1))
    yield from compare_logits(case, asked.stem, Logits(text, audio), compare)


def _warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """``warp_rows`` with the same settings for every row."""
    like = torch.ones(len(logits), device=logits.device)
    return warp_rows(logits, like * temperature, (like * top_k).long(), like * (1 - top_p))
