"""Put-off draws: made up in order, at once where they matter, and whole when asked for."""

from dataclasses import replace
from random import Random

import pytest
from engine_rig import (
    EOSP,
    GREEDY,
    HOT,
    IDS,
    PAD,
    SILENT,
    SOSP,
    Forced,
    Task,
    alone,
    engine_core,
    play,
    random_rows,
    reference,
    require_same,
    whole,
    wild_model,
)

from mosstalk.conversation import FinishReason, Mode
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.engine.request import Request
from mosstalk.reply_options import Limits

TEXT_PROMPT = [*random_rows(Random(3), 12), (7, SILENT)]
N = None

FORCED = {
    "opened and closed in one row": ((3, N), (SOSP, EOSP), (4, N), (SOSP, 3), (N, EOSP), (5, N)),
    "opened and closed at once": ((SOSP, EOSP), (SOSP, EOSP), (SOSP, 2), (N, 3), (N, EOSP)),
    "modality_pad drawn in text mode": ((3, N), (4, N), (PAD, N), (5, N), (PAD, N), (SOSP, N)),
    "modality_pad first": ((PAD, N), (PAD, EOSP), (3, N), (SOSP, 4), (N, EOSP)),
    "a long text, then speech": (*((n, N) for n in range(20)), (SOSP, 3), (N, N), (N, EOSP)),
}


def task(rows: tuple[tuple[int | None, int | None], ...], *, greedy: bool) -> Task:
    options = GREEDY if greedy else replace(HOT, seed=9)
    return Task(TEXT_PROMPT, ReplyParams(options, Limits(len(rows) + 12), Forced(rows=rows)))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FORCED)
def test_rows_that_depend_on_a_put_off_draw(name: str, greedy: bool) -> None:
    model, asked = wild_model(), task(FORCED[name], greedy=greedy)
    expected = reference(model, asked)
    for each in (asked, whole(asked)):
        for deferral in (True, False):
            require_same(alone(engine_core(model, deferral=deferral), each), expected)
    forced = [row for row, _ in zip(expected.rows, FORCED[name], strict=False)]
    for row, (text, audio) in zip(forced, FORCED[name], strict=True):
        assert text in (None, row[0])
        assert audio in (None, row[1])


def test_every_kind_of_row_in_one_batch_equals_each_alone() -> None:
    model = wild_model()
    tasks = [
        whole(task(rows, greedy=greedy)) for rows in FORCED.values() for greedy in (True, False)
    ]
    core = engine_core(model, step_rows=9)
    for request, each in zip(play(core, tasks), tasks, strict=True):
        require_same(request, reference(model, each))


def test_a_reply_in_text_leaves_its_audio_draws_and_the_audio_block_alone() -> None:
    core = engine_core(wild_model(), share=False, late=False)
    sequence = core.open(TEXT_PROMPT)
    request = core.submit(sequence, task(((3, N), (4, N), (5, N)), greedy=True).params)
    for _ in range(3):
        core.step()
    assert request.reply.rows == [(3, SILENT), (4, SILENT), (5, SILENT)]
    assert [due.step for due in request.deferred_draws] == [1, 2, 3]
    assert sequence.read == [len(TEXT_PROMPT) + 2, len(TEXT_PROMPT) + 2, 0]


def test_a_reply_in_speech_leaves_the_text_block_alone_until_its_end() -> None:
    core = engine_core(wild_model(), share=False, late=False)
    sequence = core.open([*TEXT_PROMPT, (SOSP, SILENT)])
    params = ReplyParams(GREEDY, Limits(8), Forced(rows=((N, 1), (N, 2), (N, EOSP), (6, N))))
    core.submit(sequence, params)
    for _ in range(3):
        core.step()
    rows = len(TEXT_PROMPT) + 3
    assert sequence.read == [rows, 0, rows]
    core.step()
    assert sequence.read == [rows + 1, rows + 1, rows]


def test_eosp_is_held_back_as_long_as_asked_in_made_up_draws_too() -> None:
    model = wild_model()
    rows = (*((n, N) for n in range(10)), (SOSP, N))
    for seed in range(6):
        params = ReplyParams(
            replace(HOT, seed=seed), Limits(30, min_new_rows=25), Forced(rows=rows)
        )
        asked = whole(Task(TEXT_PROMPT, params))
        request = alone(engine_core(model), asked)
        require_same(request, reference(model, asked))
        assert EOSP not in [audio for _, audio in request.reply.rows[:24]]


def text_under_way(*, whole_rows: bool) -> tuple[Request, list[int]]:
    """A reply cancelled after six rows of text; how many rows were ready after each step."""
    core = engine_core(wild_model())
    params = ReplyParams(
        GREEDY, Limits(20), Forced(rows=tuple((n, N) for n in range(9))), None, whole_rows
    )
    request, ready = core.submit(core.open(TEXT_PROMPT), params), list[int]()
    for _ in range(6):
        core.step()
        ready.append(request.ready)
    core.cancel(request)
    ready.append(request.ready)
    return request, ready


def test_rows_are_handed_out_at_once_unless_whole_ones_were_asked_for() -> None:
    assert text_under_way(whole_rows=False)[1] == [1, 2, 3, 4, 5, 6, 6]
    assert text_under_way(whole_rows=True)[1] == [0, 0, 0, 0, 0, 0, 6]


def test_a_cancelled_reply_of_whole_rows_is_whole() -> None:
    request, _ = text_under_way(whole_rows=True)
    script = Forced(rows=tuple((n, N) for n in range(9)))
    expected = reference(wild_model(), Task(TEXT_PROMPT, ReplyParams(GREEDY, Limits(6), script)))
    assert request.reply.rows == expected.rows
    assert request.reply.modes == [Mode.TEXT] * 6
    assert request.reply.finish_reason is FinishReason.CANCELLED


def test_a_script_that_stops_still_stops_when_its_draws_were_put_off() -> None:
    model = wild_model()
    asked = Task(
        TEXT_PROMPT, ReplyParams(GREEDY, Limits(9), Forced(rows=((3, N), (IDS.im_end, N))))
    )
    for each in (asked, whole(asked)):
        request = alone(engine_core(model), each)
        require_same(request, reference(model, each))
        assert request.reply.finish_reason is FinishReason.STOP
