"""``mosstalk bench serve``: what it says of a server must be so."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import QUESTION, Run, refused
from server_rig import QUICK, serving
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from mosstalk.bench.serve import Bounds, Crowd, Load, Target, measure, sentences
from mosstalk.bench.serve_clients import RATE, Pattern
from mosstalk.bench.serve_readers import Reader, ReaderPlan
from mosstalk.bench.serve_report import not_measured, page_of, tables_of, verdict

SHORT = Pattern(heard_s=0.2, spoken_s=0.4, pause_s=0.0)
FRAMES = 10
"""Of a turn of it."""
SPEECH = (3000 * np.sin(np.arange(RATE) / 20)).astype(np.int16)
SLACK_MS = 120
"""How late this machine may be, beside what it was told to be."""
LATE_MS = 20
"""Who hears of a beginning so late on a busy machine measures so much less."""
AT_ONCE = ((0.0, 500), (0.0, 500))
alone = pytest.mark.alone
"""Holds a clock to a tolerance, so it needs the machine to itself."""


def answer(say: Callable[..., None], script: Sequence[tuple[float, int]], written: str) -> None:
    for wait_s, ms in script:
        time.sleep(wait_s)
        if written:
            say("response.output_audio_transcript.delta", delta=written)
        sound = base64.b64encode(bytes(2 * RATE * ms // 1000)).decode()
        say("response.output_audio.delta", delta=sound)
    if written:
        transcript = " ".join([written] * len(script))
        say("response.output_audio_transcript.done", transcript=transcript)
    say("response.done", response={"status": "completed"})


@contextmanager
def answering(
    script: Sequence[tuple[float, int]] = AT_ONCE,
    decides_after: Sequence[int] = (),
    written: str = "",
) -> Iterator[Target]:
    """A server whose faults are known.

    It answers by ``script``: waits for so many seconds, then sends so many milliseconds of sound,
    after the text ``written`` if there is any.
    With ``decides_after`` it ends turns itself, after so many frames from the beginning.
    """

    def door(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/metrics":
            return connection.respond(HTTPStatus.OK, "<html>nothing that 1\ncould be measured\n")
        if request.path != "/v1/realtime":
            return connection.respond(HTTPStatus.NOT_FOUND, "nothing else is here")
        return None

    def talk(socket: ServerConnection) -> None:
        def say(kind: str, **more: object) -> None:
            socket.send(json.dumps({"type": kind} | more))

        frames = 0
        say("session.created")
        for message in socket:
            kind = json.loads(message)["type"]
            heard = kind == "input_audio_buffer.append"
            frames += heard
            if kind == "session.update":
                say("session.updated")
            elif kind == "response.create" or (heard and frames in decides_after):
                say("input_audio_buffer.committed")
                answer(say, script, written)

    with serve(talk, "127.0.0.1", 0, process_request=door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Target(f"ws://127.0.0.1:{server.socket.getsockname()[1]}/v1/realtime", {})
        finally:
            server.shutdown()
            thread.join(10)


def load(crowd: int = 1, turns: int = 2, *, first_ms: float = 400.0, free: bool = False) -> Load:
    return Load((crowd,), replace(SHORT, hands_free=free), turns, 0, Bounds(first_ms))


def measured(target: Target, load: Load) -> Crowd:
    (crowd,) = measure(target, load, SPEECH, lambda *_: None)
    return crowd


def test_a_server_that_keeps_within_its_bounds_has_served() -> None:
    asked = load(3, first_ms=10_000)
    with answering() as target:
        crowd = measured(target, asked)
    assert (crowd.admitted, len(crowd.turns)) == (3, 6)
    assert all(turn.audio_ms == 1000 and not turn.underruns_ms for turn in crowd.turns)
    assert crowd.quantiles("first_delta_ms") == [500, 500, 500]
    assert len({turn.begun_s for turn in crowd.turns if turn.turn == 0}) == 3
    assert verdict([crowd], asked) == "3 conversations served; no bound broke"
    # It serves something under /metrics, which is none.
    assert not_measured([crowd]) == [
        "what the server spends: it gives no /metrics to these clients"
    ]
    page = page_of({"device": "x", "weights": "none"}, [crowd], asked)
    assert page.count("<polyline") == 4
    assert "it gives no /metrics" in page


def test_a_long_past_is_typed_and_counted_before_the_first_turn(cache_folder: Path) -> None:
    asked = Load((1,), replace(SHORT, history_words=300), 2, 0, Bounds(10_000))
    with serving(*QUICK, "--model", "synthetic", cache=cache_folder) as server:
        target = Target(server.socket, {})
        crowd, without = measured(target, asked), measured(target, load())
    assert not crowd.failures + without.failures
    longer, shorter = crowd.quantiles("input_tokens"), without.quantiles("input_tokens")
    assert longer
    assert shorter
    assert min(longer) >= 300 + min(shorter)
    (table, *_) = tables_of([crowd], asked)
    assert "before them 300 words" in " ".join(table.as_text().split())
    factors = crowd.quantiles("real_time_factor")
    assert factors
    for turn in crowd.turns:
        # The client is told later than the server knows.
        assert 0 < turn.server_ms["commit_to_first_audio_ms"] <= (turn.commit_to_audio_ms or 0)
        assert turn.real_time_factor
        assert turn.real_time_factor >= (turn.commit_to_audio_ms or 0) / turn.audio_ms


def test_a_crowd_is_measured_without_and_with_texts_read_aloud(cache_folder: Path) -> None:
    asked = replace(load(first_ms=60_000), read_at_once=2, texts=("One.", "Two.", "Three."))
    with serving(*QUICK, "--model", "synthetic", "--max-sessions", "8", cache=cache_folder) as here:
        alone, beside = measure(Target(here.socket, {}), asked, SPEECH, lambda *_: None)
        here.await_nothing_held()
    assert (alone.read, alone.name, beside.name) == (None, "1", "1 + 2 texts")
    assert beside.read
    assert len(beside.read.first_ms) >= 2
    assert beside.read.audio_s > 0
    assert not beside.read.failures + beside.failures
    table, *_ = tables_of([alone, beside], asked)
    assert "1 + 2 texts" in table.as_text()
    assert alone.first_audio_ms
    assert beside.first_audio_ms
    ratio = beside.first_audio_ms[1] / alone.first_audio_ms[1]
    assert f"{ratio:.2f} times" in table.as_text()


def test_texts_that_are_not_read_are_told(cache_folder: Path) -> None:
    asked = replace(load(first_ms=60_000), read_at_once=2, texts=("One.",))
    with serving(*QUICK, "--model", "synthetic", "--max-sessions", "1", cache=cache_folder) as here:
        _, beside = measure(Target(here.socket, {}), asked, SPEECH, lambda *_: None)
    assert beside.read
    assert set(beside.read.failures) == {"503"}
    (broken, *_) = (each for each in beside.breaches(asked.bounds) if "texts" in each)
    assert (
        broken
        == f"{len(beside.read.failures)} texts were not read ({len(beside.read.failures)} x 503)"
    )


def test_a_text_whose_answer_breaks_off_is_told_and_nobody_waits_for_it() -> None:
    over = threading.Event()

    class BreaksOff(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"no number\r\n")

    with HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reader = Reader(
            ReaderPlan(f"http://127.0.0.1:{server.server_port}", {}, ["One."], 1), 0, over
        )
        reader.start()
        assert reader.begun.wait(30)
        over.set()
        reader.join(30)
        server.shutdown()
    assert reader.read.failures == ["IncompleteRead"]


@alone
def test_a_late_answer_is_measured_from_the_commit() -> None:
    with answering([(0.5, 500)]) as target:
        crowd = measured(target, load())
    found = crowd.quantiles("commit_to_audio_ms")
    assert found
    assert 500 <= min(found) <= max(found) < 500 + SLACK_MS
    assert crowd.breaches(Bounds())[0].startswith("p95 to first audio")


@alone
def test_a_crumb_of_sound_is_no_first_audio() -> None:
    with answering([(0.0, 100), (0.2, 100), (0.2, 100), (0.0, 500)]) as target:
        crowd = measured(target, load(turns=1))
    (turn,) = crowd.turns
    assert turn.first_delta_ms == 100
    assert turn.commit_to_audio_ms
    assert 400 <= turn.commit_to_audio_ms < 400 + SLACK_MS
    assert [round(gap, -2) for gap in turn.gaps_ms] == [200, 200, 0]
    assert [round(silence, -2) for silence in turn.underruns_ms] == [100, 100]


@alone
def test_a_gap_is_as_long_as_a_player_without_a_buffer_is_silent() -> None:
    asked = load()
    with answering([(0.0, 500), (0.8, 500)]) as target:
        crowd = measured(target, asked)
    silences = [each for turn in crowd.turns for each in turn.underruns_ms]
    assert len(silences) == crowd.broken == 2
    assert all(300 - LATE_MS <= each < 300 + SLACK_MS for each in silences), silences
    assert "underruns in 2 of 2 turns" in tables_of([crowd], asked)[-1].as_text()


@alone
def test_hands_free_times_run_from_the_last_word_and_from_the_decision() -> None:
    with answering([(0.3, 500)], decides_after=[FRAMES + 10]) as target:
        crowd = measured(target, load(turns=1, free=True))
    (turn,) = crowd.turns
    assert turn.commit_to_audio_ms
    assert turn.decision_to_audio_ms
    # Ten frames of a quiet room after the last word, and then the wait.
    assert 500 - LATE_MS <= turn.commit_to_audio_ms < 500 + SLACK_MS
    assert 300 - LATE_MS <= turn.decision_to_audio_ms < 300 + SLACK_MS


@alone
def test_who_answers_before_the_turn_is_over_has_failed() -> None:
    asked = load(turns=1, free=True)
    with answering(decides_after=[FRAMES // 2, 2 * FRAMES]) as target:
        crowd = measured(target, asked)
    assert crowd.turns[0].audio_ms == 2000  # the rest of it was waited for
    assert "1 x answered before the turn's end" in verdict([crowd], asked)


def test_text_counts_as_written_first_up_to_the_first_sound() -> None:
    asked = load(turns=1, first_ms=10_000)
    with answering([(0.0, 500), (1.0, 500)], written="Four or five.") as target:
        told = measured(target, asked)
    with answering() as target:
        silent = measured(target, asked)
    (turn,) = told.turns
    assert turn.words == 6
    assert turn.written_ms
    assert turn.commit_to_audio_ms
    assert 0 < turn.written_ms <= turn.commit_to_audio_ms
    (table, *_) = tables_of([told], asked)
    assert "to the text that is written first, ms" in table.as_text()
    assert silent.quantiles("words") is None
    (table, *_) = tables_of([silent], asked)
    assert "words of an answer" not in table.as_text()


def test_sentences_end_where_pauses_begin_and_no_pause_is_long() -> None:
    pause = np.zeros(RATE // 2, np.int16)
    speech = np.concatenate([pause, SPEECH, pause, SPEECH, pause[: RATE // 20], SPEECH, pause])
    cut, ends = sentences(speech)
    assert ends == pytest.approx([RATE, 3 * RATE + RATE // 5 + RATE // 20], abs=RATE // 25)
    assert len(cut) == pytest.approx(3 * RATE + 2 * RATE // 5 + RATE // 20, abs=RATE // 25)
    assert sentences(np.zeros(RATE, np.int16))[1] == []


@pytest.mark.parametrize("url", ["http://localhost:8000/v1/realtime", "ws://[::1", "ws://a:b"])
def test_a_url_that_is_no_websocket_is_refused(mosstalk: Run, url: str) -> None:
    words = ("--speech", QUESTION, "--url", url)
    assert "ws://" in refused(mosstalk("bench", "serve", *words))


def small_form(mosstalk: Run, at: str, *words: str) -> Any:
    """The document of a run as short as can be, however busy this machine is."""
    short = ("--turns", "1", "--heard", "0.5", "--spoken", "2", "--pause", "0", "--at", at)
    given = ("--speech", QUESTION, "--most-first-audio-ms", "60000", *short, *words)
    outputs = ("--html", "crowd.html", "--json", "-")
    run = mosstalk("bench", "serve", *given, *outputs, "--", "--max-sessions=2")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["verdict"] in run.stderr
    assert found["weights"] == "pocket"
    assert found["skipped"] == []
    return found


# Slow: a server and its load; what is measured is shown above without one.
@pytest.mark.slow
def test_the_command_measures_a_server_that_it_starts(mosstalk: Run, tmp_path: Path) -> None:
    (crowd,) = small_form(mosstalk, "2")["crowds"]
    assert (crowd["admitted"], crowd["failed"]) == (2, 0)
    assert crowd["quantiles"]["commit_to_audio_ms"][0] > 0
    # The first delta of mosstalk's own server is what counts as first audio.
    assert crowd["quantiles"]["first_delta_ms"] == [240, 240, 240]
    for turn in crowd["turns"]:
        # The small model writes its answer first.
        assert turn["words"] > 0
        assert 0 < turn["written_ms"] < turn["commit_to_audio_ms"]
    parts, front = crowd["server"]["parts"], crowd["server"]["front"]
    assert all(0 < cpu <= busy <= 1.01 for busy, cpu in (parts[name] for name in ("step", "hop")))
    runs = crowd["server"]["runs"]
    assert all(min(runs[part]) > 0 and runs[part][1] >= 1 for part in ("step", "hop"))
    assert "runs: step" in (tmp_path / "crowd.html").read_text()
    assert front["front"] > 0
    assert front["worker, MiB"] > 100
    assert (tmp_path / "crowd.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_a_crowd_counts_only_if_all_of_it_is_let_in(mosstalk: Run) -> None:
    two, three = small_form(mosstalk, "2,3", "--hands-free")["crowds"]
    assert (two["admitted"], two["failed"]) == (2, 0)
    last_word, decision = (
        two["quantiles"][name][0] for name in ("commit_to_audio_ms", "decision_to_audio_ms")
    )
    assert last_word > decision > 0
    assert two["server"]["parts"]["detect"][0] > 0
    assert {"begun early, used", "begun early, dropped"} < set(two["server"]["front"])
    assert (three["admitted"], three["turns"]) == (2, [])
    assert three["breaches"] == ["1 of 3 not let in (1 x status 503)"]
