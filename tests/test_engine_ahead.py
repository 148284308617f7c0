"""Rows read before any reply asks for them: the same replies, less left to read, nobody hurt."""

import asyncio
import itertools
import math
from random import Random

import pytest
from engine_rig import (
    EOSP,
    GREEDY,
    IDS,
    PAD,
    SOSP,
    Task,
    engine_core,
    random_rows,
    random_tasks,
    reference,
    require_idle,
    require_same,
    wild_model,
)

from mosstalk.conversation import Conversation, Row
from mosstalk.engine.async_engine import AsyncEngine, CachedConversation, Edit, ReplyStream
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import EngineInputError
from mosstalk.reply_options import Limits
from mosstalk.runtime.sharing import DeadlineLock

LONG = ReplyParams(GREEDY, Limits(30, min_new_rows=40))


def settle(core: EngineCore) -> None:
    """Step while there is anything to do."""
    while core.has_work:
        core.step()


def rewritten(core: EngineCore, sequence: Sequence, start: int, rows: list[Row]) -> None:
    sequence.truncate(start)
    sequence.rows += rows
    core.prefill_ahead(sequence)


def answered(core: EngineCore, sequence: Sequence, params: ReplyParams = LONG) -> None:
    """A reply, which equals the reference's to the same rows."""
    rows = list(sequence.rows)
    request = core.submit(sequence, params)
    core.run()
    require_same(request, reference(core.model, Task(rows, params)))


@pytest.mark.parametrize("deferral", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("step_rows", [3, 64])
def test_a_turn_read_and_repaired_while_it_came_is_answered_as_one_read_at_once(
    deferral: bool, share: bool, step_rows: int
) -> None:
    core = engine_core(
        wild_model(), deferral=deferral, share=share, step_rows=step_rows, block_rows=4
    )
    random = Random(1)
    sequence = core.open(random_rows(random, 9))
    for _ in range(8):
        start = random.randint(max(1, len(sequence.rows) - 4), len(sequence.rows))
        rewritten(core, sequence, start, [(PAD, random.randrange(EOSP)) for _ in range(5)])
        if random.random() < 0.8:
            settle(core)
            assert sequence.read == [len(sequence.rows)] * 3
    sequence.rows.append((SOSP, IDS.audio_pad))
    answered(core, sequence)
    core.close(sequence)
    require_idle(core)


def test_what_was_read_ahead_is_not_read_again() -> None:
    core = engine_core(wild_model())
    sequence = core.open(random_rows(Random(2), 40))
    core.prefill_ahead(sequence)
    settle(core)
    sequence.rows += [(3, IDS.audio_pad), (SOSP, IDS.audio_pad)]
    core.submit(sequence, LONG)
    (work,) = core.scheduler.plan()
    assert (work.start, work.count) == (40, 2)


def test_a_reply_can_follow_the_last_row_that_was_read_ahead() -> None:
    core = engine_core(wild_model(), block_rows=4)
    sequence = core.open([*random_rows(Random(3), 15), (SOSP, IDS.audio_pad)])
    core.prefill_ahead(sequence)
    settle(core)
    answered(core, sequence)


def test_replies_come_first_and_are_the_same_while_others_listen() -> None:
    core = engine_core(wild_model(), step_rows=8, blocks=200)
    tasks = random_tasks(5, 6)
    requests = [core.submit(core.open(task.rows), task.params) for task in tasks]
    random = Random(6)
    listening = [core.open(random_rows(random, 60)) for _ in range(3)]
    for sequence in listening:
        core.prefill_ahead(sequence)
    core.step()
    assert sum(sequence.read[Part.TRUNK] for sequence in listening) == 0
    settle(core)
    for task, request in zip(tasks, requests, strict=True):
        require_same(request, reference(core.model, task))
    assert all(sequence.unread == 0 for sequence in listening)
    for sequence in listening:
        answered(core, sequence)


def test_a_listener_for_whom_there_is_no_room_is_given_up_and_still_answered() -> None:
    core = engine_core(wild_model(), blocks=10, block_rows=8)
    busy = core.submit(core.open(random_rows(Random(7), 40)), LONG)
    core.step()
    sequence = core.open(random_rows(Random(8), 48))
    core.prefill_ahead(sequence)
    core.step()
    assert not core.scheduler.ahead
    assert sequence.read == [0, 0, 0]
    core.run()
    require_same(busy, reference(core.model, Task(busy.sequence.rows[:40], LONG)))
    answered(core, sequence)


def test_a_reply_takes_the_blocks_of_those_who_only_listen() -> None:
    core = engine_core(wild_model(), blocks=10, block_rows=8)
    listening = core.open(random_rows(Random(9), 60))
    core.prefill_ahead(listening)
    settle(core)
    core.prefill_ahead(listening)
    answered(core, core.open(random_rows(Random(10), 60)))
    answered(core, listening)


def test_rows_are_shared_only_after_a_draw_has_shown_them_to_be_sound() -> None:
    core = engine_core(wild_model(), block_rows=4)
    rows = random_rows(Random(11), 30)
    sequence = core.open(rows)
    core.prefill_ahead(sequence)
    settle(core)
    assert core.open(rows).match_prefix() == 0
    core.submit(sequence, LONG)
    core.step()
    assert core.open(rows).match_prefix() == 28


def test_an_unknown_id_is_refused_before_it_is_read() -> None:
    core = engine_core(wild_model())
    with pytest.raises(EngineInputError, match="999"):
        core.prefill_ahead(core.open([(3, 4), (999, 4)]))
    assert not core.has_work


def cached_of(engine: AsyncEngine) -> CachedConversation:
    return engine.open(Conversation(IDS, lambda text: [ord(letter) % 20 for letter in text]))


@pytest.mark.parametrize("deadline_lock", [None, DeadlineLock()])
def test_edits_through_the_engine_are_answered_as_fresh_prompts(
    deadline_lock: DeadlineLock | None,
) -> None:
    core = engine_core(wild_model())
    random = Random(12)
    first, second = random_rows(random, 20), random_rows(random, 12)

    async def main() -> None:
        async with AsyncEngine(core, deadline_lock) as engine:
            cached = cached_of(engine)
            await engine.rewrite(cached, Edit(0, tuple(first)))
            await engine.rewrite(cached, Edit(10, tuple(second)))
            last = Edit(22, ((7, IDS.audio_pad),))
            stream = await engine.submit(cached, LONG, edit=last)
            rows = [new.row async for new in stream]
            # The engine's thread adds the reply's rows while it is made.
            said = cached.conversation.rows
            prompt = said[: -len(rows)]
            assert said[len(prompt) :] == rows
            assert prompt[:23] == first[:10] + second + list(last.rows)
            expected = reference(core.model, Task(prompt, LONG))
            assert rows[:-1] == expected.rows[:-1]
            await engine.close_reply(stream)
            await engine.close(cached)
            assert not engine.ended.done()
        assert engine.ended.done()
        require_idle(core)

    asyncio.run(asyncio.wait_for(main(), 30))


def entering(gate: DeadlineLock, order: list[float], due_s: float) -> "asyncio.Task[None]":
    """Another thread that waits for its turn with work due then, and notes that it had it."""

    def enter() -> None:
        with gate.turn(lambda: due_s):
            order.append(due_s)

    return asyncio.create_task(asyncio.to_thread(enter))


def test_the_most_urgent_of_those_who_wait_goes_through_the_turnstile_first() -> None:
    gate, order = DeadlineLock(), list[float]()

    async def main() -> None:
        assert gate.enter(lambda: 0.0)
        assert not gate.enter(lambda: -1.0, timeout_s=0.001)  # however urgent: somebody is inside
        waiting = [entering(gate, order, due_s) for due_s in (3.0, 1.0, 2.0)]
        while gate.queue < len(waiting):
            await asyncio.sleep(0)
        gate.leave()
        await asyncio.gather(*waiting)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == [1.0, 2.0, 3.0]


def test_who_comes_back_keeps_out_whose_work_is_due_later() -> None:
    gate, order = DeadlineLock(), list[float]()

    async def main() -> None:
        assert gate.enter(lambda: 2.0)
        gate.expect(2.0)
        waiting = [entering(gate, order, due_s) for due_s in (3.0, 1.0)]
        while gate.queue < len(waiting):
            await asyncio.sleep(0)
        gate.leave()
        await waiting[1]
        assert order == [1.0]
        assert gate.queue == 1, "due at 3.0, and still kept out"
        assert gate.enter(lambda: 2.0, timeout_s=0.0), "who is expected comes in at once"
        gate.expect(math.inf)
        gate.leave()
        await waiting[0]

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == [1.0, 3.0]


def test_who_waits_is_as_urgent_as_what_has_come_meanwhile() -> None:
    gate, order, due_s = DeadlineLock(), list[str](), {"hops": 9.0, "steps": 5.0}

    def one(name: str) -> None:
        with gate.turn(lambda: due_s[name]):
            order.append(name)

    async def main() -> None:
        assert gate.enter(lambda: 0.0)
        waiting = [asyncio.create_task(asyncio.to_thread(one, name)) for name in due_s]
        while gate.queue < len(waiting):
            await asyncio.sleep(0)
        due_s["hops"] = 1.0  # a first hop has joined those that could wait
        gate.leave()
        await asyncio.gather(*waiting)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == ["hops", "steps"]


def test_who_comes_back_with_work_that_can_wait_lets_others_in() -> None:
    gate, order = DeadlineLock(), list[float]()

    async def main() -> None:
        assert gate.enter(lambda: 1.0)
        gate.expect(1.0)
        waiting = entering(gate, order, 2.0)
        while not gate.queue:
            await asyncio.sleep(0)
        gate.leave()
        assert not order, "due at 2.0, and somebody is expected with work due at 1.0"
        assert gate.enter(lambda: 3.0)  # that work has been cancelled meanwhile
        order.append(3.0)
        gate.leave()
        await waiting

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == [2.0, 3.0]


def test_who_asks_for_turns_in_a_row_has_them_and_then_waits_like_others() -> None:
    gate, order = DeadlineLock(), list[float]()

    async def main() -> None:
        assert gate.enter(lambda: 5.0, turns=2)
        gate.expect(5.0, turns=2)
        waiting = [entering(gate, order, due_s) for due_s in (1.0, 2.0)]
        while gate.queue < len(waiting):
            await asyncio.sleep(0)
        gate.leave()
        assert gate.queue == len(waiting), "all are kept out, however urgent"
        assert gate.enter(lambda: 5.0, timeout_s=0.0, turns=2)
        gate.expect(5.0, turns=2)
        gate.leave()  # it has had them, and now the others are more urgent
        await waiting[0]
        assert order == [1.0]
        assert gate.queue == 1, "after somebody else's turn the same holds again"
        assert gate.enter(lambda: 5.0, timeout_s=0.0, turns=2)
        gate.expect(math.inf)
        gate.leave()
        await waiting[1]

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == [1.0, 2.0]


def test_replies_that_are_due_soon_have_steps_in_a_row_however_urgent_others_are() -> None:
    core, gate, seen = engine_core(wild_model()), DeadlineLock(), list[int]()
    params = ReplyParams(GREEDY, Limits(30, min_new_rows=40), first_due_s=0.0)

    async def main() -> None:
        async with AsyncEngine(core, gate, steps_in_a_row=3) as engine:
            edit = Edit(0, ((7, IDS.audio_pad),))
            stream = await engine.submit(cached_of(engine), params, edit=edit)
            rows = stream.request.reply.rows

            def other() -> None:
                while len(rows) < LONG.limits.max_new_rows:
                    with gate.turn(lambda: -1.0):
                        seen.append(len(rows))

            await asyncio.gather(asyncio.to_thread(other), drained(stream))

    asyncio.run(asyncio.wait_for(main(), 30))
    under_way = [count for count in seen if 0 < count < LONG.limits.max_new_rows]
    between = [later - earlier for earlier, later in itertools.pairwise(under_way)]
    assert len(between) > 1
    assert min(between) >= 3, "steps between two of its turns"


async def drained(stream: ReplyStream) -> None:
    """Read a reply to its end."""
    async for _ in stream:
        pass
