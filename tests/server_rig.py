"""What the server's tests share: a running ``mosstalk serve``, and a client that listens."""

import base64
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import httpx
import numpy as np
from conftest import QUESTION, ROOT, command_environment
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from mosstalk.audio.sound import read_audio
from mosstalk.session.sound import pcm_of

RATE = 24_000
BY_HAND = {"type": "session.update", "session": {
    "type": "realtime", "audio": {"input": {"turn_detection": None}}}}  # fmt: skip
START_S = 180.0
POLL_S = 0.02
"""Between two looks at what will come: a core that looks all the time computes nothing else."""
CLOSED = "mosstalk_sessions_closed_total{"
QUICK = ("--vad", "none", "--temperature", "0", "--seed", "0")
"""Push to talk, and the same answers each time."""


class Server:
    """``mosstalk serve`` as a process of its own; ``lines`` and ``logs`` are what it printed."""

    def __init__(
        self,
        *words: str,
        cache: Path,
        env: dict[str, str] | None = None,
        output: tuple[int, int] | None = None,
        program: Sequence[str | Path] = (sys.executable, "-m", "mosstalk.cli"),
    ) -> None:
        """Start it; with ``output`` (stdout, stderr) nothing of what it prints is read here."""
        self.headers: dict[str, str] = {}
        """What every request over HTTP carries."""
        self.lines: list[str] = []
        self.logs: list[dict[str, Any]] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        port = free_port() if output else 0
        if "--transcriber" not in words:  # by default there is one where it is installed
            words = (*words, "--transcriber", "none")
        command = [*program, "serve", "--port", str(port)]
        out, err = output or (subprocess.PIPE, subprocess.PIPE)
        self.process = subprocess.Popen(
            [*command, "--log-format", "json", *words],
            env=command_environment(cache) | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=out,
            stderr=err,
            text=True,
        )
        readers = () if output else (self._read_lines, self._read_logs)
        self._threads = [threading.Thread(target=reader, daemon=True) for reader in readers]
        for thread in self._threads:
            thread.start()
        self.url = f"http://127.0.0.1:{port}" if output else self._url()

    def ready(self) -> "Server":
        """Wait until it lets clients in."""
        self._line(r"^ready: ")
        return self

    def await_ready(self) -> None:
        """Wait until it lets clients in, without reading what it prints."""
        end_s = time.monotonic() + START_S
        while True:
            with suppress(httpx.TransportError):
                if self.get("/ready").status_code == 200:
                    return
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < end_s, "it is not ready"
            time.sleep(POLL_S)

    def await_line(self, pattern: str) -> None:
        """Wait until it prints such a line."""
        self._line(pattern)

    @property
    def socket(self) -> str:
        """Where its WebSocket is."""
        return self.url.replace("http", "ws", 1) + "/v1/realtime"

    @property
    def worker_id(self) -> int:
        """The process id of its worker."""
        return self.child_id("mosstalk.server.worker")

    def child_id(self, module: str) -> int:
        """The process id of its oldest child that runs a module."""
        return self.child_ids(module)[0]

    def child_ids(self, module: str) -> list[int]:
        """The process ids of its children that run a module, the oldest first."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = map(int, path.read_text().split())
        lines = ((child, Path(f"/proc/{child}/cmdline").read_bytes()) for child in children)
        return [child for child, line in lines if module.encode() in line]

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Ask over HTTP."""
        return ask("GET", f"{self.url}{path}", **({"headers": self.headers} | more))

    def metrics(self) -> dict[str, float]:
        """All values, by name and labels as Prometheus writes them."""
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def await_metrics(
        self, met: Callable[[dict[str, float]], bool], most_s: float = 60.0
    ) -> dict[str, float]:
        """Ask for the metrics until they are as they should be: they lag by a pulse."""
        end_s = time.monotonic() + most_s
        while not met(metrics := self.metrics()):
            assert time.monotonic() < end_s, metrics
            time.sleep(POLL_S)
        return metrics

    def await_nothing_held(self) -> None:
        """Wait until no session is open, no reply is made and every block is free.

        The worker's figures lag by a pulse, so those of a short session may not have come yet;
        that its connection is over the front knows at once.
        """
        names = ("sessions", "replies_running", "replies_waiting", 'kv_blocks{state="used"}')

        def met(values: dict[str, float]) -> bool:
            closed = sum(n for name, n in values.items() if name.startswith(CLOSED))
            over = closed >= values["mosstalk_sessions_opened_total"]
            return over and not any(values[f"mosstalk_{name}"] for name in names)

        self.await_metrics(met)

    def await_folder(self, folder: Path, before: Set[Path] = frozenset()) -> list[Path]:
        """The recordings that were not there ``before``, at least one: they are written later."""
        self.await_metrics(
            lambda _: (
                set(folder.iterdir()) > before
                and all((each / "rows.json").exists() for each in folder.iterdir())
            )
        )
        return sorted(set(folder.iterdir()) - before)

    def signal(self, number: int) -> None:
        """Send the front a signal."""
        self.process.send_signal(number)

    def wait(self, most_s: float = 90.0) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(most_s)
        for thread in self._threads:
            thread.join(10)
        return code

    def stop(self) -> None:
        """End it, in order if it can."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()

    def await_log(self, met: Callable[[], bool], most_s: float = 30.0) -> None:
        """Wait until its log lines are as they should be: they come by a thread."""
        end_s = time.monotonic() + most_s
        while not met():
            assert time.monotonic() < end_s, self.logs
            time.sleep(POLL_S)

    def logged(self, message: str) -> list[dict[str, Any]]:
        """Log lines with that message so far."""
        return [line for line in self.logs if line.get("message") == message]

    def faults(self) -> list[dict[str, Any]]:
        """Log lines so far that tell of a fault of the program."""
        return [
            line for line in self.logs
            if "traceback" in line or "Traceback" in line.get("text", "")
        ]  # fmt: skip

    def _url(self) -> str:
        return self._line(r"^listening on (\S+);")

    def _line(self, pattern: str) -> str:
        while (line := self._said.get(timeout=START_S)) is not None:
            if match := re.search(pattern, line):
                return match.group(match.lastindex or 0)
        raise AssertionError((self.process.wait(10), self.lines, self.logs))

    def _read_lines(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._said.put(line)
        self._said.put(None)

    def _read_logs(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            try:
                self.logs.append(json.loads(line))
            except ValueError:
                self.logs.append({"text": line.rstrip()})


def ask(method: str, url: str, **more: Any) -> httpx.Response:
    """A request over HTTP, without a context for TLS, which alone takes 20 ms to make."""
    return httpx.request(method, url, timeout=30, verify=False, **more)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def full_pipe() -> tuple[int, int]:
    """A pipe, full of empty lines: it takes nothing more until somebody reads it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n" * 4096)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n")
    os.set_blocking(writing, True)
    return reading, writing


@contextmanager
def serving(*words: str, cache: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready, ended when the block is left."""
    server = Server(*words, cache=cache, env=env)
    try:
        yield server.ready()
    finally:
        server.stop()


class Served(Protocol):
    """What has a WebSocket to talk to."""

    @property
    def socket(self) -> str:
        """Where it is."""


class Talker:
    """A client of the Realtime protocol that keeps all it hears."""

    def __init__(self, server: Served, *, model: str = "any", **more: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._place = 0
        self._dialling = connect(f"{server.socket}?model={model}", max_size=None, **more)
        self._socket: ClientConnection | None = None

    @property
    def socket(self) -> ClientConnection:
        """The connection."""
        assert self._socket
        return self._socket

    async def __aenter__(self) -> "Talker":
        self._socket = await self._dialling
        await self.wait("session.created")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.socket.close()

    async def send(self, *events: dict[str, Any] | str | bytes) -> None:
        """Send events, or messages as they are."""
        for event in events:
            await self.socket.send(json.dumps(event) if isinstance(event, dict) else event)

    async def say(self, pcm: bytes, piece_ms: int = 100) -> None:
        """Append sound in pieces, at once."""
        size = RATE * piece_ms // 1000 * 2
        for start in range(0, len(pcm), size):
            await self.send(append(pcm[start : start + size]))

    async def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Listen until an event of that kind comes, with these fields."""
        while True:
            event: dict[str, Any] = json.loads(await self.socket.recv())
            self.events.append(event)
            if event["type"] == kind and all(event.get(k) == v for k, v in fields.items()):
                return event

    async def error(self) -> dict[str, Any]:
        """The body of the next error."""
        body: dict[str, Any] = (await self.wait("error"))["error"]
        return body

    async def ask(self, text: str, **response: Any) -> dict[str, Any]:
        """Type something and wait for the whole answer; the response."""
        await self.send(typed(text), {"type": "response.create", "response": response})
        done: dict[str, Any] = (await self.wait("response.done"))["response"]
        return done

    async def closed(self) -> tuple[int, str]:
        """Listen until the connection is closed; code and reason."""
        with suppress(ConnectionClosed):
            while True:
                self.events.append(json.loads(await self.socket.recv()))
        return self.socket.close_code or 0, self.socket.close_reason or ""

    def pcm(self) -> bytes:
        """All sound that has come."""
        deltas = [e["delta"] for e in self.events if e["type"] == "response.output_audio.delta"]
        return b"".join(map(base64.b64decode, deltas))

    def kinds(self) -> list[str]:
        """The types of all events."""
        return [event["type"] for event in self.events]


def run_lines(heading: str, server: Server) -> None:
    """Run the lines that docs/clients/openai-python.md shows below a heading, with this server."""
    page = (ROOT / "docs" / "clients" / "openai-python.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert "http://localhost:8000" in code, heading
    exec(code.replace("http://localhost:8000", server.url), {})


def append(pcm: bytes) -> dict[str, Any]:
    """An event that brings sound."""
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()}


def typed(text: str, item_id: str | None = None) -> dict[str, Any]:
    """An event that brings a typed turn."""
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    return {"type": "conversation.item.create", "item": item | ({"id": item_id} if item_id else {})}


def question() -> bytes:
    """A recorded question as PCM at 24 kHz."""
    return pcm_of(read_audio(QUESTION, RATE).samples)


def sentence() -> bytes:
    """Another voice with other words."""
    return pcm_of(read_audio(ROOT / "assets" / "librivox.flac", RATE).samples)


def silence(seconds: float) -> bytes:
    """A quiet room as PCM at 24 kHz."""
    hiss = np.random.default_rng(0).standard_normal(int(seconds * RATE)) * 1e-4
    return pcm_of(hiss.astype(np.float32))
