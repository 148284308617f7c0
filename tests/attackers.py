"""Clients that are after everybody's server, each a function that runs in a process of its own.

``neighbour_rig.attack`` starts them; each goes on until it is ended. They use the loopback alone,
at the rate that stopped the server when its limits were missing, and import little.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

TEXT, PING, CONTINUED = 1, 9, 0
_AGAIN_S = 0.1
"""Pause before one that was thrown out comes back."""
_FINAL, _MASKED = 0x80, 0x80
_NO_MASK = bytes(4)


def begun() -> None:
    """Say that the attack is under way."""
    print("begun", flush=True)


def endless_headers(url: str, mib_per_s: float = 400.0) -> None:
    """One request whose headers never end."""
    block = b"".join(b"X-%05d: %s\r\n" % (n, b"a" * 120) for n in range(500))

    def once(say: Callable[[], None]) -> None:
        with raw(url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            while True:
                connection.sendall(block)
                say()
                time.sleep(len(block) / (mib_per_s * 2**20))

    _again_and_again(once)


def requests(url: str, key: str, path: str, body: str) -> None:
    """The same request of one key again and again, whatever it is answered."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def once(say: Callable[[], None]) -> None:
        with raw(url) as connection:
            while True:
                connection.sendall(f"{head}{body}".encode())
                if not (answer := connection.recv(65536)):
                    return
                if b" 429 " in answer:
                    say()

    _again_and_again(once)


def idle_connections(url: str, count: int) -> None:
    """Connections that ask for nothing, each opened again when it is closed."""
    where, held = urlsplit(url), list[socket.socket]()
    for place in range(count):
        held.append(_connected(where.hostname, where.port))
        if place == count // 2:
            begun()
    while True:
        for place, connection in enumerate(held):
            with suppress(OSError):
                connection.setblocking(False)
                if connection.recv(1) == b"":
                    connection.close()
                    held[place] = _connected(where.hostname, where.port)
                    time.sleep(0.002)
        time.sleep(_AGAIN_S)


def updates(url: str, tools: int, small: int = 2000) -> None:
    """A session with so many characters of tools, then small updates, many in one write."""
    tool = {"type": "function", "name": "f", "description": "d" * 200, "parameters": {"p": [1, 2]}}
    session = {"type": "realtime", "tools": [tool] * (tools // len(json.dumps(tool)))}
    burst = frame({"type": "session.update", "session": {"type": "realtime"}}) * small

    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            connection.sendall(frame({"type": "session.update", "session": session}))
            reading = threading.Thread(target=_swallow, args=(connection,), daemon=True)
            reading.start()
            while True:
                connection.sendall(burst)
                say()
                time.sleep(_AGAIN_S)

    _again_and_again(once)


def deaf_updates(url: str, tools: int, connections: int) -> None:
    """The same from several connections, none of which reads its answers."""
    tool = {"type": "function", "name": "f", "description": "d" * 200}
    session = {"type": "realtime", "tools": [tool] * (tools // len(json.dumps(tool)))}
    burst = frame({"type": "session.update", "session": {"type": "realtime"}}) * 100

    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            connection.sendall(frame({"type": "session.update", "session": session}))
            say()
            while True:
                connection.sendall(burst)
                time.sleep(_AGAIN_S)

    _in_threads(once, connections)


def pings(url: str, per_write: int = 5000) -> None:
    """Pings, as fast as they go, with nobody who reads what they are answered."""
    burst = frame(b"", PING) * per_write

    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            while True:
                connection.sendall(burst)
                say()

    _again_and_again(once)


def crumbs(url: str, per_write: int = 5000) -> None:
    """One message in fragments of a single byte."""
    burst = frame(b" ", CONTINUED, final=False) * per_write

    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            connection.sendall(frame(b"{", TEXT, final=False))
            while True:
                connection.sendall(burst)
                say()

    _again_and_again(once)


def unfinished(url: str, connections: int, size: int) -> None:
    """Messages of so many bytes, the last of which does not come."""
    part = bytes(2**20)

    def once(say: Callable[[], None]) -> None:
        with websocket(url) as connection:
            connection.sendall(header(TEXT, size))
            say()
            for _ in range((size - 1) // len(part)):
                connection.sendall(part)
            while connection.recv(4096):
                pass

    _in_threads(once, connections)


def header(opcode: int, size: int, *, final: bool = True) -> bytes:
    """The beginning of a client's frame; its mask changes nothing."""
    first = opcode | (_FINAL if final else 0)
    if size < 126:
        return struct.pack("!BB", first, _MASKED | size) + _NO_MASK
    if size < 2**16:
        return struct.pack("!BBH", first, _MASKED | 126, size) + _NO_MASK
    return struct.pack("!BBQ", first, _MASKED | 127, size) + _NO_MASK


def frame(payload: dict[str, Any] | bytes, opcode: int = TEXT, *, final: bool = True) -> bytes:
    """A frame of an event, or of bytes."""
    data = json.dumps(payload).encode() if isinstance(payload, dict) else payload
    return header(opcode, len(data), final=final) + data


def upgrade(url: str, headers: dict[str, str]) -> bytes:
    """The request that opens a WebSocket, with headers of one's own."""
    where = urlsplit(url)
    own = {"Host": where.netloc, "Upgrade": "websocket", "Connection": "Upgrade"}
    own |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    lines = [f"{name}: {value}\r\n" for name, value in (own | headers).items()]
    return f"GET {where.path}?model=any HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


@contextmanager
def websocket(url: str) -> Iterator[socket.socket]:
    """A session's connection, after ``session.created``; what is sent over it is up to its user."""
    with raw(url) as connection:
        connection.sendall(upgrade(url, {}))
        answer = b""
        while b"session.created" not in answer:
            piece = connection.recv(65536)
            if not piece:
                raise ConnectionError(answer[:200])
            answer += piece
        yield connection


def _again_and_again(once: Callable[[Callable[[], None]], None]) -> None:
    """Attack, and attack again when it has ended; say once that it is under way."""
    under_way = threading.Event()

    def say() -> None:
        if not under_way.is_set():
            under_way.set()
            begun()

    while True:
        with suppress(OSError):
            once(say)
        time.sleep(_AGAIN_S)


def _in_threads(once: Callable[[Callable[[], None]], None], count: int) -> None:
    """Attack from so many threads; it is under way when all of them are."""
    left = threading.Semaphore(0)

    def attack() -> None:
        while True:
            with suppress(OSError):
                once(left.release)
            time.sleep(_AGAIN_S)

    for _ in range(count):
        threading.Thread(target=attack, daemon=True).start()
    for _ in range(count):
        left.acquire()
    begun()
    threading.Event().wait()


def _swallow(connection: socket.socket) -> None:
    """Read whatever comes."""
    with suppress(OSError):
        while connection.recv(2**20):
            pass


def _connected(host: str | None, port: int | None) -> socket.socket:
    assert host in ("127.0.0.1", "localhost"), "attacks stay on this machine"
    assert port
    return socket.create_connection((host, port), timeout=30)


@contextmanager
def raw(url: str) -> Iterator[socket.socket]:
    """A plain connection to where a URL points."""
    where = urlsplit(url)
    with _connected(where.hostname, where.port) as connection:
        yield connection
