"""Turns that a detector of speech finds, and replies that speech ends."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import soxr
from conftest import run
from session_rig import (
    GREEDY,
    HANDS_FREE,
    QUESTION,
    RATE,
    SENTENCE,
    Client,
    Offline,
    host,
    pocket,
    require_nothing_held,
    silence,
    speech,
)

from mosstalk.audio.sound import Samples
from mosstalk.conversation import Row
from mosstalk.engine.async_engine import CachedConversation, Edit
from mosstalk.reply_options import Limits
from mosstalk.session.commands import (
    CancelResponse,
    Clear,
    Command,
    Commit,
    CreateResponse,
    CreateText,
    Durations,
    Playback,
    ReplyLimits,
    SessionSettings,
    Truncate,
)
from mosstalk.session.events import (
    AudioDelta,
    ErrorCode,
    ErrorRaised,
    IdleTimeout,
    InputCleared,
    ItemAdded,
    ItemTruncated,
    Reason,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
)
from mosstalk.session.host import Host
from mosstalk.session.session import Session
from mosstalk.vad.turns import TRAILING_MS, TurnDetection

LONG = replace(HANDS_FREE, script="speech:200")
"""Replies of 16 s, which last longer than what is said meanwhile."""


def standing() -> float:
    """A wall clock that stands still: time is what the samples say."""
    return 0.0


def said(samples: Samples) -> Samples:
    """Speech in a quiet room."""
    return np.concatenate([silence(0.5), samples, silence(0.8)])


def test_a_spoken_turn_is_found_answered_and_followed_by_the_next() -> None:
    settings = replace(HANDS_FREE, limits=ReplyLimits(rows=9))

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            async with await here.open(settings) as session:
                client, offline, heard = Client(session), Offline(), np.zeros(0, np.float32)
                for path in (QUESTION, SENTENCE):
                    heard = np.concatenate([heard, said(speech(path))])
                    client.say(said(speech(path)), piece=517)
                    done = await client.wait(ResponseDone)
                    started = client.all(SpeechStarted)[-1]
                    stopped = client.all(SpeechStopped)[-1]
                    assert stopped.item_id == started.item_id
                    assert stopped.end - stopped.speech_end == TRAILING_MS * RATE // 1000
                    assert stopped.wait_ms in range(500, 533)  # to the end of a frame
                    assert done.timings.vad_wait_ms == stopped.wait / 16
                    # The turn is exactly the sound between the positions that are told.
                    offline.chat.hear(heard[started.start : stopped.end])
                    sound, _ = offline.answer(limits=Limits(9))
                    assert client.pcm(done.response_id) == sound
                    assert client.rows == offline.rows
                turns = [event.item_id for event in client.all(TurnCommitted)]
                assert turns == [event.item_id for event in client.all(SpeechStarted)]
            require_nothing_held(here)

    run(main())


def test_a_turn_is_the_same_however_long_the_silence_that_ends_it() -> None:
    async def turn(here: Host, silence_ms: int, pieces: int) -> tuple[int, int, list[Row]]:
        detection = TurnDetection(silence_duration_ms=silence_ms)
        settings = replace(HANDS_FREE, turn_detection=detection, create_response=False)
        async with await here.open(settings) as session:
            client = Client(session)
            # A pause within it is no end, and is the turn's whole.
            sound = np.concatenate([speech(SENTENCE), silence(0.15), speech(QUESTION)])
            client.say(np.concatenate([silence(0.5), sound, silence(1.5)]), piece=pieces)
            started = await client.wait(SpeechStarted)
            stopped = await client.wait(SpeechStopped)
            await client.wait(TurnCommitted)
            assert silence_ms <= stopped.wait_ms < silence_ms + 33
            return started.start, stopped.end, session.conversation_rows()

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            first, *others = [
                await turn(here, silence_ms, pieces)
                for silence_ms, pieces in ((500, 400), (500, 1999), (700, 517), (1200, 8000))
            ]
            assert others == [first] * 3

    run(main())


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
@pytest.mark.parametrize("silence_ms", [500, 200])
def test_the_end_of_a_turn_is_told_with_the_sound_that_shows_it(rate: int, silence_ms: int) -> None:
    frame_ms = 20
    settings = replace(
        HANDS_FREE,
        input_rate=rate,
        turn_detection=TurnDetection(silence_duration_ms=silence_ms),
        create_response=False,
    )

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            sound = soxr.resample(said(speech(QUESTION)), RATE, rate)
            frame = rate * frame_ms // 1000
            for end in range(frame, len(sound) + 1, frame):
                client.say(sound[end - frame : end].astype(np.float32))
                while session.clock < end * RATE // rate:
                    await asyncio.sleep(0)  # what waits together is heard as one
            stopped = await client.wait(SpeechStopped)
            await client.wait(TurnCommitted)
            shown = stopped.speech_end + stopped.wait
            # What resamples for good holds sound back for up to 115 ms.
            assert 0 <= stopped.clock - shown <= frame_ms * RATE // 1000
            # Its sound is whole all the same.
            trailing_ms = min(TRAILING_MS, stopped.wait_ms)
            assert stopped.end - stopped.speech_end == trailing_ms * RATE // 1000

    run(main())


async def begun_early(session: Session) -> None:
    """Wait until a reply is made to the turn under way, of which nobody has been told."""
    while session._responses._early is None:
        await asyncio.sleep(0)


def test_a_turn_is_read_to_its_end_while_the_silence_that_ends_it_lasts() -> None:
    detection = TurnDetection(silence_duration_ms=1000)
    settings = replace(HANDS_FREE, turn_detection=detection, limits=ReplyLimits(rows=9))
    sound = np.concatenate([silence(0.5), speech(QUESTION)])
    # In pieces that end where frames of the detector do: 400 ms of silence are no end.
    parts = (np.concatenate([sound, silence(0.4)]), speech(SENTENCE), silence(1.2))
    end = (pocket().ids.modality_pad, pocket().ids.eosp)

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            async with await here.open(settings) as session:
                client, offline = Client(session), Offline()
                client.say(parts[0])
                await begun_early(session)
                assert end in session.conversation_rows()[-3:]
                client.say(parts[1])
                while end in session.conversation_rows()[-3:]:
                    await asyncio.sleep(0)
                assert not client.all(SpeechStopped), "speech goes on, and so does its turn"
                client.say(parts[2][:8000])
                while end not in session.conversation_rows()[-3:]:
                    await asyncio.sleep(0)
                foreseen = session.conversation_rows()
                await begun_early(session)
                assert not client.all(ResponseStarted), "nobody is told before the turn has ended"
                client.say(parts[2][8000:])
                done = await client.wait(ResponseDone)
                (started,), (stopped,) = client.all(SpeechStarted), client.all(SpeechStopped)
                offline.chat.hear(np.concatenate(parts)[started.start : stopped.end])
                assert foreseen == offline.rows
                assert (here.figures.early_used, here.figures.early_dropped) == (1, 1)
                assert client.pcm(done.response_id) == offline.answer(limits=Limits(9))[0]
                assert client.rows == offline.rows
            require_nothing_held(here)

    run(main())


def test_the_rows_that_end_a_turn_are_read_in_one_step_with_the_opening_of_its_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(HANDS_FREE, turn_detection=TurnDetection(silence_duration_ms=1000))
    end = (pocket().ids.modality_pad, pocket().ids.eosp)

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            rewrite, read_ahead = here.engine.rewrite, list[Row]()

            async def rewritten(cached: CachedConversation, edit: Edit) -> None:
                read_ahead.extend(edit.rows)
                await rewrite(cached, edit)

            monkeypatch.setattr(here.engine, "rewrite", rewritten)
            async with await here.open(settings) as session:
                Client(session).say(np.concatenate([silence(0.5), speech(QUESTION), silence(0.4)]))
                await begun_early(session)
                assert end in session.conversation_rows()[-3:]
                assert read_ahead, "the user has spoken for long enough"
                assert end not in read_ahead, "a step of its own would make the reply wait"

    run(main())


def test_a_turn_that_may_be_over_waits_for_no_sound_of_others() -> None:
    detection = TurnDetection(silence_duration_ms=1000)
    settings = replace(HANDS_FREE, turn_detection=detection, limits=ReplyLimits(rows=9))
    spoken = np.concatenate([silence(0.5), speech(QUESTION)])
    parts = (spoken[: -RATE // 2], np.concatenate([spoken[-RATE // 2 :], silence(0.4)]))
    sound = np.concatenate([*parts, silence(1.2)])

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            async with await here.open(settings) as session:
                client, offline = Client(session), Offline()
                client.say(parts[0])
                listener = session._state.listener
                while listener.turn is None or session._inbox or listener.turn.encoding:
                    await asyncio.sleep(0)
                here.encoder_worker._codes._batch_delay_s = 1e6  # as on a GPU, but for days
                client.say(parts[1])
                await begun_early(session)
                assert not listener.turn.encoding
                client.say(silence(1.2))
                done = await client.wait(ResponseDone)
                (started,), (stopped,) = client.all(SpeechStarted), client.all(SpeechStopped)
                offline.chat.hear(sound[started.start : stopped.end])
                assert here.figures.early_used == 1
                assert client.pcm(done.response_id) == offline.answer(limits=Limits(9))[0]
                assert client.rows == offline.rows
            require_nothing_held(here)

    run(main())


@pytest.mark.parametrize(
    "command",
    [CreateText("user", "One more thing."), Clear(), Commit(), CreateResponse(), CancelResponse()],
)
def test_what_is_asked_during_the_silence_holds_and_nothing_early_stays(command: Command) -> None:
    detection = TurnDetection(silence_duration_ms=1000)
    settings = replace(HANDS_FREE, turn_detection=detection, limits=ReplyLimits(rows=9))

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            async with await here.open(settings) as session:
                client = Client(session)
                client.say(np.concatenate([silence(0.5), speech(QUESTION), silence(0.4)]))
                await begun_early(session)
                done = session.commands_done
                client.do(command)
                while session.commands_done == done:
                    await asyncio.sleep(0)
                assert here.figures.early_dropped == 1
                client.say(np.concatenate([silence(1.2), speech(SENTENCE), silence(1.2)]))
                last = await client.wait(SpeechStopped, lambda each: each.clock > 7 * RATE)
                started = await client.wait(ResponseStarted, lambda each: each.clock >= last.clock)
                await client.wait(
                    ResponseDone, lambda each: each.response_id == started.response_id
                )
                while session.is_answering:
                    await asyncio.sleep(0)
                engine_has = session._state.conversation._cached.conversation.rows
                assert engine_has == session.conversation_rows()
            require_nothing_held(here)

    run(main())


def test_nothing_is_begun_early_while_others_are_answered() -> None:
    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(LONG) as busy,
            await here.open(HANDS_FREE) as session,
        ):
            other, client = Client(busy), Client(session)
            other.do(CreateText("user", "Good morning."), CreateResponse())
            await other.wait(AudioDelta)
            client.say(said(speech(QUESTION)))
            await client.wait(ResponseStarted)
            assert not other.all(ResponseDone)
            assert here.figures.early_used == here.figures.early_dropped == 0

    run(main())


def test_speech_ends_the_reply_which_is_cut_to_what_was_played() -> None:
    settings = replace(LONG, playback=Playback.SESSION)

    async def main() -> None:
        async with host(hands_free=True, clock=standing) as here:
            async with await here.open(settings) as session:
                client = Client(session)
                client.say(said(speech(QUESTION)))
                # Two seconds are on their way before the user says a word.
                first = await client.wait(AudioDelta)
                await client.wait(AudioDelta, lambda delta: delta.start > 48_000)
                client.say(said(speech(SENTENCE)))
                started = await client.wait(SpeechStarted)
                done = await client.wait(ResponseDone)
                assert done.status is ResponseStatus.CANCELLED
                assert done.reason is Reason.TURN_DETECTED
                cut = await client.wait(ItemTruncated)
                assert cut.by_session
                assert cut.audio_ms == (started.clock - first.clock) // 16
                assert cut.codes == -(-cut.audio_ms // 80)
                committed = await client.wait(TurnCommitted)
                assert committed.item_id == started.item_id
                assert committed.previous_item_id == cut.item_id
                await client.wait(ResponseStarted)
                require_as_fresh(client, cut.codes)
                assert not [
                    event
                    for event in client.events[client.events.index(started) :]
                    if isinstance(event, AudioDelta) and event.item_id == cut.item_id
                ]
            require_nothing_held(here)

    run(main())


def require_as_fresh(client: Client, codes: int) -> None:
    """Check that the rows are those of a prompt of the same turns, the reply cut."""
    ids = pocket().ids
    spoken: list[list[int]] = [[]]
    for text, audio in client.rows:
        if text == ids.modality_pad and audio == ids.eosp:
            spoken.append([])
        elif text == ids.modality_pad:
            spoken[-1].append(audio)
    fresh = pocket().chat().conversation
    for role, turn in zip(("user", "assistant", "user"), spoken, strict=False):
        fresh.add_speech(role, turn)
    assert len(spoken[1]) == codes
    assert client.rows == fresh.rows


def test_until_the_client_truncates_what_was_sent_stays() -> None:
    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(LONG) as session,
        ):
            client = Client(session)
            client.say(said(speech(QUESTION)))
            await client.wait(AudioDelta)
            client.say(speech(SENTENCE))
            done = await client.wait(ResponseDone)
            (item,) = done.items
            assert item.audio_ms == len(client.pcm(done.response_id)) // 48
            client.do(Truncate(item.item_id, 160.0))
            cut = await client.wait(ItemTruncated)
            assert (cut.audio_ms, cut.codes, cut.by_session) == (160, 2, False)
            client.say(silence(0.8))
            await client.wait(ResponseStarted)
            require_as_fresh(client, 2)

    run(main())


def test_speech_ends_no_reply_where_that_is_not_wanted() -> None:
    settings = replace(HANDS_FREE, interrupt_response=False)

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            client.say(said(speech(QUESTION)))
            await client.wait(ResponseStarted)
            client.say(said(speech(SENTENCE)))
            done = await client.wait(ResponseDone)
            assert done.status is ResponseStatus.COMPLETED
            committed = [event.item_id for event in client.all(TurnCommitted)]
            if len(committed) == 1:
                committed.append((await client.wait(TurnCommitted)).item_id)
            added = [e.item.item_id for e in client.all(ItemAdded)]
            assert added[:2] == [committed[0], done.items[0].item_id]

    run(main())


def test_a_turn_without_an_answer_is_answered_when_asked_for() -> None:
    settings = replace(HANDS_FREE, create_response=False)

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            client.say(said(speech(QUESTION)))
            await client.wait(TurnCommitted)
            client.do(CreateResponse("asked"))
            assert (await client.wait(ResponseDone)).response_id == "asked"
            assert len(client.all(ResponseStarted)) == 1

    run(main())


def test_a_turn_can_be_ended_or_forgotten_by_hand() -> None:
    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(HANDS_FREE) as session,
        ):
            client = Client(session)
            client.do(Commit())
            assert (await client.error()).code is ErrorCode.COMMIT_EMPTY
            client.say(np.concatenate([silence(0.5), speech(QUESTION)[:24_000]]))
            started = await client.wait(SpeechStarted)
            client.do(Commit("mine"))
            committed = await client.wait(TurnCommitted)
            assert committed.item_id == "mine"
            item = (await client.wait(ItemAdded)).item
            assert item.audio_ms == (session.clock - started.start) // 16
            empty = len(client.rows)
            client.say(speech(SENTENCE))
            await client.wait(SpeechStarted)
            client.do(Clear())
            await client.wait(InputCleared)
            assert len(client.rows) == empty
            client.say(silence(1.0))
            client.do(Commit())
            assert (await client.error()).code is ErrorCode.COMMIT_EMPTY

    run(main())


def test_a_turn_that_is_too_long_is_answered_as_it_is() -> None:
    settings = replace(HANDS_FREE, durations=Durations(turn_s=1.0))

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            client.say(np.concatenate([silence(0.5), speech(QUESTION)[:32_000]]))
            stopped = await client.wait(SpeechStopped)
            started = client.all(SpeechStarted)[0]
            assert 0 <= stopped.end - started.start - RATE < 1600
            assert stopped.wait == 0
            await client.wait(ResponseStarted)

    run(main())


@pytest.mark.parametrize(
    # Slow: that the gate is what does it, ``test_session_echo`` shows by switching it.
    "echo_gate",
    [True, pytest.param(False, marks=pytest.mark.slow)],
)
def test_the_echo_of_a_reply_does_not_end_it_but_a_user_does(echo_gate: bool) -> None:
    settings = replace(HANDS_FREE, echo_gate=echo_gate, script="speech:60")

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            client.say(said(speech(QUESTION)))
            done = await client.wait(ResponseDone)
            assert client.all(AudioDelta)[0].clock == session.clock  # it is played from here on
            # From the loudspeaker to the microphone: 100 ms later, 10 dB softer.
            sound = np.frombuffer(client.pcm(done.response_id), "<i2").astype(np.float32) / 2**15
            echo = 0.3 * soxr.resample(sound, 24_000, RATE).astype(np.float32)
            room = silence(len(echo) / RATE + 0.1)
            room[-len(echo) :] += echo
            alone, both = room[: 3 * RATE], room[3 * RATE :]
            client.say(alone)
            client.do(Truncate("none"))
            await client.error()  # all that was said before has been heard
            assert len(client.all(SpeechStarted)) == (1 if echo_gate else 2)
            if echo_gate:
                both[: len(speech(SENTENCE))] += speech(SENTENCE)[: len(both)]
                client.say(both)
                started = await client.wait(SpeechStarted)
                assert started.clock > done.clock + len(alone)

    run(main())


def test_silence_after_a_reply_is_reported_and_answered() -> None:
    settings = SessionSettings(
        input_rate=RATE,
        sampling=GREEDY,
        turn_detection=TurnDetection(idle_timeout_ms=2000),
        script="speech:12",
    )

    async def main() -> None:
        async with (
            host(hands_free=True, clock=standing) as here,
            await here.open(settings) as session,
        ):
            client = Client(session)
            client.say(said(speech(QUESTION)))
            await client.wait(ResponseDone)
            client.say(silence(3.5))
            idle = await client.wait(IdleTimeout)
            assert idle.end - idle.start in range(32_000, 33_000)
            await client.wait(TurnCommitted, lambda event: event.item_id == idle.item_id)
            await client.wait(ResponseDone)
            assert not client.all(ErrorRaised)

    run(main())
