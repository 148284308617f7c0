"""A fleet's file: what it may hold, and what is said of one that is wrong. Without Ray."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Run, refused
from server_rig import free_port

from mosstalk.fleet.config import FleetConfig, read_config
from mosstalk.fleet.launch import _free, _say_ready

WHOLE = """\
host: 0.0.0.0
port: 9000
replicas: {min: 1, max: 4, used: 0.5}
gpus: 0
serve:
  model: pocket
  max-sessions: 8
  voice: default
  api_keys_file: keys.txt
  limit: [unsent_s=30]
"""


def test_a_file_says_what_each_replica_is_given(mosstalk: Run, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(WHOLE)
    run = mosstalk("fleet", "fleet.yaml", "--print-config")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["host"], document["port"]) == ("0.0.0.0", 9000)
    assert document["replicas"] == {
        "min": 1, "max": 4, "used": 0.5, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0,
    }  # fmt: skip
    assert document["serve"] == {
        "model": "pocket",
        "max_sessions": 8,
        "voice": "default",
        "api_keys_file": str(tmp_path / "keys.txt"),
        "limit": ["unsent_s=30"],
    }


def test_of_secrets_nothing_is_printed(mosstalk: Run, tmp_path: Path) -> None:
    secret = "{api_key: [hush, hush-2], twilio_auth_token: hush, store: 'redis://me:hush@here/1'}"
    (tmp_path / "fleet.yaml").write_text(f"serve: {secret}\n")
    run = mosstalk("fleet", "fleet.yaml", "--print-config")
    assert run.returncode == 0, run.stderr
    assert "hush" not in run.stdout
    served = json.loads(run.stdout)["serve"]
    assert (len(served["api_key"]), served["store"]) == (2, "redis")


def test_an_empty_file_is_one_replica_of_the_default_model(mosstalk: Run, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("# nothing chosen\n")
    document = json.loads(mosstalk("fleet", "fleet.yaml", "--print-config").stdout)
    assert (document["replicas"], document["port"], document["serve"]) == (1, 8000, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicas: [2", "fleet.yaml:1: is no YAML"),
        ("- 2", "fleet.yaml:1: write NAME: VALUE lines"),
        ("port: 8000\nreplica: 2", "fleet.yaml:2: replica is unknown; did you mean replicas?"),
        ("port: high", "fleet.yaml:1: port: Input should be a valid integer, not 'high'"),
        ("port: 0", "fleet.yaml:1: port: Input should be greater than or equal to 1, not 0"),
        ("replicas: 0", "fleet.yaml:1: replicas: Input should be greater than or equal to 1"),
        ("replicas: two", "fleet.yaml:1: replicas: Input should be a valid integer, not 'two'"),
        (
            "replicas:\n  min: 3\n  max: 2\nserve: {max_sessions: 2}",
            "fleet.yaml:1: replicas: min is 3 and max 2: min must not be above max",
        ),
        ("replicas:\n  max: 2\n  use: 0.5", "fleet.yaml:3: replicas.use is unknown"),
        ("replicas: {max: 2}", "need serve.max_sessions"),
        ("port: 1\nserve: fast", "fleet.yaml:2: serve: Input should be a valid dictionary"),
        (
            "serve:\n  vad: none\n  max-sesions: 2",
            "fleet.yaml:3: serve.max-sesions is no option of mosstalk serve; "
            "did you mean max_sessions?",
        ),
        (
            "serve:\n  max_sessions: many",
            "fleet.yaml:2: serve.max_sessions: Input should be a valid integer",
        ),
        ("serve: {port: 1}", "serve.port cannot be chosen for a replica"),
        ("serve: {tls-self-signed: true}", "put a proxy with a certificate before it"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    mosstalk: Run, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    assert said in refused(mosstalk("fleet", "fleet.yaml", "--print-config"))


def test_a_file_that_is_not_there_is_named(mosstalk: Run) -> None:
    assert "fleet.yaml: cannot be read" in refused(mosstalk("fleet", "fleet.yaml"))


def test_what_ray_must_be_started_with_can_be_read_by_a_shell(
    mosstalk: Run, tmp_path: Path
) -> None:
    (tmp_path / "fleet.yaml").write_text("serve: {max_session_s: 600}\n")
    lines = mosstalk("fleet", "fleet.yaml", "--environment").stdout
    script = f"{lines}\necho $RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S; echo $RAY_SERVE_HAPROXY_RETRY_ON"
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    # An ingress process that was replaced lives longer than any session.
    assert shell.stdout.splitlines() == ["660", "conn-failure 503"]


@pytest.mark.parametrize(("sessions", "target"), [("8", 4), ("'8'", 4), ("1", 1)])
def test_replicas_are_added_above_the_share_of_their_places_that_is_to_be_used(
    tmp_path: Path, sessions: str, target: int
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"replicas: {{max: 4, used: 0.5}}\nserve: {{max-sessions: {sessions}}}\n")
    assert read_config(file).target_sessions == target


def test_a_fixed_number_of_replicas_has_no_target() -> None:
    assert FleetConfig(replicas=3).target_sessions is None


def test_addresses_of_a_fleet_can_be_opened_as_they_are_printed() -> None:
    for host, shown in (("0.0.0.0", "localhost"), ("::1", "[::1]"), ("10.1.2.3", "10.1.2.3")):
        lines = list[str]()
        _say_ready(FleetConfig(host=host), lines.append)
        assert lines[0] == f"ready: http://{shown}:8000"


def test_nothing_but_a_fleet_needs_ray() -> None:
    probe = "import sys, mosstalk.cli, mosstalk.fleet.config; print({'ray'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_two_fleets_that_start_at_once_take_ports_of_their_own() -> None:
    port = free_port()
    with ExitStack() as first:
        assert _free(port, first) == port
        with ExitStack() as second:  # nothing listens there yet
            assert _free(port, second) != port
    with ExitStack() as later:
        assert _free(port, later) == port
        with socket.create_server(("127.0.0.1", free_port())) as other, ExitStack() as third:
            taken = other.getsockname()[1]
            assert _free(taken, third) != taken
