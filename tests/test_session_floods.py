"""What one session may ask for at a time, so that much of it costs others little."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from conftest import run
from realtime_rig import call
from session_rig import BY_HAND, WRITTEN, Client, host, pocket, require_nothing_held

from mosstalk.codec.hift_vocoder import HiftOptions
from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.engine.async_engine import AsyncEngine
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.session.commands import (
    CancelResponse,
    Context,
    ContextPolicy,
    CreateAudio,
    CreateResponse,
    CreateText,
    DeleteItem,
)
from mosstalk.session.events import (
    AudioDelta,
    ErrorCode,
    ErrorRaised,
    Event,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    TextDelta,
)
from mosstalk.session.host import Host, HostOptions
from mosstalk.session.response_manager import MOST_OUT_OF_BAND, ResponseManager
from mosstalk.session.session import Session

SPOKEN = replace(BY_HAND, script="speech:20")
LONG = replace(WRITTEN, script="text:60")
HELLO = CreateText("user", "Good morning.", item_id="hello")
APART = CreateResponse(in_conversation=False)


def test_items_that_come_together_are_told_to_the_engine_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, rewrite = list[int](), AsyncEngine.rewrite

    async def counted(self: AsyncEngine, *given: object) -> None:
        told.append(1)
        await rewrite(self, *given)  # type: ignore[arg-type]

    async def main() -> None:
        async with host() as here, await here.open(WRITTEN) as session:
            client = Client(session)
            monkeypatch.setattr(AsyncEngine, "rewrite", counted)
            client.do(*(CreateText("user", "Hello.", item_id=str(n)) for n in range(40)))
            client.do(DeleteItem("38"))
            await client.wait(ItemDeleted)
            assert len(told) <= 5
            sequence = session._state.conversation._cached.sequence
            while len(sequence.rows) != len(client.rows):  # read ahead, though nobody asks
                await asyncio.sleep(0.01)
            client.do(CreateResponse())
            assert (await client.wait(ResponseDone)).usage.cached > 0

    run(main())


def test_an_item_that_comes_while_a_reply_is_made_is_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, prefill_ahead = list[int](), ResponseManager.prefill_ahead

    async def counted(self: ResponseManager) -> None:
        looked.append(1)
        await prefill_ahead(self)

    async def main() -> None:
        async with host() as here, await here.open(LONG) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            await client.wait(TextDelta)
            monkeypatch.setattr(ResponseManager, "prefill_ahead", counted)
            client.do(CreateText("user", "And now?"))
            await client.wait(ResponseDone)
            assert 1 <= len(looked) <= 4, "nobody looks again and again"
            sequence = session._state.conversation._cached.sequence
            while len(sequence.rows) != len(client.rows):
                await asyncio.sleep(0.01)

    run(main())


def test_an_item_that_the_context_cannot_hold_is_refused_and_changes_nothing() -> None:
    minutes = CreateAudio(np.zeros(16_000 * 200, np.int16), item_id="long")

    async def main() -> None:
        async with host() as here, await here.open(BY_HAND) as session:
            client = Client(session)
            client.do(HELLO)
            await client.wait(ItemDone)
            rows = client.rows
            for command in (CreateText("user", "to be or " * 3000), minutes):
                client.do(replace(command, command_id="too-long"))
                error = await client.error()
                assert (error.code, error.command_id) == (ErrorCode.CONTEXT_FULL, "too-long")
                assert "this item is" in error.message
            assert client.rows == rows
            client.do(CreateResponse())
            assert (await client.wait(ResponseDone)).status is ResponseStatus.COMPLETED

    run(main())


def test_system_items_may_take_the_part_of_the_context_that_is_kept() -> None:
    settings = replace(WRITTEN, context=Context(rows=300))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.do(*(CreateText("system", "Be brief.", item_id=str(n)) for n in range(100)))
            client.do(CreateText("user", "What is it?", item_id="last"))
            await client.wait(ItemDone, lambda done: done.item.item_id == "last")
            kept = [each.item.item_id for each in client.all(ItemDone)][:-1]
            assert len(kept) + len(client.all(ErrorRaised)) == 100
            assert {error.code for error in client.all(ErrorRaised)} == {ErrorCode.CONTEXT_FULL}
            assert "system items" in client.all(ErrorRaised)[0].message
            assert 100 < len(client.rows) < 225
            client.do(DeleteItem(kept[0]), CreateText("system", "Be brief.", item_id="again"))
            await client.wait(ItemDone, lambda done: done.item.item_id == "again")
            client.do(CreateResponse())
            assert (await client.wait(ResponseDone)).status is ResponseStatus.COMPLETED

    run(main())


@pytest.mark.parametrize("policy", ContextPolicy)
def test_what_nothing_can_be_dropped_for_is_refused(policy: ContextPolicy) -> None:
    """While a reply is made nothing is dropped, and without leave nothing ever."""
    settings = replace(LONG, script="text:150", context=Context(policy, rows=300))

    async def main() -> None:
        async with host() as here, await here.open(settings) as session:
            client = Client(session)
            client.do(HELLO, CreateResponse())
            await client.wait(TextDelta)
            client.do(*(CreateText("user", "Hello.", item_id=f"item-{n}") for n in range(300)))
            error = await client.error()
            assert error.code is ErrorCode.CONTEXT_FULL
            assert "wait for the end of the response" in error.message
            client.do(DeleteItem("item-0"))
            await client.wait(ItemDeleted)
            assert 300 < len(client.rows) < 360
            client.do(CancelResponse())
            await client.wait(ResponseDone)
            client.do(CreateText("user", "Hello.", item_id="last"))
            if policy is ContextPolicy.DROP:
                await client.wait(ItemAdded, lambda added: added.item.item_id == "last")
                assert len(client.rows) < 225

    run(main())


def test_a_few_responses_outside_the_conversation_are_made_at_a_time() -> None:
    async def main() -> None:
        async with host() as here, await here.open(LONG) as session:
            client = Client(session)
            client.do(HELLO, *[APART] * 64)
            errors = [await client.error() for _ in range(64 - MOST_OUT_OF_BAND)]
            assert {error.code for error in errors} == {ErrorCode.ENGINE_FULL}
            assert all(error.retry_after_s for error in errors)
            assert len(client.all(ResponseStarted)) == MOST_OUT_OF_BAND
            client.do(CreateResponse("own"))
            await client.wait(ResponseDone, lambda done: done.response_id == "own")
            while len(client.all(ResponseDone)) < MOST_OUT_OF_BAND + 1:
                await client.wait(ResponseDone)
            assert {d.status for d in client.all(ResponseDone)} == {ResponseStatus.COMPLETED}
            client.do(APART)
            await client.wait(ResponseDone)

    run(main())


def crowded(places: int, sessions: int = 8) -> Host:
    """A host whose decoder has room for so many replies."""
    options = HostOptions(
        sessions,
        engine=EngineOptions(400, poison=True),
        decoder=DecoderOptions(hift=HiftOptions(replies=places)),
    )
    return Host(pocket(), options)


async def finished(session: Session, replies: int) -> list[ResponseDone]:
    """The ends of so many replies."""
    client = Client(session)
    return [await client.wait(ResponseDone) for _ in range(replies)]


def told_so_far(session: Session) -> list[Event]:
    """What a session has told and nobody has heard."""
    return [session._events.get_nowait() for _ in range(session._events.qsize())]


def test_replies_wait_for_a_place_for_sound_and_none_fails() -> None:
    async def main() -> None:
        async with crowded(2) as here:
            sessions = [await here.open(SPOKEN) for _ in range(4)]
            for session in sessions:
                session.do(HELLO)
                session.do(CreateResponse())
            done = await asyncio.gather(*(finished(session, 1) for session in sessions))
            assert {d.status for each in done for d in each} == {ResponseStatus.COMPLETED}
            assert {round(d.timings.audio_s, 2) for each in done for d in each} == {1.6}
            for session in sessions:
                await session.close()
            require_nothing_held(here)
            while here.decoder_worker._decoder.figures()[1].slots_used:
                await asyncio.sleep(0.01)

    run(main())


def test_a_reply_that_finds_no_place_in_time_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mosstalk.session.workers._MOST_DECODE_WAIT_S", 0.01)

    async def main() -> None:
        async with crowded(1) as here:
            first, second = Client(await here.open(SPOKEN)), Client(await here.open(SPOKEN))
            first.do(HELLO, CreateResponse())
            await first.wait(AudioDelta)
            second.do(HELLO, CreateResponse())
            refused = await second.wait(ResponseDone)
            assert refused.status is ResponseStatus.FAILED
            assert "vocoder" in (refused.message or "")
            assert (await first.wait(ResponseDone)).status is ResponseStatus.COMPLETED

    run(main())


def test_a_reply_that_waits_for_a_place_can_be_cancelled() -> None:
    async def main() -> None:
        async with crowded(1) as here:
            first, second = Client(await here.open(SPOKEN)), Client(await here.open(SPOKEN))
            first.do(HELLO, CreateResponse())
            await first.wait(AudioDelta)
            second.do(HELLO, CreateResponse())
            started = await second.wait(ResponseStarted)
            second.do(CancelResponse(started.response_id))
            assert (await second.wait(ResponseDone)).status is ResponseStatus.CANCELLED
            assert (await first.wait(ResponseDone)).status is ResponseStatus.COMPLETED
            second.do(CreateResponse())
            assert (await second.wait(ResponseDone)).status is ResponseStatus.COMPLETED

    run(main())


def test_a_reply_in_a_conversation_goes_before_all_that_are_outside_of_one() -> None:
    async def main() -> None:
        async with crowded(4) as here:
            greedy = [Client(await here.open(SPOKEN)) for _ in range(4)]
            for client in greedy:
                client.do(HELLO, *[APART] * MOST_OUT_OF_BAND)
                for _ in range(MOST_OUT_OF_BAND):
                    await client.wait(ResponseStarted)
            await greedy[0].wait(AudioDelta)
            honest = Client(await here.open(SPOKEN))
            honest.do(HELLO, CreateResponse())
            assert (await honest.wait(ResponseDone)).status is ResponseStatus.COMPLETED
            over = [event for client in greedy for event in told_so_far(client.session)]
            ended = sum(isinstance(event, ResponseDone) for event in over)
            assert ended <= 2, "those that had begun may have come to their end, and no other"

    run(main())


def test_clients_are_told_so_by_codes_that_they_know() -> None:
    def item(text: str) -> dict[str, object]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "role": "user", "content": content}

    async def main() -> None:
        async with call(defaults=LONG) as client:
            await client.until("session.created")
            client.send("conversation.item.create", item=item("to be or " * 3000), event_id="long")
            error = (await client.until("error"))["error"]
            assert (error["code"], error["event_id"]) == ("context_length_exceeded", "long")
            client.send("conversation.item.create", item=item("Hello."))
            for _ in range(MOST_OUT_OF_BAND + 1):
                client.send("response.create", response={"conversation": "none"})
            response = (await client.until("response.done"))["response"]
            assert response["status"] == "failed"
            assert response["status_details"]["error"]["code"] == "rate_limit_exceeded"
            assert response["mosstalk"]["retry_after_s"] > 0

    run(main())
