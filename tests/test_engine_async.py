"""The engine from asyncio: streams, cancelling, refusals, and an end that reaches everyone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from engine_rig import (
    GREEDY,
    IDS,
    PAD,
    SILENT,
    Task,
    engine_core,
    reference,
    require_idle,
    wild_model,
)

from mosstalk.conversation import Conversation, FinishReason
from mosstalk.engine.async_engine import AsyncEngine, NewRow, ReplyStream
from mosstalk.engine.cached_conversation import CachedConversation
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import State
from mosstalk.errors import (
    ContextLengthError,
    EngineFullError,
    EngineInputError,
    EngineStoppedError,
)
from mosstalk.sampling_options import Limits
from mosstalk.script import Script

SHORT = ReplyParams(GREEDY, Limits(20), Script.parse("speech:6"))
LONG = ReplyParams(GREEDY, Limits(100, min_new_rows=200))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; what hangs fails soon."""

    async def soon() -> None:
        await asyncio.wait_for(main, 30)

    asyncio.run(soon())


def new_talk(engine: AsyncEngine, text: str = "hi") -> CachedConversation:
    conversation = Conversation(IDS, lambda text: [ord(letter) % 20 for letter in text])
    conversation.add_text("user", text)
    return engine.talk(conversation)


async def stream(ticket: ReplyStream, most: int = 1000) -> list[NewRow]:
    """The first rows of a reply as they come."""
    rows = []
    async for new in ticket:
        rows.append(new)
        if len(rows) == most:
            break
    return rows


def test_a_stream_gives_every_row_in_order_and_then_the_reply_is_whole() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, SHORT)
            news = await stream(ticket)
            expected = reference(
                core.model, Task(talk.conversation.rows[: ticket.request.prompt_rows], SHORT)
            )
            assert [new.step for new in news] == list(range(1, 9))
            assert [new.row for new in news][:-1] == expected.rows[:-1]
            assert [new.mode for new in news] == ticket.reply.modes == expected.modes
            assert ticket.reply.finish_reason is FinishReason.STOP
            assert await stream(ticket) == []  # whoever iterates again does not wait for ever
            await engine.close_reply(ticket, 160.0)
            await engine.truncate(talk, 80.0)
            assert [row for row in talk.conversation.rows if row[0] == PAD] == [
                expected.rows[0], (PAD, IDS.eosp)
            ]  # fmt: skip
            await engine.close(talk)
        assert engine.failure is None
        require_idle(core)

    run(main())


def test_rows_come_while_others_are_made() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            slow = await engine.submit(new_talk(engine), LONG)
            await stream(slow, 3)
            assert slow.reply.finish_reason is None
            quick = await engine.submit(new_talk(engine, "you"), SHORT)
            assert len(await stream(quick)) == 8

    run(main())


def test_whole_rows_are_whole_in_the_stream() -> None:
    ask = ReplyParams(GREEDY, Limits(30), Script.parse("text:6,speech:2,text:5"), whole_rows=True)

    async def main() -> None:
        core = engine_core(wild_model())
        async with AsyncEngine(core) as engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, ask, speech=False)
            rows = [new.row for new in await stream(ticket)]
        expected = reference(core.model, Task(talk.sequence.rows[: -len(rows)], ask))
        assert rows == expected.rows
        assert [audio for _, audio in rows] != [SILENT] * len(rows)

    run(main())


def test_cancelling_midway_ends_the_stream_and_the_turn_can_be_closed_at_once() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, LONG)
            first = await stream(ticket, 2)
            await engine.cancel(ticket)
            await engine.close_reply(ticket, 80.0)
            rest = await stream(ticket)
            assert [new.step for new in first + rest] == list(range(1, len(ticket.reply.rows) + 1))
            assert ticket.reply.finish_reason is FinishReason.CANCELLED
            await engine.cancel(ticket)
            talk.conversation.add_text("user", "go on")
            assert len(await stream(await engine.submit(talk, SHORT))) == 8

    run(main())


def test_full_is_refused_at_once_and_the_conversation_is_as_it_was() -> None:
    async def main() -> None:
        core = engine_core(wild_model(), slots=1, waiting=1)
        async with AsyncEngine(core) as engine:
            talks = [new_talk(engine, text) for text in ("a", "b", "c")]
            tickets = [await engine.submit(talk, LONG) for talk in talks[:2]]
            rows = list(talks[2].conversation.rows)
            with pytest.raises(EngineFullError, match="come back in") as refused:
                await engine.submit(talks[2], LONG)
            assert 0 < refused.value.retry_after_s <= 100 * 0.08
            assert talks[2].conversation.rows == rows
            await engine.cancel(tickets[0])
            await stream(await engine.submit(talks[2], SHORT), 1)

    run(main())


def test_replies_in_the_background_take_half_of_the_slots_and_nobodys_turn() -> None:
    later = ReplyParams(GREEDY, Limits(100, min_new_rows=200), background=True)

    async def main() -> None:
        core = engine_core(wild_model(), slots=2, waiting=2)
        async with AsyncEngine(core) as engine:
            talks = [new_talk(engine, text) for text in ("a", "b", "c", "d", "e")]
            behind = [await engine.submit(talk, later) for talk in talks[:3]]
            await stream(behind[0], 1)
            assert [request.background for request in core.scheduler.running] == [True]
            with pytest.raises(EngineFullError, match="come back in"):
                await engine.submit(talks[3], later)
            first = await engine.submit(talks[3], SHORT)
            second = await engine.submit(talks[4], SHORT)
            assert len(await stream(second)) == len(second.reply.rows)
            assert first.request.state is State.DONE
            assert [len(ticket.reply.rows) for ticket in behind[1:]] == [0, 0]
            await engine.cancel(behind[0])
            await stream(behind[1], 1)

    run(main())


def test_what_can_never_run_is_refused_and_harms_nobody() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            other = await engine.submit(new_talk(engine), LONG)
            too_long = new_talk(engine, "x" * 200)
            with pytest.raises(ContextLengthError, match="160"):
                await engine.submit(too_long, SHORT)
            unknown = new_talk(engine)
            unknown.conversation.add_speech("user", [3, 999])
            with pytest.raises(EngineInputError, match="999"):
                await engine.submit(unknown, SHORT)
            assert not unknown.conversation.reply_is_open
            await stream(other, 20)
            assert engine.failure is None

    run(main())


def test_stopping_ends_open_replies_by_name() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        engine = AsyncEngine(core)
        async with engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, LONG)
            await stream(ticket, 1)
        with pytest.raises(EngineStoppedError, match="not running"):
            await stream(ticket)
        for late in (engine.submit(talk, SHORT), engine.cancel(ticket), engine.close(talk)):
            with pytest.raises(EngineStoppedError):
                await late
        assert engine.failure is None
        engine.stop()

    run(main())


def test_an_engine_that_never_began_says_so() -> None:
    async def main() -> None:
        engine = AsyncEngine(engine_core(wild_model()))
        with pytest.raises(EngineStoppedError, match="never began"):
            await engine.submit(new_talk(engine), SHORT)

    run(main())


def test_a_step_that_fails_reaches_every_reply_and_the_supervisor() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            tickets = [await engine.submit(new_talk(engine, text), LONG) for text in "abc"]
            for ticket in tickets:
                await stream(ticket, 1)
            # Weights of another shape: the next step cannot be computed.
            core.model.audio_lm_head.weight.data = core.model.audio_lm_head.weight.data[:, :3]
            for ticket in tickets:
                with pytest.raises(EngineStoppedError, match="RuntimeError"):
                    await stream(ticket)
            assert isinstance(engine.failure, RuntimeError)
            with pytest.raises(EngineStoppedError, match="RuntimeError"):
                await engine.submit(new_talk(engine), SHORT)

    run(main())


def test_a_consumer_that_vanished_blocks_nobody() -> None:
    core = engine_core(wild_model(), slots=2)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, LONG)
            task = asyncio.create_task(stream(ticket))
            await stream(await engine.submit(new_talk(engine, "b"), SHORT), 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await stream(await engine.submit(new_talk(engine, "c"), SHORT))) == 8
            await engine.close(talk)
            assert ticket.reply.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
            assert not core.scheduler.replies_of(talk.sequence)

    run(main())


def test_a_loop_that_closed_stops_no_engine() -> None:
    core = engine_core(wild_model())
    engine = AsyncEngine(core)
    engine.start()
    held = list[ReplyStream]()

    async def leave() -> None:
        held.append(await engine.submit(new_talk(engine), LONG))

    async def stay() -> None:
        assert len(await stream(await engine.submit(new_talk(engine, "b"), SHORT))) == 8

    run(leave())
    run(stay())
    engine.stop()
    assert engine.failure is None
    assert len(held) == 1


def test_requests_from_many_tasks_at_once_all_come_through() -> None:
    core = engine_core(wild_model(), slots=4)

    async def one(engine: AsyncEngine, number: int) -> None:
        talk = new_talk(engine, "q" * number)
        ticket = await engine.submit(talk, SHORT)
        news = await stream(ticket)
        expected = reference(
            core.model, Task(talk.conversation.rows[: ticket.request.prompt_rows], SHORT)
        )
        assert [new.row for new in news][:-1] == expected.rows[:-1]
        await engine.close_reply(ticket)
        await engine.close(talk)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(1, 25)))
        require_idle(core)

    run(main())


class Counting(EngineCore):
    """Counts its steps."""

    steps = 0

    def step(self) -> list[Any]:
        """A step, counted."""
        self.steps += 1
        return super().step()


def test_an_idle_engine_sleeps() -> None:
    made = engine_core(wild_model())
    core = Counting(made.model, IDS, made.options)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            talk = new_talk(engine)
            ticket = await engine.submit(talk, SHORT)
            await stream(ticket)
            while core.has_work:  # an idle conversation catches up, one step each
                await engine.cancel(ticket)
            for _ in range(5):
                before = core.steps
                await engine.cancel(ticket)
                await engine.cancel(ticket)
                # A step for each time it was woken, none in between.
                assert core.steps <= before + 4
        assert core.step() == []

    run(main())
