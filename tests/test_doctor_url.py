"""``mosstalk doctor --url`` looks at a real server and says what is wrong with it."""

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, refused, run
from server_rig import QUICK, Server, Talker, free_port, serving
from websockets.exceptions import InvalidStatus

from mosstalk.diagnostics.served import quantile

KEY = "a-key"
SHOWN = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with a key and one place."""
    with serving(*QUICK, "--max-sessions", "1", "--api-key", KEY, cache=cache_folder) as running:
        running.headers |= SHOWN
        yield running


def checks(mosstalk: Run, server: Server, code: int = 0) -> dict[str, dict[str, Any]]:
    """What is found, by name."""
    done = mosstalk("doctor", "--url", server.url, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_stranger_learns_that_it_lives_and_which_variable_shows_more(
    server: Server, mosstalk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOSSTALK_API_KEY", raising=False)
    found = checks(mosstalk, server)
    assert found["health"]["state"] == found["clock"]["state"] == "ok"
    assert (found["version"]["state"], found["version"]["detail"]) == ("ok", version("mosstalk"))
    assert "pocket weights, cpu, float32" in found["ready"]["detail"]
    assert "where turns end" in found["turns"]["detail"]
    assert found["metrics"]["detail"] == "not shown: status 401"
    assert "MOSSTALK_API_KEY" in found["metrics"]["do"]


def test_places_replies_and_first_audio_are_told(
    server: Server, mosstalk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSSTALK_API_KEY", KEY)

    async def main() -> None:
        async with Talker(server, additional_headers=SHOWN) as talker:
            assert (await talker.ask("Good morning."))["status"] == "completed"
            with pytest.raises(InvalidStatus):
                await Talker(server, additional_headers=SHOWN).__aenter__()
            full = lambda now: now["mosstalk_sessions"] == 1  # noqa: E731
            await asyncio.to_thread(server.await_metrics, full)
            found = await asyncio.to_thread(checks, mosstalk, server)
            assert found["places"]["state"] == "look"
            assert found["places"]["detail"].startswith("1 of 1 taken; refused since its start: ")
            assert "full 1" in found["places"]["detail"]
            assert "MosstalkFull" in found["places"]["do"]
            assert found["replies"]["detail"].startswith("1 since its start, 0 failed")
            assert "p95" in found["first audio"]["detail"]

    run(main())
    server.await_nothing_held()
    done = mosstalk("doctor", "--url", f"{server.url}/any/path")
    assert "ok     places       0 of 1 taken" in done.stdout
    assert done.stdout.endswith(f"\nNothing is wrong with {server.url}\n")


def test_a_server_that_lets_nobody_in_is_wrong(cache_folder: Path, mosstalk: Run) -> None:
    server = Server(*QUICK, cache=cache_folder)  # it answers, and loads
    try:
        os.kill(server.worker_id, signal.SIGSTOP)
        found = checks(mosstalk, server, code=1)
        assert found["health"]["detail"] == "the worker is loading"
        assert found["ready"]["state"] == "wrong"
        assert "still being loaded" in found["ready"]["detail"]
    finally:
        os.kill(server.worker_id, signal.SIGCONT)  # stopped it would never see its server's end
        server.process.kill()
        server.stop()


def test_where_nothing_answers_one_line_says_what_to_look_at(mosstalk: Run) -> None:
    done = mosstalk("doctor", "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert done.stdout.startswith("wrong  connection   http://127.0.0.1:")
    assert "Connection refused" in done.stdout
    assert "--host" in done.stdout


class Stranger(BaseHTTPRequestHandler):
    """Answers every path with a page, as other programs do."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<title>Something else</title>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_another_program_is_told_from_a_server(mosstalk: Run) -> None:
    with HTTPServer(("127.0.0.1", 0), Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        done = mosstalk("doctor", "--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert done.returncode == 1
    assert "wrong  health       status 200: <title>Something else" in done.stdout
    assert "do: look whether this is a mosstalk server" in done.stdout
    assert "ready" not in done.stdout


NO_SERVERS = ["localhost:8000", "ws://localhost:8000", "http://", "http://a:b", "http://[::1"]


@pytest.mark.parametrize("url", NO_SERVERS)
def test_what_is_no_address_of_a_server_is_refused(url: str, mosstalk: Run) -> None:
    assert "as http://localhost:8000" in refused(mosstalk("doctor", "--url", url))


def test_a_report_is_of_this_machine(mosstalk: Run) -> None:
    assert "--url" in refused(mosstalk("doctor", "--url", "http://a", "--report", "r.json"))


def test_quantiles_are_those_of_prometheus() -> None:
    counts = [(0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (math.inf, 20.0)]
    assert quantile(counts, 0.5) == pytest.approx(0.2)
    assert quantile(counts, 0.75) == pytest.approx(0.3)
    assert quantile([(0.1, 1.0), (math.inf, 4.0)], 0.5) == 0.1
