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
    penalised_tokens,
    reference,
    require_idle,
    require_same,
    wild_model,
)

from mosstalk.conversation import Conversation, FinishReason, Reply
from mosstalk.engine.async_engine import CachedConversation
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import Request
from mosstalk.errors import EngineFullError, OptionError
from mosstalk.reply_options import Limits, SamplingOptions, Script

SPEECH = ReplyParams(GREEDY, Limits(60), Script.parse("speech:12"))
MIXED = ReplyParams(GREEDY, Limits(60), Script.parse("speech:6,text:3,speech:6"))
LONG = ReplyParams(GREEDY, Limits(5, min_new_rows=9))
"""Asks of replies that end by themselves, change mode on the way, and end by their length."""
PENALISED = ReplyParams(SamplingOptions(temperature=0, repetition_penalty=1.8), Limits(14))
"""A greedy reply that shows every id that the penalty wrongly remembers or forgets."""


def encode(text: str) -> list[int]:
    return [ord(letter) % 20 for letter in text]


def new_talk(core: EngineCore) -> CachedConversation:
    cached = CachedConversation(Conversation(IDS, encode), core.open())
    cached.conversation.add_text("system", "be brief")
    return cached


def submit(
    core: EngineCore, cached: CachedConversation, params: ReplyParams, *, speech: bool = True
) -> Request:
    with cached.reply_opened(speech=speech):
        return core.submit(cached.sequence, params)


def replied(
    core: EngineCore, cached: CachedConversation, params: ReplyParams, *, speech: bool = True
) -> Request:
    """A reply made to its end; it equals the reference's for the same rows."""
    request = submit(core, cached, params, speech=speech)
    rows = list(cached.conversation.rows)
    core.run()
    require_same(request, reference(core.model, Task(rows, params)))
    return request


@pytest.mark.parametrize(
    ("share", "deferral"),
    [
        (True, True),
        (False, False),
        # Slow: both on and both off are above; blocks are shared whether or not draws wait.
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((True, False), (False, True))),
    ],
)
def test_every_turn_equals_a_fresh_conversation_with_the_same_history(
    deferral: bool, share: bool
) -> None:
    model = wild_model(config=replace(CONFIG, max_position_embeddings=512))
    core = engine_core(model, deferral=deferral, share=share, block_rows=4)
    talks = [new_talk(core) for _ in range(3)]
    random = Random(4)
    for turn in range(4):
        for number, cached in enumerate(talks):
            cached.conversation.add_speech("user", [random.randrange(EOSP) for _ in range(5)])
            params = random.choice([SPEECH, MIXED, LONG, PENALISED])
            hot = replace(params, options=replace(HOT, seed=turn))
            speech = (turn + number) % 2 == 0
            request = replied(core, cached, random.choice([params, hot]), speech=speech)
            cached.close_reply(request)
            assert cached.sequence.rows == cached.conversation.rows
    for cached in talks:
        core.close(cached.sequence)
    require_idle(core)


def test_the_next_turn_reads_only_what_is_new() -> None:
    core = engine_core(wild_model())
    cached = new_talk(core)
    first = replied(core, cached, SPEECH)
    cached.close_reply(first)
    history = len(cached.sequence.rows)
    assert cached.sequence.read[0] == history - 2  # all but the stop row and the newline
    cached.conversation.add_speech("user", [1, 2, 3])
    request = submit(core, cached, SPEECH)
    (work,) = core.scheduler.plan()
    assert work.start == history - 2
    assert work.start + work.count == len(cached.sequence.rows)
    core.cancel(request)


def cut(cached: CachedConversation, request: Request, *heard_ms: float) -> None:
    first, *more = heard_ms
    cached.close_reply(request, first)
    for each in more:
        cached.truncate(each)


def end_first(cached: CachedConversation, request: Request, *heard_ms: float) -> None:
    cached.close_reply(request)
    for each in heard_ms:
        cached.truncate(each)


@pytest.mark.parametrize(
    ("how", "params"),
    [
        *((cut, params) for params in (SPEECH, MIXED, LONG)),
        (end_first, SPEECH),
        # Slow: ended first, they are cut as a reply in speech is.
        *(pytest.param(end_first, params, marks=pytest.mark.slow) for params in (MIXED, LONG)),
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
    how: Callable[..., None], params: ReplyParams, heard_ms: tuple[float, ...], codes: int | None
) -> None:
    core = engine_core(wild_model(), block_rows=4)
    cached = new_talk(core)
    cached.conversation.add_speech("user", [4, 4])
    before = list(cached.conversation.rows)
    request = replied(core, cached, params)
    how(cached, request, *heard_ms)
    said = request.reply.codes(IDS) if codes is None else request.reply.codes(IDS)[:codes]
    if params is SPEECH or codes is not None:
        afresh = Conversation(IDS, encode)
        afresh.rows = before
        afresh.add_speech("assistant", said)
        assert cached.conversation.rows == afresh.rows
    cached.conversation.add_speech("user", [7])
    replied(core, cached, PENALISED, speech=False)
    core.close(cached.sequence)
    require_idle(core)


def test_a_truncated_reply_leaves_nothing_in_the_penalty() -> None:
    core = engine_core(wild_model(), late=False)
    cached = new_talk(core)
    request = replied(core, cached, ReplyParams(HOT, Limits(40), Script.parse("speech:30")))
    cached.close_reply(request, 80.0)
    (kept,) = {audio for text, audio in cached.conversation.rows if text == PAD and audio != EOSP}
    gone = {audio for _, audio in request.reply.rows} - {kept, SILENT, EOSP}
    assert len(gone) > 5
    again = submit(core, cached, PENALISED)
    core.step()
    state = penalised_tokens(core, again)[1]
    assert state.isdisjoint(gone - {again.reply.rows[0][1]})
    assert state >= {kept, SILENT, EOSP}


def test_a_reply_is_cut_while_it_runs() -> None:
    core = engine_core(wild_model())
    cached = new_talk(core)
    request = submit(core, cached, SPEECH)
    for _ in range(6):
        core.step()
    rows = list(cached.sequence.rows)
    cached.truncate(80.0)  # before it is cancelled: the reply goes on as if nothing had been said
    assert cached.sequence.rows == rows
    core.step()
    assert len(request.reply.rows) == 7
    core.cancel(request)
    core.cancel(request)
    assert request.reply.finish_reason is FinishReason.CANCELLED
    cached.close_reply(request, 3 * 80.0)
    assert cached.conversation.rows[-4:] == [
        (PAD, request.reply.rows[2][1]), (PAD, EOSP), (IDS.im_end, SILENT), (10, SILENT)
    ]  # fmt: skip
    cached.truncate(79.0)
    cached.conversation.add_text("user", "go on")
    replied(core, cached, PENALISED)


def test_a_reply_cancelled_before_it_began_is_an_empty_one() -> None:
    core = engine_core(wild_model())
    cached = new_talk(core)
    request = submit(core, cached, SPEECH)
    core.cancel(request)
    cached.close_reply(request, 0.0)
    afresh = new_talk(core).conversation
    afresh.add_speech("assistant", [])
    assert cached.conversation.rows == afresh.rows
    replied(core, cached, PENALISED)


def test_a_refused_reply_leaves_the_conversation_as_it_was() -> None:
    core = engine_core(wild_model(), slots=1, waiting=0)
    busy, cached = new_talk(core), new_talk(core)
    cached.close_reply(replied(core, cached, SPEECH))
    submit(core, busy, LONG)
    rows, table = list(cached.conversation.rows), list(cached.sequence.table)
    with pytest.raises(EngineFullError) as refused:
        submit(core, cached, SPEECH)
    assert 0 < refused.value.retry_after_s < 60
    assert cached.conversation.rows == cached.sequence.rows == rows
    assert cached.sequence.table == table
    cached.truncate(80.0)  # the reply before can be cut as before
    assert len(cached.conversation.rows) < len(rows)
    core.run()
    replied(core, cached, SPEECH)


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
    cached = new_talk(core)
    cached.close_reply(replied(core, cached, SPEECH))
    rows = list(cached.conversation.rows)
    for heard_ms in (float("nan"), float("inf")):
        with pytest.raises(OptionError, match="milliseconds"):
            cached.truncate(heard_ms)
    assert cached.conversation.rows == rows


def test_a_second_reply_cannot_begin_before_the_first_has_ended() -> None:
    core = engine_core(wild_model())
    cached = new_talk(core)
    request = submit(core, cached, SPEECH)
    with pytest.raises(AssertionError, match="close it first"):
        submit(core, cached, SPEECH)
    with pytest.raises(AssertionError, match="under way"):
        core.submit(cached.sequence, SPEECH)
    with pytest.raises(AssertionError, match="cancel it first"):
        cached.close_reply(request)
    core.run()
    assert request.reply.finish_reason is FinishReason.STOP


def test_an_ill_formed_reply_is_kept_as_generated() -> None:
    core = engine_core(wild_model())
    cached = new_talk(core)
    request = submit(core, cached, SPEECH)
    core.cancel(request)
    reply = Reply([(SOSP, EOSP), (PAD, 3), (3, 4)], [request.mode] * 3, FinishReason.LENGTH)
    request.reply = reply
    cached.close_reply(request)
    assert (PAD, 3) in cached.conversation.rows
    replied(core, cached, PENALISED)
