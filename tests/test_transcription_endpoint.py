"""``POST /v1/audio/transcriptions``: the unmodified `openai` client and a running server."""

import io
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from conftest import ROOT, Run, require_package, run
from openai import OpenAI
from openai.types.audio import (
    Transcription,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionVerbose,
)
from pydantic import BaseModel
from server_rig import QUICK, Server, Talker, ask, run_lines, serving
from session_rig import pocket

from mosstalk.audio.sound import Samples, read_audio
from mosstalk.offline.pieces import sound_pieces
from mosstalk.offline.pipeline import transcribe
from mosstalk.session.sound import samples_of

URL = "/v1/audio/transcriptions"
RATE = 16_000
VOICE = ROOT / "assets" / "librivox.flac"
SMALL = 3
"""Seconds of ``VOICE``."""
VANISHED = 'mosstalk_sessions_closed_total{reason="vanished"}'


def voice(times: int = 1) -> Samples:
    """Somebody who speaks, with a pause after each time."""
    once = np.concatenate([read_audio(VOICE, RATE).samples, np.zeros(RATE // 2, np.float32)])
    return np.tile(once, times)


def packed(samples: Samples, kind: str = "WAV", subtype: str | None = None, rate: int = RATE
           ) -> bytes:  # fmt: skip
    """A sound file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def silence(seconds: int, rate: int) -> bytes:
    """A FLAC of nothing at all, which is thousands of times smaller than its samples."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, 1, format="FLAC") as flac:
        for _ in range(0, seconds, 100):
            flac.write(np.zeros(100 * rate, np.int16))
    return file.getvalue()


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server for everybody, which waits a second for a file."""
    limits = ("upload_s=1", "upload_bytes=4000000")
    words = (word for limit in limits for word in ("--limit", limit))
    with serving(*QUICK, *words, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recordings are kept."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def narrow(cache_folder: Path, folder: Path) -> Iterator[Server]:
    """A server with two keys, room for one session, one connection a key, and recordings."""
    words = (
        "--api-key", "alpha", "--max-sessions", "1", "--limit", "per_key=1",
        "--limit", "upload_sound_s=50", "--limit", "uploads=1", "--allow-origin", "https://page.example",
        "--record", str(folder),
    )  # fmt: skip
    with serving(*QUICK, *words, cache=cache_folder, env={"MOSSTALK_API_KEY": "beta"}) as running:
        running.headers = {"Authorization": "Bearer alpha"}
        yield running


def client(server: Server, key: str = "none") -> OpenAI:
    """The client as anybody makes it, but for its patience."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def written(server: Server, file: bytes, key: str = "none", **more: Any) -> Any:
    """What the client makes of a file."""
    asked: dict[str, Any] = {"file": ("sound", file), "model": "whisper-1", **more}
    return client(server, key).audio.transcriptions.create(**asked)


def parsed(kind: type[BaseModel], content: str | bytes) -> Any:
    """An answer that is what the client's type says, with nothing converted and nothing more."""
    found = kind.model_validate_json(content, strict=True)
    assert (found.model_extra or {}).keys() <= {"task"}, "OpenAI sends it as well"
    return found


def document(server: Server, kind: type[BaseModel], file: bytes, **more: Any) -> Any:
    """An answer in JSON."""
    asked: dict[str, Any] = {"file": ("sound", file), "model": "whisper-1", **more}
    answer = client(server).audio.transcriptions.with_raw_response.create(**asked)
    assert answer.headers["content-type"] == "application/json"
    return parsed(kind, answer.text)


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which has the form that OpenAI's have."""
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) - {"retry_after_s"} == {"message", "type", "param", "code"}
    return found


def post(server: Server, file: bytes | None = b"", **more: Any) -> httpx.Response:
    """A form as any other program sends it; fields may be lists."""
    files = {} if file is None else {"file": ("sound.wav", file)}
    fields = {"model": "whisper-1", **more}
    fields = {name: value for name, value in fields.items() if value is not None}
    return ask("POST", f"{server.url}{URL}", files=files, data=fields)


def test_a_file_is_written_down_as_mosstalk_transcribe_does_it(server: Server) -> None:
    samples = samples_of(packed(voice(12))[44:])
    pieces, said = sound_pieces(samples, RATE), list[str]()
    assert len(pieces) == 2
    for piece in pieces:
        answer = transcribe(pocket(), piece)
        for _ in answer:
            pass
        said.append(" ".join(answer.text.split()))
    found = document(server, TranscriptionVerbose, packed(samples), response_format="verbose_json")
    assert [each.text for each in found.segments] == said
    assert found.text == " ".join(said)


@pytest.mark.parametrize(
    ("kind", "subtype", "rate", "channels"),
    [
        ("WAV", "FLOAT", 48_000, 2),
        ("WAV", "PCM_16", 8_000, 1),
        ("FLAC", None, 44_100, 2),
        ("OGG", "VORBIS", 16_000, 1),
        ("OGG", "OPUS", 48_000, 1),
        ("MP3", None, 24_000, 1),
    ],
)
def test_every_kind_of_file_is_heard(
    server: Server, kind: str, subtype: str | None, rate: int, channels: int
) -> None:
    samples = np.stack([read_audio(VOICE, rate).samples] * channels, axis=1)
    found = document(server, Transcription, packed(samples, kind, subtype, rate))
    assert re.search(r"[a-z]{3}", found.text)
    assert found.usage.input_tokens == sum(vars(found.usage.input_token_details).values())
    assert found.usage.input_token_details.audio_tokens * 0.08 == pytest.approx(SMALL, abs=0.2)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


def test_segments_are_the_pieces_and_formats_tell_the_same(server: Server) -> None:
    file = packed(voice(20), "FLAC")
    whole = document(
        server, TranscriptionVerbose, file, response_format="verbose_json", language="en",
        timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (whole.language, whole.duration) == ("en", len(voice(20)) / RATE)
    assert whole.usage.seconds == whole.duration
    starts = [each.start for each in whole.segments]
    assert [each.id for each in whole.segments] == list(range(len(starts)))
    assert starts == [0, *(each.end for each in whole.segments[:-1])]
    assert whole.segments[-1].end == whole.duration
    assert document(server, Transcription, file).text == whole.text
    assert written(server, file, response_format="text") == f"{whole.text}\n"
    rows = written(server, file, response_format="srt").split("\n\n")
    assert [row.split("\n")[2] for row in rows[:-1]] == [each.text for each in whole.segments]
    assert [row.split("\n")[0] for row in rows] == [*map(str, range(1, len(rows))), ""]
    times = re.findall(r"(\d\d):(\d\d):(\d\d),(\d{3})", rows[1])
    seconds = [3600 * int(h) + 60 * int(m) + int(s) + int(ms) / 1000 for h, m, s, ms in times]
    assert seconds == [whole.segments[1].start, whole.segments[1].end]
    head, *cues = written(server, file, response_format="vtt").strip().split("\n\n")
    assert head == "WEBVTT"
    assert [cue.replace(".", ",", 2).split("\n")[0] for cue in cues] == [
        row.split("\n")[1] for row in rows[:-1]
    ]


@pytest.mark.parametrize("times", [1, 12])
def test_events_bring_the_text_while_it_is_written(server: Server, times: int) -> None:
    file = packed(voice(times))
    asked: dict[str, Any] = {"file": ("sound", file), "model": "any", "stream": True}
    with client(server).audio.transcriptions.with_streaming_response.create(**asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    deltas = [parsed(TranscriptionTextDeltaEvent, line) for line in lines[:-1]]
    done = parsed(TranscriptionTextDoneEvent, lines[-1])
    assert len(deltas) >= len(done.text.split()) > 3
    assert "".join(each.delta for each in deltas) == done.text
    whole = document(server, Transcription, file)
    assert (done.text, vars(done.usage)["total_tokens"]) == (whole.text, whole.usage.total_tokens)
    kinds = [each.type for each in written(server, file, stream=True)]
    assert kinds == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]


def test_the_lines_in_the_docs_write_a_file_down(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "morning.wav").write_bytes(packed(voice()))
    monkeypatch.chdir(tmp_path)
    run_lines("Speech to text", server)
    assert capsys.readouterr().out.strip() == written(server, packed(voice())).text


def test_silence_has_no_words(server: Server) -> None:
    file = silence(100, RATE)
    found = document(server, TranscriptionVerbose, file, response_format="verbose_json")
    assert (found.text, found.segments, found.duration) == ("", [], 100)
    assert [each.type for each in written(server, file, stream=True)] == ["transcript.text.done"]
    assert written(server, file, response_format="srt") == ""


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "format": ({"response_format": "diarized_json"}, "invalid_value", "'srt', 'text', 'verbose"),
    "no model": ({"model": None}, "missing_required_parameter", "'model'"),
    "hot": ({"temperature": "1.5"}, "invalid_value", "0 to 1"),
    "no number": ({"temperature": "warm"}, "invalid_value", "a number"),
    "stream": ({"stream": "perhaps"}, "invalid_type", "true or false"),
    "logprobs": ({"include[]": "logprobs"}, "invalid_value", "logprobs"),
    "words": ({"timestamp_granularities[]": ["word", "segment"]}, "invalid_value", "not timed"),
    "granularity": ({"timestamp_granularities[]": "row"}, "invalid_value", "'segment'"),
    "twice": ({"language": ["en", "zh"]}, "invalid_form", "twice"),
    "long": ({"prompt": "a" * 32_769}, "string_above_max_length", "32768"),
    "unknown": ({"keywords[]": "moss"}, "unknown_parameter", "'keywords'"),
    "stream of cues": ({"response_format": "srt", "stream": "true"}, "invalid_value", "json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_told_in_openais_form(server: Server, case: str) -> None:
    fields, code, words = WRONG[case]
    answer = post(server, packed(voice()), **fields)
    found = error(answer)
    assert (answer.status_code, found["type"], found["code"]) == (
        400, "invalid_request_error", code,
    )  # fmt: skip
    assert found["param"].partition("[")[0] == next(iter(fields)).removesuffix("[]")
    assert words in found["message"]


NOT_HEARD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "webm": (b"\x1a\x45\xdf\xa3" + bytes(400), "this is webm"),
    "m4a": (b"\0\0\0\x20ftypM4A " + bytes(400), "this is mp4 or m4a"),
    "text": (b"Good morning.", "wav, flac, ogg"),
    "damaged": (b"RIFF\xff\xff\xff\x7fWAVE" + bytes(400), "not a readable sound file"),
    "short": (packed(voice()[:1000]), "too short"),
    "channels": (packed(np.zeros((RATE, 3), np.float32)), "3 channels"),
    "not a number": (packed(np.full(RATE, np.nan).astype(np.float32), subtype="FLOAT"), "NaN"),
}


@pytest.mark.parametrize("case", NOT_HEARD)
def test_a_file_that_cannot_be_heard_is_refused(server: Server, case: str) -> None:
    file, words = NOT_HEARD[case]
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        written(server, file, response_format="text")
    assert refused.value.param == "file"


def test_a_form_without_a_file_and_what_is_no_form_are_refused(server: Server) -> None:
    answer = post(server, None, language="en")
    assert error(answer)["code"] == "invalid_content_type", "httpx sends no form without a file"
    whole = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nany\r\n--b--\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=b"}

    def code(content: bytes, headers: dict[str, str] = form) -> str:
        answer = ask("POST", f"{server.url}{URL}", content=content, headers=headers)
        assert answer.status_code == 400
        found: str = error(answer)["code"]
        return found

    assert code(whole) == "missing_required_parameter"
    assert code(b"Passed over.\r\n" + whole) == "missing_required_parameter"
    for each in (b"", b"--b", b"x--b\r\n", whole[:-12], b"--b\r\n\r\n\r\n--b--"):
        assert code(each) == "invalid_form", each
    many = ask("POST", f"{server.url}{URL}", content=whole[:-7] * 64 + whole, headers=form)
    assert "more than 64 parts" in error(many)["message"]
    assert code(whole.replace(b"any", b"\xff")) == "invalid_value"
    for kind in (
        "multipart/form-data",
        "application/json",
        f"multipart/form-data; boundary={71 * 'b'}",
    ):
        assert code(whole, {"Content-Type": kind}).startswith("invalid_"), kind
    server.await_nothing_held()
    assert not server.faults()


def test_ten_hours_are_refused_before_they_are_decoded(server: Server) -> None:
    file = silence(36_000, 4000)
    assert len(file) < 4_000_000
    with pytest.raises(openai.BadRequestError, match=r"36000 s of sound.* at most 3600 s"):
        written(server, file)


def memory_mib(server: Server) -> float:
    """The most that the front has ever had in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def test_an_hour_in_a_small_file_fills_no_memory(server: Server) -> None:
    """Decoded at once it would be 220 MiB."""
    written(server, silence(100, RATE))
    before = memory_mib(server)
    assert written(server, silence(3600, RATE)).text == ""
    assert memory_mib(server) - before < 60


def test_a_file_that_is_longer_than_its_header_says_is_not_read_on(narrow: Server) -> None:
    """Two files in one: the header tells of the first."""
    file = packed(voice(12), "MP3")
    with soundfile.SoundFile(io.BytesIO(file + file)) as opened:
        promised_s = opened.frames / RATE
        decoded_s = len(opened.read()) / RATE
    if max(promised_s, decoded_s) > 50:
        with pytest.raises(openai.BadRequestError, match="at most 50 s"):
            written(narrow, file + file, "alpha")
    else:
        assert written(narrow, file + file, "alpha").text
    narrow.await_nothing_held()


def test_long_and_slow_files_and_pages_from_elsewhere_are_refused(server: Server) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        written(server, bytes(30 << 20))
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    with uploading(server) as slow:
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    elsewhere = {"Origin": "https://evil.example"}
    answer = ask("POST", f"{server.url}{URL}", content=b"", headers=elsewhere)
    assert (answer.status_code, error(answer)["code"]) == (403, "origin")
    for method in ("GET", "PUT"):
        answer = ask(method, f"{server.url}{URL}")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert "takes POST" in error(answer)["message"]


def uploading(server: Server, sent: int = 300_000) -> socket.socket:
    """Somebody who sends a part of a large file."""
    host, port = server.url.removeprefix("http://").split(":")
    slow = socket.create_connection((host, int(port)), 20)
    head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in server.headers.items()) + "\r\n"
    slow.sendall(head.encode() + bytes(sent))
    return slow


def test_one_large_file_too_many_is_told_to_come_again_and_small_ones_pass(
    narrow: Server,
) -> None:
    large, small = packed(voice(12)), packed(voice())

    def refused() -> openai.InternalServerError | None:
        try:
            written(narrow, large, "beta")
        except openai.InternalServerError as error:
            return error
        return None

    with uploading(narrow):
        while (found := refused()) is None:
            pass  # the slow one has not come so far
        assert (found.status_code, found.code) == (503, "uploads")
        assert int(found.response.headers["retry-after"]) >= 1
        assert written(narrow, small, "beta").text
    patient = client(narrow, "beta").with_options(max_retries=9)
    assert patient.audio.transcriptions.create(file=("sound", large), model="any").text
    narrow.await_nothing_held()


def test_who_goes_away_ends_it(server: Server) -> None:
    before = server.metrics().get(VANISHED, 0)
    asked: dict[str, Any] = {"file": ("sound", packed(voice(100), "MP3")), "model": "any"}
    create = client(server).audio.transcriptions.with_streaming_response.create
    with create(**asked, stream=True) as response:
        assert next(response.iter_bytes())
    server.await_metrics(lambda after: after.get(VANISHED, 0) == before + 1)
    server.await_nothing_held()
    assert not server.faults()


def test_keys_places_and_pages_are_those_of_conversations(narrow: Server) -> None:
    file = packed(voice())
    with pytest.raises(openai.AuthenticationError):
        written(narrow, file, "gamma")

    async def main() -> None:
        async with Talker(narrow, additional_headers=narrow.headers):
            with pytest.raises(openai.RateLimitError) as refused:
                written(narrow, file, "alpha")
            assert refused.value.code == "per_key"
            with pytest.raises(openai.InternalServerError) as full:
                written(narrow, file, "beta")
            assert (full.value.status_code, full.value.code) == (503, "full")
            for told in (refused.value, full.value):
                assert int(told.response.headers["retry-after"]) >= 1

    run(main())
    narrow.await_nothing_held()
    page = {"Origin": "https://page.example"}
    wanted = page | {"Access-Control-Request-Method": "POST"}
    answer = ask("OPTIONS", f"{narrow.url}{URL}", headers=wanted)
    assert "POST" in answer.headers["access-control-allow-methods"]
    answer = ask("POST", f"{narrow.url}{URL}", headers=page | narrow.headers,
                 files={"file": file}, data={"model": "any"})  # fmt: skip
    assert answer.headers["access-control-allow-origin"] == page["Origin"]
    assert parsed(Transcription, answer.text).text
    narrow.await_nothing_held()


def test_a_file_is_recorded_and_replayed_as_a_session(
    narrow: Server, folder: Path, mosstalk: Run
) -> None:
    narrow.await_nothing_held()
    before = set(folder.iterdir())
    written(narrow, packed(voice()), "alpha")
    (latest,) = narrow.await_folder(folder, before)
    assert json.loads((latest / "session.json").read_text())["settings"]["task"] == "transcribe"
    replayed = mosstalk("replay", str(latest), "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["order"] == []


def test_a_file_that_is_being_written_down_is_finished_before_the_server_ends(
    narrow: Server,
) -> None:
    """The last of this server: it ends it."""
    file = packed(voice(13), "FLAC")
    whole = written(narrow, file, "alpha").text
    narrow.await_nothing_held()
    events = iter(written(narrow, file, "alpha", stream=True))
    first = next(events).delta
    narrow.signal(signal.SIGTERM)
    narrow.await_log(lambda: any("draining" in str(line.get("message")) for line in narrow.logs))
    *deltas, done = events
    assert first + "".join(each.delta for each in deltas) == done.text == whole
    assert narrow.wait(20) == 0
    assert not narrow.faults()


def test_a_worker_that_dies_is_told(cache_folder: Path) -> None:
    with serving(*QUICK, cache=cache_folder) as server:
        events = iter(written(server, packed(voice(100), "FLAC"), stream=True))
        assert next(events).delta
        os.kill(server.worker_id, signal.SIGKILL)
        with pytest.raises(openai.APIError) as refused:
            list(events)
        assert refused.value.code == "dead"
        assert server.wait() == 70
        assert not server.faults()


@pytest.mark.system
def test_the_transcriber_writes_files_down_where_there_is_one(cache_folder: Path) -> None:
    require_package("faster_whisper", "transcribe")
    with serving(*QUICK, "--transcriber", "whisper-tiny", cache=cache_folder) as server:
        file = packed(voice(12))
        found = document(server, TranscriptionVerbose, file, response_format="verbose_json")
        assert "young man" in found.text
        assert " ".join(each.text for each in found.segments) == found.text
        whole = document(server, Transcription, file)
        assert (whole.usage.type, whole.usage.seconds) == ("duration", found.duration)
        assert whole.text == found.text
        *deltas, done = written(server, file, stream=True)
        assert "".join(each.delta for each in deltas) == done.text == whole.text
        opened = "mosstalk_sessions_opened_total"
        assert server.metrics()[opened] == 0, "the model is not asked"
        assert document(server, Transcription, file, language="zh").usage.type == "tokens"
        server.await_nothing_held()
        os.kill(server.child_id("mosstalk.server.captions"), signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="is started again") as refused:
            written(server, file)
        assert (refused.value.status_code, refused.value.code) == (503, "transcriber")
        assert refused.value.response.headers["retry-after"] == "5"
        assert again(server, file) == whole.text


def again(server: Server, file: Any) -> str:
    """What a transcriber writes that was started again, once it is there."""
    until_s = time.monotonic() + 60
    while True:
        try:
            found: str = document(server, Transcription, file).text
        except openai.InternalServerError:
            assert time.monotonic() < until_s
        else:
            return found
