"""What a session refuses, how it ends, and that nobody else hears of it."""

import asyncio
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import run
from session_rig import (
    BY_HAND,
    QUESTION,
    WRITTEN,
    Client,
    host,
    pocket,
    require_nothing_held,
    silence,
    speech,
)

from mosstalk import Pipeline
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.errors import EngineFullError, EngineStoppedError, OptionError, VoiceError
from mosstalk.session.commands import (
    CancelResponse,
    Clear,
    Command,
    Commit,
    Context,
    ContextPolicy,
    CreateAudio,
    CreateMessage,
    CreateResponse,
    CreateText,
    DeleteItem,
    Durations,
    Message,
    Push,
    ReplyLimits,
    ReplyMode,
    Sampling,
    Sound,
    Truncate,
    UpdateSettings,
)
from mosstalk.session.events import (
    AudioDelta,
    Closed,
    ContextDropped,
    ErrorCode,
    ErrorRaised,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    Reason,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    TurnCommitted,
)
from mosstalk.session.host import Host, HostOptions

LONG = replace(BY_HAND, script="speech:300")
HELLO = CreateText("user", "Good morning.", item_id="hello")

REFUSED: list[tuple[Command, ErrorCode]] = [
    (Push(b"odd"), ErrorCode.HALF_SAMPLE),
    (Push(b"even", rate=44_100), ErrorCode.WRONG_RATE),
    (Push(np.zeros((2, 2), np.int16)), ErrorCode.BAD_SOUND),
    (Push(np.full(3, np.nan, np.float32)), ErrorCode.BAD_SOUND),
    (Commit(), ErrorCode.COMMIT_EMPTY),
    (CancelResponse(), ErrorCode.RESPONSE_NOT_ACTIVE),
    (CancelResponse("resp_unknown"), ErrorCode.RESPONSE_NOT_ACTIVE),
    (DeleteItem("item_unknown"), ErrorCode.UNKNOWN_ITEM),
    (Truncate("item_unknown", 0), ErrorCode.UNKNOWN_ITEM),
    (Truncate("hello", 0), ErrorCode.BAD_ITEM),
    (CreateText("user", "again", item_id="hello"), ErrorCode.DUPLICATE_ITEM),
    (CreateText("user", "lost", previous_item_id="nowhere"), ErrorCode.UNKNOWN_ITEM),
    (CreateText("user", "  "), ErrorCode.BAD_ITEM),
    (CreateText("tool", "what"), ErrorCode.BAD_ITEM),
    (CreateText("user", "\ud800"), ErrorCode.BAD_ITEM),
    (CreateAudio(b"\0\0" * 100), ErrorCode.BAD_ITEM),
    (CreateAudio(b"\0\0" * 10_000, rate=11_025), ErrorCode.WRONG_RATE),
    (CreateResponse(voice="../../secret"), ErrorCode.UNKNOWN_VOICE),
    (CreateResponse(max_rows=0), ErrorCode.BAD_VALUE),
    (CreateMessage(Message("user", ())), ErrorCode.BAD_ITEM),
    (CreateMessage(Message("user", ("Hear this:", Sound(b"\0\0" * 100)))), ErrorCode.BAD_ITEM),
    (CreateMessage(Message("assistant", (Sound(b"\0\0" * 4000),))), ErrorCode.BAD_ITEM),
    (CreateMessage(Message("user", (Sound(b"odd"),))), ErrorCode.HALF_SAMPLE),
    (CreateMessage(Message("user", ("a",)), item_id="hello"), ErrorCode.DUPLICATE_ITEM),
    (CreateResponse(input=("hello", "nothing")), ErrorCode.UNKNOWN_ITEM),
    (CreateResponse(in_conversation=False, input=("nothing",)), ErrorCode.UNKNOWN_ITEM),
    (CreateResponse(input=(Message("user", (" ",)),)), ErrorCode.BAD_ITEM),
    (UpdateSettings(replace(BY_HAND, voice="nobody")), ErrorCode.UNKNOWN_VOICE),
    (UpdateSettings(replace(BY_HAND, sampling=Sampling(top_p=7.0))), ErrorCode.BAD_VALUE),
    (UpdateSettings(replace(BY_HAND, script="nonsense")), ErrorCode.BAD_VALUE),
]


def test_what_is_refused_is_told_by_name_and_changes_nothing() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(HELLO)
            await client.wait(ItemDone)
            rows = client.rows
            for number, (command, code) in enumerate(REFUSED):
                client.do(replace(command, command_id=str(number)))
                error = await client.error()
                assert error.code is code, (command, error)
                assert (error.command, error.command_id) == (type(command).__name__, str(number))
                assert not error.fatal
            assert client.rows == rows
            assert session.settings == BY_HAND
            client.do(CreateResponse())
            assert (await client.wait(ResponseDone)).status is ResponseStatus.COMPLETED

    run(main())


def test_less_than_100_ms_is_no_turn() -> None:
    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            session.push(silence(0.099))
            client.do(Commit())
            assert "99 ms" in (await client.error()).message
            session.push(silence(0.001))
            client.do(Commit())
            assert (await client.wait(ItemAdded)).item.audio_ms == 100
            session.push(silence(0.5))
            client.do(Clear(), Commit())
            assert "0 ms" in (await client.error()).message

    run(main())


def test_there_is_one_response_at_a_time() -> None:
    async def main() -> None:
        async with host() as here, await here.open(LONG) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse("first"), CreateResponse("second"))
            error = await client.error()
            assert error.code is ErrorCode.RESPONSE_ACTIVE
            assert "first" in error.message
            client.do(CreateResponse("first", in_conversation=False), DeleteItem("hello"))
            assert (await client.error()).code is ErrorCode.BAD_VALUE
            client.do(CancelResponse("first"), CancelResponse("first"))
            await client.wait(ResponseDone)
            assert (await client.error()).code is ErrorCode.RESPONSE_NOT_ACTIVE

    run(main())


def test_an_item_that_is_being_made_can_be_deleted() -> None:
    async def main() -> None:
        async with host() as here, await here.open(LONG) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            delta = await client.wait(AudioDelta)
            client.do(DeleteItem(delta.item_id), DeleteItem("hello"))
            done = await client.wait(ResponseDone)
            assert done.status is ResponseStatus.CANCELLED
            client.do(CreateText("user", "Hello."))
            await client.wait(ItemDone)
            fresh = pocket().chat()
            fresh.read("Hello.")
            assert client.rows == fresh.conversation.rows

    run(main())


def test_an_item_that_its_own_end_drops_can_be_deleted_all_the_same() -> None:
    settings = replace(LONG, context=Context(rows=130, full=0.3, keep=0.2))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            delta = await client.wait(AudioDelta)
            client.do(CreateText("user", "Hello.", item_id="last"), DeleteItem(delta.item_id))
            assert (await client.wait(ItemDeleted)).item_id == delta.item_id
            client.do(DeleteItem("last"))
            await client.wait(ItemDeleted)

    run(main())


def test_a_turn_by_hand_may_be_so_long_and_no_longer() -> None:
    async def main() -> None:
        settings = replace(BY_HAND, durations=Durations(turn_s=1.0))
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.say(speech(QUESTION))
            assert (await client.error()).code is ErrorCode.TURN_TOO_LONG
            client.do(Commit())
            await client.wait(TurnCommitted)
            assert (await client.wait(ItemAdded)).item.audio_ms == 1000
            assert len(client.all(ErrorRaised)) == 1
            client.say(speech(QUESTION)[:8000])
            client.do(Commit())
            assert (await client.wait(ItemAdded)).item.audio_ms == 500

    run(main())


def changed(change: str) -> Pipeline:
    """The pocket model with an audio head that always says the same, or that fails.

    It writes nothing before it speaks; or it writes the same for ever.
    """
    model = deepcopy(pocket().model)
    if change == "wordy":
        model.text_lm_head.weight.data = torch.zeros_like(model.text_lm_head.weight)
        return replace(pocket(), model=model)
    head = model.audio_lm_head.weight
    head.data = torch.zeros_like(head) if change == "monotonous" else head.data[:, :3]
    return replace(pocket(), model=model, defaults=replace(pocket().defaults, writes_first=False))


def test_a_reply_that_has_run_away_is_ended() -> None:
    monotonous = changed("monotonous")
    unbounded = replace(BY_HAND, limits=ReplyLimits(longest_s=3.5, repeating_s=None))

    async def main() -> None:
        options = HostOptions(engine=EngineOptions(400, poison=True))
        async with Host(monotonous, options) as here:
            for settings, codes, reason in (
                (BY_HAND, 26, Reason.REPETITION),
                (unbounded, 44, Reason.MAX_LENGTH),
            ):
                async with await here.open(settings) as session:
                    client = Client(session)
                    client.do(HELLO, CreateResponse())
                    done = await client.wait(ResponseDone)
                    assert (done.status, done.reason) == (ResponseStatus.INCOMPLETE, reason)
                    assert len(client.pcm(done.response_id)) == 2 * 1920 * codes
                    pad, eosp = pocket().ids.modality_pad, pocket().ids.eosp
                    spoken = [audio for text, audio in client.rows if text == pad]
                    assert spoken == [0] * codes + [eosp]

    run(main())


def test_a_reply_that_writes_for_ever_and_never_speaks_is_ended() -> None:
    wordy = changed("wordy")

    async def main() -> None:
        options = HostOptions(engine=EngineOptions(400, poison=True))
        async with Host(wordy, options) as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            done = await client.wait(ResponseDone)
            assert (done.status, done.reason) == (ResponseStatus.INCOMPLETE, Reason.REPETITION)
            assert done.usage.output_audio == 0
            client.do(CreateResponse(reply=ReplyMode.TEXT))
            done = await client.wait(ResponseDone)
            assert done.reason is Reason.MAX_LENGTH, "text that nobody speaks may go round"

    run(main())


def test_the_oldest_turns_make_room_between_turns() -> None:
    settings = replace(WRITTEN, context=Context(rows=200, full=0.6, keep=0.4))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            chat = pocket().chat(system="")
            chat.read("The train is late.")
            turn = chat.conversation.rows
            for number in range(12):
                client.do(CreateText("user", "The train is late.", item_id=f"{number}"))
                client.do(CreateResponse())
                done = await client.wait(ResponseDone)
                assert done.status is ResponseStatus.COMPLETED
                # Dropped before it was asked for: at most 0.6 of 200 rows and the user's turn.
                assert done.usage.input_text <= 120 + len(turn)
            client.do(DeleteItem("none"))
            await client.error()  # all that is dropped after the last reply has been told
            dropped = client.all(ContextDropped)
            assert len(dropped) > 1
            gone = [item_id for event in dropped for item_id in event.item_ids]
            items = [e.item.item_id for e in client.all(ItemAdded)]
            assert gone == items[: len(gone)]
            kept = {e.item.item_id: e.item for e in client.all(ItemDone)}
            fresh = pocket().chat(speech=False)
            for item_id in items[len(gone) :]:
                fresh.conversation.add_text(kept[item_id].role, kept[item_id].text or "")
            assert client.rows == fresh.conversation.rows
            assert all(event.rows <= 80 for event in dropped)

    run(main())


def test_a_full_context_is_refused_where_nothing_may_be_dropped() -> None:
    settings = replace(WRITTEN, context=Context(ContextPolicy.REFUSE, rows=200))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            long = "The train is late and nobody knows when it will be here at all. " * 9
            client.do(HELLO, CreateResponse())
            await client.wait(ResponseDone)
            client.do(CreateText("user", long, item_id="long"), CreateResponse())
            assert (await client.error()).code is ErrorCode.CONTEXT_FULL
            assert not client.all(ContextDropped)
            client.do(DeleteItem("long"), CreateResponse())
            await client.wait(ResponseStarted)

    run(main())


def test_a_turn_that_alone_is_too_long_is_refused_after_everything_was_dropped() -> None:
    settings = replace(BY_HAND, context=Context(rows=120))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.do(HELLO)
            client.say(np.tile(speech(QUESTION), 5))  # as long as its speaker goes on
            client.do(Commit(), CreateResponse())
            await client.wait(ContextDropped)
            assert (await client.error()).code is ErrorCode.CONTEXT_FULL

    run(main())


def test_a_reply_that_fills_the_context_says_so() -> None:
    settings = replace(LONG, context=Context(rows=130, full=0.99))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            done = await client.wait(ResponseDone)
            assert (done.status, done.reason) == (ResponseStatus.INCOMPLETE, Reason.CONTEXT)

    run(main())


def test_a_full_engine_refuses_and_says_when_to_come_back() -> None:
    engine = EngineOptions(400, limits=SchedulerLimits(slots=1, waiting=0), poison=True)

    async def main() -> None:
        async with host(engine=engine) as here:
            first, second = Client(await here.open(LONG)), Client(await here.open(BY_HAND))
            first.do(HELLO, CreateResponse())
            await first.wait(AudioDelta)
            second.do(HELLO, CreateResponse())
            error = await second.error()
            assert error.code is ErrorCode.ENGINE_FULL
            assert error.retry_after_s
            first.do(CancelResponse())
            await first.wait(ResponseDone)
            second.do(CreateResponse())
            done = await second.wait(ResponseDone)
            assert done.status is ResponseStatus.COMPLETED

    run(main())


def test_a_host_opens_so_many_sessions_and_no_bad_one() -> None:
    async def main() -> None:
        async with host(sessions=1) as here:
            with pytest.raises(VoiceError, match="default"):
                await here.open(replace(BY_HAND, voice="nobody"))
            with pytest.raises(OptionError):
                await here.open(replace(BY_HAND, sampling=Sampling(temperature=-1)))
            async with await here.open(BY_HAND):
                with pytest.raises(EngineFullError) as refused:
                    await here.open(BY_HAND)
                assert refused.value.retry_after_s > 0
            async with await here.open(BY_HAND):
                assert here.figures.sessions == 1
            await here.warm_up()
            require_nothing_held(here)

    run(main())


def test_an_engine_that_dies_ends_every_session() -> None:
    broken = changed("broken")

    async def main() -> None:
        async with Host(broken, HostOptions(engine=EngineOptions(400))) as here:
            clients = [Client(await here.open(BY_HAND)) for _ in range(3)]
            clients[0].do(HELLO, CreateResponse())
            for client in clients:
                error = await client.wait(ErrorRaised)
                assert error.code is ErrorCode.ENGINE_STOPPED
                assert error.fatal
                assert "RuntimeError" in error.message
                events = [event async for event in client.session]
                assert isinstance(events[-1], Closed)
                assert events[-1].reason == "engine"
            assert clients[0].all(ResponseStarted)
            assert not here.sessions
            with pytest.raises(EngineStoppedError):
                await here.open(BY_HAND)

    run(main())


def test_closing_frees_everything_at_once_whatever_is_going_on() -> None:
    async def main() -> None:
        async with host() as here:
            clients = [Client(await here.open(LONG)) for _ in range(4)]
            spoken, typing, speaking, _ = clients
            spoken.do(HELLO, CreateResponse())
            await spoken.wait(AudioDelta)
            typing.do(HELLO, CreateResponse(), CreateResponse(in_conversation=False))
            await typing.wait(ResponseStarted)
            speaking.say(speech(QUESTION))
            for client in clients:
                await client.session.close()
            require_nothing_held(here)
            last = [event async for event in spoken.session]
            assert isinstance(last[-1], Closed)
            assert last[-1].reason == "client"
            done = next(event for event in last if isinstance(event, ResponseDone))
            assert done.reason is Reason.SESSION_CLOSED
            spoken.session.push(silence(0.1))  # what comes too late is ignored
            left = await here.open(LONG)
            left.push(speech(QUESTION))
        require_nothing_held(here)
        assert [e.reason async for e in left if isinstance(e, Closed)] == ["host"]

    run(main())


def test_a_session_ends_when_nothing_happens_in_it_or_it_has_lasted_too_long() -> None:
    async def main() -> None:
        async with host() as here:
            for durations, reason in (
                (Durations(idle_s=2.0), "idle"),
                (Durations(longest_s=2.0), "longest"),
                (Durations(idle_s=0.05), "idle"),  # by the wall clock, with no sound at all
            ):
                session = await here.open(replace(BY_HAND, durations=durations))
                if durations.idle_s >= 2 or durations.longest_s == 2:
                    session.push(silence(2.5))
                events = await asyncio.wait_for(all_of(session.__aiter__()), 30)
                assert isinstance(events[-1], Closed)
                assert events[-1].reason == reason
            require_nothing_held(here)

    async def all_of(events: object) -> list[object]:
        return [event async for event in events]  # type: ignore[attr-defined]

    run(main())
