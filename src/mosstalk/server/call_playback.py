"""What is played to the client of a call: replies at the pace at which they are heard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.limits import TooSlowError
from mosstalk.session.events import AudioDelta

FRAME = OUTPUT_RATE // 50
"""Samples of 20 ms, which one packet of a reply holds."""
Change = Literal["started", "stopped"]
"""What becomes of a response's sound."""
_SILENCE = bytes(2 * FRAME)
_MS = OUTPUT_RATE // 1000


@dataclass
class PlayedReply:
    """A response's sound: ``unsent`` is int16 at 24 kHz, ``whole`` says that no more follows."""

    response_id: str
    item_id: str
    unsent: bytearray = field(default_factory=bytearray)
    sent_samples: int = 0
    whole: bool = False

    @property
    def sent_ms(self) -> int:
        """How much of it was played."""
        return self.sent_samples // _MS


class Playback:
    """Replies one after the other, 20 ms at a time, with silence between them.

    ``on_change`` is told when the sound of a response begins, and when it has come to its end, and
    ``on_sound`` when there is sound to play and was none.
    """

    def __init__(self, most_s: float) -> None:
        self.on_change: Callable[[Change, str], None] = lambda *_: None
        self.on_sound: Callable[[], None] = lambda: None
        self._most_bytes = int(most_s * OUTPUT_RATE) * 2
        self._replies: dict[str, PlayedReply] = {}
        self._dropped: set[str] = set()
        """Responses that were cleared while they were being made."""

    @property
    def is_playing(self) -> bool:
        """Whether a reply is being played, or about to be."""
        return bool(self._replies)

    def push(self, sound: AudioDelta) -> None:
        """Take more sound of a response.

        Raises:
            TooSlowError: more would wait than may.
        """
        if sound.response_id in self._dropped:
            return
        waiting = sum(len(each.unsent) for each in self._replies.values())
        reply = self._replies.get(sound.response_id)
        if reply is None:
            reply = PlayedReply(sound.response_id, sound.item_id)
            self._replies[sound.response_id] = reply
        reply.unsent += sound.pcm
        if not waiting:
            self.on_sound()
        if (waiting := waiting + len(sound.pcm)) > self._most_bytes:
            raise TooSlowError(f"{waiting / 2 / OUTPUT_RATE:.0f} s of replies wait to be played")

    def finish(self, response_id: str) -> None:
        """No more sound of this response follows."""
        self._dropped.discard(response_id)
        if reply := self._replies.get(response_id):
            reply.whole = True

    def frame(self) -> bytes:
        """The next 20 ms, ``FRAME`` samples: of the reply that is played, or silence."""
        while self._replies:
            reply = next(iter(self._replies.values()))
            if reply.unsent:
                return self._frame_of(reply)
            if not reply.whole:
                break
            del self._replies[reply.response_id]
            self.on_change("stopped", reply.response_id)
        return _SILENCE

    def clear(self) -> list[PlayedReply]:
        """Stop what is played and what waits; what it was."""
        stopped, self._replies = list(self._replies.values()), {}
        self._dropped.update(each.response_id for each in stopped if not each.whole)
        return stopped

    def _frame_of(self, reply: PlayedReply) -> bytes:
        if len(reply.unsent) < len(_SILENCE) and not reply.whole:
            return _SILENCE  # the rest of the frame is late
        if not reply.sent_samples:
            self.on_change("started", reply.response_id)
        frame = bytes(reply.unsent[: len(_SILENCE)])
        del reply.unsent[: len(_SILENCE)]
        reply.sent_samples += len(frame) // 2
        return frame.ljust(len(_SILENCE), b"\0")
