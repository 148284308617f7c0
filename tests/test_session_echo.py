"""What is heard while a reply plays and after it: users, echoes, and nothing at all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soxr
from conftest import run
from session_rig import (
    HANDS_FREE,
    QUESTION,
    RATE,
    SENTENCE,
    Client,
    host,
    silence,
    speech,
)

from evals.vad_clips import clip_of
from mosstalk.audio.sound import Samples
from mosstalk.server.ipc import WorkerInfo
from mosstalk.server.observers import Metrics
from mosstalk.server.recording import Recorder, Recording
from mosstalk.server.replay import play, read_recording
from mosstalk.session.commands import Push, Truncate, UpdateSettings
from mosstalk.session.events import (
    AudioDelta,
    InputPaused,
    ItemAdded,
    ResponseDone,
    SpeechStarted,
    SpeechStopped,
)
from mosstalk.session.sound import pcm_of

TALK = replace(HANDS_FREE, script="speech:50")
"""Replies of 4 s."""
SLOW = pytest.mark.slow
FACTS = WorkerInfo("pocket", "m", "cpu", "float32", ("default",), None, 2048, 10, 16, 0.1)


class Wall:
    """A wall clock that goes on when a test says so."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def onset(samples: Samples) -> int:
    """Where speech begins in a recording."""
    return clip_of(samples).onset_samples - RATE


async def answered(client: Client, sound: Samples) -> Samples:
    """Say something and wait for its answer: what that sounds like, (n,) at 16 kHz."""
    client.say(np.concatenate([sound, silence(0.8)]))
    done = await client.wait(ResponseDone)
    reply = np.frombuffer(client.pcm(done.response_id), "<i2").astype(np.float32) / 2**15
    return np.asarray(soxr.resample(reply, 24_000, RATE), np.float32)


async def heard(client: Client) -> None:
    """Wait until all that was said has been heard."""
    client.do(Truncate("none"))
    await client.error()


# Slow, here and below: other voices, times and stalls than the first.


@pytest.mark.parametrize(
    ("path", "begin_s"),
    [
        (QUESTION, 0.05),
        *(pytest.param(*n, marks=SLOW) for n in ((SENTENCE, 0.05), (QUESTION, 0.7))),
    ],
)
def test_a_user_who_talks_over_the_first_reply_is_heard_whole(path: Path, begin_s: float) -> None:
    """With a headset: nothing of the reply comes back."""

    async def main() -> None:
        async with host(hands_free=True, clock=Wall()) as here, await here.open(TALK) as session:
            client = Client(session)
            await answered(client, speech(QUESTION))
            first = client.all(AudioDelta)[0].clock
            begin = session.clock + round(begin_s * RATE) + onset(speech(path))
            assert session.clock - first < 100  # the reply begins here
            client.say(np.concatenate([silence(begin_s), speech(path), silence(0.8)]))
            started = await client.wait(SpeechStarted)
            assert begin - 10_000 < started.start <= begin
            assert started.clock - begin <= 0.6 * RATE
            stopped = await client.wait(SpeechStopped)
            added = await client.wait(ItemAdded, lambda each: each.item.item_id == started.item_id)
            assert added.item.audio_ms == (stopped.end - started.start) // 16
            assert stopped.end >= begin + len(speech(path)) * 0.7

    run(main())


@pytest.mark.parametrize(
    ("path", "waits_s"),
    [
        (QUESTION, (0.0, 3.0)),
        pytest.param(QUESTION, (1.0, 10.0), marks=SLOW),
        pytest.param(SENTENCE, (0.0, 1.0, 3.0, 10.0), marks=SLOW),
    ],
)
def test_who_sends_nothing_while_a_reply_plays_is_heard_whole_after_it(
    path: Path, waits_s: tuple[float, ...]
) -> None:
    wall = Wall()

    async def main() -> None:
        async with host(hands_free=True, clock=wall) as here, await here.open(TALK) as session:
            client = Client(session)
            reply = await answered(client, speech(QUESTION))
            for waited_s in waits_s:
                wall.seconds += len(reply) / RATE + waited_s
                begin = session.clock + onset(speech(path))
                turns = len(client.all(SpeechStarted))
                reply = await answered(client, speech(path))
                assert len(client.all(SpeechStarted)) == turns + 1
                started = client.all(SpeechStarted)[-1]
                assert begin - 10_000 < started.start <= begin, waited_s
                assert client.all(InputPaused)[-1].seconds == pytest.approx(4.0 + waited_s, abs=0.1)

    run(main())


@pytest.mark.parametrize("stall_s", [1.0, *(pytest.param(n, marks=SLOW) for n in (0.2, 3.0))])
def test_a_microphone_that_stalls_and_comes_in_a_burst_interrupts_no_reply(stall_s: float) -> None:
    wall = Wall()

    async def main() -> None:
        async with host(hands_free=True, clock=wall) as here, await here.open(TALK) as session:
            client = Client(session)
            reply = await answered(client, speech(QUESTION))
            # From the loudspeaker to the microphone: 100 ms later, 10 dB softer.
            microphone = silence(len(reply) / RATE + 0.1)
            microphone[-len(reply) :] += 0.3 * reply
            at = 0
            for wait_s in (0.3, 0.3, 0.4, stall_s, 0.2, 0.4):
                wall.seconds += wait_s
                size = round(wait_s * RATE)
                client.say(microphone[at : at + size])
                await heard(client)
                at += size
            assert len(client.all(SpeechStarted)) == 1
            assert not client.all(InputPaused)

    run(main())


@pytest.mark.parametrize("echo_gate", [True, False])
def test_the_gate_can_be_switched_while_a_session_lasts(echo_gate: bool) -> None:
    async def main() -> None:
        begun = replace(TALK, echo_gate=not echo_gate)
        async with host(hands_free=True, clock=Wall()) as here, await here.open(begun) as session:
            client = Client(session)
            client.do(UpdateSettings(replace(TALK, echo_gate=echo_gate)))
            reply = await answered(client, speech(QUESTION))
            client.say(0.3 * reply[: 3 * RATE])
            await heard(client)
            # Without the gate the reply is taken for a user.
            assert len(client.all(SpeechStarted)) == (1 if echo_gate else 2)

    run(main())


def test_a_replay_hears_after_a_pause_what_was_heard_then(tmp_path: Path) -> None:
    wall = Wall()
    recorder = Recorder(tmp_path, Metrics())

    def say(client: Client, kept: Recording, samples: Samples) -> None:
        for start in range(0, len(samples), 1600):
            push = Push(pcm_of(samples[start : start + 1600]))
            kept.on_command(push)
            client.do(push)

    async def main() -> None:
        kept = recorder.open(TALK, FACTS)
        async with host(hands_free=True, clock=wall) as here, await here.open(TALK) as session:
            client, recorded_events = Client(session), 0
            for path in (QUESTION, SENTENCE):
                say(client, kept, np.concatenate([speech(path), silence(0.8)]))
                await client.wait(ResponseDone)
                for event in client.events[recorded_events:]:
                    kept.on_event(event)
                recorded_events = len(client.events)
                wall.seconds += 5.0
        kept.on_close("client", None)
        recorder.stop()
        assert len(client.all(InputPaused)) == 1
        (folder,) = tmp_path.iterdir()
        recorded = read_recording(folder)
        async with host(hands_free=True) as here:
            replayed = await play(here, recorded)
        then = [moment.event or {} for moment in recorded.events]
        now = [event for _, event in replayed.events]
        pauses = [event["seconds"] for event in then if event["type"] == "InputPaused"]
        assert [event.seconds for event in now if isinstance(event, InputPaused)] == pauses
        starts = [event["start"] for event in then if event["type"] == "SpeechStarted"]
        assert [event.start for event in now if isinstance(event, SpeechStarted)] == starts
        assert len(starts) == 2

    run(main())
