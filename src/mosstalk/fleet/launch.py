"""What ``mosstalk fleet`` does: start Ray and Ray Serve, watch replicas, end all in order."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.environment import set_unless_set
from mosstalk.fleet.config import FleetConfig

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

_HERE = "127.0.0.1"
_LOOK_S = 0.5
_FAILED = 70
"""Exit code where no replica could be started, or Ray is gone."""


def launch(config: FleetConfig, say: Callable[[str], None]) -> int:
    """Serve until a signal, telling ``say`` how far the replicas are; the exit code.

    Raises:
        OptionError: an option means nothing.
    """
    with ExitStack() as stack:
        set_unless_set(config.settings)
        if config.ray is None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="mosstalk-", ignore_cleanup_errors=True)
            )
            set_unless_set(_places_of_haproxy(Path(folder)))
            own = {"_temp_dir": folder, "_node_ip_address": _HERE, "include_dashboard": False}
            stack.enter_context(_ray(**own))
        else:
            stack.enter_context(_ray(address=config.ray))
        stopped = stack.enter_context(_signals())  # in place of those that Ray has set
        return _serve(config, say, stopped)


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


def _places_of_haproxy(folder: Path) -> dict[str, str]:
    """The environment variables that say where HAProxy's files are: in a folder that goes away."""
    names = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / path) for name, path in names.items()}


@contextmanager
def _ray(**more: Any) -> Iterator[None]:
    """A Ray of this process's own, or a running one, which goes on afterwards."""
    import ray

    ray.init(logging_level="warning", namespace="mosstalk", **more)
    try:
        yield
    finally:
        ray.shutdown()


def _serve(config: FleetConfig, say: Callable[[str], None], stopped: threading.Event) -> int:
    from ray import serve

    from mosstalk.fleet.replica import NAME, application

    serve.start(
        proxy_location="EveryNode",
        http_options={"host": config.host, "port": config.port},
        logging_config={"log_level": "WARNING"},
    )
    try:
        target = serve.RunTarget(application(config), NAME, "/")
        serve.run_many([target], wait_for_applications_running=False)
        said, was_ready = "", False
        while not stopped.wait(_LOOK_S):
            state = _State(serve.status(), NAME)
            if state.line != said:
                say(said := state.line)
            if state.failed and not was_ready:
                return _FAILED
            if state.ready and not was_ready:
                was_ready = True
                _say_ready(config, say)
        say(f"ending: replies that are being made have {config.drain_s:g} s")
        return 0
    finally:
        serve.shutdown()


class _State:
    """What Ray Serve says of the application, in a line."""

    def __init__(self, status: "ServeStatus", name: str) -> None:
        self.ready = self.failed = False
        self.line = "replicas: none yet"
        if application := status.applications.get(name):
            self.ready = application.status == "RUNNING"
            self.failed = application.status in ("DEPLOY_FAILED", "UNHEALTHY")
            self.line = _line(application, failed=self.failed)


def _line(application: Any, *, failed: bool) -> str:
    counts = [
        f"{number} {str(getattr(state, 'value', state)).lower()}"
        for deployment in application.deployments.values()
        for state, number in sorted(deployment.replica_states.items())
        if number
    ]
    why = [deployment.message for deployment in application.deployments.values()]
    line = f"replicas: {', '.join(counts) or 'none yet'}"
    if failed and any(why := [" ".join(each.split()) for each in (*why, application.message)]):
        line += f"; {why[0] or why[-1]}"
    return line


def _say_ready(config: FleetConfig, say: Callable[[str], None]) -> None:
    host = "localhost" if config.host in ("0.0.0.0", "127.0.0.1", "::") else config.host
    say(f"ready: http://{host}:{config.port}")
    say(f"talk in a browser   http://{host}:{config.port}/")
    say(f"Realtime clients    ws://{host}:{config.port}/v1/realtime")
