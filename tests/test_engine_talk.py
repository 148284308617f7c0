"""Conversations of several turns: each turn equals a fresh prompt and reads only what is new."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from engine_rig import (
    CONFIG,
    EOSP,
    GREEDY,
    HOT,
    IDS,
    PAD,
    SILENT,
    SOSP,
    Task,
    engine_core,
    reference,
    require_idle,
    require_same,
    wild_model,
)

from mosstalk.conversation import Conversation, FinishReason, Reply
from mosstalk.engine.cached_conversation import CachedConversation
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.errors import EngineFullError, OptionError
from mosstalk.sampling_options import Limits, SamplingOptions
from mosstalk.script import Script

SPEECH = ReplyParams(GREEDY, Limits(60), Script.parse("speech:12"))
MIXED = ReplyParams(GREEDY, Limits(60), Script.parse("speech:6,text:3,speech:6"))
LONG = ReplyParams(GREEDY, Limits(5, min_new_rows=9))
"""Asks of replies that end by themselves, change mode on the way, and end by their length."""
PENALISED = ReplyParams(SamplingOptions(temperature=0, repetition_penalty=1.8), Limits(14))
"""A greedy reply that shows every id that the penalty wrongly remembers or forgets."""


def encode(text: str) -> list[int]:
    return [ord(letter) % 20 for letter in text]


def new_talk(core: EngineCore) -> CachedConversation:
    talk = CachedConversation(Conversation(IDS, encode), core.open())
    talk.conversation.add_text("system", "be brief")
    return talk


def submit(
    core: EngineCore, talk: CachedConversation, ask: ReplyParams, *, speech: bool = True
) -> Request:
    with talk.reply_opened(speech=speech):
        return core.submit(talk.sequence, ask)


def replied(
    core: EngineCore, talk: CachedConversation, ask: ReplyParams, *, speech: bool = True
) -> Request:
    """A reply made to its end; it equals the reference's for the same rows."""
    request = submit(core, talk, ask, speech=speech)
    rows = list(talk.conversation.rows)
    core.run()
    require_same(request, reference(core.model, Task(rows, ask)))
    return request


@pytest.mark.parametrize("deferral", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_every_turn_equals_a_fresh_conversation_with_the_same_history(
    deferral: bool, share: bool
) -> None:
    model = wild_model(config=replace(CONFIG, max_position_embeddings=512))
    core = engine_core(model, deferral=deferral, share=share, block_rows=4)
    talks = [new_talk(core) for _ in range(3)]
    random = Random(4)
    for turn in range(4):
        for number, talk in enumerate(talks):
            talk.conversation.add_speech("user", [random.randrange(EOSP) for _ in range(5)])
            ask = random.choice([SPEECH, MIXED, LONG, PENALISED])
            hot = replace(ask, options=replace(HOT, seed=turn))
            speech = (turn + number) % 2 == 0
            request = replied(core, talk, random.choice([ask, hot]), speech=speech)
            talk.close_reply(request)
            assert talk.sequence.rows == talk.conversation.rows
    for talk in talks:
        core.close(talk.sequence)
    require_idle(core)


def test_the_next_turn_reads_only_what_is_new() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    first = replied(core, talk, SPEECH)
    talk.close_reply(first)
    history = len(talk.sequence.rows)
    assert talk.sequence.read[0] == history - 2  # all but the stop row and the newline
    talk.conversation.add_speech("user", [1, 2, 3])
    request = submit(core, talk, SPEECH)
    (work,) = core.scheduler.plan()
    assert work.start == history - 2
    assert work.start + work.count == len(talk.sequence.rows)
    core.cancel(request)


def cut(talk: CachedConversation, request: Request, *heard_ms: float) -> None:
    first, *more = heard_ms
    talk.close_reply(request, first)
    for each in more:
        talk.truncate(each)


def end_first(talk: CachedConversation, request: Request, *heard_ms: float) -> None:
    talk.close_reply(request)
    for each in heard_ms:
        talk.truncate(each)


@pytest.mark.parametrize(
    ("how", "ask"),
    [
        *((cut, ask) for ask in (SPEECH, MIXED, LONG)),
        (end_first, SPEECH),
        # Slow: ended first, they are cut as a reply in speech is.
        *(pytest.param(end_first, ask, marks=pytest.mark.slow) for ask in (MIXED, LONG)),
    ],
    ids=["cut-speech", "cut-mixed", "cut-length", "ended-speech", "ended-mixed", "ended-length"],
)
@pytest.mark.parametrize(
    ("heard_ms", "codes"),
    [
        ((0.0,), 0),
        ((1.0,), 1),
        ((79.0,), 1),
        ((80.0,), 1),
        ((81.0,), 2),
        ((3.2e6,), None),
        ((240.0, 80.0), 1),
        ((80.0, 240.0), 1),
        ((-5.0,), 0),
    ],
)
def test_a_truncated_reply_is_a_fresh_prompt_of_what_was_heard(
    how: Callable[..., None], ask: ReplyParams, heard_ms: tuple[float, ...], codes: int | None
) -> None:
    core = engine_core(wild_model(), block_rows=4)
    talk = new_talk(core)
    talk.conversation.add_speech("user", [4, 4])
    before = list(talk.conversation.rows)
    request = replied(core, talk, ask)
    how(talk, request, *heard_ms)
    said = request.reply.codes(IDS) if codes is None else request.reply.codes(IDS)[:codes]
    if ask is SPEECH or codes is not None:
        afresh = Conversation(IDS, encode)
        afresh.rows = before
        afresh.add_speech("assistant", said)
        assert talk.conversation.rows == afresh.rows
    talk.conversation.add_speech("user", [7])
    replied(core, talk, PENALISED, speech=False)
    core.close(talk.sequence)
    require_idle(core)


def test_a_truncated_reply_leaves_nothing_in_the_penalty() -> None:
    core = engine_core(wild_model(), late=False)
    talk = new_talk(core)
    request = replied(core, talk, ReplyParams(HOT, Limits(40), Script.parse("speech:30")))
    talk.close_reply(request, 80.0)
    (kept,) = {audio for text, audio in talk.conversation.rows if text == PAD and audio != EOSP}
    gone = {audio for _, audio in request.reply.rows} - {kept, SILENT, EOSP}
    assert len(gone) > 5
    again = submit(core, talk, PENALISED)
    core.step()
    state = core.runner.penalised_tokens(again)[1]
    assert state.isdisjoint(gone - {again.reply.rows[0][1]})
    assert state >= {kept, SILENT, EOSP}


def test_a_reply_is_cut_while_it_runs() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    request = submit(core, talk, SPEECH)
    for _ in range(6):
        core.step()
    rows = list(talk.sequence.rows)
    talk.truncate(80.0)  # before it is cancelled: the reply goes on as if nothing had been said
    assert talk.sequence.rows == rows
    core.step()
    assert len(request.reply.rows) == 7
    core.cancel(request)
    core.cancel(request)
    assert request.reply.finish_reason is FinishReason.CANCELLED
    talk.close_reply(request, 3 * 80.0)
    assert talk.conversation.rows[-4:] == [
        (PAD, request.reply.rows[2][1]), (PAD, EOSP), (IDS.im_end, SILENT), (10, SILENT)
    ]  # fmt: skip
    talk.truncate(79.0)
    talk.conversation.add_text("user", "go on")
    replied(core, talk, PENALISED)


def test_a_reply_cancelled_before_it_began_is_an_empty_one() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    request = submit(core, talk, SPEECH)
    core.cancel(request)
    talk.close_reply(request, 0.0)
    afresh = new_talk(core).conversation
    afresh.add_speech("assistant", [])
    assert talk.conversation.rows == afresh.rows
    replied(core, talk, PENALISED)


def test_a_refused_reply_leaves_the_conversation_as_it_was() -> None:
    core = engine_core(wild_model(), slots=1, waiting=0)
    busy, talk = new_talk(core), new_talk(core)
    talk.close_reply(replied(core, talk, SPEECH))
    submit(core, busy, LONG)
    rows, table = list(talk.conversation.rows), list(talk.sequence.table)
    with pytest.raises(EngineFullError) as refused:
        submit(core, talk, SPEECH)
    assert 0 < refused.value.retry_after_s < 60
    assert talk.conversation.rows == talk.sequence.rows == rows
    assert talk.sequence.table == table
    talk.truncate(80.0)  # the reply before can be cut as before
    assert len(talk.conversation.rows) < len(rows)
    core.run()
    replied(core, talk, SPEECH)


def test_a_conversation_that_lost_its_blocks_reads_its_rows_again() -> None:
    core = engine_core(wild_model(), block_rows=4, blocks=30)
    first, other = new_talk(core), new_talk(core)
    first.close_reply(replied(core, first, SPEECH))
    other.conversation.add_speech("user", [3] * 50)
    other.close_reply(replied(core, other, SPEECH))
    assert first.sequence.table == []
    first.truncate(400.0)
    replied(core, first, PENALISED)


def test_what_was_heard_must_be_a_time() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    talk.close_reply(replied(core, talk, SPEECH))
    rows = list(talk.conversation.rows)
    for heard_ms in (float("nan"), float("inf")):
        with pytest.raises(OptionError, match="milliseconds"):
            talk.truncate(heard_ms)
    assert talk.conversation.rows == rows


def test_a_second_reply_cannot_begin_before_the_first_has_ended() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    request = submit(core, talk, SPEECH)
    with pytest.raises(AssertionError, match="close it first"):
        submit(core, talk, SPEECH)
    with pytest.raises(AssertionError, match="under way"):
        core.submit(talk.sequence, SPEECH)
    with pytest.raises(AssertionError, match="cancel it first"):
        talk.close_reply(request)
    core.run()
    assert request.reply.finish_reason is FinishReason.STOP


def test_an_ill_formed_reply_is_kept_as_generated() -> None:
    core = engine_core(wild_model())
    talk = new_talk(core)
    request = submit(core, talk, SPEECH)
    core.cancel(request)
    reply = Reply([(SOSP, EOSP), (PAD, 3), (3, 4)], [request.mode] * 3, FinishReason.LENGTH)
    request.reply = reply
    talk.close_reply(request)
    assert (PAD, 3) in talk.conversation.rows
    replied(core, talk, PENALISED)
