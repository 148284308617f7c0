"""The TLS handshake of a connection, with limits, before HTTP is spoken over it."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from mosstalk.server.admission import Refusal
from mosstalk.server.websocket import HttpProtocol, ServerConfig, response_bytes

_HANDSHAKE = b"\x16"
"""What TLS begins with: the type of its record."""
_PLAIN_HTTP = Refusal(
    400, "plain_http", "this port speaks TLS: write https or wss in place of http or ws"
)
_GOODBYE_S = 1.0
"""How long a client's TLS may take to say goodbye."""
_HELD_BYTES = 64 << 10
"""What TLS may hold of a connection each way, about; its own limits are 256 and 512 KiB."""
_REQUEST_BYTES = 64 << 10


class TlsProtocol(asyncio.Protocol):
    """A connection until TLS is agreed on; from then on it is an ``HttpProtocol``.

    It counts as a connection from its first moment on. The handshake has to begin, and to end, in
    the time that a request may take.
    """

    def __init__(self, config: uvicorn.Config, server_state: ServerState, **more: Any) -> None:
        self._config, self._connections = cast(ServerConfig, config), server_state.connections
        self._limiter = self._config.limiter
        self._https = _HttpsProtocol(self._leave, config, server_state, **more)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for TLS, or close it at once if there are too many."""
        given = transport.get_extra_info("socket")
        self._connections.add(cast(Any, self))
        if self._limiter.admit(len(self._connections), given.fileno()):
            # A transport reads on while one for TLS is put in its place, so that one is new.
            with suppress(OSError):  # no file is left
                self._socket = socket.socket(fileno=os.dup(given.fileno()))
                self._socket.setblocking(False)
                self._limiter.idle[self] = None
                self._beginning = asyncio.create_task(self._begin())
        if self not in self._limiter.idle:
            self._leave()
        cast(asyncio.Transport, transport).abort()

    def timeout_keep_alive_handler(self) -> None:
        """Make room for another connection."""
        self.shutdown()

    def shutdown(self) -> None:
        """End before TLS is agreed on: whoever waits for the client sees that it is over."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _begin(self) -> None:
        try:
            first = await self._first_byte()
            if first == _HANDSHAKE:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._https,
                    self._socket,  # which is that one's to close from here on
                    ssl=self._config.tls,
                    ssl_handshake_timeout=self._limiter.limits.header_s,
                    ssl_shutdown_timeout=_GOODBYE_S,
                )
            else:
                self._refuse(first)
        except OSError:  # it has gone, or what it says is no TLS
            pass
        finally:
            self._leave()

    async def _first_byte(self) -> bytes:
        """What the client begins with, left where it is; none if it has gone."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, there.set)
        try:
            await asyncio.wait_for(there.wait(), self._limiter.limits.header_s)
        except TimeoutError:
            return b""
        finally:
            loop.remove_reader(self._socket)
        return self._socket.recv(1, socket.MSG_PEEK)

    def _refuse(self, first: bytes) -> None:
        """Hang up, after an answer where a client has asked without TLS."""
        with self._socket as client:
            if first:
                client.recv(_REQUEST_BYTES)  # what is left unread takes the answer along
                client.send(response_bytes(_PLAIN_HTTP))

    def _leave(self) -> None:
        self._connections.discard(cast(Any, self))
        self._limiter.idle.pop(self, None)


class _HttpsProtocol(HttpProtocol):
    """What comes after ``TlsProtocol``, which has ``left`` by then."""

    def __init__(self, left: Callable[[], None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._left = left

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """TLS is agreed on."""
        self._left()
        transport.set_write_buffer_limits(_HELD_BYTES)
        cast(Any, transport).set_read_buffer_limits(_HELD_BYTES)
        super().connection_made(transport)
