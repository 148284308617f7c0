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
from mosstalk.engine.async_engine import AsyncEngine, CachedConversation, NewRow, ReplyStream
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import State
from mosstalk.errors import (
    ContextLengthError,
    EngineFullError,
    EngineInputError,
    EngineStoppedError,
)
from mosstalk.reply_options import Limits, Script

SHORT = ReplyParams(GREEDY, Limits(20), Script.parse("speech:6"))
LONG = ReplyParams(GREEDY, Limits(100, min_new_rows=200))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; what hangs fails soon."""

    async def soon() -> None:
        await asyncio.wait_for(main, 30)

    asyncio.run(soon())


def new_conversation(engine: AsyncEngine, text: str = "hi") -> CachedConversation:
    conversation = Conversation(IDS, lambda text: [ord(letter) % 20 for letter in text])
    conversation.add_text("user", text)
    return engine.open(conversation)


async def news_of(stream: ReplyStream, most: int = 1000) -> list[NewRow]:
    """The first rows of a reply as they come."""
    rows = []
    async for new in stream:
        rows.append(new)
        if len(rows) == most:
            break
    return rows


def test_a_stream_gives_every_row_in_order_and_then_the_reply_is_whole() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, SHORT)
            news = await news_of(stream)
            expected = reference(
                core.model, Task(cached.conversation.rows[: stream.request.prompt_rows], SHORT)
            )
            assert [new.step for new in news] == list(range(1, 9))
            assert [new.row for new in news][:-1] == expected.rows[:-1]
            assert [new.mode for new in news] == stream.reply.modes == expected.modes
            assert stream.reply.finish_reason is FinishReason.STOP
            assert await news_of(stream) == []  # whoever iterates again does not wait for ever
            await engine.close_reply(stream, 160.0)
            await engine.truncate(cached, 80.0)
            assert [row for row in cached.conversation.rows if row[0] == PAD] == [
                expected.rows[0], (PAD, IDS.eosp)
            ]  # fmt: skip
            await engine.close(cached)
        assert engine.failure is None
        require_idle(core)

    run(main())


def test_rows_come_while_others_are_made() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            slow = await engine.submit(new_conversation(engine), LONG)
            await news_of(slow, 3)
            assert slow.reply.finish_reason is None
            quick = await engine.submit(new_conversation(engine, "you"), SHORT)
            assert len(await news_of(quick)) == 8

    run(main())


def test_whole_rows_are_whole_in_the_stream() -> None:
    params = ReplyParams(
        GREEDY, Limits(30), Script.parse("text:6,speech:2,text:5"), whole_rows=True
    )

    async def main() -> None:
        core = engine_core(wild_model())
        async with AsyncEngine(core) as engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, params, speech=False)
            rows = [new.row for new in await news_of(stream)]
        expected = reference(core.model, Task(cached.sequence.rows[: -len(rows)], params))
        assert rows == expected.rows
        assert [audio for _, audio in rows] != [SILENT] * len(rows)

    run(main())


def test_cancelling_midway_ends_the_stream_and_the_turn_can_be_closed_at_once() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, LONG)
            first = await news_of(stream, 2)
            await engine.cancel(stream)
            await engine.close_reply(stream, 80.0)
            rest = await news_of(stream)
            assert [new.step for new in first + rest] == list(range(1, len(stream.reply.rows) + 1))
            assert stream.reply.finish_reason is FinishReason.CANCELLED
            await engine.cancel(stream)
            cached.conversation.add_text("user", "go on")
            assert len(await news_of(await engine.submit(cached, SHORT))) == 8

    run(main())


def test_full_is_refused_at_once_and_the_conversation_is_as_it_was() -> None:
    async def main() -> None:
        core = engine_core(wild_model(), slots=1, waiting=1)
        async with AsyncEngine(core) as engine:
            several = [new_conversation(engine, text) for text in ("a", "b", "c")]
            streams = [await engine.submit(cached, LONG) for cached in several[:2]]
            rows = list(several[2].conversation.rows)
            with pytest.raises(EngineFullError, match="come back in") as refused:
                await engine.submit(several[2], LONG)
            assert 0 < refused.value.retry_after_s <= 100 * 0.08
            assert several[2].conversation.rows == rows
            await engine.cancel(streams[0])
            await news_of(await engine.submit(several[2], SHORT), 1)

    run(main())


def test_replies_in_the_background_take_half_of_the_slots_and_nobodys_turn() -> None:
    later = ReplyParams(GREEDY, Limits(100, min_new_rows=200), background=True)

    async def main() -> None:
        core = engine_core(wild_model(), slots=2, waiting=2)
        async with AsyncEngine(core) as engine:
            several = [new_conversation(engine, text) for text in ("a", "b", "c", "d", "e")]
            behind = [await engine.submit(cached, later) for cached in several[:3]]
            await news_of(behind[0], 1)
            assert [request.background for request in core.scheduler.running] == [True]
            with pytest.raises(EngineFullError, match="come back in"):
                await engine.submit(several[3], later)
            first = await engine.submit(several[3], SHORT)
            second = await engine.submit(several[4], SHORT)
            assert len(await news_of(second)) == len(second.reply.rows)
            assert first.request.state is State.DONE
            assert [len(stream.reply.rows) for stream in behind[1:]] == [0, 0]
            await engine.cancel(behind[0])
            await news_of(behind[1], 1)

    run(main())


def test_what_can_never_run_is_refused_and_harms_nobody() -> None:
    async def main() -> None:
        async with AsyncEngine(engine_core(wild_model())) as engine:
            other = await engine.submit(new_conversation(engine), LONG)
            too_long = new_conversation(engine, "x" * 200)
            with pytest.raises(ContextLengthError, match="160"):
                await engine.submit(too_long, SHORT)
            unknown = new_conversation(engine)
            unknown.conversation.add_speech("user", [3, 999])
            with pytest.raises(EngineInputError, match="999"):
                await engine.submit(unknown, SHORT)
            assert not unknown.conversation.reply_is_open
            await news_of(other, 20)
            assert engine.failure is None

    run(main())


def test_stopping_ends_open_replies_by_name() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        engine = AsyncEngine(core)
        async with engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, LONG)
            await news_of(stream, 1)
        with pytest.raises(EngineStoppedError, match="not running"):
            await news_of(stream)
        for late in (engine.submit(cached, SHORT), engine.cancel(stream), engine.close(cached)):
            with pytest.raises(EngineStoppedError):
                await late
        assert engine.failure is None
        engine.stop()

    run(main())


def test_an_engine_that_never_began_says_so() -> None:
    async def main() -> None:
        engine = AsyncEngine(engine_core(wild_model()))
        with pytest.raises(EngineStoppedError, match="never began"):
            await engine.submit(new_conversation(engine), SHORT)

    run(main())


def test_a_step_that_fails_reaches_every_reply_and_the_supervisor() -> None:
    core = engine_core(wild_model())

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            streams = [await engine.submit(new_conversation(engine, text), LONG) for text in "abc"]
            for stream in streams:
                await news_of(stream, 1)
            # Weights of another shape: the next step cannot be computed.
            core.model.audio_lm_head.weight.data = core.model.audio_lm_head.weight.data[:, :3]
            for stream in streams:
                with pytest.raises(EngineStoppedError, match="RuntimeError"):
                    await news_of(stream)
            assert isinstance(engine.failure, RuntimeError)
            with pytest.raises(EngineStoppedError, match="RuntimeError"):
                await engine.submit(new_conversation(engine), SHORT)

    run(main())


def test_a_consumer_that_vanished_blocks_nobody() -> None:
    core = engine_core(wild_model(), slots=2)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, LONG)
            task = asyncio.create_task(news_of(stream))
            await news_of(await engine.submit(new_conversation(engine, "b"), SHORT), 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (
                len(await news_of(await engine.submit(new_conversation(engine, "c"), SHORT))) == 8
            )
            await engine.close(cached)
            assert stream.reply.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
            assert not core.scheduler.replies_of(cached.sequence)

    run(main())


def test_a_loop_that_closed_stops_no_engine() -> None:
    core = engine_core(wild_model())
    engine = AsyncEngine(core)
    engine.start()
    held = list[ReplyStream]()

    async def leave() -> None:
        held.append(await engine.submit(new_conversation(engine), LONG))

    async def stay() -> None:
        assert len(await news_of(await engine.submit(new_conversation(engine, "b"), SHORT))) == 8

    run(leave())
    run(stay())
    engine.stop()
    assert engine.failure is None
    assert len(held) == 1


def test_requests_from_many_tasks_at_once_all_come_through() -> None:
    core = engine_core(wild_model(), slots=4)

    async def one(engine: AsyncEngine, number: int) -> None:
        cached = new_conversation(engine, "q" * number)
        stream = await engine.submit(cached, SHORT)
        news = await news_of(stream)
        expected = reference(
            core.model, Task(cached.conversation.rows[: stream.request.prompt_rows], SHORT)
        )
        assert [new.row for new in news][:-1] == expected.rows[:-1]
        await engine.close_reply(stream)
        await engine.close(cached)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(1, 25)))
        require_idle(core)

    run(main())


class Counting(EngineCore):
    """Counts its steps."""

    steps = 0

    def step(self, waited_s: float = 0.0) -> list[Any]:
        """A step, counted."""
        self.steps += 1
        return super().step(waited_s)


def test_an_idle_engine_sleeps() -> None:
    made = engine_core(wild_model())
    core = Counting(made.model, IDS, made.options)

    async def main() -> None:
        async with AsyncEngine(core) as engine:
            cached = new_conversation(engine)
            stream = await engine.submit(cached, SHORT)
            await news_of(stream)
            while core.has_work:  # an idle conversation catches up, one step each
                await engine.cancel(stream)
            for _ in range(5):
                before = core.steps
                await engine.cancel(stream)
                await engine.cancel(stream)
                # A step for each time it was woken, none in between.
                assert core.steps <= before + 4
        assert core.step() == []

    run(main())
