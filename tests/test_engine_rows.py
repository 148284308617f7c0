"""Rows from the engine equal the reference's: alone, mixed, at every size, with every switch."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import GOLDENS
from engine_rig import (
    GREEDY,
    HOT,
    IDS,
    Flapping,
    Task,
    alone,
    engine_core,
    on_every_device,
    play,
    random_rows,
    random_tasks,
    reference,
    require_idle,
    require_same,
    whole,
    wild_model,
)

from mosstalk.conversation import FinishReason, Mode, Reply, SpecialIds
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.models.checkpoint import load_language_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.reply_options import Limits, SamplingOptions
from mosstalk.runtime.device import pick_device
from mosstalk.verify.compare import Case, read_case
from mosstalk.verify.language_model import case_ids

CASES = sorted(path.parent for path in GOLDENS.glob("lm-*/case.json"))
SWITCHES = {
    "all": (True, True, True),
    "not late": (True, True, False),
    "not shared": (True, False, True),
    "not deferred": (False, True, False),
    "none": (False, False, False),
}
switches = pytest.mark.parametrize(
    ("deferral", "share", "late"), SWITCHES.values(), ids=SWITCHES.keys()
)
# Slow: one switch at a time with every size and a switch of mode at every step;
# ``test_prompts_kept_aside_mixed_in_one_batch`` has each.
all_or_none = pytest.mark.parametrize(
    ("deferral", "share", "late"),
    [
        pytest.param(*on, id=name, marks=[] if name in ("all", "none") else pytest.mark.slow)
        for name, on in SWITCHES.items()
    ],
)


def golden(folder: Path, device: str) -> tuple[Case, LanguageModel, SpecialIds]:
    case = read_case(folder)
    model = load_language_model(case.weights, device=pick_device(device), dtype=torch.float32)
    return case, model, case_ids(case, model)


def golden_task(case: Case, run: dict[str, Any]) -> Task:
    rows = [(text, audio) for text, audio in case.tensor(f"{run['prompt']}.prompt").tolist()]
    options = SamplingOptions(temperature=0, repetition_penalty=run["repetition_penalty"])
    limits = Limits(run["max_new_tokens"], run["min_new_tokens"])
    return Task(rows, ReplyParams(options, limits, whole_rows=True))


def golden_reply(case: Case, run: dict[str, Any]) -> Reply:
    stem = f"{run['prompt']}.{run['run']}"
    rows = [(text, audio) for text, audio in case.tensor(f"{stem}.rows").tolist()]
    modes = [Mode(mode) for mode in case.tensor(f"{stem}.modes").tolist()]
    return Reply(rows, modes, FinishReason(run["finish_reason"]))


@on_every_device
@pytest.mark.parametrize(
    ("deferral", "share", "late"),
    [
        # Slow: with all switches on, ``test_engine_verify`` has the goldens alone and mixed.
        pytest.param(*on, id=name, marks=[] if name == "none" else pytest.mark.slow)
        for name, on in SWITCHES.items()
    ],
)
@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.name)
def test_golden_rows_alone_and_all_mixed(
    folder: Path, device: str, deferral: bool, share: bool, late: bool
) -> None:
    case, model, ids = golden(folder, device)
    runs = case.get("runs")
    tasks = [golden_task(case, run) for run in runs]
    core = engine_core(model, ids=ids, deferral=deferral, share=share, late=late, step_rows=40)
    found = [alone(core, task) for task in tasks] + play(core, tasks, seed=1)
    for request, run in zip(found, runs * 2, strict=True):
        require_same(request, golden_reply(case, run), ids)
    require_idle(core)


@on_every_device
@switches
def test_prompts_kept_aside_mixed_in_one_batch(
    device: str, deferral: bool, share: bool, late: bool
) -> None:
    truth, tasks = wild_model(), random_tasks(seed=7, count=24)
    core = engine_core(wild_model(device), deferral=deferral, share=share, late=late)
    for request, task in zip(play(core, tasks, seed=2), tasks, strict=True):
        require_same(request, reference(truth, task))
    require_idle(core)


@all_or_none
@pytest.mark.parametrize(
    ("block_rows", "step_rows"),
    [
        *((1, 7), (3, 1), (16, 7)),
        # Slow: each size with each other.
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (3, 7), (16, 1))),
    ],
)
def test_any_size_of_block_and_step(
    block_rows: int, step_rows: int, deferral: bool, share: bool, late: bool
) -> None:
    model, tasks = wild_model(seed=1), random_tasks(seed=block_rows, count=7)
    core = engine_core(
        model,
        block_rows=block_rows,
        step_rows=step_rows,
        blocks=1600 // block_rows,
        deferral=deferral,
        share=share,
        late=late,
    )
    for request, task in zip(play(core, tasks, seed=3), tasks, strict=True):
        require_same(request, reference(model, task))
    require_idle(core)


@on_every_device
@all_or_none
def test_a_mode_switch_at_every_step_of_a_batch(
    device: str, deferral: bool, share: bool, late: bool
) -> None:
    truth, random = wild_model(), Random(0)
    asks = [
        ReplyParams(options, Limits(100), Flapping(steps=steps), whole_rows=steps % 2 == 0)
        for options in (GREEDY, HOT)
        for steps in range(15, 21)
    ]
    tasks = [Task(random_rows(random, random.randint(1, 30)), params) for params in asks]
    core = engine_core(wild_model(device), deferral=deferral, share=share, late=late)
    for request, task in zip(play(core, tasks), tasks, strict=True):
        expected = reference(truth, task)
        switching = [a is not b for a, b in zip(expected.modes, expected.modes[1:], strict=False)]
        assert switching.count(False) <= 1
        require_same(request, expected)


@on_every_device
def test_deferral_changes_no_row_not_even_audio_ids_of_text_rows(device: str) -> None:
    model = wild_model(device)
    tasks = [whole(task) for task in random_tasks(seed=11, count=16)]
    with_it, without = (
        play(engine_core(model, deferral=deferral), tasks) for deferral in (True, False)
    )
    assert any(r.reply.modes.count(Mode.TEXT) > 5 for r in without)
    for one, other in zip(with_it, without, strict=True):
        assert one.reply == other.reply


def test_a_context_that_ends_gives_the_references_length() -> None:
    model = wild_model()
    limit = model.config.max_position_embeddings
    tasks = [
        Task(random_rows(Random(n), limit - n), ReplyParams(HOT, Limits(50, 60)))
        for n in range(1, 5)
    ]
    found = play(engine_core(model), tasks)
    for request, task in zip(found, tasks, strict=True):
        require_same(request, reference(model, task))
        assert len(request.reply.rows) <= limit - len(task.rows)


@pytest.mark.parametrize("late", [True, False])
def test_long_prompts_are_read_in_chunks_while_others_go_on_speaking(late: bool) -> None:
    core = engine_core(wild_model(), step_rows=8, late=late)
    speaking = core.submit(core.open([(SOSP, SILENT)]), speech_ask(60))
    core.step()
    long = core.submit(core.open(random_rows(Random(1), 90)), speech_ask(2))
    steps = 0
    while not long.reply.rows:
        before = len(speaking.reply.rows)
        core.step()
        steps += 1
        assert len(speaking.reply.rows) == before + 1
    assert steps == -(-90 // 7) + late  # one step was on the device when it was asked


def speech_ask(codes: int) -> ReplyParams:
    return ReplyParams(GREEDY, Limits(100, min_new_rows=codes))


SOSP, SILENT = IDS.sosp, IDS.audio_pad
