"""One WebRTC connection by aiortc: offer and answer, sound both ways, and a data channel.

A ``Peer`` is to ``Connection`` what a WebSocket is, and what ``WebSocketProtocol`` is: the data
channel's messages and the microphone's sound are heard at once, or wait.

The addresses in an offer are not used. A client reaches the server, and whoever shows the password
of this call by doing so (ICE, RFC 8445, 7.3.1.3) is answered where the packet came from. So nobody
can have the server send anything to a third party, however many addresses an offer names.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, MutableMapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soxr
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceCandidate,
    RTCIceParameters,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCSessionDescription,
)
from aiortc.rtp import RtpPacket
from aiortc.sdp import SessionDescription
from starlette.websockets import WebSocketDisconnect

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.limits import Limits, TokenBucket
from mosstalk.server.realtime.validation import WireError, too_long
from mosstalk.server.webrtc import FRAME, INPUT_RATE
from mosstalk.server.websocket import WEBSOCKET

OPUS_RATE = 48_000
"""Hz of timestamps, whatever the sound's own rate (RFC 7587)."""
_FRAME_S = FRAME / OUTPUT_RATE
_TICKS = round(_FRAME_S * OPUS_RATE)
_LATE_S = 0.2
"""A sender that is later than this skips, rather than to send all at once."""
_BIT_RATE = 40_000
_LONGEST_SDP = 64 << 10
_SECRETS = re.compile(r"[A-Za-z0-9+/]{4,256}"), re.compile(r"[A-Za-z0-9+/]{22,256}")
"""ICE's name and password (RFC 8839, 5.4)."""
_NO_CANDIDATE = re.compile(r"^a=(candidate|end-of-candidates)\b.*(\r?\n|$)", re.MULTILINE)
_MOST_CHANNELS = 8
_BUFFERED = 64 << 10
"""Bytes that may wait in the data channel; others wait in the send queue, and are counted there."""
_HELD = 3
"""Packets that wait for one that is late; then it counts as lost."""
_FAR = 100
"""A sequence number that is so far off belongs to a stream that begins anew (RFC 3550, A.1)."""
_SLACK_S = 1.0
_FASTER, _BURST_S = 1.25, 4.0
"""Sound may come so much faster than it is heard, and so much of it at once."""
_DISCARD = 9
_SILENT_S = 10.0
"""A client whose connection ends after so long without a packet has not ended it."""


def require_offer(offer: str) -> None:
    """Check that an offer is one of a microphone and a data channel.

    Raises:
        WireError: it is too long, no SDP, or one of something else.
    """
    if len(offer) > _LONGEST_SDP:
        raise too_long("sdp", f"{_LONGEST_SDP} characters", len(offer))
    try:
        media = SessionDescription.parse(offer).media
    except Exception as error:  # aiortc's parser has no error of its own
        raise _wrong("it is no session description") from error
    if sorted(each.kind for each in media) != ["application", "audio"]:
        raise _wrong("offer one audio track, and one data channel, 'oai-events', and nothing else")
    for each in media:
        ice = each.ice or RTCIceParameters()
        named = ice.usernameFragment or "", ice.password or ""
        if not all(form.fullmatch(text) for form, text in zip(_SECRETS, named, strict=True)):
            raise _wrong("it has no a=ice-ufrag and a=ice-pwd as RFC 8839 has them")
        if not (each.dtls and each.dtls.fingerprints):
            raise _wrong("it has no a=fingerprint")
    audio = next(each for each in media if each.kind == "audio")
    if not any(codec.mimeType.lower() == "audio/opus" for codec in audio.rtp.codecs):
        raise _wrong("it offers no Opus")
    if audio.direction not in ("sendrecv", "recvonly"):
        raise _wrong("replies are sent as sound: offer the audio as sendrecv or recvonly")


def _wrong(why: str) -> WireError:
    return WireError("invalid_value", f"Invalid 'sdp': {why}.", "sdp")


# Sound to the client.


class ReplyTrack(MediaStreamTrack):
    """Sends 20 ms of sound every 20 ms, encoded as Opus (RFC 6716) from 24 kHz.

    ``frame`` gives the next ``FRAME`` samples, int16.
    """

    kind = "audio"

    def __init__(self, frame: Callable[[], bytes]) -> None:
        super().__init__()
        self._frame, self._due_s, self._place = frame, 0.0, 0
        self._encoder = av.CodecContext.create("libopus", "w")
        self._encoder.sample_rate, self._encoder.bit_rate = OUTPUT_RATE, _BIT_RATE
        self._encoder.layout, self._encoder.format = "mono", "s16"
        self._encoder.options = {
            "application": "voip", "frame_duration": "20", "compression_level": "5",
            "fec": "1", "packet_loss": "5",
        }  # fmt: skip

    async def recv(self) -> "av.Packet[Any]":
        """The next packet, when it is due."""
        now_s = time.monotonic()
        self._due_s = self._due_s or now_s
        late = int((now_s - self._due_s) / _FRAME_S)
        if late * _FRAME_S > _LATE_S:
            self._due_s += late * _FRAME_S
            self._place += late
        await asyncio.sleep(self._due_s - now_s)
        sound = av.AudioFrame.from_ndarray(
            np.frombuffer(self._frame(), "<i2")[None], format="s16", layout="mono"
        )
        sound.sample_rate, sound.pts = OUTPUT_RATE, self._place * FRAME
        sound.time_base = Fraction(1, OUTPUT_RATE)
        (packet,) = self._encoder.encode(sound)
        packet = av.Packet(bytes(packet))
        packet.pts, packet.time_base = self._place * _TICKS, Fraction(1, OPUS_RATE)
        self._due_s += _FRAME_S
        self._place += 1
        return packet


# Sound from the client.


class PacketOrder:
    """Puts a track's packets in order, and gives up those that are late or lost (RFC 3550)."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._held: dict[int, RtpPacket] = {}
        """By number, those that wait for one before them."""

    def push(self, packet: RtpPacket) -> Iterator[RtpPacket]:
        """The packets that are due with this one, in order."""
        number = packet.sequence_number
        if self._next is None or abs(self._ahead(number)) > _FAR:
            self._held.clear()
            self._next = number
        if self._ahead(number) < 0:
            return
        self._held[number] = packet
        if len(self._held) > _HELD and self._next not in self._held:
            self._next = min(self._held, key=self._ahead)
        while found := self._held.pop(self._next, None):
            self._next = (self._next + 1) & 0xFFFF
            yield found

    def _ahead(self, number: int) -> int:
        """How many packets a number lies behind the next one that is due; below 0: before it."""
        assert self._next is not None
        return (number - self._next + 0x8000) % 0x10000 - 0x8000


class Microphone:
    """A client's packets of Opus to samples, int16 at ``INPUT_RATE``.

    Where packets are missing there is silence of their length, by their timestamps: but no more
    than has gone by since the last one came.
    """

    def __init__(self) -> None:
        self._order = PacketOrder()
        self._decoder = av.CodecContext.create("libopus", "r")
        self._decoder.layout, self._decoder.format = "mono", "s16"
        self._decoder.sample_rate = OPUS_RATE
        self._resampler = soxr.ResampleStream(OPUS_RATE, INPUT_RATE, 1, dtype="int16")
        self._pace = TokenBucket(_FASTER, _BURST_S, time.monotonic())
        self._source: int | None = None
        self._due = 0
        """Timestamp at which the next packet follows the last one."""
        self._came_s = 0.0

    def push(self, packet: RtpPacket, now_s: float) -> bytes:
        """The sound that is due with a packet."""
        if packet.ssrc != self._source:
            self._source, self._order, self._came_s = packet.ssrc, PacketOrder(), 0.0
        if self._pace.wait_s(0.0, now_s) > 0.0:
            return b""
        pieces = [self._sound(each, now_s) for each in self._order.push(packet)]
        if not any(len(piece) for piece in pieces):
            return b""
        heard = np.concatenate(pieces)
        self._pace.wait_s(len(heard) / OPUS_RATE, now_s)
        return self._resampler.resample_chunk(heard).astype("<i2").tobytes()

    def _sound(self, packet: RtpPacket, now_s: float) -> np.ndarray[Any, np.dtype[np.int16]]:
        """A packet's samples at 48 kHz, behind the silence that stands for what was lost."""
        try:
            frames = self._decoder.decode(av.Packet(packet.payload)) if packet.payload else []
        except av.FFmpegError:
            frames = []
        pieces = [frame.to_ndarray()[0] for frame in frames]
        lost = (packet.timestamp - self._due + (1 << 31)) % (1 << 32) - (1 << 31)
        if pieces and self._came_s and lost > 0:
            most = int((now_s - self._came_s + _SLACK_S) * OPUS_RATE)
            pieces.insert(0, np.zeros(min(lost, most), np.int16))
        if pieces:
            self._came_s = now_s
            self._due = packet.timestamp + sum(frame.samples for frame in frames)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int16)


class _Arrivals:
    """Stands where aiortc's receiver has its jitter buffer, and hands every packet on as it comes.

    aiortc's own holds 4 packets back at all times, and 16 once one was lost.
    """

    def __init__(self, receiver: RTCRtpReceiver, take: Callable[[RtpPacket], None]) -> None:
        name = "_RTCRtpReceiver__jitter_buffer"
        assert hasattr(receiver, name), "aiortc has changed"
        setattr(receiver, name, self)
        self._take = take

    def add(self, packet: RtpPacket) -> tuple[bool, None]:
        self._take(packet)
        return False, None


# The connection.


class Peer:
    """A client of one call; ``frame`` gives what is sent to it (``ReplyTrack``).

    ``hears`` is as that of ``WebSocketProtocol``: events are strings, sound is bytes.
    """

    def __init__(self, offer: str, limits: Limits, frame: Callable[[], bytes]) -> None:
        """Check the offer; raises WireError as ``require_offer`` does."""
        require_offer(offer)
        self.scope: MutableMapping[str, Any] = {"extensions": {WEBSOCKET: self}}
        self.hears: Callable[[str | bytes], bool] | None = None
        self._offer, self._limits = _NO_CANDIDATE.sub("", offer), limits
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._frame, self._track, self._microphone = frame, ReplyTrack(self._tick), Microphone()
        self._channel: RTCDataChannel | None = None
        self._channels = 0
        self._changed = asyncio.Event()
        self._unheard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._unheard_bytes, self._taken, self._gone = 0, False, False
        self._heard_s = time.monotonic()

    async def answer(self) -> str:
        """The answer to the offer, with this machine's addresses.

        Raises:
            WireError: the offer cannot be served.
        """
        connection = self._connection
        connection.on("datachannel", self._on_channel)
        connection.on("connectionstatechange", self._on_state)
        audio = connection.addTransceiver(self._track, direction="sendrecv")
        known = RTCRtpReceiver.getCapabilities("audio")
        assert known
        audio.setCodecPreferences([each for each in known.codecs if each.mimeType == "audio/opus"])
        _Arrivals(audio.receiver, self._on_packet)
        try:
            await connection.setRemoteDescription(RTCSessionDescription(self._offer, "offer"))
            await connection.setLocalDescription(await connection.createAnswer())
        except Exception as error:  # aiortc raises what it meets with
            raise _wrong("it cannot be answered") from error
        await self._wait_for_checks()
        return connection.localDescription.sdp

    async def _wait_for_checks(self) -> None:
        """Have aiortc wait for the client's checks: without any address to try it would give up.

        What it tries is a port of this machine's own that nobody listens on.
        """
        audio, sctp = self._connection.getTransceivers()[0].receiver, self._connection.sctp
        assert sctp
        for ice in {audio.transport.transport, sctp.transport.transport}:
            for own in ice.iceGatherer.getLocalCandidates():
                await ice.addRemoteCandidate(
                    RTCIceCandidate(own.component, "0", own.ip, _DISCARD, 1, "udp", "host")
                )

    # For ``Connection``.

    async def accept(self, subprotocol: str | None = None) -> None:
        """Wait until the client is there; raises OSError where it does not come in time."""
        del subprotocol
        async with asyncio.timeout(self._limits.header_s):
            while self._channel is None and not self._gone:
                await self._change()
        if self._gone:
            raise ConnectionError("the client has gone")

    async def receive(self) -> dict[str, Any]:
        """The next message that was not heard at once, as of a WebSocket."""
        self._taken = False
        message = await self._unheard.get()
        self._unheard_bytes -= len(message.get("text", message.get("bytes", b"")))
        self._taken = True
        return message

    def hold(self) -> None:
        """Let what comes wait until ``receive`` has returned a message without content."""
        self._unheard.put_nowait({"type": "websocket.receive"})

    def is_gone(self) -> bool:
        """Whether the client has."""
        return self._gone

    async def send_text(self, data: str) -> None:
        """Send an event once the client has taken most of those before.

        Raises:
            WebSocketDisconnect: it has gone.
        """
        while not self._gone and self._channel and self._channel.bufferedAmount > _BUFFERED:
            await self._change()
        if self._gone or self._channel is None:
            raise WebSocketDisconnect
        self._channel.send(data)

    async def close(self, code: int, reason: str | None = None) -> None:
        """End once the client has taken all that was sent: what ends it the events have told."""
        del code, reason
        if self._channel:
            self._channel.bufferedAmountLowThreshold = 0
        while not self._gone and self._channel and self._channel.bufferedAmount:
            await self._change()
        await self.end()

    async def end(self) -> None:
        """Close what is open."""
        self._gone = True
        self._track.stop()
        await self._connection.close()

    def lost(self, reason: str | None = None, code: int = 1000) -> None:
        """The client has gone; without a reason it has said nothing."""
        if self._gone:
            return
        said = {} if reason is None else {"reason": reason}
        self._unheard.put_nowait({"type": "websocket.disconnect", "code": code} | said)
        self._gone = True
        self._changed.set()

    def _tick(self) -> bytes:
        """What is sent next; a message that never ends is not kept any longer."""
        sctp = self._connection.sctp
        if sctp and sctp._advertised_rwnd < 0:
            self.lost("a message is too long", 1009)
        return self._frame()

    # From the client.

    def _on_state(self) -> None:
        if self._connection.connectionState == "failed":  # nothing comes any more (RFC 7675)
            self.lost()
        elif self._connection.connectionState == "closed":
            self._on_close()

    def _on_close(self) -> None:
        """Nothing comes any more: the client has said so, or has not been heard for too long."""
        self.lost("closed" if time.monotonic() - self._heard_s < _SILENT_S else None)

    def _on_channel(self, channel: RTCDataChannel) -> None:
        """A data channel is open: the first is for events, others for nothing."""
        self._channels += 1
        if self._channels > _MOST_CHANNELS:
            self.lost("too many data channels", 1008)
        if self._channel is not None:
            return
        self._channel = channel
        channel.bufferedAmountLowThreshold = _BUFFERED // 2
        channel.on("message", self._on_message)
        channel.on("bufferedamountlow", self._changed.set)
        channel.on("close", self._on_close)
        self._changed.set()

    def _on_message(self, message: str | bytes) -> None:
        self._hear(message if isinstance(message, str) else message.decode("utf-8", "replace"))

    def _on_packet(self, packet: RtpPacket) -> None:
        if self._channel and (sound := self._microphone.push(packet, time.monotonic())):
            self._hear(sound)

    def _hear(self, message: str | bytes) -> None:
        """Have a message heard, at once or once those before it are."""
        if self._gone:
            return
        self._heard_s = time.monotonic()
        first = self._unheard.empty() and not self._taken
        if first and self.hears is not None and self.hears(message):
            return
        if self._unheard_bytes > self._limits.event_bytes:
            if isinstance(message, str):
                self.lost("too many messages", 1008)
            return
        self._unheard_bytes += len(message)
        name = "text" if isinstance(message, str) else "bytes"
        self._unheard.put_nowait({"type": "websocket.receive", name: message})

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
