"""Language-model cases through the engine: every run alone, and all mixed in one batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.engine.sampler import warp_rows
from mosstalk.engine.sequence import Sequence
from mosstalk.engine.step_plan import QuerySpan
from mosstalk.errors import CaseError
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import Logits
from mosstalk.verify.case import Case
from mosstalk.verify.compare import Check, Comparer
from mosstalk.verify.language_model import (
    PREFILL,
    Asked,
    check_warpers,
    compare_logits,
    compare_reply,
    special_ids,
)

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
        yield from _check_prompt(case, core, prompt, compare)
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


def _check_prompt(case: Case, core: EngineCore, prompt: str, compare: Comparer) -> Iterator[Check]:
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
