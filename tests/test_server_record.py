"""Recordings: what is kept, that it can be replayed, and what a full disk does."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, require_package, run
from server_rig import BY_HAND, Server, Talker, question, serving, silence, typed
from typer.testing import CliRunner

from mosstalk.cli import app
from mosstalk.errors import OptionError, OutputError
from mosstalk.server import recording
from mosstalk.server.ipc import WorkerInfo
from mosstalk.server.observers import Metrics
from mosstalk.server.recording import Recorder, WavFile
from mosstalk.server.replay import read_recording
from mosstalk.session.commands import (
    Commit,
    CreateMessage,
    CreateResponse,
    CreateText,
    Message,
    Push,
    ReplyMode,
    SessionSettings,
    Sound,
)
from mosstalk.session.events import AudioDelta, SessionOpened

FACTS = WorkerInfo("pocket", "m", "cpu", "float32", ("default",), None, 2048, 10, 16, 0.1)
SETTINGS = SessionSettings(turn_detection=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps recordings."""
    return tmp_path_factory.mktemp("kept") / "recordings"


@pytest.fixture(scope="module")
def server(cache_folder: Path, folder: Path) -> Iterator[Server]:
    """A server that records."""
    require_package("silero_vad", "vad")
    same_each_time = ("--temperature", "0", "--seed", "0")
    with serving(*same_each_time, "--record", str(folder), cache=cache_folder) as running:
        yield running


def test_a_session_is_kept_and_its_replay_is_the_same(server: Server, folder: Path) -> None:
    heard: list[bytes] = []

    async def main() -> None:
        async with Talker(server) as talker:
            await talker.say(question() + silence(1.0))
            await talker.wait("response.done")
            await talker.send(BY_HAND)
            await talker.send(typed("Good morning."), {"type": "response.create"})
            await talker.wait("response.output_audio.delta")
            await talker.send({"type": "response.cancel"})
            await talker.wait("response.done")
            await talker.ask("Go on.", output_modalities=["text"])
            heard.append(talker.pcm())

    run(main())
    server.await_nothing_held()
    (kept,) = server.await_folder(folder)
    assert kept.stat().st_mode & 0o077 == 0
    said, rate = soundfile.read(kept / "input-24000.wav", dtype="int16")
    assert (rate, said.tobytes()) == (24_000, question() + silence(1.0))
    assert soundfile.read(kept / "output-24000.wav", dtype="int16")[0].tobytes() == heard[0]
    wire = [json.loads(line) for line in (kept / "wire.jsonl").read_text().splitlines()]
    assert {line["from"] for line in wire} == {"client", "server"}
    assert "session.created" in [line["message"]["type"] for line in wire]
    assert {"chars": 6400} in [line["message"].get("audio") for line in wire]
    result = CliRunner().invoke(app, ["replay", str(kept), "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    # The cancelled reply keeps the share of its words that was said, of those codes that had been
    # drawn by then: on another processor a word more or less.
    (recorded, replayed, _), same = document["rows"], document["same"]
    assert result.exit_code == int(not same)
    assert same or abs(recorded - replayed) in range(1, 4), result.output
    assert document["order"] == []
    assert document["text_same"]
    first, cancelled, text = document["timings"]
    assert first["vad_wait_ms"][0] == first["vad_wait_ms"][1] > 400
    for ms, name in zip(first["speech_to_first_audio_ms"], ("recorded", "replayed"), strict=True):
        assert ms > first["vad_wait_ms"][0], name
    metrics = server.metrics()
    assert metrics["mosstalk_vad_wait_seconds_count"] == 1
    assert metrics["mosstalk_speech_to_first_audio_seconds_count"] == 1
    assert "total_ms" in cancelled
    assert "commit_to_first_text_ms" in text
    was, now, equal = document["samples"]
    assert equal == min(was, now) > 24_000  # the cancelled reply may be longer or shorter now


def test_no_message_ends_a_recording(server: Server, folder: Path) -> None:
    surrogate = '{"type": "response.cancel", "event_id": "\\ud800"}'
    hostile: list[str | bytes] = [surrogate, "[" * 200_000, b"\xff{", b'{"type": "\xed\xa0\x80"}']
    ids: list[str] = []

    async def main() -> None:
        async with Talker(server) as other, Talker(server) as talker:
            for message in hostile:
                await talker.send(message)
                error = await talker.error()
                assert (error["code"], error["event_id"]) == ("invalid_json", None)
            for each in (talker, other):
                await each.send(BY_HAND)
                line = "One\u2028two \u4f60"  # a line's end to Python, and none to JSON
                await each.ask(line, output_modalities=["text"], max_output_tokens=2)
                ids.append(each.events[0]["session"]["id"])

    run(main())
    server.await_nothing_held()
    server.await_folder(folder)
    for session_id in ids:
        (kept,) = folder.glob(f"*{session_id}")
        assert read_recording(kept).closed == "client"
        text = (kept / "wire.jsonl").read_text("utf-8")
        wire = [json.loads(line) for line in text.split("\n")[:-1]]
        assert "response.done" in [line["message"].get("type") for line in wire]
        unread = [line["message"]["no_json"] for line in wire if "no_json" in line["message"]]
        assert unread == ([200_000, 2] if session_id == ids[0] else [])
    metrics = server.metrics()
    assert metrics["mosstalk_recordings_cut_total"] == 0
    assert metrics["mosstalk_recorder_up"] == 1
    assert server.faults() == []


def test_a_recording_that_fails_does_so_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    recorder = Recorder(tmp_path, metrics)
    fails, goes_on = (recorder.open(SETTINGS, FACTS) for _ in range(2))
    for number, each in enumerate((fails, goes_on)):
        each.on_event(SessionOpened(f"sess_{number}", SETTINGS, clock=0))
    fails.on_command(
        Push(np.zeros(3, np.int16))
    )  # no wire brings arrays: nothing here can write one
    fails.on_command(Push(b"\1\0"))
    goes_on.on_command(Push(b"\1\0"))
    goes_on.on_close("client", [])
    assert b"mosstalk_recorder_up 1.0" in metrics.text()
    recorder.stop()
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "recording failed" in line.getMessage()
    assert vars(line)["session"] == "sess_0"
    assert b"mosstalk_recordings_cut_total 1.0" in metrics.text()
    (folder,) = tmp_path.glob("*sess_1")
    assert read_recording(folder).closed == "client"
    assert b"mosstalk_recorder_up 0.0" in metrics.text(), "nothing can be written any more"


def test_what_a_response_is_given_and_mixed_items_are_kept_with_their_sound(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Metrics())
    kept = recorder.open(SETTINGS, FACTS)
    kept.on_event(SessionOpened("sess_1", SETTINGS, clock=0))
    mixed = Message("user", ("Hear:", Sound(b"\1\0" * 80, 8000), "and", Sound(b"\2\0" * 90)))
    told = (
        Push(b"\3\0" * 100, 8000),
        CreateMessage(mixed, "mine", "root"),
        CreateResponse(reply=ReplyMode.TEXT, input=("mine", mixed), metadata={"for": "me"}),
        CreateResponse(input=()),
        CreateResponse(),
    )
    for command in told:
        kept.on_command(command)
    kept.on_close("client", [])
    recorder.stop()
    (folder,) = tmp_path.iterdir()
    read = [moment.command for moment in read_recording(folder).moments if moment.command]
    push, message, given, empty, plain = read
    assert isinstance(push, Push)
    assert (push.pcm, push.rate) == (b"\3\0" * 100, 8000)
    assert isinstance(message, CreateMessage)
    assert (message.item_id, message.previous_item_id) == ("mine", "root")
    assert isinstance(given, CreateResponse)
    assert given.input is not None
    reference, again = given.input
    assert (reference, given.reply, given.metadata) == ("mine", ReplyMode.TEXT, {"for": "me"})
    assert isinstance(again, Message)
    for each in (message.message, again):
        shown = [part if isinstance(part, str) else (part.pcm, part.rate) for part in each.parts]
        assert shown == ["Hear:", (b"\1\0" * 80, 8000), "and", (b"\2\0" * 90, 24_000)]
    assert isinstance(empty, CreateResponse)
    assert empty == told[3]
    assert plain == told[4]


def test_a_recording_of_the_format_before_is_read_as_it_was_meant() -> None:
    read = read_recording(ROOT / "tests" / "recordings" / "format-1")
    commands = [moment.command for moment in read.moments if moment.command]
    push, _, typed_in, apart, plain = commands
    assert isinstance(push, Push)
    assert (push.pcm, push.rate, push.paused_s) == (b"\3\0" * 240, 24_000, 0.0)
    assert typed_in == CreateText("user", "Good morning.", "item_2")
    assert apart == CreateResponse(in_conversation=False, input=("item_2",))
    assert plain == CreateResponse()
    assert (read.closed, read.rows) == ("client", [(1, 2)])


def test_a_disk_that_fills_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    recorder = Recorder(tmp_path / "kept", metrics)
    kept = recorder.open(SETTINGS, FACTS)
    kept.on_command(Commit())  # before the session has said its name
    kept.on_event(SessionOpened("sess_1", SETTINGS, clock=0))
    kept.on_command(Push(b"\1\0" * 240))
    recorder.stop()
    monkeypatch.setattr(recording, "LEFT_BYTES", 1 << 62)
    other = Recorder(tmp_path / "kept", metrics)
    cut = other.open(SETTINGS, FACTS)
    cut.on_event(SessionOpened("sess_2", SETTINGS, clock=0))
    for place in range(3):
        cut.on_event(AudioDelta("r", "i", place, b"\0\0", clock=0))
    cut.on_close("client", [])
    other.stop()
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "a recording ends" in line.getMessage()
    assert b"mosstalk_recordings_cut_total 1.0" in metrics.text()
    (folder,) = (tmp_path / "kept").glob("*sess_1")
    read = read_recording(folder)  # it was never ended, as if the power had gone
    assert read.settings == SETTINGS
    assert [type(m.command) for m in read.moments if m.command] == [Commit, Push]
    pushed = read.moments[-1].command
    assert isinstance(pushed, Push)
    assert (pushed.pcm, pushed.rate) == (b"\1\0" * 240, 24_000)
    assert read.closed is None


def test_old_recordings_are_deleted_and_nothing_else_in_the_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Metrics())
    for name in ("sess_1", "sess_2"):
        kept = recorder.open(SETTINGS, FACTS, f"conv_{name}")
        kept.on_event(SessionOpened(name, SETTINGS, clock=0))
    recorder.stop()
    (tmp_path / "notes").mkdir()
    old, new = (next(tmp_path.glob(f"*{name}")) for name in ("sess_1", "sess_2"))
    two_days_ago_s = time.time() - 2 * 86_400
    for path in (tmp_path / "notes", *old.iterdir()):
        os.utime(path, (two_days_ago_s, two_days_ago_s))
    os.utime(new / "session.json", (two_days_ago_s, two_days_ago_s))  # but more has come since
    Recorder(tmp_path, Metrics(), days=3).stop()
    assert old.exists()
    Recorder(tmp_path, Metrics(), days=1).stop()
    assert sorted(tmp_path.iterdir()) == sorted([new, tmp_path / "notes"])


def test_a_disk_that_takes_no_more_ends_the_recording_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    recorder = Recorder(tmp_path, metrics)
    cut = recorder.open(SETTINGS, FACTS)
    cut.on_event(SessionOpened("sess_1", SETTINGS, clock=0))
    recorder.stop()
    (kept,) = tmp_path.iterdir()
    (kept / "output-24000.wav").symlink_to("/dev/full")
    again = Recorder(tmp_path, metrics)
    cut._recorder = again
    cut.on_event(AudioDelta("r", "i", 0, bytes(1 << 16), clock=0))
    cut.on_event(AudioDelta("r", "i", 0, bytes(1 << 16), clock=0))
    again.stop()
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "No space left" in line.getMessage()


def test_a_file_of_unknown_length_can_be_read(tmp_path: Path) -> None:
    file = WavFile(tmp_path / "a.wav", 8000)
    assert [file.write(b"\1\0\2\0\3"), file.write(b"\4\0")] == [0, 2]
    assert soundfile.read(tmp_path / "a.wav", dtype="int16")[0].tolist() == [1, 2, 4]
    file.close()
    assert soundfile.info(tmp_path / "a.wav").frames == 3


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no recording"):
        read_recording(tmp_path)
    (tmp_path / "session.json").write_text('{"format": 2}')
    (tmp_path / "session.jsonl").write_text("")
    with pytest.raises(OptionError, match="damaged"):
        read_recording(tmp_path)
    (tmp_path / "session.json").write_text('{"format": 99}')
    with pytest.raises(OptionError, match="format 99"):
        read_recording(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        Recorder(tmp_path / "file", Metrics())


@pytest.mark.parametrize("command", ["HangUp", "Push"])
def test_a_recording_with_an_unknown_command_or_without_its_sound_is_damaged(
    command: str, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, Metrics())
    kept = recorder.open(SETTINGS, FACTS)
    kept.on_event(SessionOpened("sess_1", SETTINGS, clock=0))
    kept.on_command(Push(b"\1\0" * 240))
    recorder.stop()
    (folder,) = tmp_path.iterdir()
    lines = (folder / "session.jsonl").read_text()
    (folder / "session.jsonl").write_text(lines.replace('"Push"', f'"{command}"'))
    (folder / "input-24000.wav").write_bytes(b"no sound")
    (folder / "output-24000.wav").write_bytes(b"no sound")
    with pytest.raises(OptionError, match="damaged"):
        read_recording(folder)
    (folder / "session.jsonl").write_text("")
    with pytest.raises(OptionError, match=r"output-24000\.wav: a damaged recording"):
        read_recording(folder).sound()
