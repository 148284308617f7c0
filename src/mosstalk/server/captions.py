"""Transcripts of one session's sound, both sides', fitted into what is told of it.

A user's turn is written down when it is over, and told whenever that is done. A reply's end is
held back for it, for a moment and only while nothing else happens: after it clients take no more.
"""

import asyncio
from collections.abc import Callable

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.server.realtime.state import Transcript
from mosstalk.server.transcriber import Transcriber
from mosstalk.session import commands as told
from mosstalk.session.events import (
    AudioDelta,
    Event,
    Item,
    ItemDone,
    ItemStatus,
    ResponseDone,
    SpeechStopped,
    TurnCommitted,
)
from mosstalk.session.settings import SessionSettings
from mosstalk.session.sound import Resampler, pcm_of, samples_of

HOLD_S = 3.0
"""How long a reply's end waits for its transcript."""
_MORE_S = 5.0
"""Input that is kept beyond the longest turn."""


class Captions:
    """Every event goes through ``take``, to be passed on by ``give``; transcripts by ``tell``."""

    def __init__(
        self,
        transcriber: Transcriber,
        settings: SessionSettings,
        give: Callable[[Event], None],
        tell: Callable[[Transcript], None],
    ) -> None:
        self._transcriber, self._give, self._tell = transcriber, give, tell
        self._resampler = Resampler(settings.input_rate)
        self._most = int((settings.durations.turn_s + _MORE_S) * INPUT_RATE)
        self._input, self._forgotten = bytearray(), 0
        self._ends: dict[str, int] = {}
        self._sounds: dict[str, bytearray] = {}
        self._held: list[Event] = []
        self._held_item = ""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, command: told.Command) -> None:
        """The client tells the session something."""
        if isinstance(command, told.Push):
            self._keep(self._resampler.push(samples_of(command.pcm), command.rate))

    def _keep(self, samples: Samples) -> None:
        """Add input at 16 kHz, and forget what lies further back than the longest turn."""
        self._input += pcm_of(samples)
        excess = len(self._input) // 2 - self._most
        if excess > 0:
            del self._input[: 2 * excess]
            self._forgotten += excess

    def take(self, event: Event) -> None:
        """The session tells something."""
        if self._held and not isinstance(event, ResponseDone):
            self._release()
        if isinstance(event, AudioDelta):
            self._sounds.setdefault(event.item_id, bytearray()).extend(event.pcm)
        elif isinstance(event, SpeechStopped):
            self._ends[event.item_id] = event.end
        elif isinstance(event, TurnCommitted):
            self._ends.setdefault(event.item_id, event.clock)
        holds = isinstance(event, ItemDone) and self._is_awaited(event)
        if self._held or holds:
            self._held.append(event)
        else:
            self._give(event)

    def end(self) -> None:
        """Nothing is told any more."""
        if self._timer:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _is_awaited(self, event: ItemDone) -> bool:
        """Have a whole item's sound written down; whether its end is to wait for that."""
        item = event.item
        if item.item_id in self._ends:
            end, length_ms = self._ends.pop(item.item_id), item.audio_ms or 0
            pcm = self._heard(end - length_ms * INPUT_RATE // 1000, end)
            self._begin(item, pcm, INPUT_RATE)
            return False
        if item.item_id not in self._sounds:
            return False
        pcm = bytes(self._sounds.pop(item.item_id))
        if item.status is not ItemStatus.COMPLETED:
            return False
        self._held_item = item.item_id
        self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._release)
        self._begin(item, pcm, OUTPUT_RATE)
        return True

    def _heard(self, start: int, end: int) -> bytes:
        """Input between two places that are counted at 16 kHz."""
        if end > self._forgotten + len(self._input) // 2:
            self._keep(self._resampler.flush())
        first, last = (max(0, at - self._forgotten) for at in (start, end))
        return bytes(self._input[2 * first : 2 * last])

    def _begin(self, item: Item, pcm: bytes, rate: int) -> None:
        task = asyncio.create_task(self._write(item, pcm, rate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, item: Item, pcm: bytes, rate: int) -> None:
        written = await self._transcriber.write(pcm, rate)
        audio_s = len(pcm) / 2 / rate
        if written.text or item.role == "user":
            self._tell(Transcript(item.item_id, written.text, audio_s, written.failed))
        if self._held and self._held_item == item.item_id:
            self._release()

    def _release(self) -> None:
        if self._timer:
            self._timer.cancel()
        held, self._held = self._held, []
        for event in held:
            self._give(event)
