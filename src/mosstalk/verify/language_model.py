"""Language-model cases: prompts, greedy runs and warpers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mosstalk.conversation import Mode, SpecialIds
from mosstalk.model.checkpoint import load_language_model
from mosstalk.model.generate import Generation, Limits
from mosstalk.model.network import LanguageModel
from mosstalk.model.sampling import SamplingOptions, warp
from mosstalk.verify.case import Case
from mosstalk.verify.compare import Check, Comparer

_NO_ID = -1
_PREFILL = ("trunk_hidden", "prefill_text_logits", "prefill_audio_logits")


def check_language_model(case: Case, device: torch.device, compare: Comparer) -> Iterator[Check]:
    """Run every prompt and greedy run of a case through the reference network.

    States and logits are compared where the case has them, of as many steps as it has.
    """
    model = load_language_model(case.weights, device=device, dtype=compare.dtype)
    ids = _special_ids(model, case.get("stop_token_ids"))
    runs: list[dict[str, Any]] = case.get("runs")
    for prompt in dict.fromkeys(run["prompt"] for run in runs):
        yield from _check_prompt(case, model, prompt, compare)
    for run in runs:
        yield from _check_run(case, model, ids, run, compare)
    for index, settings in enumerate(case.settings.get("warpers", [])):
        logits = case.tensor("warpers.logits").to(device)
        probabilities = warp(logits, **settings).softmax(dim=-1)
        name = f"warpers.probs_{index}"
        yield Comparer(torch.float32).tensor(name, probabilities, case.tensor(name))


def _special_ids(model: LanguageModel, stop: list[int]) -> SpecialIds:
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
    if not any(case.wants(f"{prompt}.{name}") for name in _PREFILL):
        return
    rows = case.tensor(f"{prompt}.prompt").to(model.device)[None]
    with torch.inference_mode():
        hidden, *_ = model.trunk(rows, model.new_cache())
        logits = model(rows, model.new_cache())
    for name, found in zip(_PREFILL, (hidden, logits.text, logits.audio), strict=True):
        if case.wants(f"{prompt}.{name}"):
            yield compare.tensor(f"{prompt}.{name}", found[0], case.tensor(f"{prompt}.{name}"))


def _check_run(
    case: Case, model: LanguageModel, ids: SpecialIds, run: dict[str, Any], compare: Comparer
) -> Iterator[Check]:
    stem = f"{run['prompt']}.{run['run']}"
    prompt, rows = case.tensor(f"{run['prompt']}.prompt"), case.tensor(f"{stem}.rows")
    options = SamplingOptions(temperature=0, repetition_penalty=run["repetition_penalty"])
    limits = Limits(run["max_new_tokens"], run["min_new_tokens"])
    grid = [(text, audio) for text, audio in prompt.tolist()]
    generation = Generation(model, model.new_cache(), grid, ids, options, limits)
    steps = list(generation)
    reply = generation.reply
    yield compare.ids(f"{stem}.rows", [list(row) for row in reply.rows], rows)
    yield compare.ids(f"{stem}.modes", [int(m) for m in reply.modes], case.tensor(f"{stem}.modes"))
    switches = sum(a is not b for a, b in zip(reply.modes, reply.modes[1:], strict=False))
    for name, found in (
        ("finish_reason", str(reply.finish_reason)),
        ("steps", len(steps)),
        ("transitions", switches),
    ):
        if name in run:
            yield compare.value(f"{stem}.{name}", found, run[name])
    if case.has(f"{stem}.text_logits"):
        text, audio = _follow(model, prompt, rows[: len(case.tensor(f"{stem}.text_logits"))])
        for head, found_logits in (("text_logits", text), ("audio_logits", audio)):
            yield compare.tensor(f"{stem}.{head}", found_logits, case.tensor(f"{stem}.{head}"))


def _follow(model: LanguageModel, prompt: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Raw logits (N, V) of each step, decoded one row at a time along the expected rows."""
    cache, found = model.new_cache(), []
    steps = [prompt, *rows[:-1].split(1)]
    with torch.inference_mode():
        for new in steps:
            found.append(model(new.to(model.device)[None], cache, last_only=True))
    return torch.cat([s.text[0] for s in found]), torch.cat([s.audio[0] for s in found])


assert [int(mode) for mode in Mode] == [0, 1], "cases count text as mode 0 and audio as 1"
