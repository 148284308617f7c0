"""Speech is found in a process of its own as it is here, and the host outlives that process."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import QUESTION, run
from session_rig import HANDS_FREE, RATE, Client, detector, pocket, silence, speech

from mosstalk.audio.sound import SOON, Resampler, resample
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import EngineStoppedError
from mosstalk.session.events import (
    Closed,
    CloseReason,
    ErrorCode,
    ErrorRaised,
    ResponseDone,
    SpeechStarted,
    SpeechStopped,
)
from mosstalk.session.host import Host, HostOptions
from mosstalk.vad.ears import EarProcess, EarStreams, EarThread, HearRequest, JudgedFrames

SOUND = np.concatenate([silence(0.3), speech(QUESTION), silence(1.0)])
PIECE = 320


def asked(number: int, start: int, *, gated: bool = True) -> HearRequest:
    """What a stream hears from a piece of SOUND on; the assistant says the same 0.2 s before."""
    changes = [("played", (SOUND[3200:], 0))] if start == 0 and gated else []
    return HearRequest(number, SOUND[start : start + PIECE], INPUT_RATE, changes, start == 0, gated)


def hear(
    ears: EarStreams | EarProcess, asked: Sequence[HearRequest], closed: Sequence[int] = ()
) -> Sequence[JudgedFrames | Exception]:
    """What ears of either kind answer."""
    if isinstance(ears, EarStreams):
        return ears.hear(asked, closed)
    return asyncio.run(ears.hear(asked, closed))


def whole(
    ears: EarStreams | EarProcess, numbers: Sequence[int]
) -> list[list[tuple[int, list[float], int]]]:
    """All that is found in SOUND for streams of which every other one is gated."""
    found = list[list[tuple[int, list[float], int]]]()
    for start in range(0, len(SOUND), PIECE):
        requests = [asked(number, start, gated=number % 2 == 0) for number in numbers]
        heard = hear(ears, requests)
        assert all(isinstance(each, JudgedFrames) for each in heard)
        found.append(
            [
                (each.frames.start_samples, each.frames.speech.tolist(), each.held)
                for each in heard
                if isinstance(each, JudgedFrames)
            ]
        )
    return found


@pytest.fixture(scope="module")
def apart() -> Iterator[EarProcess]:
    """A process that is there, for tests that leave it alive."""
    ears = EarProcess(detector().name)
    yield ears
    ears.stop()


def test_a_process_apart_hears_what_this_one_does(apart: EarProcess) -> None:
    here = whole(EarStreams(detector()), (0, 1, 2))
    assert whole(apart, (0, 1, 2)) == here
    gated, bare, _ = (
        [value for _, values, _ in stream for value in values] for stream in zip(*here, strict=True)
    )
    assert max(bare) > 0.9
    assert sum(value > 0.5 for value in gated) < sum(value > 0.5 for value in bare) / 2


def test_sound_of_another_rate_is_heard_as_if_it_had_come_at_16_khz(apart: EarProcess) -> None:
    sound, resampler = resample(SOUND, INPUT_RATE, 24_000), Resampler(24_000, SOON)
    for start in range(0, len(sound), 480):
        piece = sound[start : start + 480]
        at_16 = HearRequest(20, resampler.push(piece), INPUT_RATE, [], start == 0, False)
        at_24 = HearRequest(21, piece, 24_000, [], start == 0, False)
        first, second = hear(apart, [at_16, at_24])
        assert isinstance(first, JudgedFrames)
        assert isinstance(second, JudgedFrames)
        assert first.frames.start_samples == second.frames.start_samples
        assert np.array_equal(first.frames.speech, second.frames.speech)


def test_a_process_is_asked_every_10_ms_at_most_unless_soon_and_a_thread_at_once() -> None:
    async def spacings(host: Host, *, soon: bool = False) -> list[float]:
        """Seconds between runs, of one stream that never waits."""
        worker, begun = host.encoder_worker, list[float]()
        (ears,) = worker.ears
        assert isinstance(ears, EarThread | EarProcess)
        asking = ears._calls if isinstance(ears, EarThread) else ears
        ear = worker.open_ear(gated=False)
        for start in range(0, 20 * PIECE, PIECE):
            await worker.detect(ear, SOUND[start : start + PIECE], INPUT_RATE, [], soon=soon)
            begun.append(asking._begun_s)  # by its own clock: a busy machine may come here later
        worker.close_ear(ear)
        return np.diff(begun).tolist()

    async def main() -> None:
        async with Host(pocket(), HostOptions(4), detector=detector()) as here:
            assert min(await spacings(here)) < 0.009
        options = HostOptions(4, ear_processes=1)
        async with Host(pocket(), options, detector=detector()) as host:
            assert min(await spacings(host)) > 0.00999
            assert min(await spacings(host, soon=True)) < 0.009

    run(main())


def test_sound_of_many_streams_is_heard_together_and_that_of_one_who_has_gone_is_not() -> None:
    async def main() -> None:
        ears, sizes = EarProcess(detector().name), list[int]()
        try:
            hear_all = ears.hear

            async def counted(*given: Any) -> Any:
                sizes.append(len(given[0]))
                return await hear_all(*given)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(ears, "hear", counted)
                await ears.put(asked(0, 0))
                waiting = [ears.put(asked(number, 0)) for number in range(1, 9)]
                waiting[0].cancel()
                ears.forget(1)
                found = await asyncio.gather(*waiting[1:])
                assert sizes == [1, 7]
                assert all(isinstance(each, JudgedFrames) for each in found)
                with pytest.raises(EngineStoppedError):
                    await ears.put(asked(1, PIECE))
        finally:
            ears.stop()
        with pytest.raises(EngineStoppedError):
            ears.put(asked(0, PIECE))

    run(main())


def test_who_waits_when_the_ears_are_stopped_is_told() -> None:
    async def main() -> None:
        ears = EarProcess(detector().name)
        waiting = [ears.put(asked(number, 0)) for number in range(3)]
        await asyncio.sleep(0)  # its run begins
        later = ears.put(asked(3, 0))
        await asyncio.to_thread(ears.stop)
        found = await asyncio.gather(*waiting, later, return_exceptions=True)
        assert all(isinstance(each, JudgedFrames | EngineStoppedError) for each in found)
        assert isinstance(found[-1], EngineStoppedError)
        assert ears._link.fileno() == -1

    run(main())


def test_what_is_closed_is_forgotten_and_a_number_that_nobody_knows_is_refused(
    apart: EarProcess,
) -> None:
    for ears in (EarStreams(detector()), apart):
        first, again = asked(7, 0), asked(7, PIECE)
        assert isinstance(hear(ears, [first])[0], JudgedFrames)
        assert isinstance(hear(ears, [again])[0], JudgedFrames)
        assert isinstance(hear(ears, [again], [7])[0], EngineStoppedError)


def test_when_the_process_dies_its_streams_are_lost_and_the_next_ones_heard() -> None:
    ears = EarProcess(detector().name)
    try:
        assert isinstance(hear(ears, [asked(0, 0)])[0], JudgedFrames)
        kill(ears)
        lost = hear(ears, [asked(0, PIECE), asked(1, 0)])
        assert [type(each) for each in lost] == [EngineStoppedError, EngineStoppedError]
        heard = hear(ears, [asked(0, PIECE), asked(2, 0)])
        assert [type(each) for each in heard] == [EngineStoppedError, JudgedFrames]
    finally:
        ears.stop()


def kill(ears: EarProcess) -> None:
    """End it as the system would."""
    os.kill(ears.pid, signal.SIGKILL)


async def talk(host: Host) -> tuple[SpeechStarted, SpeechStopped, ResponseDone]:
    """A hands-free turn and its answer."""
    async with await host.open(HANDS_FREE) as session:
        client = Client(session)
        client.say(SOUND, PIECE)
        started = await client.wait(SpeechStarted)
        stopped = await client.wait(SpeechStopped)
        return started, stopped, await client.wait(ResponseDone)


def places(started: SpeechStarted, stopped: SpeechStopped) -> tuple[int, int, int]:
    return started.start, stopped.end, stopped.speech_end


def test_a_hands_free_session_outlives_no_ear_but_the_next_one_is_heard() -> None:
    async def main() -> None:
        async with Host(pocket(), HostOptions(4), detector=detector()) as here:
            wanted = await talk(here)
        options = HostOptions(4, ear_processes=1)
        async with Host(pocket(), options, detector=detector()) as host:
            found = await talk(host)
            assert places(*found[:2]) == places(*wanted[:2])
            assert found[2].status == "completed"
            async with await host.open(HANDS_FREE) as session:
                client = Client(session)
                client.say(SOUND[: RATE // 2], PIECE)
                client.say(SOUND[RATE // 2 : RATE], PIECE)
                await client.wait(SpeechStarted)
                (ears,) = host.encoder_worker.ears
                assert isinstance(ears, EarProcess)
                kill(ears)
                client.say(SOUND[RATE:], PIECE)
                error = await client.wait(ErrorRaised)
                assert (error.code, error.fatal) == (ErrorCode.ENGINE_STOPPED, True)
                async for event in session:
                    if isinstance(event, Closed):
                        assert event.reason == CloseReason.ENGINE
                        break
            again = await talk(host)
            assert places(*again[:2]) == places(*wanted[:2])

    run(main())


def test_ears_end_with_the_one_who_asked() -> None:
    """The link is all that holds them: once it is closed they are gone, killed or not."""

    async def main() -> None:
        options = HostOptions(4, ear_processes=2)
        async with Host(pocket(), options, detector=detector()) as host:
            pids = [each.pid for each in host.encoder_worker.ears if isinstance(each, EarProcess)]
        assert len(pids) == 2
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(main())
