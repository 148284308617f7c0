"""Log lines for people or for programs, and output that never makes its writer wait.

Lines hold no sound and no words of anyone. Whoever reads a server's output may stop reading: a full
pipe would then hold up the whole process at its next line.

What a line is about (a session, a response) goes into its fields: ``log.info("...",
extra={"session": session_id})``.
"""

import io
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

_STDOUT, _STDERR = 1, 2
_LAST_LINES_S = 1.0
"""How long the last lines may take to be read at the end."""


def _plainly(lost: int) -> str:
    return f"warning: {lost} lines were dropped here: nobody read this output"


class BoundedStream(io.TextIOBase):
    """Lines of text on their way to a file descriptor, written by a thread of its own.

    At most ``most`` characters wait for their reader. Lines beyond that are dropped and counted;
    once there is room again ``lost_line`` makes the line that says how many they were.
    """

    def __init__(self, descriptor: int, most: int = 1 << 20) -> None:
        self.lost_line: Callable[[int], str] = _plainly
        self._descriptor, self._most = descriptor, most
        self._begun, self._lost = "", 0
        self._lines: deque[str] = deque()
        self._waiting = 0
        """Characters in ``_lines``, with those of the line that is being written."""
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name=f"output-{descriptor}", daemon=True).start()

    def fileno(self) -> int:
        """The file descriptor that lines are written to."""
        return self._descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Take text without waiting; it goes on its way line by line."""
        with self._changed:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > self._most:
                lines, self._begun = [*lines, self._begun], ""
            for line in lines:
                self._take(f"{line}\n")
        return len(text)

    def drain(self, most_s: float) -> bool:
        """Wait until everything is written, at most so long; whether it is."""
        with self._changed:
            if self._begun:
                self.write("\n")
            return self._changed.wait_for(lambda: not self._waiting, most_s)

    def _take(self, line: str) -> None:
        if self._lost:
            lost = f"{self.lost_line(self._lost)}\n"
            if self._waiting + len(lost) + len(line) > self._most:
                self._lost += 1
                return
            self._lost = 0
            self._append(lost)
        if self._waiting + len(line) > self._most:
            self._lost += 1
            return
        self._append(line)

    def _append(self, line: str) -> None:
        self._lines.append(line)
        self._waiting += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            written = self._written(line.encode(errors="backslashreplace"))
            with self._changed:
                self._waiting -= len(line)
                if not written:
                    self._lost += 1
                elif self._lost and not self._lines:
                    self._append(f"{self.lost_line(self._lost)}\n")
                    self._lost = 0
                self._changed.notify_all()

    def _written(self, data: bytes) -> bool:
        """Write as soon as the reader takes it; whether there is a reader."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody who shares it has made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


@contextmanager
def bounded_output() -> Iterator[None]:
    """Have standard output and error of this process be ``BoundedStream``s in the block.

    What waits at its end has a second to be read; the rest is dropped.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    streams = BoundedStream(_STDOUT), BoundedStream(_STDERR)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        end_s = time.monotonic() + _LAST_LINES_S
        for stream in streams:
            stream.drain(max(0.0, end_s - time.monotonic()))
        sys.stdout, sys.stderr = before


FIELDS = ("session", "response", "item", "code", "reason", "status", "client", "figures")
"""Names of the fields that lines may carry, in their order."""
_QUIET = (
    "uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "asyncio", "aioice", "aiortc"
)  # fmt: skip


@dataclass(frozen=True)
class LogStyle:
    """``json`` or ``text`` lines, from ``level`` on."""

    form: str = "text"
    level: str = "INFO"

    def install(self, process: str) -> None:
        """Send every log line of this process to standard error in this style.

        Call it within ``bounded_output``: then no line waits for whoever reads them.
        """
        formatter = JsonLines(process) if self.form == "json" else TextLines(process)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(formatter)
        logging.basicConfig(level=self.level, handlers=[handler], force=True)
        if isinstance(sys.stderr, BoundedStream):
            sys.stderr.lost_line = lambda lost: formatter.format(_lost(lost))
        for name in _QUIET:
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
        logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)


@dataclass
class LogLimiter:
    """Which of the lines that strangers can cause are logged: ``most`` of a kind in ``per_s``."""

    most: int = 10
    per_s: float = 60.0
    _begun_s: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def take(self, kind: str, now_s: float) -> int | None:
        """One of a kind: None if it is not to be logged, else how many were not since the last."""
        left_out = 0
        if now_s - self._begun_s.get(kind, -self.per_s) >= self.per_s:
            left_out = max(0, self._counts.get(kind, 0) - self.most)
            self._begun_s[kind], self._counts[kind] = now_s, 0
        self._counts[kind] += 1
        return left_out if self._counts[kind] <= self.most else None


class _Lines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process


class JsonLines(_Lines):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": _when(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if trace := _trace(record):
            line["traceback"] = trace
        return json.dumps(line, default=str)


class TextLines(_Lines):
    """Time, level, message and fields, to be read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, a traceback below it."""
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        when = _when(record).astimezone().strftime("%H:%M:%S")
        level = f"{record.levelname.lower():<7}"
        line = f"{when} {level} {self._process:<6} {record.getMessage()}"
        return "\n".join(part.rstrip() for part in (f"{line}  {fields}", _trace(record)) if part)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket that is refused over HTTP for a fault, each time."""
    return "returned without completing handshake" not in record.getMessage()


def _lost(lines: int) -> logging.LogRecord:
    message = "%d lines were dropped here: nobody read standard error"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, message, (lines,), None)


def _when(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _trace(record: logging.LogRecord) -> str:
    return "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in given if value is not None}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{_shown(each)}" for name, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
