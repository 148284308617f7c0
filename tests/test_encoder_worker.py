"""Hearing for many sessions: each stream's codes are the offline ones, whoever shares its run."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import session_rig
import torch
from conftest import QUESTION, run
from live_rig import CODE, LIVE, quiet, rising, speech

from mosstalk.errors import CodecFullError
from mosstalk.runtime.busy import BusyPart, taken
from mosstalk.session.commands import Close, Commit, CreateText, Durations, SessionSettings
from mosstalk.session.events import (
    Closed,
    ItemDone,
    SessionOpened,
    SpeechStarted,
    TurnCommitted,
)
from mosstalk.session.listener import Listener, LiveTurn, TurnUpdate
from mosstalk.session.workers import EncoderWorker

TOKENIZER = LIVE["goldens"].tokenizer


@pytest.fixture
def encoder_worker() -> Iterator[EncoderWorker]:
    """Hears codes alone."""
    encoder_worker = EncoderWorker(TOKENIZER, None)
    yield encoder_worker
    encoder_worker.stop()


def test_turns_that_end_and_turns_that_go_on_share_a_run(encoder_worker: EncoderWorker) -> None:
    clips = [kind(9 * CODE + 77 * n).numpy() for n, kind in enumerate((speech, rising, quiet))]
    states = [encoder_worker.open() for _ in clips]

    async def hear() -> None:
        firsts = [
            encoder_worker.encode(s, c[: 4 * CODE]) for s, c in zip(states, clips, strict=True)
        ]
        await asyncio.gather(*firsts)
        rests = [
            encoder_worker.encode(state, clip[4 * CODE :], last=place != 1)
            for place, (state, clip) in enumerate(zip(states, clips, strict=True))
        ]
        await asyncio.gather(*rests)
        assert [state.finished for state in states] == [True, False, True]
        await encoder_worker.encode(states[1], np.zeros(0, np.float32), last=True)

    asyncio.run(hear())
    assert [state.codes for state in states] == [
        TOKENIZER.encode(torch.from_numpy(c)) for c in clips
    ]


def test_no_sound_is_no_work(encoder_worker: EncoderWorker) -> None:
    state = encoder_worker.open()

    asyncio.run(encoder_worker.encode(state, np.zeros(0, np.float32)))

    assert (state.samples, state.blocks, state.finished) == (0, 0, False)


def test_a_whole_turn_has_the_offline_codes(encoder_worker: EncoderWorker) -> None:
    clip = rising(11 * CODE + 5)

    assert asyncio.run(encoder_worker.codes_of(clip.numpy())) == TOKENIZER.encode(clip)


@pytest.fixture
def narrow() -> Iterator[EncoderWorker]:
    """Keeps one segment: a second turn finds no memory until the first has ended."""
    encoder_worker = EncoderWorker(TOKENIZER, None, limit_s=1.0)
    yield encoder_worker
    encoder_worker.stop()


def test_who_finds_no_memory_waits_for_another_turn_to_end(narrow: EncoderWorker) -> None:
    clips = [kind(9 * CODE).numpy() for kind in (speech, rising)]
    first, second = (narrow.open() for _ in clips)

    async def hear() -> None:
        await narrow.encode(first, clips[0][: 4 * CODE])
        waits = asyncio.create_task(narrow.encode(second, clips[1], last=True))
        # What is asked after it is done before it, and not refused with it.
        await narrow.encode(first, clips[0][4 * CODE : 6 * CODE])
        assert second.samples == 0
        await narrow.encode(first, clips[0][6 * CODE :], last=True)
        await waits

    asyncio.run(hear())
    assert [state.codes for state in (first, second)] == [
        TOKENIZER.encode(torch.from_numpy(c)) for c in clips
    ]


def test_the_wait_has_an_end_and_a_typed_refusal(
    narrow: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mosstalk.session.workers._MOST_ENCODE_WAIT_S", 0.05)
    first, second = narrow.open(), narrow.open()

    async def hear() -> None:
        await narrow.encode(first, speech(4 * CODE).numpy())
        with pytest.raises(CodecFullError, match="limited to 1 s"):
            await narrow.encode(second, speech(4 * CODE).numpy())
        await narrow.encode(first, speech(2 * CODE).numpy())

    asyncio.run(hear())
    assert (first.samples, second.samples) == (6 * CODE, 0)


def test_of_many_only_those_are_refused_for_whom_there_is_no_memory(narrow: EncoderWorker) -> None:
    states, clip = [narrow.open() for _ in range(7)], speech(4 * CODE).numpy()

    async def hear() -> list[BaseException | None]:
        asked = (narrow.encode_ahead(state, clip) for state in states)
        return await asyncio.gather(*asked, return_exceptions=True)

    refused = [isinstance(each, CodecFullError) for each in asyncio.run(hear())]
    assert refused == [state.samples == 0 for state in states]
    assert refused.count(False) == 1


def by_hand(worker: EncoderWorker) -> Listener:
    return Listener(worker, SessionSettings(input_rate=16_000, turn_detection=None))


def test_turns_by_hand_follow_one_another_at_a_rate_that_is_resampled(
    encoder_worker: EncoderWorker,
) -> None:
    listener = Listener(encoder_worker, SessionSettings(input_rate=24_000, turn_detection=None))
    places, sound = list[tuple[int, int]](), np.zeros(12_000, np.float32)

    async def hear() -> None:
        for number in range(4):
            async for _ in listener.hear(sound, 24_000, lambda: False):
                pass
            if number == 2:  # what is forgotten was heard all the same
                listener.clear()
            else:
                turn = await listener.commit()
                places.append((turn.start, turn.end))

    asyncio.run(hear())
    assert places == [(0, 8_000), (8_000, 16_000), (24_000, 32_000)]
    assert listener.clock == 32_000


def hear_all(listener: Listener, clip: torch.Tensor) -> AsyncIterator[TurnUpdate]:
    return listener.hear(clip.numpy(), 16_000, lambda: False)


async def news_of(listener: Listener, clip: torch.Tensor) -> list[TurnUpdate]:
    """What is told of a clip, once it is encoded if it is going to be."""
    news = [each async for each in hear_all(listener, clip)]
    if listener.turn and listener.turn.encoding:
        await asyncio.wait([listener.turn.encoding])
    return news


def test_sound_that_finds_no_memory_waits_in_its_turn_while_more_is_heard(
    narrow: EncoderWorker,
) -> None:
    other, clip, listener = narrow.open(), rising(17 * CODE), by_hand(narrow)

    async def hear() -> LiveTurn:
        await narrow.encode(other, speech(4 * CODE).numpy())
        assert await news_of(listener, clip[: 12 * CODE]) == []
        assert listener.turn
        assert (listener.turn.samples, listener.turn.codes.samples) == (12 * CODE, 0)
        await narrow.encode(other, speech(CODE).numpy(), last=True)
        await news_of(listener, clip[12 * CODE :])
        assert listener.turn.codes.samples == 17 * CODE
        return await listener.commit()

    assert asyncio.run(hear()).codes.codes == TOKENIZER.encode(clip)


def test_a_turn_that_finds_no_memory_at_its_end_has_the_offline_codes_nonetheless(
    narrow: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mosstalk.session.workers._MOST_ENCODE_WAIT_S", 0.05)
    other, listener, clips = narrow.open(), by_hand(narrow), (speech(9 * CODE), rising(9 * CODE))

    async def hear() -> LiveTurn:
        await narrow.encode(other, clips[0][: 4 * CODE].numpy())
        await news_of(listener, clips[1])
        committed = await listener.commit()
        await narrow.encode(other, clips[0][4 * CODE :].numpy(), last=True)
        return committed

    found = asyncio.run(hear()).codes, other
    assert [each.codes for each in found] == [TOKENIZER.encode(clip) for clip in reversed(clips)]
    assert all(each.finished for each in found)


@contextmanager
def held(worker: EncoderWorker) -> Iterator[None]:
    """Its thread does nothing within."""
    release = threading.Event()
    worker._codes.post(release.wait)
    try:
        yield
    finally:
        release.set()


def test_a_turn_that_ends_while_its_sound_waits_is_one_run(encoder_worker: EncoderWorker) -> None:
    told = list[BaseException | None]()
    settings = SessionSettings(input_rate=16_000, turn_detection=None)
    listener, clip = Listener(encoder_worker, settings, told.append), rising(12 * CODE)

    async def hear() -> LiveTurn:
        await news_of(listener, clip[: 5 * CODE])
        assert told == [None]
        with held(encoder_worker):
            async for _ in hear_all(listener, clip[5 * CODE :]):
                pass
            assert listener.turn
            assert listener.turn.encoding
            committing = asyncio.create_task(listener.commit())
            await asyncio.wait([listener.turn.encoding])
            assert listener.turn.encoding.cancelled()
        return await committing

    taken()
    assert asyncio.run(hear()).codes.codes == TOKENIZER.encode(clip)
    assert told == [None]
    spent = taken()
    assert sum(spent[part].runs for part in spent if part != BusyPart.CAPTURE) == 2


def test_a_turn_that_ends_while_its_sound_is_encoded_has_all_of_it(
    encoder_worker: EncoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, clip = by_hand(encoder_worker), rising(12 * CODE)
    begun, release = threading.Event(), threading.Event()
    push_many = encoder_worker._tokenizer.push_many

    def slowly(*given: Any) -> Any:
        begun.set()
        assert release.wait(30)
        return push_many(*given)

    monkeypatch.setattr(encoder_worker._tokenizer, "push_many", slowly)

    async def hear() -> LiveTurn:
        async for _ in hear_all(listener, clip):
            pass
        await asyncio.to_thread(begun.wait)
        committing = asyncio.create_task(listener.commit())
        await asyncio.sleep(0)
        release.set()
        return await committing

    assert asyncio.run(hear()).codes.codes == TOKENIZER.encode(clip)


def test_who_sends_faster_than_codes_are_made_is_heard_no_faster(
    encoder_worker: EncoderWorker,
) -> None:
    listener, clip = by_hand(encoder_worker), rising(50 * CODE)  # 4 s

    async def hear() -> LiveTurn:
        with held(encoder_worker):
            for piece in clip[: 25 * CODE].split(5 * CODE):
                async for _ in hear_all(listener, piece):
                    pass
            beyond_2_s = asyncio.ensure_future(
                anext(hear_all(listener, clip[25 * CODE : 30 * CODE]), None)
            )
            await asyncio.wait([beyond_2_s], timeout=0.2)
            assert not beyond_2_s.done()
        await beyond_2_s
        await news_of(listener, clip[30 * CODE :])
        return await listener.commit()

    assert asyncio.run(hear()).codes.codes == TOKENIZER.encode(clip)


def test_sound_of_a_turn_that_is_cleared_is_not_encoded(encoder_worker: EncoderWorker) -> None:
    listener, clip = by_hand(encoder_worker), rising(6 * CODE)

    async def hear() -> LiveTurn:
        with held(encoder_worker):
            async for _ in hear_all(listener, speech(9 * CODE)):
                pass
            assert listener.turn
            encoding = listener.turn.encoding
            listener.clear()
            assert encoding
            assert encoding.cancelled()
        await news_of(listener, clip)
        return await listener.commit()

    assert asyncio.run(hear()).codes.codes == TOKENIZER.encode(clip)


@pytest.mark.parametrize("hands_free", [False, True])
def test_a_session_goes_on_while_its_sound_waits_to_be_encoded(*, hands_free: bool) -> None:
    async def main() -> None:
        async with (
            session_rig.host(hands_free=hands_free) as host,
            await host.open(
                session_rig.HANDS_FREE if hands_free else session_rig.BY_HAND
            ) as session,
        ):
            client = session_rig.Client(session)
            with held(host.encoder_worker):
                client.say(session_rig.speech(QUESTION)[: 2 * session_rig.RATE], 320)
                if hands_free:
                    await client.wait(SpeechStarted)
                client.do(CreateText("user", "Hello."))
                await client.wait(ItemDone)
            if not hands_free:
                client.do(Commit())
                await client.wait(TurnCommitted)

    run(main())


def test_a_session_that_is_sent_sound_is_not_idle_however_much_comes_at_once() -> None:
    settings = replace(session_rig.BY_HAND, durations=Durations(idle_s=2.0))

    async def main() -> None:
        async with session_rig.host() as host, await host.open(settings) as session:
            client = session_rig.Client(session)
            client.say(session_rig.silence(5.0), 80_000)
            client.do(CreateText("user", "Hello."))
            await client.wait(ItemDone)

    run(main())


def test_whoever_closes_does_not_wait_for_what_was_pushed_to_be_heard() -> None:
    async def main() -> None:
        async with session_rig.host() as host:
            session = await host.open(session_rig.BY_HAND)
            client = session_rig.Client(session)
            with held(host.encoder_worker):
                client.say(session_rig.silence(30.0), 480_000)
                opened = await client.wait(SessionOpened)
                while session.clock == opened.clock:
                    await asyncio.sleep(0)
                client.do(Close())
            async for event in session:
                if isinstance(event, Closed):
                    assert event.clock < 4 * session_rig.RATE
                    break

    run(main())


def test_warming_asks_a_cpu_for_nothing(encoder_worker: EncoderWorker) -> None:
    asyncio.run(encoder_worker.warm(64))

    assert encoder_worker._tokenizer.pages.count == 0
