"""``mosstalk bench serve``: what it says of a server must be so."""

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from conftest import QUESTION, command_environment
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from mosstalk.bench.serve import Bounds, Crowd, Load, Target, measure, sentence_ends
from mosstalk.bench.serve_clients import RATE, Pattern
from mosstalk.bench.serve_report import page_of, tables_of, verdict

SHORT = Pattern(heard_s=0.2, spoken_s=0.4, pause_s=0.0)
SPEECH = (3000 * np.sin(np.arange(RATE) / 20)).astype(np.int16)
SOUND = base64.b64encode(bytes(RATE)).decode()
"""Half a second of it."""
SLACK_MS = 120
"""How late this machine may be, beside what it was told to be."""


@contextmanager
def answering(wait_s: float = 0.0, gap_s: float = 0.0, most: int = 99) -> Iterator[Target]:
    """A server whose faults are known.

    It answers ``wait_s`` after it was asked with half a second of sound, and brings as much again
    ``gap_s`` after that has been played. It lets in ``most`` connections.
    """
    numbers = count()

    def door(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/v1/realtime":
            return connection.respond(HTTPStatus.NOT_FOUND, "nothing else is here")
        if next(numbers) < most:
            return None
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "full")

    def answer(socket: ServerConnection) -> None:
        def say(kind: str, **more: object) -> None:
            socket.send(json.dumps({"type": kind} | more))

        say("session.created")
        for message in socket:
            kind = json.loads(message)["type"]
            if kind == "session.update":
                say("session.updated")
            elif kind == "response.create":
                time.sleep(wait_s)
                say("response.output_audio.delta", delta=SOUND)
                time.sleep(0.5 + gap_s if gap_s else 0)
                say("response.output_audio.delta", delta=SOUND)
                say("response.done", response={"status": "completed"})

    with serve(answer, "127.0.0.1", 0, process_request=door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Target(f"ws://127.0.0.1:{server.socket.getsockname()[1]}/v1/realtime", {})
        finally:
            server.shutdown()
            thread.join(10)


def load(*crowds: int, turns: int = 2, first_audio_ms: float = 400.0) -> Load:
    return Load(crowds, SHORT, turns, 0, Bounds(first_audio_ms))


def measured(target: Target, load: Load) -> list[Crowd]:
    return measure(target, load, SPEECH, [len(SPEECH)], lambda *_: None)


def test_a_server_that_keeps_within_its_bounds_has_served() -> None:
    asked = load(1, 3, first_audio_ms=2000)
    with answering() as target:
        crowds = measured(target, asked)
    assert [(crowd.admitted, len(crowd.turns)) for crowd in crowds] == [(1, 2), (3, 6)]
    assert all(turn["audio_ms"] == 1000 and not turn["underruns_ms"] for turn in crowds[1].turns)
    assert verdict(crowds, asked) == "3 conversations served; no bound broke"
    assert "<polyline" in page_of({"device": "x", "weights": "none"}, crowds, asked)


def test_a_late_answer_is_measured_from_the_commit() -> None:
    with answering(wait_s=0.5) as target:
        (crowd,) = measured(target, load(1))
    found = crowd.quantiles("commit_to_audio_ms")
    assert found
    assert 500 <= min(found) <= max(found) < 500 + SLACK_MS
    assert crowd.breaches(Bounds())[0].startswith("p95 to first audio")


def test_a_gap_is_as_long_as_a_player_without_a_buffer_is_silent() -> None:
    asked = load(1)
    with answering(gap_s=0.3) as target:
        (crowd,) = measured(target, asked)
    assert crowd.broken == 2
    assert all(300 <= gap < 300 + SLACK_MS for gap in crowd.underruns_ms), crowd.underruns_ms
    assert "underruns in 2 of 2 turns" in tables_of([crowd], asked)[0].as_text()


def test_a_crowd_that_was_not_let_in_as_a_whole_does_not_count() -> None:
    asked = load(2, 3, first_audio_ms=2000)
    with answering(most=4) as target:
        crowds = measured(target, asked)
    assert crowds[1].turns == []
    assert crowds[1].refusals == {"status 503": 1}
    assert verdict(crowds, asked).startswith("2 conversations served; at 3: 1 of 3 not let in")


def test_sentences_end_where_pauses_begin() -> None:
    pause = np.zeros(RATE // 4, np.int16)
    speech = np.concatenate([SPEECH, pause, SPEECH, pause[: RATE // 20], SPEECH, pause])
    ends = [RATE, 3 * RATE + len(pause) + RATE // 20]
    assert sentence_ends(speech) == pytest.approx(ends, abs=RATE // 50)
    assert sentence_ends(np.zeros(RATE, np.int16)) == []


@pytest.mark.parametrize("hands_free", [False, True])
def test_the_command_measures_a_server_that_it_starts(
    hands_free: bool, cache_folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "crowd.html"
    words = ["--at", "2,3", "--turns", "1", "--heard", "1", "--spoken", "1", "--pause", "0"]
    words += ["--speech", str(QUESTION), "--html", str(page), "--json", "-"]
    words += ["--most-first-audio-ms", "60000"]  # however busy this machine is
    words += ["--hands-free"] if hands_free else []
    run = subprocess.run(
        [sys.executable, "-m", "mosstalk.cli", "bench", "serve", *words, "--", "--max-sessions=2"],
        capture_output=True, text=True, check=True, env=command_environment(cache_folder),
    )  # fmt: skip
    found = json.loads(run.stdout)
    two, three = found["crowds"]
    assert found["weights"] == "pocket"
    assert two["failed"] == 0
    assert two["commit_to_audio_ms"][0] > 0
    assert bool(two["decision_to_audio_ms"]) is hands_free
    assert two["server"]["front"] > 0
    assert two["server"]["worker_mib"] > 100
    assert three["refusals"] == {"status 503": 1}
    assert "at 3: 1 of 3 not let in (1 x status 503)" in run.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
