"""What ``mosstalk fleet`` does: start Ray and Ray Serve, watch replicas, end all in order."""

import logging
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from mosstalk.environment import set_unless_set
from mosstalk.errors import ConfigError, OptionError
from mosstalk.fleet.config import FleetConfig, serve_options
from mosstalk.server.front import listen

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

_HERE = "127.0.0.1"
_PORTS = {
    "HAPROXY_METRICS_PORT": 9101,
    "HAPROXY_STATS_PORT": 8404,
    "FALLBACK_PROXY_HTTP_PORT": 8500,
}
"""Ports that Ray Serve takes beside the fleet's."""
_LONGEST_FOLDER = 20
"""Characters of the folder for temporary files: sockets are below it, whose paths are limited."""
_LOOK_S = 0.5
_LONGEST_FAULT = 2000
"""Characters that are told of what Ray says at its end; the cause is the last of them."""
_FAILED = 70
"""Exit code where no replica could be started, or Ray is gone."""


def launch(config: FleetConfig, say: Callable[[str], None]) -> int:
    """Serve until a signal, telling ``say`` how far the replicas are; the exit code.

    Raises:
        ConfigError: nothing can listen there.
        OptionError: an option means nothing.
    """
    set_unless_set(config.settings)
    with _own_ray(config) if config.ray is None else _ray(address=config.ray), _signals() as stop:
        return _serve(config, say, stop)


@contextmanager
def _own_ray(config: FleetConfig) -> Iterator[None]:
    """A Ray on this machine alone, of which nothing is left behind."""
    try:
        listen(config.host, config.port).close()
    except OptionError as error:
        raise ConfigError(f"{str(error).partition(';')[0]}; choose host and port anew") from None
    serve_options(config.options())  # before anything is started
    above = gettempdir() if len(gettempdir()) <= _LONGEST_FOLDER else "/tmp"
    with TemporaryDirectory("", "mosstalk-", above, ignore_cleanup_errors=True) as folder:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        set_unless_set(_haproxy(Path(folder)) | token)
        try:
            with _ray(_temp_dir=folder, _node_ip_address=_HERE, include_dashboard=False):
                yield
        finally:
            _end_all_in(folder)


def _haproxy(folder: Path) -> dict[str, str]:
    """The environment variables that say where HAProxy's files and ports are."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "s",
        "METRICS_SOCKET_PATH": "m",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    named = {f"RAY_SERVE_HAPROXY_{name}": str(folder / path) for name, path in files.items()}
    return named | {f"RAY_SERVE_{name}": str(_free(port)) for name, port in _PORTS.items()}


def _free(port: int) -> int:
    """The port, or another one where something listens there."""
    try:
        with listen("0.0.0.0", port):
            return port
    except OptionError:
        with listen("0.0.0.0", 0) as listener:
            return int(listener.getsockname()[1])


def _end_all_in(folder: str) -> None:
    """Kill what runs with a file of this folder: HAProxy outlives a Ray that is ended at once."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in line.read_bytes():
                os.kill(int(line.parent.name), signal.SIGKILL)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set at the first signal; the second one ends the process, whatever it does."""
    stopped = threading.Event()

    def stop(number: int, _: Any) -> None:
        if stopped.is_set():
            raise SystemExit(128 + number)
        stopped.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _ray(**more: Any) -> Iterator[None]:
    """A Ray of this process's own, or a running one, which goes on afterwards."""
    import ray

    ray.init(logging_level="warning", **more)
    try:
        yield
    finally:
        ray.shutdown()


def _serve(config: FleetConfig, say: Callable[[str], None], stop: threading.Event) -> int:
    from ray import serve
    from ray.exceptions import RayError

    from mosstalk.fleet.replica import NAME, application

    http = {"host": config.host, "port": config.port}
    try:
        serve.start("EveryNode", http, logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        target = serve.RunTarget(application(config), NAME, "/")
        serve.run_many([target], wait_for_applications_running=False)
        code = _watch(config, say, stop)
        if code == 0:
            say(f"ending: replies that are being made have {config.drain_s:g} s")
        _end_replicas(config.drain_s)
        return code
    except RayError as error:
        say(f"Ray has failed: {' '.join(str(error).split())[-_LONGEST_FAULT:]}")
        return _FAILED
    finally:
        if config.ray is None:  # else others may use it
            serve.shutdown()


def _watch(config: FleetConfig, say: Callable[[str], None], stop: threading.Event) -> int:
    """Tell how far the replicas are until a signal comes, or until none could be started."""
    from ray import serve

    from mosstalk.fleet.replica import NAME

    said, was_ready = "", False
    while not stop.wait(_LOOK_S):
        application = serve.status().applications[NAME]
        failed = application.status in ("DEPLOY_FAILED", "UNHEALTHY")
        if (line := _line(application, failed=failed)) != said:
            say(said := line)
        if failed and not was_ready:
            return _FAILED
        if application.status == "RUNNING" and not was_ready:
            was_ready = True
            _say_ready(config, say)
    return 0


def _end_replicas(drain_s: float) -> None:
    """Have every replica end, each after its replies; the ingress is there until they have."""
    from ray import serve

    from mosstalk.fleet.replica import NAME

    end_s = time.monotonic() + drain_s
    while True:
        with suppress(TimeoutError):  # Serve waits for a minute
            serve.delete(NAME)
            return
        if time.monotonic() > end_s:
            return


def _line(application: "ApplicationStatusOverview", *, failed: bool) -> str:
    """What Ray Serve says of the application, in a line."""
    deployments = application.deployments.values()
    counts = Counter[str]()
    for each in deployments:
        counts.update({it.lower(): number for it, number in each.replica_states.items()})
    parts = [f"{number} {state}" for state, number in sorted(counts.items()) if number]
    line = f"replicas: {', '.join(parts) or 'none yet'}"
    if failed:
        told = (each.message.strip() for each in (*deployments, application))
        line += f"; {next(filter(None, told), 'Ray does not say why').splitlines()[-1]}"
    return line


def _say_ready(config: FleetConfig, say: Callable[[str], None]) -> None:
    host = "localhost" if config.host in ("0.0.0.0", "127.0.0.1", "::") else config.host
    say(f"ready: http://{host}:{config.port}")
    say(f"talk in a browser   http://{host}:{config.port}/")
    say(f"Realtime clients    ws://{host}:{config.port}/v1/realtime")
