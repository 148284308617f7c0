"""Who else is in the batch changes nothing: not 63 others, not a poisoned one."""

from dataclasses import replace
from random import Random

import pytest
import torch
from engine_rig import (
    HOT,
    IDS,
    PAD,
    SILENT,
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
    wild_model,
)

from mosstalk.conversation import FinishReason, Row
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.errors import OptionError, PoisonedError
from mosstalk.models.language_model import LanguageModel
from mosstalk.reply_options import Limits

SICK = 24
"""The text id whose embedding is NaN in a sick model."""


def sampled_task(seed: int) -> Task:
    rows = [row for row in random_rows(Random(seed), 30) if row[0] != SICK]
    return Task(rows, ReplyParams(replace(HOT, seed=seed), Limits(40), whole_rows=True))


def sick_model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Reading id 24 gives NaN; nothing draws it but a task that begins with it."""
    model = wild_model(device, dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[SICK] = float("nan")
        # Drawing it must not happen by itself: its logit would have to be the largest.
        model.text_lm_head.weight[SICK] = 0
    return model


def clean(task: Task) -> Task:
    rows = [(1, SILENT) if row[0] == SICK else row for row in task.rows]
    return replace(task, rows=rows)


@on_every_device
@pytest.mark.parametrize("deferral", [True, False])
def test_a_sampled_conversation_is_the_same_alone_and_among_63(device: str, deferral: bool) -> None:
    model, one = wild_model(device), sampled_task(5)
    expected = reference(wild_model(), one)
    assert len(expected.rows) > 8
    by_itself = alone(engine_core(model, deferral=deferral), one)
    core = engine_core(model, slots=64, step_rows=128, deferral=deferral)
    among = play(core, [*random_tasks(13, 30), one, *random_tasks(17, 33)])
    assert len(among) == 64
    require_same(by_itself, expected)
    require_same(among[30], expected)
    require_idle(core)


def poisoned_at(row: int) -> Task:
    rows = [(2, SILENT)] * 20 + [(PAD, 3)] * 10 + [(7, SILENT)]
    rows[row] = (SICK, SILENT)
    return Task(rows, ReplyParams(replace(HOT, seed=1), Limits(40)))


@on_every_device
@pytest.mark.parametrize("deferral", [True, False])
@pytest.mark.parametrize("step_rows", [8, 64])
def test_beside_a_poisoned_one_the_others_rows_are_identical(
    device: str, deferral: bool, step_rows: int
) -> None:
    model, truth = sick_model(device), sick_model()
    others = [clean(task) for task in (*random_tasks(19, 6), sampled_task(5))]
    tasks = [poisoned_at(3), *others[:3], poisoned_at(30), *others[3:], poisoned_at(17)]
    core = engine_core(model, deferral=deferral, step_rows=step_rows)
    found = play(core, tasks)
    for request, task in zip(found, tasks, strict=True):
        if any(text == SICK for text, _ in task.rows):
            assert isinstance(request.error, PoisonedError)
            assert f"request {request.number}:" in str(request.error)
            assert request.reply.rows == []
            assert request.reply.finish_reason is FinishReason.CANCELLED
            continue
        require_same(request, reference(truth, task))
    require_idle(core)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_invariant_rows_in_16_bit_are_identical_in_any_company(dtype: torch.dtype) -> None:
    model, one = sick_model("cuda", dtype), clean(sampled_task(5))
    by_itself = alone(engine_core(model, invariant=True), one)
    core = engine_core(model, slots=64, step_rows=48, invariant=True)
    others = [clean(task) for task in random_tasks(13, 62)]
    found = play(core, [*others[:31], poisoned_at(3), one, *others[31:]])
    assert len(found) == 64
    assert isinstance(found[31].error, PoisonedError)
    assert found[32].error is None
    assert len(found[32].reply.rows) > 8
    assert found[32].reply.rows == by_itself.reply.rows
    require_idle(core)


def test_batch_invariance_where_no_kernels_run_is_refused_in_16_bit() -> None:
    with pytest.raises(OptionError, match=r"--batch-invariant in torch.bfloat16 needs .* kernels"):
        engine_core(wild_model(dtype=torch.bfloat16), invariant=True)
    assert engine_core(wild_model(), invariant=True).batch_invariant


def findable(core: EngineCore, rows: list[Row]) -> int:
    """Rows that a newcomer with these rows and one more would find read."""
    newcomer = core.open([*rows, (7, SILENT)])
    found = newcomer.match_prefix()
    core.close(newcomer)
    return found


@pytest.mark.parametrize("deferral", [True, False])
@pytest.mark.parametrize("step_rows", [8, 64])
def test_blocks_of_a_poisoned_one_are_never_found(deferral: bool, step_rows: int) -> None:
    core, task = engine_core(sick_model(), deferral=deferral, step_rows=step_rows), poisoned_at(9)
    request = core.submit(core.open(task.rows), task.params)
    while core.busy:
        assert findable(core, task.rows) == 0
        core.step()
    assert isinstance(request.error, PoisonedError)
    assert findable(core, task.rows) == 0
    assert core.pool.in_use == 0


def test_what_a_poisoned_one_shares_stays_with_the_others() -> None:
    core, bad = engine_core(sick_model(), deferral=False), poisoned_at(20)
    good = Task([*bad.rows[:20], (7, SILENT)], ReplyParams(HOT, Limits(30, min_new_rows=31)))
    healthy = core.submit(core.open(good.rows), good.params)
    core.step()
    assert findable(core, bad.rows) == 16
    poisoned = core.submit(core.open(bad.rows), bad.params)
    core.run()
    assert isinstance(poisoned.error, PoisonedError)
    require_same(healthy, reference(sick_model(), good))
    assert findable(core, bad.rows) == 16


def test_a_model_that_breaks_while_replies_run_ends_them_all_by_name() -> None:
    model = wild_model()
    core = engine_core(model)
    requests = [
        core.submit(core.open(task.rows), replace(task.params, limits=Limits(90, 95), script=None))
        for task in random_tasks(23, 5)
    ]
    core.step()
    running = [request for request in requests if request.error is None and not request.ended]
    assert running
    with torch.no_grad():
        model.text_lm_head.weight.fill_(float("nan"))
        model.audio_lm_head.weight.fill_(float("nan"))
    core.run()
    assert [f"request {r.number}:" in str(r.error) for r in running] == [True] * len(running)
    assert not any(text in IDS.stop for r in running for text, _ in r.reply.rows)
    assert core.pool.in_use == 0
