"""``deploy/`` asks for metrics that there are, and each alert says what to do about it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, require_program

from mosstalk.cli.serve import Serve
from mosstalk.server.observers import CLOSES, REFUSALS, Metrics

DEPLOY = ROOT / "deploy"
ALERTS = (DEPLOY / "alerts.yml").read_text()
BOARD = DEPLOY / "grafana" / "mosstalk.json"
RUNBOOKS = (ROOT / "docs" / "operate.md").read_text()
UNIT = (DEPLOY / "mosstalk.service").read_text()
FLEET_UNIT = (DEPLOY / "mosstalk-fleet.service").read_text()
_METRIC = re.compile(r"\b(?:mosstalk|process)_\w+")
_LARGEST_DASHBOARD = 30_000


def exported() -> set[str]:
    """Names of all samples of a server."""
    return set(re.findall(r"^(\w+)", Metrics().text().decode(), re.MULTILINE))


def alerts() -> dict[str, str]:
    """Each alert's own lines."""
    parts = re.split(r"- alert: (\w+)\n", ALERTS)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sections() -> dict[str, str]:
    """Each runbook's text."""
    parts = re.split(r"^### (Mosstalk\w+)\n", RUNBOOKS.partition("\n## Logs\n")[0], flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard, rows too."""
    board: dict[str, Any] = json.loads(BOARD.read_text())
    return list(board["panels"])


def test_what_is_asked_for_is_exported() -> None:
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    queries += [lines.partition("labels:")[0] for lines in alerts().values()]
    asked = {name for query in queries for name in _METRIC.findall(query)}
    assert len(asked) > 30
    assert asked - exported() == set()


def test_the_runbooks_name_metrics_that_are_exported() -> None:
    names = exported() | {name.removesuffix("_bucket") for name in exported()}
    asked = set(_METRIC.findall(RUNBOOKS))
    assert len(asked) > 20
    assert asked - names == set()


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    assert list(alerts()) == list(sections())
    assert len(alerts()) > 10
    for name, lines in alerts().items():
        assert f"runbook: docs/operate.md#{name.lower()}\n" in lines
        assert re.search(r"severity: (critical|warning)", lines)
        section = sections()[name]
        assert re.search(r"\* \*\*Look:\*\*.*?\* \*\*Do", section, re.DOTALL), name
        asked = set(re.findall(r"(\w+?)(?:_bucket)?\{", lines.partition("labels:")[0]))
        assert asked & set(re.findall(r"\w+", section)), f"{name} names none of {asked}"


def test_the_dashboard_is_small_whole_and_names_its_alerts() -> None:
    assert len(BOARD.read_bytes()) < _LARGEST_DASHBOARD
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        own = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & own, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in own) < 24
        cells |= own
        for name in re.findall(r"Mosstalk\w+", panel.get("description", "")):
            assert name in alerts(), panel["title"]
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["description"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers))


def test_every_metric_of_the_program_is_on_the_dashboard() -> None:
    board = BOARD.read_text()
    families = [each for each in Metrics().registry.collect() if each.name.startswith("mosstalk_")]
    missing = [each.name for each in families if each.name not in board]
    assert missing == []


@pytest.mark.parametrize(("what", "reasons"), [("close", CLOSES), ("refusal", REFUSALS)])
def test_reasons_that_are_there_from_the_start_are_those_of_the_docs(
    what: str, reasons: tuple[str, ...]
) -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    listed = re.search(rf"Reasons of a {what}: (.+?)\.", text, re.DOTALL)
    assert listed
    assert re.findall(r"`(\w+)`", listed.group(1)) == list(reasons)
    counter = {"close": "sessions_closed", "refusal": "refusals"}[what]
    samples = Metrics().text().decode()
    for reason in reasons:
        assert f'mosstalk_{counter}_total{{reason="{reason}"}} 0.0' in samples


def test_the_unit_waits_longer_than_replies_are_given_and_knows_the_exit_codes() -> None:
    assert f"--drain-timeout {Serve().drain_timeout:.0f} " in UNIT
    assert int(re.findall(r"TimeoutStopSec=(\d+)", UNIT)[0]) >= Serve().drain_timeout + 15
    assert "RestartPreventExitStatus=2\n" in UNIT
    assert "Restart=on-failure\n" in UNIT


def test_the_unit_of_a_fleet_differs_where_a_fleet_does() -> None:
    for line in ("KillMode=mixed", "RestartPreventExitStatus=2", "Restart=on-failure"):
        assert f"{line}\n" in FLEET_UNIT
    assert 'ExecReload=/bin/sh -c "kill -HUP $MAINPID"\n' in FLEET_UNIT
    assert int(re.findall(r"TimeoutStopSec=(\d+)", FLEET_UNIT)[0]) >= Serve().drain_timeout + 60
    hardening = UNIT.partition("CapabilityBoundingSet=")[2]
    assert FLEET_UNIT.endswith(hardening)


def test_the_commands_of_image_compose_file_and_unit_are_understood(mosstalk: Run) -> None:
    image = json.loads(
        re.findall(r"^ENTRYPOINT (.+)$", (DEPLOY / "Dockerfile").read_text(), re.M)[0]
    )
    compose = json.loads(
        re.findall(
            r"^ +command: (\[.*--allowed-host.*)$", (DEPLOY / "compose.yaml").read_text(), re.M
        )[0]
    )
    options = re.findall(r"^MOSSTALK_OPTIONS=(.+)$", (DEPLOY / "mosstalk.env").read_text(), re.M)[0]
    unit = re.findall(r"^ExecStart=\S+/mosstalk (.+)$", UNIT, re.M)[0]
    for words in (
        [*image[1:], *compose],
        unit.replace("$MOSSTALK_OPTIONS", options).split(),
    ):
        run = mosstalk(*words, "--print-config")
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["log"]["form"] == "json"


def test_an_unknown_kind_of_machine_is_refused_before_anything_is_installed() -> None:
    words = [str(DEPLOY / "install.sh"), "tpu"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == 'install.sh: "tpu" is no kind of machine; give cpu or cuda\n'


@pytest.mark.system
@pytest.mark.parametrize("unit", [UNIT, FLEET_UNIT], ids=["server", "fleet"])
def test_systemd_takes_the_unit(tmp_path: Path, unit: str) -> None:
    program = tmp_path / "mosstalk"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "mosstalk.service"
    path.write_text(unit.replace("/opt/mosstalk/.venv/bin/mosstalk", str(program)))
    words = [require_program("systemd-analyze"), "verify", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.system
def test_prometheus_takes_its_settings_and_the_alerts() -> None:
    promtool = require_program("promtool")
    words = [promtool, "check", "config", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(alerts())} rules found" in done.stdout


SERVER = 'job="mosstalk",instance="here"'
WELL = {
    "up{}": "1+0x30",
    "mosstalk_worker_up{}": "1+0x30",
    "process_start_time_seconds{}": "1000+0x30",
    "mosstalk_engine_silent_seconds{}": "0.2+0x30",
    "mosstalk_sessions{}": "3+0x30",
    "mosstalk_sessions_limit{}": "4+0x30",
    'mosstalk_refusals_total{reason="full"}': "0+1x30",
    'mosstalk_commit_to_first_audio_seconds_bucket{le="0.4"}': "0+60x30",
    'mosstalk_commit_to_first_audio_seconds_bucket{le="1.6"}': "0+60x30",
    'mosstalk_commit_to_first_audio_seconds_bucket{le="+Inf"}': "0+60x30",
    "mosstalk_replies_waiting{}": "0 3 0 1 0 3 0 0 3 0 0 1 0 0 3 0 3 0 1 0 0",
    "mosstalk_underruns_total{}": "0+0x30",
    'mosstalk_responses_total{status="completed",reason="none"}': "0+60x30",
    'mosstalk_responses_total{status="failed",reason="error"}': "0+0x30",
    'mosstalk_errors_total{code="invalid_json"}': "0+1x30",
    "process_open_fds{}": "100+0x30",
    "process_max_fds{}": "1024+0x30",
    "mosstalk_recordings_cut_total{}": "1+0x30",
}
"""A server that is well, a value a minute."""
TROUBLE = {
    "MosstalkDown": {"up{}": "0+0x30"},
    "MosstalkNotReady": {"mosstalk_worker_up{}": "0+0x30"},
    "MosstalkRestarts": {"process_start_time_seconds{}": "1000+60x30"},
    "MosstalkReplicasReplaced": {
        f'process_start_time_seconds{{gone="{n}"}}': "1000+0x3 stale" for n in range(3)
    },
    "MosstalkEngineSilent": {"mosstalk_engine_silent_seconds{}": "0+1x30"},
    "MosstalkFull": {"mosstalk_sessions{}": "4+0x30"},
    "MosstalkRefuses": {'mosstalk_refusals_total{reason="full"}': "0+60x30"},
    "MosstalkFirstAudioSlow": {
        'mosstalk_commit_to_first_audio_seconds_bucket{le="0.4"}': "0+50x30"
    },
    "MosstalkRepliesWait": {"mosstalk_replies_waiting{}": "2+0x30"},
    "MosstalkUnderruns": {"mosstalk_underruns_total{}": "0+2x30"},
    "MosstalkRepliesFail": {'mosstalk_responses_total{status="failed",reason="error"}': "0+2x30"},
    "MosstalkErrors": {'mosstalk_errors_total{code="invalid_json"}': "0+60x30"},
    "MosstalkFilesRunOut": {"process_open_fds{}": "900+0x30"},
    "MosstalkRecordingsCut": {"mosstalk_recordings_cut_total{}": "1+1x30"},
}
"""What is different where an alert is due."""


@pytest.mark.system
def test_each_alert_fires_in_its_trouble_and_none_where_all_is_well(tmp_path: Path) -> None:
    assert list(TROUBLE) == list(alerts())
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    tests = []
    for due, trouble in {"": {}, **TROUBLE}.items():
        series = {
            name.replace("{", f"{{{SERVER},").replace(",}", "}"): values
            for name, values in (WELL | trouble).items()
        }
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": n, "values": v} for n, v in series.items()],
                # ALERTS is what Prometheus itself writes of those that fire.
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "20m",
                        "exp_samples": [{"labels": f'{{alertname="{due}"}}', "value": 1}]
                        * bool(due),
                    }
                ],
            }
        )
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    words = [require_program("promtool"), "test", "rules", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
