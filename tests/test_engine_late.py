"""Steps launched before the rows of the one before are known: the same rows, and no waiting."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

import pytest
import torch
from engine_rig import (
    EOSP,
    GREEDY,
    HOT,
    IDS,
    PAD,
    SILENT,
    SOSP,
    Flapping,
    Forced,
    Task,
    engine_core,
    random_tasks,
    reference,
    require_idle,
    require_same,
    wild_model,
)

from mosstalk.conversation import FinishReason, Mode
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.model_runner import InFlightStep, ModelRunner, Outcome
from mosstalk.engine.request import Request
from mosstalk.engine.scheduler import Work
from mosstalk.errors import PoisonedError
from mosstalk.reply_options import Limits

N = None
SPEECH = ReplyParams(GREEDY, Limits(100, min_new_rows=90))
SHORT = ReplyParams(GREEDY, Limits(30, min_new_rows=25))
SPOKEN = [(3, SILENT), (SOSP, SILENT)]


class Noted(ModelRunner):
    """A runner that notes what it was asked to do, and with how many draws."""

    def note(self) -> list[str]:
        self.noted: list[str] = []
        return self.noted

    def launch(self, works: list[Work], fresh: Several[Request] = ()) -> InFlightStep:
        self.noted.append(f"launch {sum(work.draws for work in works)}")
        return super().launch(works, fresh)

    def collect(self, flight: InFlightStep) -> list[Outcome]:
        self.noted.append("collect")
        return super().collect(flight)


def noted(core: EngineCore) -> list[str]:
    """What the engine's runner is asked to do from now on."""
    core.runner.__class__ = Noted
    assert isinstance(core.runner, Noted)
    return core.runner.note()


def speaking(core: EngineCore, steps: int = 4, ask: ReplyParams = SPEECH) -> Request:
    request = core.submit(core.open(SPOKEN), ask)
    for _ in range(steps):
        core.step()
    assert len(request.reply.rows) == steps
    return request


def require_beginning(request: Request, prompt: list[tuple[int, int]], params: ReplyParams) -> None:
    """Check that a reply that was cut short began as the reference's."""
    expected = reference(wild_model(), Task(prompt, params)).rows
    assert request.reply.rows == expected[: len(request.reply.rows)]


def test_the_next_step_is_on_the_device_before_the_rows_of_this_one_are_known() -> None:
    core = engine_core(wild_model())
    calls = noted(core)
    request = speaking(core)
    assert calls == ["launch 1", *["launch 1", "collect"] * 4]
    assert request.sequence.pending == 1


@pytest.mark.parametrize("switch", [{"late": False}, {"deferral": False}])
def test_the_switch_turns_it_off_and_so_does_reading_everything(switch: dict[str, bool]) -> None:
    core = engine_core(wild_model(), **switch)  # type: ignore[arg-type]
    calls = noted(core)
    speaking(core)
    assert calls == ["launch 1", "collect"] * 4


def test_on_a_cpu_where_nothing_is_won_steps_are_not_late_unless_asked() -> None:
    core = EngineCore(wild_model(), IDS, EngineOptions())
    calls = noted(core)
    speaking(core, 2)
    assert calls == ["launch 1", "collect"] * 2


def test_a_reply_that_must_end_is_not_launched_again() -> None:
    core = engine_core(wild_model())
    calls = noted(core)
    params = ReplyParams(GREEDY, Limits(3, min_new_rows=9))
    request = core.submit(core.open(SPOKEN), params)
    core.run()
    assert calls == ["launch 1", "launch 1", "collect", "launch 1", "collect", "collect"]
    require_same(request, reference(wild_model(), Task(SPOKEN, params)))


def test_a_mode_switch_costs_one_step_of_its_own_reply_and_none_of_another() -> None:
    core = engine_core(wild_model())
    other = speaking(core, 1)
    params = ReplyParams(GREEDY, Limits(100), Flapping(steps=12))
    flapping = core.submit(core.open(SPOKEN), params)
    steps = 0
    while not flapping.reply.finish_reason:
        core.step()
        steps += 1
        assert len(other.reply.rows) == 1 + steps
    require_same(flapping, reference(wild_model(), Task(SPOKEN, params)))
    switches = len(flapping.reply.rows) - 1
    # One step was on the device when it was asked, and each switch had one draw for nothing.
    assert steps == 1 + len(flapping.reply.rows) + switches


ROWS = {
    "closed in the row that opened it": ((3, N), (SOSP, EOSP), (4, N), (5, N), (SOSP, 3), (N, 4)),
    "modality_pad in text": ((3, N), (PAD, N), (4, N), (PAD, N), (PAD, N), (5, N), (SOSP, N)),
    "opened and closed again and again": ((SOSP, 2), (N, EOSP), (SOSP, EOSP), (SOSP, 3), (N, EOSP)),
}


@pytest.mark.parametrize("whole_rows", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_a_late_step_cannot_follow_are_read_and_drawn_again(
    name: str, whole_rows: bool
) -> None:
    prompt = [(PAD, 3), (PAD, EOSP), (7, SILENT)]  # its last codes are not those of later rows
    for options in (GREEDY, replace(HOT, seed=4)):
        limits = Limits(len(ROWS[name]) + 15, min_new_rows=5)
        params = ReplyParams(options, limits, Forced(rows=ROWS[name]), whole_rows=whole_rows)
        core = engine_core(wild_model(), block_rows=2)
        request, other = core.submit(core.open(prompt), params), speaking(core, 1, SHORT)
        core.run()
        require_same(request, reference(wild_model(), Task(prompt, params)))
        require_same(other, reference(wild_model(), Task(SPOKEN, SHORT)))
        for each in (request, other):
            core.close(each.sequence)
        require_idle(core)


def cancelled(core: EngineCore, request: Request) -> None:
    core.cancel(request)


def closed(core: EngineCore, request: Request) -> None:
    core.close(request.sequence)


def truncated(core: EngineCore, request: Request) -> None:
    core.cancel(request)
    request.sequence.truncate(3)


@pytest.mark.parametrize("cut", [cancelled, closed, truncated])
@pytest.mark.parametrize("asked", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_who_comes_after_a_reply_that_was_cut_in_flight_has_its_slot_and_blocks_to_itself(
    cut: Callable[[EngineCore, Request], None], asked: object
) -> None:
    core = engine_core(wild_model(), slots=1, blocks=20, block_rows=8)
    first = speaking(core)
    calls = noted(core)
    cut(core, first)
    assert first.reply.finish_reason is FinishReason.CANCELLED
    assert first.sequence.pending == 0
    require_beginning(first, SPOKEN, SPEECH)
    options = GREEDY if asked is GREEDY else HOT
    task = Task(
        [(n % 20, SILENT) for n in range(30)] + SPOKEN, ReplyParams(options, Limits(60, 70))
    )
    second = core.submit(core.open(task.rows), task.params)
    core.step()
    assert len(second.reply.rows) == 1
    core.run()
    assert calls[0] == "launch 1"  # nobody waits for what was on the device
    require_same(second, reference(wild_model(), task))
    for request in (first, second):
        core.close(request.sequence)
    require_idle(core)


def test_a_conversation_cut_in_flight_goes_on_as_if_it_had_not_been() -> None:
    core = engine_core(wild_model(), block_rows=4)
    sequence = core.open(SPOKEN)
    for turn in range(4):
        prompt = list(sequence.rows)
        request = core.submit(sequence, SPEECH)
        for _ in range(3 + turn):
            core.step()
        core.cancel(request)
        assert sequence.unread == 1
        require_beginning(request, prompt, SPEECH)
        sequence.rows += [(PAD, EOSP), (5, SILENT), (SOSP, SILENT)]
    core.close(sequence)
    require_idle(core)


def test_a_reply_that_turns_bad_in_flight_ends_alone() -> None:
    model = wild_model()
    sick = 24
    with torch.no_grad():
        model.model.embed_tokens.weight[sick] = float("nan")
        model.text_lm_head.weight[sick] = 0
    prompt = [(1, SILENT), (7, SILENT)]
    params = ReplyParams(GREEDY, Limits(30), Forced(rows=((3, N), (4, N), (sick, N), (5, N))))
    core = engine_core(model, block_rows=2)
    bad, others = core.submit(core.open(prompt), params), random_tasks(3, 3)
    others = [replace(t, rows=[r for r in t.rows if r[0] != sick]) for t in others]
    good = [core.submit(core.open(task.rows), task.params) for task in others]
    core.run()
    assert isinstance(bad.error, PoisonedError)
    assert [text for text, _ in bad.reply.rows] == [3, 4, sick]
    assert bad.sequence.table == []
    assert core.open([*prompt, *bad.reply.rows, (7, SILENT)]).match_prefix() == 0
    for request, task in zip(good, others, strict=True):
        require_same(request, reference(model, task))


def test_no_row_is_shared_before_it_is_known() -> None:
    core = engine_core(wild_model(), block_rows=1)
    request = speaking(core)
    known = [*SPOKEN, *request.reply.rows]
    newcomer = core.open([*known, (7, SILENT), (8, SILENT)])
    assert newcomer.match_prefix() == 0  # the text block has not read them
    core.cancel(request)
    while core.has_work:
        core.step()
    assert newcomer.match_prefix() == len(known) - 1


def test_replies_put_back_in_line_from_flight_are_the_same() -> None:
    core = engine_core(wild_model(), blocks=21, block_rows=8, slots=2)
    tasks = [
        Task([(n % 20, SILENT) for n in range(40)] + [(7 + due, SILENT)], params)
        for due, params in enumerate(
            ReplyParams(
                GREEDY, Limits(110, 200), Forced(rows=((3, N),) * 20 + ((SOSP, N),)), float(due)
            )
            for due in range(2)
        )
    ]
    requests = [core.submit(core.open(task.rows), task.params) for task in tasks]
    core.run()
    assert sum(request.preemptions for request in requests) > 0
    for request, task in zip(requests, tasks, strict=True):
        require_same(request, reference(wild_model(), task))


@pytest.mark.gpu
def test_nothing_waits_for_the_device_between_a_launch_and_its_collection() -> None:
    class Strict(ModelRunner):
        """Whatever would wait for the device in a launch raises."""

        def begin(self, request: Request) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().begin(request)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        def launch(self, works: list[Work], fresh: Several[Request] = ()) -> InFlightStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return super().launch(works, fresh)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    core = engine_core(wild_model("cuda"))
    core.options = replace(core.options, poison=False)
    core.runner.__class__ = Strict
    tasks = random_tasks(seed=43, count=12)
    requests = [core.submit(core.open(task.rows), task.params) for task in tasks]
    core.run()
    assert {mode for request in requests for mode in request.reply.modes} == set(Mode)
    for request, task in zip(requests, tasks, strict=True):
        require_same(request, reference(wild_model(), task))
