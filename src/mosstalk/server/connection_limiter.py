"""Who may connect at all, and how long a request may take: what uvicorn leaves open.

uvicorn bounds the head of one request (with h11) and one message. It has no limit on how long a
request may take to arrive, and none that keeps connections which ask for nothing from taking all
file descriptors.
"""

import asyncio
import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mosstalk.server.admission import Refusal
from mosstalk.server.limits import Limits
from mosstalk.server.metrics import Metrics

if TYPE_CHECKING:
    from mosstalk.server.websocket import WebSocketProtocol

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_LOG = logging.getLogger("mosstalk.server")
OTHER_FILES = 512
"""Files that a front may have open beside its connections: recordings have a few each, and as many
newcomers as wait in line (``front``'s backlog) are accepted before the first is looked at."""
_LAST_FILES = 16
_LOG_EVERY_S = 10.0
_RETRY_S = 5
"""What one connection too many is told."""


def raise_file_limit(wanted: int = 0) -> int:
    """How many files this process may have open, after asking for as many as are wanted."""
    if resource is None:
        return sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if soft != endless and soft < wanted:
        soft = wanted if hard == endless else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == endless else soft


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, with what all connections share."""

    def __init__(self, limiter: "ConnectionLimiter", *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.limiter = limiter


class ConnectionLimiter:
    """Counts connections and large messages."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self._metrics = limits, metrics
        self.between: dict[HttpProtocol, None] = {}
        """Connections that have asked for nothing, or for nothing more, the oldest first."""
        self._large: set[WebSocketProtocol] = set()
        self._in_line: deque[WebSocketProtocol] = deque()
        self._logged_s = float("-inf")

    def admit(self, connections: int, descriptor: int) -> bool:
        """Whether a new connection may stay; the oldest one that waits idly makes room for it.

        ``descriptor`` is the newcomer's. Systems give out the lowest that is free, so a high one
        says that they run out.
        """
        files, most = raise_file_limit(), self.limits.connections
        last = descriptor >= files - _LAST_FILES
        few = last or connections > files - min(OTHER_FILES, files // 2)
        if not few and connections <= most:
            return True
        oldest = next(iter(self.between), None)
        if oldest is None and not last and connections <= most:
            return True
        self._log(connections, files if few else None)
        if oldest is None:
            self._metrics.refusals.labels("connections").inc()
            return False
        oldest.timeout_keep_alive_handler()
        self.between.pop(oldest, None)
        return True

    @property
    def others_wait(self) -> bool:
        """Whether connections wait in line with a large message."""
        return bool(self._in_line)

    def may_read_large(self, protocol: "WebSocketProtocol") -> bool:
        """Whether a connection may go on with a large message; if not, it is called later."""
        if protocol in self._large:
            return True
        if len(self._large) < self.limits.large_messages:
            self._large.add(protocol)
            return True
        if protocol not in self._in_line:
            self._in_line.append(protocol)
        return False

    def done_with_large(self, protocol: "WebSocketProtocol") -> None:
        """A connection has no large message, or none any more: the next in line has its turn."""
        if protocol in self._large:
            self._large.discard(protocol)
            if self._in_line:
                following = self._in_line.popleft()
                self._large.add(following)
                following.go_on()
        elif protocol in self._in_line:
            self._in_line.remove(protocol)

    def _log(self, connections: int, files: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = now_s
        if files is not None:
            _LOG.warning(
                "file descriptors run out: %d connections are open, and this process may have %d "
                "files; raise it with ulimit -n, or LimitNOFILE= of systemd",
                connections,
                files,
            )
        else:
            _LOG.warning(
                "%d connections are open, more than may be; raise it with --limit connections=",
                connections,
            )


class HttpProtocol(H11Protocol):
    """A connection before it becomes a WebSocket: requests have to arrive whole and in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close it at once if there are too many."""
        super().connection_made(transport)
        self._limiter = cast(ServerConfig, self.config).limiter
        descriptor = transport.get_extra_info("socket").fileno()
        if self._limiter.admit(len(self.connections), descriptor):
            self._wait_for_a_request(self._limiter.limits.header_s)
        else:
            transport.write(_full())
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take data; unlike uvicorn's own, some of a request does not stop the clock."""
        self.conn.receive_data(data)
        self.handle_events()

    def on_response_complete(self) -> None:
        """The next request has to arrive in time."""
        super().on_response_complete()
        if self.timeout_keep_alive_task:
            self._limiter.between[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _wait_for_a_request(self, most_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(most_s, self.timeout_keep_alive_handler)
        self._limiter.between[self] = None

    def _unset_keepalive_if_required(self) -> None:
        """A request is whole, or the connection is over."""
        super()._unset_keepalive_if_required()
        self._limiter.between.pop(self, None)


def _full() -> bytes:
    """The answer to one connection too many, before it has asked."""
    message = f"too many connections are open; come again in {_RETRY_S} s"
    answer = Refusal(503, "connections", message, _RETRY_S).answer()
    head = (
        b"HTTP/1.1 503 Service Unavailable",
        *(b"%b: %b" % header for header in answer.raw_headers),
        b"X-Content-Type-Options: nosniff",
        b"Connection: close",
    )
    return b"\r\n".join((*head, b"", bytes(answer.body)))
