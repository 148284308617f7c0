"""Transcripts of both sides, made beside the talk."""

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from conftest import require_package, run
from server_rig import (
    BY_HAND,
    QUICK,
    RATE,
    Server,
    Talker,
    append,
    question,
    serving,
    typed,
)
from typer.testing import CliRunner

from mosstalk.cli import app
from mosstalk.environment import install_command
from mosstalk.server import captions
from mosstalk.server.captions import (
    AUTO,
    GONE,
    NONE,
    SHIPPED,
    Captions,
    Transcriber,
    transcriber_of,
)
from mosstalk.server.logs import LogStyle
from mosstalk.server.realtime.protocol import Transcript
from mosstalk.server.realtime.session_config import TranscriptionConfig
from mosstalk.server.realtime.validation import MU_LAW, encode_g711
from mosstalk.session.commands import ReplyMode, SessionSettings
from mosstalk.session.events import (
    AudioDelta,
    Event,
    Item,
    ItemDone,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
    SpeechStarted,
    Timings,
    TurnCommitted,
    Usage,
)


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that writes down what is said."""
    require_package("faster_whisper", "transcribe")
    with serving(*QUICK, "--transcriber", "whisper-tiny", cache=cache_folder) as running:
        yield running


@pytest.mark.system
def test_both_sides_are_written_down_and_clients_see_it_in_time(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send({"type": "input_audio_buffer.commit"})
            item_id = (await talker.wait("conversation.item.done"))["item"]["id"]
            kind = "conversation.item.input_audio_transcription.completed"
            heard = await talker.wait(kind, item_id=item_id)
            assert "folder" in heard["transcript"].lower()
            assert heard["usage"] == {"type": "duration", "seconds": 2.866}
            await talker.send({"type": "response.create"})
            done = await talker.wait("response.output_audio_transcript.done")
            assert done["transcript"]
            ended = (await talker.wait("response.done"))["response"]
            assert ended["output"][0]["content"][0]["transcript"] == done["transcript"]

    run(main())
    server.await_nothing_held()


@pytest.mark.system
def test_turns_of_every_format_are_written_down_and_items_are_not_taken_for_turns(
    server: Server,
) -> None:
    low = soxr.resample(np.frombuffer(question(), "<i2"), RATE, 8000).astype("<i2")
    sounds = {"audio/pcmu": encode_g711(low.tobytes(), MU_LAW), "audio/pcm": question()}

    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND, typed("Hello.", "typed"))
            audio = base64.b64encode(question()).decode()
            content = [{"type": "input_audio", "audio": audio}]
            item = {"id": "recorded", "type": "message", "role": "user", "content": content}
            await talker.send({"type": "conversation.item.create", "item": item})
            done = "conversation.item.input_audio_transcription.completed"
            told: dict[str, str] = {}
            for kind, sound in sounds.items():
                session = {"audio": {"input": {"format": {"type": kind}}}}
                await talker.send({"type": "session.update", "session": session}, append(sound))
                await talker.send({"type": "input_audio_buffer.commit"})
                item_id = (await talker.wait("input_audio_buffer.committed"))["item_id"]
                heard = await talker.wait(done, item_id=item_id)
                assert "folder" in heard["transcript"].lower()
                assert heard["usage"]["seconds"] == pytest.approx(2.866, abs=0.001)
                told[item_id] = heard["transcript"]
            deltas = [e for e in talker.events if e["type"].endswith("_transcription.delta")]
            assert {e["item_id"]: e["delta"] for e in deltas} == told
            assert len([e for e in talker.events if e["type"] == done]) == len(sounds)

    run(main())
    server.await_nothing_held()


@pytest.mark.system
def test_the_transcriber_works_behind_everybody_else(server: Server) -> None:
    process = server.child_id("mosstalk.server.captions")

    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send({"type": "input_audio_buffer.commit"})
            await talker.wait("conversation.item.input_audio_transcription.completed")

    run(main())
    threads = [int(each.name) for each in Path(f"/proc/{process}/task").iterdir()]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {15}


@pytest.mark.system
def test_what_a_client_says_of_transcripts_holds_and_others_have_them(server: Server) -> None:
    kinds = ("conversation.item.done", "conversation.item.input_audio_transcription.completed")

    async def main() -> None:
        async with Talker(server) as talker:
            session = talker.events[0]["session"]
            assert session["audio"]["input"]["transcription"] == {"model": "whisper-tiny"}
            await talker.send(BY_HAND)
            asked: tuple[Any, ...] = (None, {"language": "zh"}, {"language": "en-GB"})
            for transcription in asked:
                update = {"audio": {"input": {"transcription": transcription}}}
                await talker.send({"type": "session.update", "session": update})
                await talker.say(question())
                await talker.send({"type": "input_audio_buffer.commit"})
                await talker.wait(kinds[0])
            assert "folder" in (await talker.wait(kinds[1]))["transcript"].lower()
            assert len([each for each in talker.events if each["type"] == kinds[1]]) == 1
            updated = [e["session"] for e in talker.events if e["type"] == "session.updated"]
            warnings = [each["mosstalk"]["warnings"] for each in updated]
            assert [len(each) for each in warnings] == [0, 0, 1, 0]
            assert "whisper-tiny does not hear this language" in warnings[2][0]

    run(main())


@pytest.mark.system
def test_without_its_transcriber_the_talk_goes_on(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            transcriber = server.child_id("mosstalk.server.captions")
            os.kill(transcriber, signal.SIGSTOP)
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send({"type": "input_audio_buffer.commit"}, {"type": "response.create"})
            done = (await talker.wait("response.done"))["response"]
            assert done["status"] == "completed"
            os.kill(transcriber, signal.SIGKILL)
            failed = await talker.wait("conversation.item.input_audio_transcription.failed")
            assert failed["error"]["message"] == GONE
            deltas = [
                event["delta"] for event in talker.events
                if event["type"] == "response.output_audio_transcript.delta"
            ]  # fmt: skip
            words = done["output"][0]["content"][0]["transcript"]
            assert words == "".join(deltas) != "", "the model's own"

    run(main())
    assert server.get("/health").status_code == 200


def test_by_default_whisper_writes_where_it_is_installed_and_few_talk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert transcriber_of(NONE, crowd=False) == (None, "")
    monkeypatch.setattr(captions, "find_spec", lambda _: object())
    assert transcriber_of(AUTO, crowd=False) == (SHIPPED, "")
    assert transcriber_of(AUTO, crowd=True)[0] is None
    assert transcriber_of(SHIPPED, crowd=True) == (SHIPPED, "")
    monkeypatch.setattr(captions, "find_spec", lambda _: None)
    chosen, why = transcriber_of(AUTO, crowd=False)
    assert chosen is None
    assert install_command("transcribe") in why


@pytest.mark.slow  # a server starts
def test_a_server_without_a_transcriber_says_so_once_and_what_to_do(cache_folder: Path) -> None:
    words = (*QUICK, "--transcriber", "auto", "--max-sessions", "97", "--front-processes", "1")
    with serving(*words, cache=cache_folder) as server:
        said = [
            line["message"] for line in server.logs
            if line.get("message", "").startswith("what users say is not written down: ")
        ]  # fmt: skip
        assert len(said) == 1
        assert "--transcriber whisper-tiny" in said[0] or install_command("transcribe") in said[0]
        assert not server.child_ids("mosstalk.server.captions")


def test_what_is_told_while_a_transcript_is_awaited_is_told_in_its_order() -> None:
    async def main() -> None:
        given: list[Event] = []
        heard: list[Transcript] = []
        transcriber = Transcriber("none", LogStyle())
        wanted = lambda: TranscriptionConfig(user=True, assistant=True)  # noqa: E731
        writer = Captions(transcriber, SessionSettings(), wanted, given.append, heard.append)

        def deliver(event: Event) -> None:
            writer.on_event(event)
            if not writer.holds(event):
                given.append(event)

        item = Item("reply", "assistant", audio_ms=80)
        sound = AudioDelta("resp", "reply", 0, bytes(3840), clock=0)
        done = ResponseDone(
            "resp", ResponseStatus.COMPLETED, None, (item,), Usage(), Timings(), clock=0
        )
        told = [sound, ItemDone(item, None, clock=0), done, SpeechStarted("next", 0, clock=9)]
        for event in told[:3]:
            deliver(event)
        assert given == told[:1]  # its end is held back, as long as nothing else happens
        deliver(told[3])
        assert given == told
        writer.stop()
        assert heard == []

    run(main())


@pytest.mark.parametrize(
    ("reply", "waits"),
    [(ReplyMode.AUDIO, True), (ReplyMode.TEXT, False), (None, False)],
)
def test_a_turn_is_written_down_once_a_spoken_answer_sounds(
    monkeypatch: pytest.MonkeyPatch, reply: ReplyMode | None, waits: bool
) -> None:
    """On two cores Whisper would make the answer late; without one nothing is waited for."""
    monkeypatch.setattr(captions, "_REPLY_S", 0)
    monkeypatch.setattr(captions, "_MOST_LATER_S", 600)

    async def main() -> None:
        told = asyncio.Queue[Transcript]()
        # Not started, so that it answers at once that it is gone.
        transcriber = Transcriber("none", LogStyle())
        wanted = lambda: TranscriptionConfig(user=True)  # noqa: E731
        writer = Captions(transcriber, SessionSettings(), wanted, lambda _: None, told.put_nowait)
        item = Item("turn", "user", audio_ms=80)
        events: list[Event] = [TurnCommitted("turn", None, clock=1280)]
        if reply:
            events.append(ResponseStarted("resp", reply, in_conversation=True, clock=1280))
        for event in [*events, ItemDone(item, None, clock=1280)]:
            writer.on_event(event)
            assert not writer.holds(event)
        if waits:
            for _ in range(100):
                await asyncio.sleep(0)
            assert told.empty()
            writer.on_event(AudioDelta("resp", "reply", 0, bytes(3840), clock=1280))
        transcript = await asyncio.wait_for(told.get(), 20)
        assert (transcript.item_id, transcript.failed) == ("turn", GONE)
        writer.stop()

    run(main())


def test_a_transcriber_that_cannot_be_had_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--transcriber", str(tmp_path)])
    assert result.exit_code == 2
    assert "model.bin" in result.stderr or install_command("transcribe") in result.stderr
