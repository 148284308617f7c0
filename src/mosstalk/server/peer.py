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
from collections.abc import Callable, MutableMapping
from typing import Any

from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceCandidate,
    RTCIceParameters,
    RTCIceTransport,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCSessionDescription,
)
from aiortc.rtp import RtpPacket
from aiortc.sdp import SessionDescription
from starlette.websockets import WebSocketDisconnect

from mosstalk.server.admission import RefusedError
from mosstalk.server.call_network import CallNetwork
from mosstalk.server.call_playback import Playback
from mosstalk.server.call_sound import Microphone, ReplyTrack
from mosstalk.server.candidates import name_candidates, own_candidates
from mosstalk.server.data_channel import LEAST_BYTES, TOO_LONG, BoundedMessages, fitted
from mosstalk.server.limits import Limits
from mosstalk.server.realtime.validation import WireError, too_long
from mosstalk.server.webrtc import RefusedMessage
from mosstalk.server.websocket import WEBSOCKET

_LONGEST_SDP = 64 << 10
_SECRETS = re.compile(r"[A-Za-z0-9+/]{4,256}"), re.compile(r"[A-Za-z0-9+/]{22,256}")
"""ICE's name and password (RFC 8839, 5.4)."""
_NO_CANDIDATE = re.compile(r"^a=(candidate|end-of-candidates)\b.*(\r?\n|$)", re.MULTILINE)
_MOST_CHANNELS = 8
_BUFFERED = 64 << 10
"""Bytes that may wait in the data channel; others wait in the send queue, and are counted there."""
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
        takes = each.sctpCapabilities
        if takes and takes.maxMessageSize != 0 and takes.maxMessageSize < LEAST_BYTES:
            raise _wrong(f"a=max-message-size must be {LEAST_BYTES} at least, or 0 for any")
    audio = next(each for each in media if each.kind == "audio")
    if not any(codec.mimeType.lower() == "audio/opus" for codec in audio.rtp.codecs):
        raise _wrong("it offers no Opus")
    if audio.direction not in ("sendrecv", "recvonly"):
        raise _wrong("replies are sent as sound: offer the audio as sendrecv or recvonly")


def _wrong(why: str) -> WireError:
    return WireError("invalid_value", f"Invalid 'sdp': {why}.", "sdp")


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
    """A client of one call; what is sent to it is what ``playback`` plays (``ReplyTrack``).

    ``hears`` is as that of ``WebSocketProtocol``: events are strings, sound is bytes. While
    ``is_hands_free``, a microphone that sends nothing is heard as silence.
    """

    def __init__(
        self,
        offer: str,
        limits: Limits,
        network: CallNetwork,
        playback: Playback,
        is_hands_free: Callable[[], bool],
    ) -> None:
        """Check the offer; raises WireError as ``require_offer`` does."""
        require_offer(offer)
        self.scope: MutableMapping[str, Any] = {"extensions": {WEBSOCKET: self}}
        self.hears: Callable[[str | bytes], bool] | None = None
        self._offer, self._limits = _NO_CANDIDATE.sub("", offer), limits
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._network, self._playback, self._is_hands_free = network, playback, is_hands_free
        self._track = ReplyTrack(self._tick, lambda: playback.is_playing)
        playback.on_sound = self._track.hurry
        self._microphone = Microphone()
        self._channel: RTCDataChannel | None = None
        self._channels = 0
        self._bounds: BoundedMessages | None = None
        self._changed = asyncio.Event()
        self._unheard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._unheard_bytes, self._taken, self._gone = 0, False, False
        self._heard_s = time.monotonic()

    async def answer(self) -> str:
        """The answer to the offer, with this machine's addresses and those that lead to it.

        Raises:
            RefusedError: no port is free.
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
            assert connection.sctp
            self._bounds = BoundedMessages(connection.sctp, self._limits.event_bytes)
            for ice in self._transports:
                name_candidates(ice, self._network)
            await connection.setLocalDescription(await connection.createAnswer())
        except RefusedError:
            raise
        except Exception as error:  # aiortc raises what it meets with
            raise _wrong("it cannot be answered") from error
        await self._wait_for_checks()
        return connection.localDescription.sdp

    @property
    def _transports(self) -> set[RTCIceTransport]:
        """What sound and events travel by: with most clients one and the same."""
        audio, sctp = self._connection.getTransceivers()[0].receiver, self._connection.sctp
        assert sctp
        return {audio.transport.transport, sctp.transport.transport}

    async def _wait_for_checks(self) -> None:
        """Have aiortc wait for the client's checks: without any address to try it would give up.

        What it tries is a port of this machine's own that nobody listens on.
        """
        for ice in self._transports:
            for own in own_candidates(ice):
                await ice.addRemoteCandidate(
                    RTCIceCandidate(own.component, "0", own.host, _DISCARD, 1, "udp", "host")
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
        """Send an event once the client has taken most of those before, ``fitted`` to it.

        Raises:
            WebSocketDisconnect: it has gone.
        """
        while not self._gone and self._channel and self._channel.bufferedAmount > _BUFFERED:
            await self._change()
        if self._gone or self._channel is None:
            raise WebSocketDisconnect
        self._channel.send(fitted(data, self._channel.transport._remote_max_message_size))

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
        """What is sent next, every 20 ms; what else goes by the clock is done as well."""
        if self._bounds and self._bounds.exceeded(self._limits.message_bytes):
            self.lost("a message is too long", 1009)
        if self._is_hands_free() and (silence := self._microphone.silence(time.monotonic())):
            self._hear(silence)
        return self._playback.frame()

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
        self._heard_s = time.monotonic()
        text = message if isinstance(message, str) else message.decode("utf-8", "replace")
        self._hear(RefusedMessage() if text == TOO_LONG else text)

    def _on_packet(self, packet: RtpPacket) -> None:
        self._heard_s = time.monotonic()
        if self._channel and (sound := self._microphone.push(packet, self._heard_s)):
            self._hear(sound)

    def _hear(self, message: str | bytes) -> None:
        """Have a message heard, at once or once those before it are."""
        if self._gone:
            return
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
