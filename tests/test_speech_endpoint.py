"""``POST /v1/audio/speech``: the unmodified `openai` client and a running server."""

import base64
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from conftest import Run, run
from openai import OpenAI
from server_rig import QUICK, RATE, Server, Talker, ask, run_lines, serving
from session_rig import pocket

from mosstalk.offline.pipeline import speak
from mosstalk.offline.text_normalizer import readable
from mosstalk.session.sound import pcm_of

LINE = "Good morning. The train leaves at 5:30."
LONG = " ".join(f"Number {word} is a long sentence that is here for its own sake, and not said in "
                "a moment." for word in ("one", "two", "three", "four"))  # fmt: skip
KINDS = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "wav": "audio/wav",
    "pcm": "audio/pcm",
}  # fmt: skip
URL = "/v1/audio/speech"
ALL = ("--flow-context", "0")
"""The flow decoder forgets nothing, as without a clock."""


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server for everybody, which waits a second for a request, and hears all of each reply."""
    with serving(
        *QUICK, *ALL, "--limit", "header_s=1", "--limit", "stalled_s=2", cache=cache_folder
    ) as running:
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
        "--record", str(folder),
    )  # fmt: skip
    with serving(*QUICK, *words, cache=cache_folder, env={"MOSSTALK_API_KEY": "beta"}) as running:
        running.headers = {"Authorization": "Bearer alpha"}
        yield running


def client(server: Server, key: str = "none") -> OpenAI:
    """The client as anybody makes it, but for its patience."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def body(text: str = LINE, **more: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "tts-1", "voice": "default", "input": text, **more}


def pcm(server: Server, text: str = LINE, **more: Any) -> bytes:
    """A text's sound."""
    answer: bytes = (
        client(server).audio.speech.create(**body(text, response_format="pcm", **more)).content
    )
    return answer


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which has the form that OpenAI's have."""
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) - {"retry_after_s"} == {"message", "type", "param", "code"}
    return found


def test_a_text_is_read_as_mosstalk_speak_reads_it(server: Server) -> None:
    pipeline, offline = pocket(), b""
    for piece in readable(LONG, pipeline.defaults.text).pieces:
        sound = speak(pipeline, piece, as_written=True)
        offline += pcm_of(np.concatenate(list(sound)))
    online = pcm(server, LONG)
    assert len(online) == len(offline) > 8 * 2 * RATE
    both = [np.frombuffer(each, "<i2").astype(int) for each in (online, offline)]
    assert abs(both[0] - both[1]).max() <= 2, "batches round in the last bit"


@pytest.mark.parametrize("name", KINDS)
def test_every_format_holds_the_same_sound(server: Server, name: str, tmp_path: Path) -> None:
    whole = pcm(server)
    file = tmp_path / f"speech.{name}"
    asked = body(response_format=name)
    with client(server).audio.speech.with_streaming_response.create(**asked) as response:
        assert response.headers["content-type"] == KINDS[name]
        assert response.headers["transfer-encoding"] == "chunked"
        response.stream_to_file(file)
    content = file.read_bytes()
    if name == "pcm":
        assert content == whole
    elif (
        name == "flac"
    ):  # of unknown length, which libsndfile does not read: see the encoder's test
        assert content.startswith(b"fLaC")
    else:
        sound, rate = soundfile.read(io.BytesIO(content))
        assert rate == RATE
        assert 0 <= len(sound) - len(whole) // 2 < 0.12 * RATE


def test_the_lines_in_the_docs_write_a_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_lines("Text to speech", server)
    sound, _ = soundfile.read("morning.wav", dtype="int16")
    assert sound.tobytes() == pcm(server)


def test_mp3_is_what_comes_unless_another_format_is_named(server: Server) -> None:
    answer = client(server).audio.speech.create(**body("Hello."))
    assert answer.response.headers["content-type"] == "audio/mpeg"


def test_a_voice_may_be_an_object_and_instructions_are_taken(server: Server) -> None:
    asked: Any = body("Hello.", voice={"id": "default"}, instructions="Whisper.")
    answer = client(server).audio.speech.create(**asked, response_format="pcm").content
    assert answer == pcm(server, "Hello.")


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_speed_makes_it_longer_or_shorter(server: Server, speed: float) -> None:
    usual, other = pcm(server), pcm(server, speed=speed)
    assert len(other) // 2 == round(len(usual) // 2 / speed)


def test_events_bring_the_sound_and_at_the_end_what_it_took(server: Server) -> None:
    asked = body(LONG, response_format="wav", stream_format="sse")
    with client(server).audio.speech.with_streaming_response.create(**asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    *deltas, done = told
    assert len(deltas) > 4
    assert all(set(each) == {"type", "audio"} for each in deltas)
    assert {each["type"] for each in deltas} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(each["audio"], validate=True) for each in deltas)
    assert sound[44:] == pcm(server, LONG)
    usage = done.pop("usage")
    assert done == {"type": "speech.audio.done"}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] * 1920 >= len(sound[44:]) // 2, "a token is 80 ms"


def test_the_first_bytes_come_while_it_speaks_and_who_goes_away_ends_it(server: Server) -> None:
    """The reply is cancelled after its first bytes came: it cannot have been whole by then."""
    cancelled = 'mosstalk_responses_total{reason="session_closed",status="cancelled"}'
    vanished = 'mosstalk_sessions_closed_total{reason="vanished"}'
    before = server.metrics()
    for name in KINDS:
        asked = body(LONG, response_format=name)
        with client(server).audio.speech.with_streaming_response.create(**asked) as response:
            assert next(iter(response.iter_bytes()))

    def counted(name: str, after: dict[str, float]) -> float:
        return after.get(name, 0) - before.get(name, 0)

    server.await_metrics(lambda after: counted(vanished, after) == len(KINDS))
    assert counted(cancelled, server.metrics()) == len(KINDS)
    server.await_nothing_held()
    assert not server.faults()


def test_who_takes_nothing_off_is_given_up(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body(LONG, response_format="pcm")).encode()
    with socket.socket() as still:
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        still.connect((host, int(port)))
        head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        still.sendall(head.encode() + content)
        stalled = 'mosstalk_sessions_closed_total{reason="stalled"}'
        server.await_metrics(lambda metrics: metrics.get(stalled) == 1)
        server.await_nothing_held()


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "voice": ({"voice": "nobody"}, "invalid_value", "Supported values are: 'default'"),
    "no voice": ({"voice": None}, "missing_required_parameter", "There are: default"),
    "empty": ({"input": " \n"}, "invalid_value", "empty"),
    "no word": ({"input": "?!"}, "invalid_value", "no word"),
    "another script": ({"input": "Привет"}, "invalid_value", "English"),
    "long": ({"input": "a" * 32_769}, "string_above_max_length", "32768"),
    "number": ({"input": 3}, "invalid_type", "a string"),
    "aac": ({"response_format": "aac"}, "invalid_value", "'flac', 'mp3', 'opus', 'pcm', 'wav'"),
    "slow": ({"speed": 0.2}, "invalid_value", "0.25 to 4"),
    "stream": ({"stream_format": "ws"}, "invalid_value", "'audio', 'sse'"),
    "unknown": ({"tempo": 2}, "unknown_parameter", "'tempo'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_told_in_openais_form(server: Server, case: str) -> None:
    fields, code, words = WRONG[case]
    answer = ask("POST", f"{server.url}{URL}", json=body() | fields)
    found = error(answer)
    assert (answer.status_code, found["type"]) == (400, "invalid_request_error")
    assert (found["code"], found["param"]) == (code, next(iter(fields)))
    assert words in found["message"]


def test_the_client_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="Supported values") as refused:
        client(server).audio.speech.create(**body(voice="nobody"))
    assert refused.value.param == "voice"


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 1000, b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_refused(server: Server, content: bytes) -> None:
    answer = ask("POST", f"{server.url}{URL}", content=content)
    assert (answer.status_code, error(answer)["code"]) == (400, "invalid_json")


def test_long_and_slow_bodies_and_pages_from_elsewhere_are_refused(server: Server) -> None:
    url = f"{server.url}{URL}"
    answer = ask("POST", url, content=b" " * (257 << 10))
    assert (answer.status_code, error(answer)["code"]) == (413, "request_too_large")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as slow:
        slow.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\n"
                     b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    answer = ask("POST", url, json=body(), headers={"Origin": "https://evil.example"})
    assert (answer.status_code, error(answer)["code"]) == (403, "origin")
    for method in ("GET", "PUT"):
        answer = ask(method, url)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert "takes POST" in error(answer)["message"]
    server.await_nothing_held()


def test_keys_and_places_are_those_of_conversations(narrow: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        client(narrow, "gamma").audio.speech.create(**body())

    async def main() -> None:
        async with Talker(narrow, additional_headers=narrow.headers):
            with pytest.raises(openai.RateLimitError) as refused:
                client(narrow, "alpha").audio.speech.create(**body())
            assert refused.value.code == "per_key"
            with pytest.raises(openai.InternalServerError) as full:
                client(narrow, "beta").audio.speech.create(**body())
            assert (full.value.status_code, full.value.code) == (503, "full")
            for told in (refused.value, full.value):
                assert int(told.response.headers["retry-after"]) >= 1

    run(main())
    narrow.await_nothing_held()
    reading = client(narrow, "alpha").audio.speech.with_streaming_response.create(**body(LONG))
    with reading as response:
        sound = response.iter_bytes()
        assert next(sound)
        with pytest.raises(openai.RateLimitError):
            client(narrow, "alpha").audio.speech.create(**body())
        assert b"".join(sound)
    narrow.await_nothing_held()


def test_a_text_is_recorded_and_replayed_as_a_session(
    narrow: Server, folder: Path, mosstalk: Run
) -> None:
    before = set(folder.iterdir())
    client(narrow, "alpha").audio.speech.create(**body())
    (latest,) = narrow.await_folder(folder, before)
    assert json.loads((latest / "session.json").read_text())["settings"]["task"] == "speak"
    replayed = mosstalk("replay", str(latest), "--json")
    assert replayed.returncode == 0, replayed.stderr
    found = json.loads(replayed.stdout)
    assert found["order"] == []
    was, now, equal = found["samples"]
    assert was == now == equal > RATE


def test_a_text_that_is_being_read_is_finished_before_the_server_ends(narrow: Server) -> None:
    """The last of this server: it ends it."""
    whole = client(narrow, "alpha").audio.speech.create(**body(LONG)).content
    narrow.await_nothing_held()
    reading = client(narrow, "alpha").audio.speech.with_streaming_response.create(**body(LONG))
    with reading as response:
        sound = response.iter_bytes()
        first = next(sound)
        narrow.signal(signal.SIGTERM)
        narrow.await_log(
            lambda: any("draining" in str(line.get("message")) for line in narrow.logs)
        )
        assert first + b"".join(sound) == whole
    assert narrow.wait(20) == 0
    assert not narrow.faults()


@pytest.mark.parametrize("stream_format", ["sse", "audio"])
def test_a_worker_that_dies_breaks_the_sound_off(cache_folder: Path, stream_format: str) -> None:
    asked = body(LONG, response_format="pcm", stream_format=stream_format)
    with serving(*QUICK, cache=cache_folder) as server:
        reading = client(server).audio.speech.with_streaming_response.create(**asked)
        with reading as response:
            content = response.iter_bytes()
            assert next(content)
            os.kill(server.worker_id, signal.SIGKILL)
            if stream_format == "audio":
                with pytest.raises(Exception, match="incomplete chunked read"):
                    list(content)
            else:
                last = json.loads(b"".join(content).splitlines()[-2].removeprefix(b"data: "))
                assert (last["type"], last["error"]["code"]) == ("error", "dead")
        assert server.wait() == 70
        assert not server.faults()
