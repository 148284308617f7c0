"""How far ahead of its session a client is read, and that its place is free when it has gone."""

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conftest import run
from server_rig import BY_HAND, QUICK, RATE, Server, Talker, append, serving
from websockets.exceptions import InvalidStatus

MIB = 1 << 20
PER_KEY = 2
LONG = bytes(15 * MIB)
"""5.5 minutes of sound."""
WHOLE_MS = len(LONG) * 500 // RATE
"""All of it in one message."""
GONE_S = 2.0
HANDSHAKE = (
    "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that lets two clients in."""
    with serving(*QUICK, "--limit", f"per_key={PER_KEY}", cache=cache_folder) as running:
        yield running


def closed(metrics: dict[str, float]) -> float:
    """How many sessions are over."""
    name = "mosstalk_sessions_closed_total{"
    return sum(n for each, n in metrics.items() if each.startswith(name))


@pytest.mark.parametrize(
    ("piece_ms", "how"),
    [
        (WHOLE_MS, "reset"),
        (1000, "closed"),
        # Slow: each with the other.
        pytest.param(WHOLE_MS, "closed", marks=pytest.mark.slow),
        pytest.param(1000, "reset", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_sends_minutes_of_sound_and_vanishes_leaves_its_place_at_once(
    how: str, piece_ms: int, server: Server
) -> None:
    """Nobody reads what it has sent, so its end stands behind what is left unread."""

    async def main() -> float:
        talker = Talker(server)
        await talker.__aenter__()
        await talker.send(BY_HAND)
        before = await asyncio.to_thread(server.metrics)
        sending = asyncio.create_task(talker.say(LONG, piece_ms))
        throttled = "mosstalk_throttled_total"
        await asyncio.to_thread(server.await_metrics, lambda m: m[throttled] > before[throttled])
        raw = talker.socket.transport.get_extra_info("socket")
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone_s = time.monotonic()
        talker.socket.transport.abort()
        await asyncio.gather(sending, return_exceptions=True)
        over = lambda m: closed(m) == closed(before) + 1 and not m["mosstalk_sessions"]  # noqa: E731
        await asyncio.to_thread(server.await_metrics, over)
        return time.monotonic() - gone_s

    took_s = asyncio.run(main())
    print(f"15 MiB, {how}: its place was free after {took_s:.2f} s")
    assert took_s < GONE_S


def test_a_refused_change_of_the_rate_leaves_the_conversation_read(server: Server) -> None:
    g711 = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
    refused = {"type": "realtime", "mosstalk": {"sampling": {"top_p": 0}}, **g711}

    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND, append(bytes(2 * RATE)))
            await talker.send({"type": "session.update", "session": refused})
            await talker.error()
            for _ in range(3):  # far more than may be on its way at a time, were it counted wrong
                await talker.say(bytes(20 * 2 * RATE), 1000)
                await talker.send({"type": "input_audio_buffer.clear"})
            for _ in range(3):
                await talker.wait("input_audio_buffer.cleared")
            assert (await talker.ask("Good morning."))["status"] == "completed"

    run(main(), 60)


def test_of_connections_that_come_together_a_key_gets_as_many_as_it_may(server: Server) -> None:
    async def enter() -> int:
        talker = Talker(server)
        try:
            await talker.__aenter__()
        except InvalidStatus as refused:
            return refused.response.status_code
        inside.append(talker)
        return 101

    async def main() -> None:
        statuses = Counter(await asyncio.gather(*(enter() for _ in range(30))))
        print(f"of 30 connections with per_key={PER_KEY}: {dict(statuses)}")
        assert statuses == {101: PER_KEY, 429: 30 - PER_KEY}
        for talker in inside:
            await talker.__aexit__(None, None, None)

    server.await_nothing_held()
    inside = list[Talker]()
    run(main())
    server.await_nothing_held()
    assert run_one(server) == 101, "places are given back"


def run_one(server: Server) -> int:
    """The status of one connection's handshake."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), 20)) as raw:
        raw.sendall(HANDSHAKE.encode())
        return status(raw)


def status(raw: socket.socket) -> int:
    """The status of the answer to a handshake; 0 if the connection is closed without one."""
    try:
        line = raw.makefile("rb").readline().split()
    except ConnectionError:
        line = []
    return int(line[1]) if line else 0
