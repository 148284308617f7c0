"""A call's sound: replies to packets of Opus, and a microphone's packets to samples."""

import asyncio
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from aiortc import MediaStreamTrack
from aiortc.rtp import RtpPacket

from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.server.call_playback import FRAME
from mosstalk.server.limits import TokenBucket

Samples = np.ndarray[Any, np.dtype[np.int16]]
OPUS_RATE = 48_000
"""Hz of timestamps, whatever the sound's own rate (RFC 7587)."""
_FRAME_S = FRAME / OUTPUT_RATE
_TICKS = round(_FRAME_S * OPUS_RATE)
_LATE_S = 0.2
"""A sender that is later than this skips, rather than to send all at once."""
_BIT_RATE = 40_000
_HELD = 3
"""Packets that wait for one that is late; then it counts as lost."""
_FAR = 100
"""A sequence number that is so far off belongs to a stream that begins anew (RFC 3550, A.1)."""
_SLACK_S = 1.0
"""By so much what was heard may be longer than the time that has passed, and be filled up still."""
_AHEAD_S = 0.1
"""Beyond so much, quiet is shortened."""
_QUIET = 500
"""Of int16, below which sound is quiet."""
_STOPPED_S = 1.0
"""A client that has sent no sound for so long sends none: longer than a line falters, and than
Opus is silent in between (DTX, 0.4 s)."""
_LONGEST_GAP_S = 30
"""Silence at most for what is missing at once."""
_FASTER, _BURST_S = 1.25, 4.0
"""Sound may come so much faster than it is heard, and so much of it at once."""


# Sound to the client.


class ReplyTrack(MediaStreamTrack):
    """Sends 20 ms of sound every 20 ms, encoded as Opus (RFC 6716) from 24 kHz.

    ``frame`` gives the next ``FRAME`` samples, int16. A reply does not wait for the next packet to
    be due: after ``hurry`` packets are sent up to 20 ms before their time, all by the same, until
    nothing ``is_playing``. So their timestamps keep to the clock.
    """

    kind = "audio"

    def __init__(self, frame: Callable[[], bytes], is_playing: Callable[[], bool]) -> None:
        super().__init__()
        self._frame, self._is_playing, self._due_s, self._place = frame, is_playing, 0.0, 0
        self._early_s, self._hurry = 0.0, asyncio.Event()
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
        await self._until_due()
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

    def hurry(self) -> None:
        """There is sound to send, and was none."""
        self._hurry.set()

    async def _until_due(self) -> None:
        """Wait for the time of the next packet, which ``hurry`` may bring forward."""
        loop = asyncio.get_running_loop()
        if not self._is_playing():
            self._early_s = 0.0
        while (left_s := self._due_s - self._early_s - time.monotonic()) > 0.0:
            timer = loop.call_later(left_s, self._hurry.set)
            await self._hurry.wait()
            timer.cancel()
            self._hurry.clear()
            if self._is_playing():
                early_s = self._due_s - time.monotonic()
                self._early_s = max(self._early_s, min(early_s, _FRAME_S))
        self._hurry.clear()


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
    """A client's packets of Opus to samples, int16 at ``INPUT_RATE``, on the clock of time.

    Where packets are missing there is silence of their length, by their timestamps, and where none
    come at all, as long as time passes (``silence``): but no more than brings what was heard to
    the time that has gone by. If what such silence stood for comes yet, it is heard, and the quiet
    that follows it is shortened.
    """

    def __init__(self) -> None:
        self._order = PacketOrder()
        self._decoder = av.CodecContext.create("libopus", "r")
        self._decoder.layout, self._decoder.format = "mono", "s16"
        self._decoder.sample_rate = OPUS_RATE
        # The rate that sessions listen at: it holds sound back for 1 ms, soxr would for 21.
        self._resampler = av.AudioResampler("s16", "mono", INPUT_RATE)
        self._pace = TokenBucket(_FASTER, _BURST_S, time.monotonic())
        self._source: int | None = None
        self._due = 0
        """Timestamp at which the next packet follows the last one."""
        self._begun_s: float | None = None
        self._came_s: float | None = None
        """When the last sound came of this source."""
        self._heard = 0
        """Samples since the first sound, silence counted."""
        self._stood_in = 0
        """Samples of silence since the last sound came."""
        self._twice = 0
        """Samples that were heard though silence had stood for them."""

    def push(self, packet: RtpPacket, now_s: float) -> bytes:
        """The sound that is due with a packet."""
        if packet.ssrc != self._source:
            self._source, self._order, self._came_s = packet.ssrc, PacketOrder(), None
        if self._pace.wait_s(0.0, now_s) > 0.0:
            return b""
        pieces = [self._sound(each, now_s) for each in self._order.push(packet)]
        return self._resampled(np.concatenate(pieces)) if pieces else b""

    def silence(self, now_s: float) -> bytes:
        """What stands for the sound of a client that sends none any more.

        It is asked for again and again: for ``_STOPPED_S`` after the last sound there is none, then
        as much as time has passed, but for what is more than ``_LONGEST_GAP_S``.
        """
        if self._came_s is None or now_s - self._came_s < _STOPPED_S:
            return b""
        due = int((now_s - self._came_s) * OPUS_RATE) - self._stood_in
        self._stood_in += due
        return self._resampled(np.zeros(self._silent(due, now_s), np.int16))

    def _sound(self, packet: RtpPacket, now_s: float) -> Samples:
        """A packet's samples at 48 kHz, behind the silence that stands for what was lost."""
        try:
            frames = self._decoder.decode(av.Packet(packet.payload)) if packet.payload else []
        except av.FFmpegError:
            frames = []
        if not frames:
            return np.empty(0, np.int16)
        sound = np.concatenate([frame.to_ndarray()[0] for frame in frames])
        self._pace.wait_s(len(sound) / OPUS_RATE, now_s)
        lost = (packet.timestamp - self._due + (1 << 31)) % (1 << 32) - (1 << 31)
        self._due = packet.timestamp + len(sound)
        missing = lost - self._stood_in
        silent = 0
        if self._came_s is None:
            self._begun_s = now_s if self._begun_s is None else self._begun_s
        elif missing > 0:
            silent = self._silent(missing, now_s)
            self._twice = max(0, self._twice - (missing - silent))
        elif self._stood_in:
            self._twice = min(self._stood_in, -missing)
        self._came_s, self._stood_in = now_s, 0
        if self._twice and self._ahead_s(now_s) > _AHEAD_S and _is_quiet(sound):
            self._twice = max(0, self._twice - len(sound))
            return np.empty(0, np.int16)
        self._heard += len(sound)
        return np.concatenate([np.zeros(silent, np.int16), sound])

    def _ahead_s(self, now_s: float) -> float:
        """By how much what was heard is longer than the time that has passed."""
        assert self._begun_s is not None
        return self._heard / OPUS_RATE - (now_s - self._begun_s)

    def _silent(self, samples: int, now_s: float) -> int:
        """Count as many samples of silence as heard, or fewer where there is no time for them."""
        slack_s = 0.0 if self._twice else _SLACK_S  # silence may stand for these already
        room_s = min(slack_s - self._ahead_s(now_s), _LONGEST_GAP_S)
        silent = min(samples, max(0, int(room_s * OPUS_RATE)))
        self._heard += silent
        return silent

    def _resampled(self, sound: Samples) -> bytes:
        if not len(sound):
            return b""
        frame = av.AudioFrame.from_ndarray(sound[None], "s16", "mono")
        frame.sample_rate = OPUS_RATE
        low = [each.to_ndarray()[0] for each in self._resampler.resample(frame)]
        return b"".join(each.astype("<i2").tobytes() for each in low)


def _is_quiet(sound: Samples) -> bool:
    return bool(np.abs(sound.astype(int)).max() < _QUIET)
