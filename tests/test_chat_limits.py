"""``POST /v1/chat/completions``: its docs, its limits, and clients that misbehave or go away."""

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile
from conftest import ROOT, Run, require_package, run
from server_rig import QUICK, RATE, Server, Talker, ask, run_lines, serving
from test_chat_endpoint import (
    STRAYING,
    URL,
    answer,
    body,
    client,
    error,
    folder,
    heard,
    narrow,
    packed,
    reply,
    said,
    server,
    streamed,
)

from mosstalk.server.chat_request import ChatRequest

__all__ = ["folder", "narrow", "server"]
POCKET = ROOT / "src" / "mosstalk" / "pocket"
VANISHED = 'mosstalk_sessions_closed_total{reason="vanished"}'
STALLED = 'mosstalk_sessions_closed_total{reason="stalled"}'
CANCELLED = 'mosstalk_responses_total{reason="session_closed",status="cancelled"}'
SECTION = (ROOT / "docs" / "server.md").read_text().partition("## Chat completions")[2]


def test_the_lines_in_the_docs_answer_by_voice(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run_lines("Chat completions", server)
    assert "Paris" in capsys.readouterr().out
    assert soundfile.info("answer.wav").duration > 1


def test_every_field_is_in_the_docs_table() -> None:
    table = SECTION.partition("\n### ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert named == set(ChatRequest.model_fields)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 1000, b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_refused(server: Server, content: bytes) -> None:
    found = ask("POST", f"{server.url}{URL}", content=content)
    assert (found.status_code, error(found)["code"]) == (400, "invalid_json")


def test_long_and_slow_bodies_and_pages_from_elsewhere_are_refused(server: Server) -> None:
    url = f"{server.url}{URL}"
    found = ask("POST", url, content=b" " * 4_000_001)
    assert (found.status_code, error(found)["code"]) == (413, "request_too_large")
    wordy = body(*[said("a" * 30_000)] * 40)
    found = ask("POST", url, json=wordy)
    assert (found.status_code, error(found)["code"]) == (400, "string_above_max_length")
    assert "the sound of fields named 'data'" in error(found)["message"]
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as slow:
        head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{"
        slow.sendall(head.encode())
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    found = ask("POST", url, json=body(), headers={"Origin": "https://evil.example"})
    assert (found.status_code, error(found)["code"]) == (403, "origin")
    for method in ("GET", "PUT"):
        found = ask(method, url)
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
    server.await_nothing_held()


def test_a_long_recording_is_no_long_text(server: Server) -> None:
    """Of one megabyte and more, where a message may have one without its sound."""
    file = packed(bytes(29 * 2 * RATE))
    assert len(file) > 1 << 20
    found = answer(server, heard(file), said())
    assert found.usage.prompt_tokens_details.audio_tokens == pytest.approx(29 / 0.08, abs=2)


@pytest.mark.parametrize("streamed", [True, False])
def test_who_goes_away_frees_its_place_at_once(server: Server, streamed: bool) -> None:
    server.await_nothing_held()
    before = server.metrics()
    content = json.dumps(body(STRAYING, spoken="pcm16", stream=streamed)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), 20) as leaving:
        leaving.sendall(head.encode() + content)
        if streamed:
            assert leaving.recv(100).startswith(b"HTTP/1.1 200 ")
        else:
            server.await_metrics(lambda after: after["mosstalk_replies_running"] == 1)
    gone = before.get(VANISHED, 0) + 1
    after = server.await_metrics(lambda after: after.get(VANISHED, 0) == gone)
    assert after.get(CANCELLED, 0) == before.get(CANCELLED, 0) + 1, "it was not whole by then"
    server.await_nothing_held()
    assert not server.faults()


def test_who_takes_nothing_off_holds_nobody_up_and_is_given_up(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body(STRAYING, spoken="pcm16", stream=True)).encode()
    before = server.metrics().get(STALLED, 0)
    with socket.socket() as still:
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        still.connect((host, int(port)))
        head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        still.sendall(head.encode() + content)
        assert still.recv(100).startswith(b"HTTP/1.1 200 ")
        assert "Paris" in reply(server).content
        server.await_metrics(lambda after: after.get(STALLED, 0) == before + 1)
        server.await_nothing_held()


def test_keys_places_and_pages_are_those_of_conversations(narrow: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        reply(narrow, key="gamma")

    async def main() -> None:
        async with Talker(narrow, additional_headers=narrow.headers):
            with pytest.raises(openai.RateLimitError) as refused:
                reply(narrow, key="alpha")
            assert refused.value.code == "per_key"
            with pytest.raises(openai.InternalServerError) as full:
                reply(narrow, key="beta")
            assert (full.value.status_code, full.value.code) == (503, "full")
            for told in (refused.value, full.value):
                assert int(told.response.headers["retry-after"]) >= 1

    run(main())
    narrow.await_nothing_held()
    page = {"Origin": "https://page.example"}
    wanted = page | {"Access-Control-Request-Method": "POST"}
    found = ask("OPTIONS", f"{narrow.url}{URL}", headers=wanted)
    assert "POST" in found.headers["access-control-allow-methods"]
    found = ask("POST", f"{narrow.url}{URL}", headers=page | narrow.headers, json=body())
    assert found.headers["access-control-allow-origin"] == page["Origin"]
    assert found.status_code == 200
    narrow.await_nothing_held()


def test_a_reply_belongs_to_its_key(narrow: Server) -> None:
    first = reply(narrow, spoken="wav", key="alpha")
    named: dict[str, Any] = {"role": "assistant", "audio": {"id": first.audio.id}}
    narrow.await_nothing_held()
    assert reply(narrow, said(), named, said(), key="alpha").content
    narrow.await_nothing_held()
    with pytest.raises(openai.BadRequestError, match="another key"):
        reply(narrow, said(), named, said(), key="beta")
    narrow.await_nothing_held()


def test_a_turn_is_recorded_and_replayed_as_a_session(
    narrow: Server, folder: Path, mosstalk: Run
) -> None:
    narrow.await_nothing_held()
    before = set(folder.iterdir())
    reply(narrow, spoken="wav", key="alpha")
    (latest,) = narrow.await_folder(folder, before)
    replayed = mosstalk("replay", str(latest), "--json")
    assert replayed.returncode == 0, replayed.stderr
    found = json.loads(replayed.stdout)
    assert found["order"] == []
    was, now, equal = found["samples"]
    assert was == now == equal > RATE


def test_an_answer_that_is_being_made_is_finished_before_the_server_ends(narrow: Server) -> None:
    """The last of this server: it ends it."""
    asked = body(STRAYING, spoken="pcm16", stream=True)
    chunks = iter(client(narrow, "alpha").chat.completions.create(**asked))
    next(chunks)
    narrow.signal(signal.SIGTERM)
    narrow.await_log(lambda: any("draining" in str(line.get("message")) for line in narrow.logs))
    assert list(chunks)[-1].choices[0].finish_reason in ("stop", "length")
    assert narrow.wait(20) == 0
    assert not narrow.faults()


def test_a_worker_that_dies_is_told_and_words_that_nobody_knows_are(cache_folder: Path) -> None:
    """Random weights write nothing of what they say."""
    with serving(*QUICK, "--model", "synthetic", cache=cache_folder) as server:
        first = reply(server, spoken="wav")
        assert (first.audio.transcript, first.content) == ("", None)
        with pytest.raises(openai.BadRequestError, match="--transcriber") as refused:
            reply(server, said(), {"role": "assistant", "audio": {"id": first.audio.id}}, said())
        assert refused.value.code == "audio_without_transcript"
        chunks = iter(client(server).chat.completions.create(**body(spoken="pcm16", stream=True)))
        next(chunks)
        os.kill(server.worker_id, signal.SIGKILL)
        with pytest.raises(openai.APIError) as dead:
            list(chunks)
        assert dead.value.code == "dead"
        assert server.wait() == 70
        assert not server.faults()


@pytest.mark.system
def test_the_transcriber_gives_the_words_of_a_model_that_does_not_write_them(
    cache_folder: Path, tmp_path: Path
) -> None:
    require_package("faster_whisper", "transcribe")
    shutil.copytree(POCKET, tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "model" / "generation_config.json"
    settings.write_text(
        settings.read_text().replace('"writes_first": true', '"writes_first": false')
    )
    model = ("--model", str(tmp_path / "model"), "--codec", str(tmp_path / "codec"))
    words = (*QUICK, *model, "--transcriber", "whisper-tiny")
    with serving(*words, cache=cache_folder) as server:
        first = reply(server, spoken="wav")
        assert first.content is None
        assert "capital" in first.audio.transcript  # it says more surely what it wrote before
        chunks = streamed(server, spoken="pcm16")
        told = [each.choices[0].delta.audio for each in chunks if each.choices[0].delta.audio]
        assert "".join(each.transcript or "" for each in told) == first.audio.transcript
        named: dict[str, Any] = {"role": "assistant", "audio": {"id": first.audio.id}}
        assert reply(server, said(), named, said()).content
