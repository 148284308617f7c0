"""Every query of the dashboard and of the alerts, asked of a real Prometheus and a real server.

That Prometheus reads ``deploy/prometheus.yml`` and ``deploy/alerts.yml`` with another target and
shorter intervals, and has scraped a server whose clients have talked by hand, hands-free and in
writing, did something wrong, and of whom one was refused.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require_package, run
from prometheus_rig import DASHBOARD, DEPLOY, Prometheus, queries, settings_of_a_server
from server_rig import BY_HAND, Server, Talker, question, serving, silence
from websockets.exceptions import InvalidStatus

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ALERTS = re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text())
_COMPARISON = re.compile(r" (==|>=|<=|>|<) ")


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
    running = Prometheus(settings_of_a_server(server.url), tmp_path_factory.mktemp("prometheus"))
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


@pytest.mark.parametrize("name", queries())
def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus, name: str) -> None:
    prometheus.await_data(queries()[name])


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
