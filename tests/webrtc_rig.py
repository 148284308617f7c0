"""What the tests of calls share: an aiortc client, which talks with a server as a browser does."""

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from types import TracebackType
from typing import Any, Literal

import av
import httpx
import numpy as np
import numpy.typing as npt
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError
from aiortc.rtp import RtpPacket
from server_rig import RATE, Server

CALLS = "/v1/realtime/calls"
WIRE_RATE = 48_000
"""Hz of Opus's timestamps."""
FRAME = RATE // 50
"""Samples of 20 ms."""
Samples = npt.NDArray[np.int16]
Sound = npt.NDArray[np.float32]


class Microphone(MediaStreamTrack):
    """Says what it is given, 20 ms every 20 ms, and is silent in between."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._unsaid, self._place, self._begun_s = bytearray(), 0, 0.0
        self._said, self._is_on = asyncio.Event(), asyncio.Event()
        self._is_on.set()
        self._stamps_go_on = True

    def push(self, pcm: bytes) -> None:
        """Say this, int16 at 24 kHz, after what was given before."""
        self._unsaid += pcm
        self._said.clear()

    async def said(self) -> None:
        """Wait until all was."""
        await self._said.wait()

    def stop_sending(self, *, stamps_go_on: bool) -> None:
        """Send nothing, not even silence; whether timestamps count the time that passes."""
        self._is_on.clear()
        self._stamps_go_on = stamps_go_on

    def send_again(self) -> None:
        """Go on as before."""
        self._is_on.set()

    async def recv(self) -> av.AudioFrame:
        """The next 20 ms."""
        self._begun_s = self._begun_s or time.monotonic()
        if not self._is_on.is_set():
            since_s = time.monotonic()
            await self._is_on.wait()
            if self._stamps_go_on:
                self._place += round((time.monotonic() - since_s) * 50) * FRAME
            else:
                self._begun_s += time.monotonic() - since_s
        await asyncio.sleep(self._begun_s + self._place / RATE - time.monotonic())
        piece = bytes(self._unsaid[: 2 * FRAME]).ljust(2 * FRAME, b"\0")
        del self._unsaid[: 2 * FRAME]
        if not self._unsaid:
            self._said.set()
        samples = np.frombuffer(piece, "<i2")[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE, self._place
        frame.time_base = Fraction(1, RATE)
        self._place += FRAME
        return frame


Address = tuple[str, int]
_CANDIDATE = re.compile(r"(a=candidate:\S+ \d udp \d+) (\d+(?:\.\d+){3}) (\d+) typ host\r\n")
_BIG = 1 << 20


class LossyRelay:
    """Stands between clients and a server, and loses a share of the packets each way.

    ``loss`` is that share, at first none; ``lost`` are the packets that it took, "up" to the
    server and "down" to the client. It belongs to the running loop.
    """

    def __init__(self, server: Address, at: Address | None = None) -> None:
        """Listen ``at`` a place, or at any port of the server's machine."""
        self.loss = 0.0
        self.lost: dict[str, list[bytes]] = {"up": [], "down": []}
        self._dice = {"up": random.Random(0), "down": random.Random(1)}
        self._server = server
        self._front = self._socket(at or (server[0], 0), self._up)
        self._towards: dict[Address, socket.socket] = {}
        """By a client's address, what speaks with the server in its name."""

    @classmethod
    def of(cls, answer: str) -> "tuple[LossyRelay, str]":
        """A relay to the server of an answer, and the answer that names nothing but the relay."""
        first = _CANDIDATE.search(answer)
        assert first, answer
        relay = cls((first[2], int(first[3])))
        host, port = relay._front.getsockname()
        named = re.sub(r"a=candidate:.*\r\n", "", answer)
        place = named.index("a=ice-ufrag")
        return relay, f"{named[:place]}{first[1]} {host} {port} typ host\r\n{named[place:]}"

    def close(self) -> None:
        """Pass on nothing more."""
        for each in (self._front, *self._towards.values()):
            asyncio.get_running_loop().remove_reader(each)
            each.close()

    def _socket(self, at: Address, take: Callable[[bytes, Address], None]) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BIG)
        made.bind(at)
        made.setblocking(False)

        def read() -> None:
            with suppress(BlockingIOError):
                while True:
                    take(*made.recvfrom(65_536))

        asyncio.get_running_loop().add_reader(made, read)
        return made

    def _up(self, packet: bytes, client: Address) -> None:
        if client not in self._towards:
            self._towards[client] = self._socket(
                (self._server[0], 0),
                lambda packet, _: self._pass("down", packet, self._front, client),
            )
        self._pass("up", packet, self._towards[client], self._server)

    def _pass(self, way: str, packet: bytes, by: socket.socket, to: Address) -> None:
        if self._dice[way].random() < self.loss:
            self.lost[way].append(packet)
        else:
            by.sendto(packet, to)


class Caller:
    """A client of a call, which keeps the events and the sound that come.

    ``relayed``: through a ``LossyRelay``, which is there once the server has answered. ``takes`` is
    what it announces as its longest message, in bytes; "" announces nothing. ``resume`` is a token,
    to go on with a conversation.
    """

    def __init__(
        self,
        server: Server,
        *,
        key: str | None = None,
        resume: str | None = None,
        relayed: bool = False,
        takes: int | Literal[""] = 262_144,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.times_s: list[float] = []
        """When each of the events came."""
        self.heard: list[tuple[float, int, Samples]] = []
        """Frames of sound: when each came, its place at 48 kHz, and its samples."""
        self.packets: list[tuple[float, RtpPacket]] = []
        """The same sound as it came: when each packet did."""
        self.location = ""
        self.relay: LossyRelay
        self._relayed = relayed
        self._takes = takes and f"a=max-message-size:{takes}\r\n"
        self.microphone = Microphone()
        self._server, self._headers = server, {"Authorization": f"Bearer {key}"} if key else {}
        if resume:
            self._headers["X-Mosstalk-Resume"] = resume
        self._came, self._place = asyncio.Event(), 0
        self.closed = asyncio.Event()
        self.connection: RTCPeerConnection
        self.channel: RTCDataChannel
        self._listening: asyncio.Task[None] | None = None

    async def offer(self) -> str:
        """What this client offers; it belongs to the loop in which it does."""
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTrack(self.microphone)
        self.channel = self.connection.createDataChannel("oai-events")
        self.channel.on("message", self._on_message)
        self.connection.on("track", self._on_track)
        self.connection.on("connectionstatechange", self._on_state)
        receiver = self.connection.getTransceivers()[0].receiver
        handle = receiver._handle_rtp_packet

        async def noting(packet: RtpPacket, arrival_time_ms: int) -> None:
            self.packets.append((time.monotonic(), packet))
            await handle(packet, arrival_time_ms)

        receiver._handle_rtp_packet = noting  # type: ignore[method-assign]
        await self.connection.setLocalDescription(await self.connection.createOffer())
        said = self.connection.localDescription.sdp
        return re.sub(r"a=max-message-size:.*\r\n", str(self._takes), said)

    async def __aenter__(self) -> "Caller":
        answer = await post(self._server, await self.offer(), **self._headers)
        assert answer.status_code == 201, answer.text
        await self.answered(answer)
        await self.wait("session.created")
        return self

    async def answered(self, answer: httpx.Response) -> None:
        """Take the server's answer."""
        assert answer.headers["content-type"] == "application/sdp"
        self.location = answer.headers["location"]
        sdp = answer.text
        if self._relayed:
            self.relay, sdp = LossyRelay.of(sdp)
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp, "answer"))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.connection.close()
        if self._relayed:
            self.relay.close()
        if self._listening:
            await self._listening

    def send(self, *events: dict[str, Any] | str) -> None:
        """Send events, or messages as they are."""
        for event in events:
            said = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            self.channel.send(said)

    async def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for the next event of that kind, with these fields."""
        while True:
            while self._place == len(self.events):
                self._came.clear()
                await self._came.wait()
            event = self.events[self._place]
            self._place += 1
            if event["type"] == kind and all(event.get(k) == v for k, v in fields.items()):
                return event

    async def hears(self, met: Callable[[], bool]) -> None:
        """Wait until the sound that has come is as it should be."""
        while not met():
            self._came.clear()
            await self._came.wait()

    def kinds(self) -> list[str]:
        """The types of all events."""
        return [event["type"] for event in self.events]

    def time_s(self, kind: str) -> float:
        """When the first event of a kind came."""
        return self.times_s[self.kinds().index(kind)]

    def sound(self) -> Samples:
        """All sound, at 48 kHz, from the first frame on."""
        return np.concatenate([samples for _, _, samples in self.heard])

    def _on_message(self, message: str) -> None:
        self.events.append(json.loads(message))
        self.times_s.append(time.monotonic())
        self._came.set()

    def _on_state(self) -> None:
        if self.connection.connectionState in ("closed", "failed"):
            self.closed.set()

    def _on_track(self, track: MediaStreamTrack) -> None:
        self._listening = asyncio.create_task(self._listen(track))

    async def _listen(self, track: MediaStreamTrack) -> None:
        with suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                assert isinstance(frame, av.AudioFrame)
                stereo = frame.to_ndarray().reshape(-1, len(frame.layout.channels))
                samples = stereo[:, 0].astype(np.int16)
                self.heard.append((time.monotonic(), frame.pts or 0, samples))
                self._came.set()


async def post(
    server: Server, content: str | bytes, kind: str = "application/sdp", **headers: str
) -> httpx.Response:
    """Offer something to a server."""
    async with httpx.AsyncClient() as client:
        return await client.post(
            f"{server.url}{CALLS}", content=content, headers={"Content-Type": kind} | headers
        )


def place_of(sound: Sound, heard: Sound) -> int:
    """Where a sound begins in what was heard."""
    size = 1 << (len(heard) + len(sound)).bit_length()
    match = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(sound, size)))
    return int(np.argmax(match[: len(heard)]))
