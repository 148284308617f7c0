"""What tests share that ask a real Prometheus: Debian's, with the settings of ``deploy/``."""

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from conftest import ROOT, require_program
from server_rig import POLL_S, ask, free_port

DEPLOY = ROOT / "deploy"
PATIENCE_S = 120.0
DASHBOARD = json.loads((DEPLOY / "grafana" / "mosstalk.json").read_text())
_VARIABLES = {"$instance": ".*", "$__rate_interval": "5m"}
"""What Grafana puts in their place: all servers, and some scrapes."""
SETTINGS = (DEPLOY / "prometheus.yml").read_text()
TARGET = "mosstalk:8000"
_TARGETS = f'    static_configs:\n      - targets: ["{TARGET}"]\n'
_FLEET = "    http_sd_configs:\n"

Sample = tuple[dict[str, str], float]


def settings_of_a_server(url: str) -> str:
    """What Prometheus is told of one server."""
    assert f'"{TARGET}"' in SETTINGS
    return SETTINGS.replace(TARGET, url.removeprefix("http://"))


def settings_of_a_fleet(url: str) -> str:
    """What it is told of a fleet without keys, by docs/fleet.md; there it is a comment."""
    page = (ROOT / "docs" / "fleet.md").read_text()
    discovery = _FLEET + page.partition(_FLEET)[2].partition("```")[0]
    assert discovery.replace("    ", "    # ", 1).replace("\n    ", "\n    # ") in SETTINGS
    assert _TARGETS in SETTINGS
    return SETTINGS.replace(_TARGETS, discovery.replace("http://localhost:8000", url))


def queries() -> dict[str, str]:
    """The dashboard's, as Grafana asks them, by panel and line."""
    found = dict[str, str]()
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in _VARIABLES.items():
                query = query.replace(variable, value)
            assert "$" not in query
            found[f"{panel['title']}, {target['legendFormat'] or 'value'}"] = query
    return found


class Prometheus:
    """Debian's Prometheus, which scrapes four times a second."""

    def __init__(self, settings: str, folder: Path) -> None:
        """Start it with such settings, of which only the intervals are others."""
        self.url = f"http://127.0.0.1:{free_port()}"
        shutil.copy(DEPLOY / "alerts.yml", folder)
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
