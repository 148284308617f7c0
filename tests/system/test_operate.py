"""Every query of the dashboard and of the alerts, asked of a real Prometheus and a real server.

That Prometheus reads ``deploy/prometheus.yml`` and ``deploy/alerts.yml`` with another target and
shorter intervals, and has scraped a server whose clients have talked by hand, hands-free and in
writing, did something wrong, and of whom one was refused.
"""

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT, require_package, require_program, run
from server_rig import (
    BY_HAND,
    POLL_S,
    Server,
    Talker,
    ask,
    free_port,
    question,
    serving,
    silence,
)
from websockets.exceptions import InvalidStatus

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "mosstalk.json").read_text())
PATIENCE_S = 120.0
TARGET = "mosstalk:8000"
VARIABLES = {"$instance": ".*", "$__rate_interval": "5m"}
"""What Grafana puts in their place: all servers, and some scrapes."""
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}, {target['legendFormat'] or 'value'}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
ALERTS = re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text())
_COMPARISON = re.compile(r" (==|>=|<=|>|<) ")

Sample = tuple[dict[str, str], float]


class Prometheus:
    """Debian's Prometheus, which scrapes one server four times a second."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        shutil.copy(DEPLOY / "alerts.yml", folder)
        settings = (DEPLOY / "prometheus.yml").read_text()
        assert f'"{TARGET}"' in settings
        assert settings.count("15s") == 2
        settings = settings.replace(TARGET, server.url.removeprefix("http://"))
        (folder / "prometheus.yml").write_text(settings.replace("15s", "250ms"))
        self._log = (folder / "log").open("w")
        words = [
            require_program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.process = subprocess.Popen(words, stderr=self._log)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)
        self._log.close()

    def get(self, path: str, **words: str) -> Any:
        """What it answers."""
        answer = ask("GET", f"{self.url}/api/v1/{path}", params=words).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[Sample]:
        """Labels and value of each sample, without those that are no number."""
        result = self.get("query", query=query)["result"]
        samples = [(each["metric"], float(each["value"][1])) for each in result]
        return [sample for sample in samples if not math.isnan(sample[1])]

    def await_true(self, met: Callable[[], bool], what: str) -> None:
        """Ask until it is so."""
        end_s = time.monotonic() + PATIENCE_S
        while not met():
            assert self.process.poll() is None, "Prometheus has ended"
            assert time.monotonic() < end_s, what
            time.sleep(POLL_S * 5)

    def await_data(self, query: str) -> list[Sample]:
        """The samples of a query, once there are some."""
        self.await_true(lambda: bool(self.query(query)), f"no data: {query}")
        return self.query(query)

    def pending(self) -> set[str]:
        """Names of alerts whose condition is met now, whether or not for long enough."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"]}

    def await_ready(self) -> None:
        """Wait until it answers."""

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return ask("GET", f"{self.url}/-/ready").status_code == 200
            return False

        self.await_true(answers, "Prometheus does not answer")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server with two places."""
    require_package("silero_vad", "vad")
    words = ("--temperature", "0", "--seed", "0", "--max-sessions", "2")
    with serving(*words, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, after a crowd has been served."""
    running = Prometheus(server, tmp_path_factory.mktemp("prometheus"))
    try:
        running.await_ready()
        running.await_data("mosstalk_worker_up == 1")  # so that what is counted now has a rate
        run(crowd(server, running))
        server.await_nothing_held()
        yield running
    finally:
        running.stop()


async def crowd(server: Server, prometheus: Prometheus) -> None:
    """Two talk several times, hands-free and by hand; meanwhile a third one is refused."""
    async with Talker(server) as by_hand, Talker(server) as hands_free:
        full = lambda: "MosstalkFull" in prometheus.pending()  # noqa: E731
        await asyncio.to_thread(prometheus.await_true, full, "no alert that all places are taken")
        with pytest.raises(InvalidStatus):
            await Talker(server).__aenter__()
        await by_hand.send("no json")
        await by_hand.error()
        await by_hand.send(BY_HAND)
        for _ in range(3):
            await by_hand.say(question())
            await by_hand.send({"type": "input_audio_buffer.commit"}, {"type": "response.create"})
            await by_hand.wait("response.done")
            await hands_free.say(silence(0.5) + question() + silence(1.0))
            await hands_free.wait("response.done")
        assert (await by_hand.ask("Good morning."))["status"] == "completed"
        assert (await by_hand.ask("Hello.", output_modalities=["text"]))["status"] == "completed"


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus, query: str) -> None:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query
    prometheus.await_data(query)


def test_the_dashboards_list_of_servers_is_filled(prometheus: Prometheus, server: Server) -> None:
    asked = DASHBOARD["templating"]["list"][1]["query"]["query"]
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", asked)
    assert match, asked
    series, label = match.groups()
    values = prometheus.get(f"label/{label}/values", **{"match[]": series})
    assert values == [server.url.removeprefix("http://")]


def test_what_happened_is_what_is_asked_for(prometheus: Prometheus) -> None:
    for query, value in (
        ('increase(mosstalk_refusals_total{reason="full"}[5m]) > 0', None),
        ('mosstalk_errors_total{code="invalid_json"} == 1', None),
        ('mosstalk_responses_total{status="completed",reason="none"} >= 7', None),
        ("mosstalk_sessions_limit", 2.0),
        ("mosstalk_speech_to_first_audio_seconds_count", 3.0),
        ("mosstalk_commit_to_first_audio_seconds_count > 5", None),
    ):
        ((_, found),) = prometheus.await_data(query)
        assert value is None or found == value, query


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_data_to_look_at(prometheus: Prometheus, alert: str) -> None:
    """Its expression with ``bool``: it then says for each series 0 or 1, where there are any."""
    rules = {rule["name"]: rule for rule in prometheus.get("rules")["groups"][0]["rules"]}
    query, number = _COMPARISON.subn(r" \1 bool ", rules[alert]["query"])
    assert number == 1, query
    assert all(value in (0, 1) for _, value in prometheus.await_data(query))
    assert rules[alert]["health"] == "ok"


def test_a_server_that_was_killed_is_down(prometheus: Prometheus, server: Server) -> None:
    assert "MosstalkDown" not in prometheus.pending()
    server.process.kill()
    prometheus.await_true(lambda: "MosstalkDown" in prometheus.pending(), "it is not told as down")
