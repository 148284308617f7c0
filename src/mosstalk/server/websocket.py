"""Connections and WebSockets as uvicorn speaks them, with limits on what a client may send.

uvicorn bounds the head of one request (with h11) and one message. It has no limit on how long a
request may take to arrive, and none that keeps connections which ask for nothing from taking all
file descriptors.

uvicorn parses all that has come in one go, answers any number of pings, and holds an unfinished
message for every connection. Here a connection is read in slices, and no further while a message
waits to be heard; control frames are counted; large messages are read a few at a time. And it says
whether a client is still there while nothing is read from it.
"""

import asyncio
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from mosstalk.server.admission import DRAINING, Refusal
from mosstalk.server.ipc import hand_over
from mosstalk.server.limits import ConnectionLimiter, TokenBucket

_RETRY_S = 5
"""What one connection too many is told."""


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, with what all connections share; ``tls`` None is without."""

    def __init__(
        self,
        limiter: "ConnectionLimiter",
        tls: ssl.SSLContext | None,
        *args: Any,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.limiter, self.tls = limiter, tls


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
            self._limiter.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _wait_for_a_request(self, most_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(most_s, self.timeout_keep_alive_handler)
        self._limiter.idle[self] = None

    def _unset_keepalive_if_required(self) -> None:
        """A request is whole, or the connection is over."""
        super()._unset_keepalive_if_required()
        self._limiter.idle.pop(self, None)


def _full() -> bytes:
    """The answer to one connection too many, before it has asked."""
    message = f"too many connections are open; come again in {_RETRY_S} s"
    return response_bytes(Refusal(503, "connections", message, _RETRY_S))


def response_bytes(refusal: Refusal) -> bytes:
    """A refusal as bytes, for a connection of which no request was read."""
    answer = refusal.answer()
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}".encode(),
        *(b"%b: %b" % header for header in answer.raw_headers),
        b"X-Content-Type-Options: nosniff",
        b"Connection: close",
    )
    return b"\r\n".join((*head, b"", bytes(answer.body)))


WEBSOCKET = "mosstalk.websocket"
"""The extension of a connection's scope that holds its ``WebSocketProtocol``."""
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_SLICE = 8192
"""Bytes that are parsed in one go: at most some 1,400 frames, which take some 10 ms."""
_TURN_S = 0.002
"""How long one connection parses before the others have their turn."""
_FRAGMENT = 256
"""A fragment with fewer bytes brings next to nothing, and counts as a control frame."""
_AGAIN_S = 0.25
"""How often one that takes long with a large message is held against who waits for its place."""
_POLICY = 1008
_NUMBER = struct.Struct("!Q")
_GOODBYE_S = 1.0
"""How long a client that is sent away may take to read why."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that is read in slices, and no further while a message waits to be heard.

    A message waits for ``receive``, unless ``hears`` is set and takes it as it comes: that spares
    a frame of sound two turns of the loop and two calls that stop and start the socket.
    """

    def __init__(self, config: uvicorn.Config, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self._limiter = cast(ServerConfig, config).limiter
        limits = self._limiter.limits
        self._unread = bytearray()
        self._request = b""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the connection is over."""
        self.hears: Callable[[str | bytes], bool] | None = None
        """Hears a message at once, or returns False: it must wait, and those that follow it."""
        self._taken = False
        """A message was taken by ``receive`` and is being heard."""
        self._turn_ends_s = 0.0
        self._sent_away = False
        self._pings_sent = 0
        self._parsing: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._control_frames = TokenBucket(
            limits.control_frames_per_s, limits.burst_s, self.loop.time()
        )

    def data_received(self, data: bytes) -> None:
        """Keep what has come, and parse as much of it as may be."""
        if self._sent_away:
            return
        self._request = self._request or data
        self._unread += data
        if self._parsing is None:
            self._parse()

    def go_on(self) -> None:
        """Parse more, in a while."""
        if self._parsing is None:
            self._parsing = self.loop.call_soon(self._parse)

    async def receive(self) -> Any:
        """The next message, without content after ``hold``; the rest waits until this is heard."""
        self._taken = False
        message = await self.queue.get()
        self._taken = True
        if self._free and self._parsing is None:
            self._parse()
        return message

    def hold(self) -> None:
        """Leave what comes unread until ``receive`` has returned a message without content."""
        self.queue.put_nowait(cast(Any, {"type": "websocket.receive"}))

    async def send(self, message: Any) -> None:
        """Send; after a close the rest is parsed for the client's own.

        Raises:
            ClientDisconnected: it has gone, or was sent away by this side.
        """
        if self._sent_away:
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self.go_on()

    def handle_connect(self, event: Request) -> None:
        """Begin a connection whose scope has the extension ``WEBSOCKET``."""
        super().handle_connect(event)
        if hasattr(self, "scope"):  # what is no WebSocket request has been refused
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[WEBSOCKET] = self

    def is_gone(self) -> bool:
        """Whether the client has hung up or its machine has reset the connection.

        Sends a ping: a socket that the client has closed answers even that with a reset, also
        where what it sent before is still unread and hides that nothing will follow.
        """
        if self.close_sent or self.transport.is_closing():
            return True
        hung_up = select.poll()
        hung_up.register(self.transport.get_extra_info("socket").fileno(), _HUNG_UP)
        if hung_up.poll(0):
            return True
        self._pings_sent += 1
        self.conn.send_ping(b"")
        self.transport.write(b"".join(self.conn.data_to_send()))
        return False

    def give_away(self, carrier: socket.socket, number: int) -> None:
        """Hand a connection that was not answered yet over to another process, with its request.

        There ``take_over`` goes on with it, under this number.

        Raises:
            OSError: that process takes none.
        """
        self.transport.pause_reading()
        note = note_of(number, self._request)
        try:
            hand_over(carrier, self.transport.get_extra_info("socket"), note)
        except OSError:
            self.transport.resume_reading()
            raise
        self.handshake_complete = self._sent_away = True  # as far as this process is concerned
        self.transport.close()

    def shutdown(self) -> None:
        """End as the server does; who has not been let in yet is told when to come back."""
        if self.handshake_complete or self.initial_response or not self.handshake_initiated:
            super().shutdown()
            return
        answer = DRAINING.answer()
        refused = self.conn.reject(answer.status_code, bytes(answer.body).decode())
        for name in ("Content-Type", "Retry-After"):
            del refused.headers[name]
            refused.headers[name] = answer.headers[name]
        self.conn.send_response(refused)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Count fragments that are too small to be of use."""
        self._count_fragment(event)
        super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        """Count fragments that are too small to be of use."""
        self._count_fragment(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Count fragments that are too small to be of use."""
        self._count_fragment(event)
        super().handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        """A message is whole: have it heard at once, or let it wait."""
        if not self._heard():
            super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Count it; what answers it is sent."""
        self._count("pings")
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        """Count it unless it was asked for."""
        if self._pings_sent:
            self._pings_sent -= 1
        else:
            self._count("pongs")
        super().handle_pong(event)

    def send_keepalive_ping(self) -> None:
        """Ask whether the client is there."""
        self._pings_sent += 1
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        """End a connection without an answer, unless that may lie there unread."""
        if self.read_paused and not self.transport.is_closing():
            self.pong_timer = self.loop.call_later(self.ping_timeout or 1, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def handle_parser_exception(self) -> None:
        """Send the client away for what no frame may be."""
        super().handle_parser_exception()
        self._sent_away = True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._forget()
        super().connection_lost(exc)
        self.on_lost()

    @property
    def _free(self) -> bool:
        """Whether more may be parsed: no message waits to be heard, or nobody hears any more."""
        return self.close_sent or self.queue.empty()

    @property
    def _unfinished_bytes(self) -> int:
        """How much there is of a message that is not whole."""
        return len(self.conn.reader.buffer) + (self.conn.current_size or 0)

    def _heard(self) -> bool:
        """Whether the message that is whole was heard at once.

        Not if others wait before it, and not once this connection's turn is over.
        """
        if self.hears is None or self._taken or not self.queue.empty() or self.close_sent:
            return False
        if time.perf_counter() > self._turn_ends_s:
            return False
        data = b"".join(self.frames)
        try:
            message = data.decode() if self.curr_msg_data_type == "text" else data
        except UnicodeDecodeError:
            return False  # the client is sent away for it
        if not self.hears(message):
            return False
        self.frames = []
        return True

    def _parse(self) -> None:
        self._parsing = None
        self._turn_ends_s = end_s = time.perf_counter() + _TURN_S
        while self._unread and self._free and not self.transport.is_closing():
            if not self._may_grow():
                break
            if time.perf_counter() > end_s:
                self.go_on()
                break
            piece = bytes(self._unread[:_SLICE])
            del self._unread[:_SLICE]
            super().data_received(piece)
        if not self._unread and not self.handshake_initiated:
            self._refuse_handshake()
        if self._unfinished_bytes <= self._limiter.limits.large_bytes:
            self._end_deadline()
            if self.queue.empty():
                self._limiter.done_with_large(self)
        self._pause(bool(self._unread) or not self._free)

    def _may_grow(self) -> bool:
        """Whether an unfinished message may grow: those that are large only a few at a time."""
        limits = self._limiter.limits
        if self._unfinished_bytes <= limits.large_bytes:
            return True
        if not self._limiter.may_read_large(self):
            return False
        if self._deadline is None:
            self._deadline = self.loop.call_later(limits.message_s, self._unfinished)
        return True

    def _end_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _pause(self, wanted: bool) -> None:
        """Leave what comes in the socket, or no longer."""
        if wanted != self.read_paused and not self.transport.is_closing():
            self.read_paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _unfinished(self) -> None:
        if not self._limiter.others_wait:  # a slow line takes nobody's place
            self._deadline = self.loop.call_later(_AGAIN_S, self._unfinished)
            return
        most_s = self._limiter.limits.message_s
        self._fail(f"a message was not whole after {most_s:g} s: send long sound in pieces")

    def _count_fragment(self, frame: Frame) -> None:
        if not frame.fin and len(frame.data) < _FRAGMENT:
            self._count("small fragments")

    def _count(self, what: str) -> None:
        if self._control_frames.wait_s(1, self.loop.time()):
            self._fail(f"too many {what}")

    def _fail(self, reason: str) -> None:
        """Close the connection because of what its client does.

        The socket stays open a little longer: closed with something in it that was not read, it
        would be reset, and the client would not hear why.
        """
        if self.close_sent or self.transport.is_closing():
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": _POLICY, "reason": reason})
        self.conn.send_close(_POLICY, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self._sent_away = True
        self._forget()
        self.close_timer = self.loop.call_later(_GOODBYE_S, self.transport.close)

    def _forget(self) -> None:
        """Free what nobody will hear."""
        self._unread.clear()
        self.conn.reader.buffer.clear()
        self.frames = []
        self._end_deadline()
        self._limiter.done_with_large(self)

    def _refuse_handshake(self) -> None:
        """Say what websockets has against a request that h11 let through: its headers' size."""
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()


def note_of(number: int, request: bytes) -> bytes:
    """What ``take_over`` is to know of a connection: its number, and its request."""
    return _NUMBER.pack(number) + request


async def take_over(
    connection: socket.socket, note: bytes, server: uvicorn.Server, on_lost: Callable[[int], None]
) -> None:
    """Go on with a connection that ``give_away`` has given; ``on_lost`` tells when it is over."""
    (number,), request = _NUMBER.unpack_from(note), note[_NUMBER.size :]
    protocol = WebSocketProtocol(server.config, server.server_state, {})
    protocol.on_lost = partial(on_lost, number)
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    except OSError:  # it has gone meanwhile
        connection.close()
        on_lost(number)
    else:
        protocol.data_received(request)
