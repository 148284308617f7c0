"""What the tests of fleets share: ``mosstalk fleet`` as a process of its own, which is watched."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from conftest import command_environment, require_package
from server_rig import POLL_S, ask, free_port

REPLICAS = 2
START_S = 240.0
REPLICA = b"ray::ServeReplica"
"""What the process of a replica is called."""


def fleet_file(**serve: object) -> str:
    """A fleet of two replicas, whose port is still to be chosen, with options for each."""
    options = "".join(f"  {name.replace('_', '-')}: {value}\n" for name, value in serve.items())
    return f"""\
port: PORT
replicas: {REPLICAS}
cpus: 0.5
serve:
  temperature: 0
  seed: 0
  drain-timeout: 20
  transcriber: none
{options}"""


class Fleet:
    """``mosstalk fleet`` as a process of its own, all of whose files are in ``folder``."""

    def __init__(self, folder: Path, cache: Path, file: str) -> None:
        self.port, self._printed = free_port(), folder / "printed"
        self.socket = f"ws://127.0.0.1:{self.port}/v1/realtime"
        (folder / "fleet.yaml").write_text(file.replace("PORT", str(self.port)))
        (folder / "tmp").mkdir()
        self.kept = [folder / "tmp", folder / "home"]
        """Where Ray and HAProxy could leave something."""
        ports = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT")
        more = {f"RAY_SERVE_{name}": str(free_port()) for name in ports}
        more |= {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder / "home"),
        }
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mosstalk.cli", "fleet", str(folder / "fleet.yaml")],
                env=command_environment(cache) | more,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text()

    def await_that(self, met: Callable[[], bool], most_s: float = START_S) -> None:
        """Wait until something is so."""
        end_s = time.monotonic() + most_s
        while not met():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < end_s, self.printed()
            time.sleep(POLL_S * 10)

    def processes(self) -> dict[int, bytes]:
        """Itself and all processes below it, by id, with what each is called."""
        parents = dict[int, int]()
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                stat = (each / "stat").read_text()
                parents[int(each.name)] = int(stat.rpartition(")")[2].split()[1])
        found, left = dict[int, bytes](), [self.process.pid]
        while left:  # a child may well have a smaller id than its parent
            found[left[0]] = b""
            with suppress(OSError):
                found[left[0]] = Path(f"/proc/{left[0]}/cmdline").read_bytes()
            left = [*left[1:], *(pid for pid, parent in parents.items() if parent == left[0])]
        return found

    def replicas(self) -> list[int]:
        """The process ids of its replicas."""
        return [pid for pid, name in self.processes().items() if name.startswith(REPLICA)]

    def sessions(self) -> list[int]:
        """How many sessions are open, of each replica that is up."""
        found: dict[float, int] = {}
        for _ in range(50):
            values = _metrics(f"http://127.0.0.1:{self.port}")
            found[values["process_start_time_seconds"]] = int(values["mosstalk_sessions"])
            if len(found) == REPLICAS:
                break
        return sorted(found.values())

    def sessions_by_process(self) -> dict[int, int]:
        """How many sessions are open, by the process id of the replica, of those that answer."""
        found: dict[int, int] = {}
        for address in self.replica_sockets():
            with suppress(httpx.TransportError):
                values = _metrics(address.replace("ws", "http", 1).removesuffix("/v1/realtime"))
                pid = _listener(int(address.split(":")[2].partition("/")[0]), self.replicas())
                found[pid] = int(values["mosstalk_sessions"])
        return found

    def replica_sockets(self) -> list[str]:
        """Where each replica itself takes connections, past the ingress."""
        (line,) = [line for line in self.processes().values() if b"haproxy\0-db" in line]
        words = line.decode().split("\0")
        config = Path(words[words.index("-f") + 1]).read_text()
        servers = re.findall(r"^\s*server \S+ ([\d.]+:\d+)(?!.* backup$)", config, re.MULTILINE)
        return [f"ws://{address}/v1/realtime" for address in servers]

    def stop(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            processes = self.processes()
            self.process.kill()
            for each in processes:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        self.process.wait(30)


def _metrics(url: str) -> dict[str, float]:
    lines = ask("GET", f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _listener(port: int, processes: list[int]) -> int:
    """Which of some processes takes the connections to a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        f"socket:[{line[9]}]"
        for line in lines
        if line[3] == "0A" and int(line[1].partition(":")[2], 16) == port
    }
    for pid in processes:
        with suppress(OSError):  # one that has just ended
            links = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
            if links & listening:
                return pid
    raise AssertionError(f"no replica listens on {port}")


async def await_sessions(fleet: Fleet, numbers: list[int]) -> None:
    """Wait until so many sessions are open, of each replica."""
    await asyncio.to_thread(fleet.await_that, lambda: fleet.sessions() == numbers)


@contextmanager
def running_fleet(cache: Path, file: str) -> "Iterator[Fleet]":
    """One that is ready. Its folder has a short name: Ray's sockets are in it."""
    require_package("ray", "fleet")
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    running = Fleet(folder, cache, file)
    try:
        running.await_that(lambda: "\nready: " in running.printed())
        # A moment later the ingress knows them all.
        running.await_that(lambda: running.sessions() == [0] * REPLICAS)
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)
