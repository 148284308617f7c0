"""What the tests of fleets share: ``mosstalk fleet`` as a process of its own, which is watched."""

import asyncio
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from conftest import ROOT, command_environment, require_package
from server_rig import CLOSED, POLL_S, ask, free_port

REPLICAS = 2
START_S = 240.0
REPLICA = b"ray::ServeReplica"
"""What the process of a replica is called."""
_HEAD = b"/gcs_server"


def fleet_file(replicas: str = str(REPLICAS), **serve: object) -> str:
    """A fleet of two replicas, whose port is still to be chosen, with options for each."""
    options = "".join(f"  {name.replace('_', '-')}: {value}\n" for name, value in serve.items())
    return f"""\
port: PORT
replicas: {replicas}
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
        self.port, self._printed, self._file = (
            free_port(),
            folder / "printed",
            folder / "fleet.yaml",
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket = f"ws://127.0.0.1:{self.port}/v1/realtime"
        self.describe(file)
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
                [sys.executable, "-m", "mosstalk.cli", "fleet", str(self._file)],
                env=command_environment(cache) | more,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def describe(self, file: str) -> None:
        """Write its file, anew."""
        self._file.write_text(file.replace("PORT", str(self.port)))

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

    def ingress(self) -> int:
        """The process id of HAProxy: the youngest one, as an older one may still have clients."""
        return self._ingress()[0]

    def _ingress(self) -> tuple[int, bytes]:
        """And what it is called: at each change of replicas another takes its place."""
        found = {pid: name for pid, name in self.processes().items() if b"haproxy\0-db" in name}
        youngest = max(found, key=_begun_ticks)
        return youngest, found[youngest]

    def head(self) -> int:
        """The process id of what knows all of Ray's other processes."""
        (found,) = [pid for pid, name in self.processes().items() if _HEAD in name.split(b"\0")[0]]
        return found

    def sessions(self) -> list[int]:
        """How many sessions are open, of each replica that answers."""
        found = list[int]()
        for url in self._replica_urls():
            with suppress(httpx.TransportError):
                found.append(_open_sessions(url))
        return sorted(found)

    def answering(self) -> int:
        """How many replicas the ingress sends requests to.

        A process is known by the hundredth of a second in which it began, which two may share.
        """
        sent_to = set[float]()
        for _ in range(10 * REPLICAS):
            with suppress(httpx.HTTPError):  # 503: by an ingress that knows of none
                sent_to.add(_metrics(self.url)["process_start_time_seconds"])
        begun = list[float]()
        for url in self._replica_urls():
            with suppress(httpx.TransportError):
                begun.append(_metrics(url)["process_start_time_seconds"])
        return sum(each in sent_to for each in begun)

    def sessions_by_process(self) -> dict[int, int]:
        """How many sessions are open, by the process id of the replica, of those that answer."""
        found: dict[int, int] = {}
        for url in self._replica_urls():
            with suppress(httpx.TransportError):
                pid = _listener(int(url.split(":")[2]), self.replicas())
                found[pid] = _open_sessions(url)
        return found

    def replica_sockets(self) -> list[str]:
        """Where each replica itself takes WebSockets, past the ingress."""
        return [f"{url.replace('http', 'ws', 1)}/v1/realtime" for url in self._replica_urls()]

    def _replica_urls(self) -> list[str]:
        words = self._ingress()[1].decode().split("\0")
        config = Path(words[words.index("-f") + 1]).read_text()
        servers = re.findall(r"^\s*server \S+ ([\d.]+:\d+)(?!.* backup$)", config, re.MULTILINE)
        return [f"http://{address}" for address in servers]

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
    lines = ask("GET", f"{url}/metrics").raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _open_sessions(url: str) -> int:
    """How many sessions a replica has: what its front counts, as its worker's figures lag."""
    values = _metrics(url)
    closed = sum(number for name, number in values.items() if name.startswith(CLOSED))
    return int(values["mosstalk_sessions_opened_total"] - closed)


def _begun_ticks(pid: int) -> int:
    """When a process began, since the machine did."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _listener(port: int, processes: list[int]) -> int:
    """Which of some processes takes the connections to a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        f"socket:[{line[9]}]"
        for line in lines
        if line[3] == "0A" and int(line[1].partition(":")[2], 16) == port
    }
    for pid in processes:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # one that was just closed
                if str(file.readlink()) in listening:
                    return pid
    raise AssertionError(f"no replica listens on {port}")


async def await_sessions(fleet: Fleet, numbers: list[int]) -> None:
    """Wait until so many sessions are open, of each replica."""
    await asyncio.to_thread(fleet.await_that, lambda: fleet.sessions() == numbers)


@contextmanager
def running_fleet(
    cache: Path, file: str, replicas: int = REPLICAS, start_s: float = START_S
) -> "Iterator[Fleet]":
    """One that is ready. Its folder has a short name: Ray's sockets are in it."""
    require_package("ray", "fleet")
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    running = Fleet(folder, cache, file)
    try:
        running.await_that(lambda: "\nready: " in running.printed(), start_s)
        # By then the ingress knows of one at least, and a moment later of them all.
        assert ask("GET", f"{running.url}/health").is_success
        running.await_that(lambda: running.answering() == replicas)
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


SPOKEN = [ROOT / "assets" / name for name in ("capital.flac", "spain.flac")]
"""Two questions, of which the second needs the first."""
LOST, RESUMED = "the connection was lost", "the conversation goes on"


@dataclass
class Talk:
    """One conversation of examples/agent.py: what it has told and when, and where it is heard."""

    loudspeaker: Path
    lines: list[tuple[float, str]] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Note a line."""
        self.lines.append((time.monotonic(), line))

    def times(self, beginning: str) -> list[float]:
        """When such lines were told, in seconds."""
        return [at_s for at_s, line in self.lines if line.startswith(beginning)]

    def answers(self) -> list[str]:
        """All answers so far."""
        return [line for _, line in self.lines if line.startswith("the answer is")]

    async def hold(self, url: str, questions: Iterable[Path]) -> None:
        """Ask everything, and stay as long as that takes."""
        agent = runpy.run_path(str(ROOT / "examples" / "agent.py"))
        with wave.open(str(self.loudspeaker), "wb") as played:
            played.setparams((1, 2, agent["RATE"], 0, "NONE", ""))
            await agent["Agent"](f"{url}/v1", played, self.say).converse(questions)
