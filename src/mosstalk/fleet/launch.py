"""What ``mosstalk fleet`` does: start Ray and Ray Serve, watch replicas, end all in order."""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from mosstalk.environment import set_unless_set
from mosstalk.errors import ConfigError, MosstalkError, OptionError
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
_RAYLET = "raylet"
"""The program of Ray whose end is that of this process, at once."""
_HEAD_S = 1.0
"""For how long it is tried to reach Ray's head, and the ingress."""
_INGRESS_S = 30.0
"""After so long one that cannot be reached from this machine counts as there."""
_LONGEST_FAULT = 2000
"""Characters that are told of what Ray says at its end; the cause is the last of them."""
_FIXED = {"host": "host", "port": "port", "ray": "ray", "settings": "serve.max-session-s"}
"""What an upgrade cannot change, and what it is called: Ray was started with it."""
_FAILED = 70
"""Exit code where no replica could be started, or Ray is gone."""


def launch(read: Callable[[], FleetConfig], say: Callable[[str], None]) -> int:
    """Serve until a signal, telling ``say`` how far the replicas are; the exit code.

    ``read`` gives the fleet as its file describes it: now, and again after each SIGHUP.

    Raises:
        ConfigError: nothing can listen there.
        OptionError: an option means nothing.
    """
    config = read()
    set_unless_set(config.settings)
    with _own_ray(config) if config.ray is None else _ray(address=config.ray), _signals() as asked:
        return _serve(_Launch(read, say, asked, config))


@dataclass
class _Asked:
    """What signals have asked for."""

    stop: threading.Event = field(default_factory=threading.Event)
    upgrade: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _own_ray(config: FleetConfig) -> Iterator[None]:
    """A Ray on this machine alone, of which nothing is left behind."""
    try:
        listen(config.host, config.port).close()
    except OptionError as error:
        raise ConfigError(f"{str(error).partition(';')[0]}; choose host and port anew") from None
    serve_options(config.options())  # before anything is started
    above = gettempdir() if len(gettempdir()) <= _LONGEST_FOLDER else "/tmp"
    kept = TemporaryDirectory("", "mosstalk-", above, ignore_cleanup_errors=True)
    with ExitStack() as ports, kept as folder:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        set_unless_set(_haproxy(Path(folder), ports) | token)
        try:
            with _ray(_temp_dir=folder, _node_ip_address=_HERE, include_dashboard=False):
                yield
                if not _has_head():  # all would wait for it for a minute
                    _end_all_of(folder, but=_RAYLET)
        finally:
            _end_all_of(folder)


def _haproxy(folder: Path, ports: ExitStack) -> dict[str, str]:
    """The environment variables that say where HAProxy's files and ports are.

    No other fleet takes these until ``ports`` is closed.
    """
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "s",
        "METRICS_SOCKET_PATH": "m",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    named = {f"RAY_SERVE_HAPROXY_{name}": str(folder / path) for name, path in files.items()}
    return named | {f"RAY_SERVE_{name}": str(_free(port, ports)) for name, port in _PORTS.items()}


def _free(port: int, ports: ExitStack) -> int:
    """The port, or another one where something listens there, or soon will.

    Seconds go by until HAProxy does. A fleet that starts meanwhile sees this one's mark: a socket
    whose name has no file, and which ends with the process.
    """
    mark = ports.enter_context(socket.socket(socket.AF_UNIX))
    try:
        mark.bind(f"\0mosstalk-fleet-{port}")
        with listen("0.0.0.0", port):
            return port
    except (OSError, OptionError):
        mark.close()
        with listen("0.0.0.0", 0) as listener:
            return int(listener.getsockname()[1])


def _end_all_of(folder: str, but: str = "") -> None:
    """Kill what is below this process, and what has this folder in its environment.

    HAProxy outlives Ray, and Ray's processes overwrite their environment.
    """
    below = set(_below(os.getpid()))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, pid = (process / "exe").readlink().name, int(process.name)
            is_own = pid in below or folder.encode() in (process / "environ").read_bytes()
            if is_own and program != but:
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    """Every process that one has started, and what those have."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _below(child)


@contextmanager
def _signals() -> Iterator[_Asked]:
    """``stop`` is set at the first signal; the second one ends the process, whatever it does."""
    asked = _Asked()

    def stop(number: int, _: Any) -> None:
        if asked.stop.is_set():
            raise SystemExit(128 + number)
        asked.stop.set()

    def upgrade(*_: Any) -> None:
        asked.upgrade.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, upgrade)
    try:
        yield asked
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


@dataclass
class _Launch:
    """A fleet that runs as ``config`` says.

    Attributes:
        read: gives the fleet as its file describes it now.
        say: prints a line.
        asked: what signals have asked for.
        config: what was deployed last.
        secret: makes ephemeral keys, the same in all replicas.
    """

    read: Callable[[], FleetConfig]
    say: Callable[[str], None]
    asked: _Asked
    config: FleetConfig
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def deploy(self) -> None:
        """Have the replicas be as ``config`` says; those that are not end, each in its turn."""
        from ray import serve

        from mosstalk.fleet.replica import NAME, application

        target = serve.RunTarget(application(self.config, self.secret), NAME, "/")
        serve.run_many([target], wait_for_applications_running=False)

    def upgrade(self) -> bool:
        """Begin to replace every replica with one of the file as it is now; False: it is wrong."""
        try:
            config = self.read()
            for name, shown in _FIXED.items():
                if getattr(config, name) != getattr(self.config, name):
                    raise ConfigError(f"{shown} cannot change while the fleet runs")
            serve_options(config.options())
        except MosstalkError as error:
            self.say(f"no upgrade: {error}")
            return False
        self.say("upgrading: one replica after the other is replaced")
        self.config = config
        self.deploy()
        return True


def _serve(launched: _Launch) -> int:
    from ray import serve
    from ray.exceptions import RayError

    config = launched.config
    try:
        http = {"host": config.host, "port": config.port}
        serve.start("EveryNode", http, logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        launched.deploy()
        code = _watch(launched)
        drain_s = launched.config.drain_s
        if code == 0:
            launched.say(f"ending: replies that are being made have {drain_s:g} s")
        if _has_head():
            _end_replicas(drain_s)
        return code
    except RayError as error:
        fault = " ".join(str(error).split())[-_LONGEST_FAULT:]
        launched.say(f"Ray has failed: {fault}")
        return _FAILED
    finally:
        if config.ray is None and _has_head():  # else others may use it, or nobody can
            serve.shutdown()


def _watch(launched: _Launch) -> int:
    """Tell how far the replicas are until a signal comes, or until none could be started."""
    from ray import serve

    from mosstalk.fleet.replica import NAME

    said, was_ready, upgrading, asked = "", False, False, launched.asked
    running_s = 0.0
    while not asked.stop.wait(_LOOK_S):
        if not _has_head():
            launched.say("Ray has failed: its head has ended; start the fleet again")
            return _FAILED
        if was_ready and asked.upgrade.is_set():
            asked.upgrade.clear()
            upgrading = launched.upgrade()
        application = serve.status().applications[NAME]
        failed = application.status in ("DEPLOY_FAILED", "UNHEALTHY")
        if (line := _line(application, failed=failed)) != said:
            launched.say(said := line)
        if failed and not was_ready:
            return _FAILED
        if application.status == "RUNNING" and not was_ready:
            running_s = running_s or time.monotonic()
            was_ready = (
                _reaches_replica(launched.config) or time.monotonic() > running_s + _INGRESS_S
            )
            if was_ready:
                _say_ready(launched.config, launched.say)
        elif application.status == "RUNNING" and upgrading:
            upgrading = False
            launched.say("upgraded: every replica is new")
    return 0


def _has_head() -> bool:
    """Whether Ray's head is there: without it Ray itself would end this process, in a minute."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _HEAD_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # it is slow, or far away
        pass
    return True


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
        messages = (each.message.strip() for each in (*deployments, application))
        line += f"; {next(filter(None, messages), 'Ray does not say why').splitlines()[-1]}"
    return line


def _reaches_replica(config: FleetConfig) -> bool:
    """Whether the ingress sends requests to a replica: it learns of the first a moment later."""
    with closing(HTTPConnection(_host(config), config.port, timeout=_HEAD_S)) as ingress:
        try:
            ingress.request("GET", "/health")
            return ingress.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False


def _host(config: FleetConfig) -> str:
    return "localhost" if config.host in ("0.0.0.0", "127.0.0.1", "::") else config.host


def _say_ready(config: FleetConfig, say: Callable[[str], None]) -> None:
    host = _host(config)
    host = f"[{host}]" if ":" in host else host
    say(f"ready: http://{host}:{config.port}")
    say(f"talk in a browser   http://{host}:{config.port}/")
    say(f"Realtime clients    ws://{host}:{config.port}/v1/realtime")
