"""``mosstalk serve`` as a process, and what it answers besides conversations."""

import hashlib
import http.client
import json
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .results import masked
from .subject import Subject

_START_S = 120.0
REQUESTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("GET", "/health", {}), ("GET", "/ready", {}), ("GET", "/v1/models", {}),
    ("GET", "/v1/models/mosstalk-pocket", {}), ("GET", "/v1/models/other", {}),
    ("GET", "/nothing", {}), ("POST", "/health", {}), ("GET", "/v1/realtime", {}),
    ("GET", "/", {}), ("GET", "/health", {"Host": "elsewhere.example.org"}),
    ("GET", "/v1/realtime", {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Origin": "https://elsewhere.example.org",
    }),
)  # fmt: skip


class Server:
    """A server that is ready."""

    def __init__(self, subject: Subject, *words: str) -> None:
        self._process = subprocess.Popen(
            subject.command("serve", "--port", "0", *words), cwd=subject.work,
            env=subject.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self._line(r"^listening on http://[^:]+:(\d+)"))
        self._line(r"^(ready): ")

    def ask(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def stop(self) -> int:
        """End it as an operator does; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            self._reader.join(10)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            self._said.put(line)
        self._said.put(None)

    def _line(self, pattern: str) -> str:
        while (line := self._said.get(timeout=_START_S)) is not None:
            if match := re.search(pattern, line):
                return match[1]
        raise RuntimeError("the server has ended:\n" + "\n".join(self.lines))


@contextmanager
def serving(subject: Subject, *words: str) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    server = Server(subject, *words)
    try:
        yield server
    finally:
        server.stop()


def answers(server: Server) -> list[Any]:
    """What it answers over HTTP; of pages the hashes."""
    found: list[Any] = []
    for method, path, headers in REQUESTS:
        status, kept, body = server.ask(method, path, headers)
        named = {key.lower(): value for key, value in kept.items()}
        for changing in ("date", "server", "content-length"):
            named.pop(changing, None)
        if path == "/":
            body = hashlib.sha256(body.encode()).hexdigest()
        elif named["content-type"].startswith("application/json"):
            body = masked(json.loads(body), ("created", "warm_up_s"))
        answer = {
            "asked": [method, path, headers],
            "status": status,
            "headers": named,
            "body": body,
        }
        found.append(json.loads(json.dumps(answer).replace(f":{server.port}", ":PORT")))
    return found


def metrics(server: Server) -> list[str]:
    """Names, labels and help of its metrics, values left out."""
    lines = server.ask("GET", "/metrics", {})[2].splitlines()
    own = (line for line in lines if "mosstalk_" in line)
    return sorted({line if line.startswith("#") else line.rpartition(" ")[0] for line in own})
