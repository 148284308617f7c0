"""Log lines for people or for programs, on standard error; no sound and no words of anyone.

What a line is about (a session, a response) goes into its fields: ``log.info("...",
extra={"session": session_id})``.
"""

import json
import logging
import sys
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mosstalk.server.streams import BoundedStream

FIELDS = ("session", "response", "item", "code", "reason", "status", "client", "figures")
"""Names of the fields that lines may carry, in their order."""
_QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "asyncio")


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


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": _when(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level, message and fields, to be read."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, a traceback below it."""
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        when = _when(record).astimezone().strftime("%H:%M:%S")
        level = f"{record.levelname.lower():<7}"
        line = f"{when} {level} {self._process:<6} {record.getMessage()}"
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        return "\n".join(part.rstrip() for part in (f"{line}  {fields}", trace) if part)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket that is refused over HTTP for a fault, each time."""
    return "returned without completing handshake" not in record.getMessage()


def _lost(lines: int) -> logging.LogRecord:
    message = "%d lines were dropped here: nobody read standard error"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, message, (lines,), None)


def _when(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in given if value is not None}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{_shown(each)}" for name, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
