"""Where a user's turns begin and end, and the codes of the one under way.

Sound is float at 16 kHz here; a place in it is the number of samples before it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mosstalk.audio.sound import SHORTEST_MS, Samples
from mosstalk.codec.tokenizer_state import LiveCodes
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE
from mosstalk.errors import SessionError
from mosstalk.session.encoder_worker import EncoderWorker, InputGap, PlayedAudio
from mosstalk.session.events import ErrorCode
from mosstalk.vad import turns
from mosstalk.vad.echo import EchoGate

LISTEN_CODES = 5
"""Codes that are encoded at once, and read by the engine, while the user speaks: 400 ms."""
_LISTEN_SAMPLES = LISTEN_CODES * INPUT_SAMPLES_PER_CODE
_SHORTEST_SAMPLES = SHORTEST_MS * INPUT_RATE // 1000
_KEPT_SAMPLES = 3 * INPUT_RATE
"""Sound kept from before a turn, beside the detector's padding: speech is known only later."""


@dataclass
class LiveTurn:
    """A turn while it is spoken: the sound from ``start`` to before ``end``."""

    start: int
    end: int
    codes: LiveCodes
    item_id: str | None = None
    _waiting: list[Samples] = field(default_factory=list)

    @property
    def waiting_samples(self) -> int:
        """Samples that no code was made of yet."""
        return sum(map(len, self._waiting))

    def take(self, samples: Samples) -> None:
        """Go on by these samples."""
        self._waiting.append(samples)
        self.end += len(samples)

    def due(self) -> Samples:
        """The samples that wait; they wait no longer."""
        samples = _joined(self._waiting)
        self._waiting.clear()
        return samples


@dataclass(frozen=True)
class TurnStarted:
    """The user began to speak."""

    turn: LiveTurn


@dataclass(frozen=True)
class TurnProgressed:
    """There are new codes of the turn under way, or other ones."""

    turn: LiveTurn


@dataclass(frozen=True)
class TurnStopped:
    """The user has finished; the codes are final. The last speech ended at ``speech_end``."""

    turn: LiveTurn
    speech_end: int


@dataclass(frozen=True)
class TurnIdled:
    """Nobody spoke from ``start`` on; the latest of that silence is a turn with final codes."""

    turn: LiveTurn
    start: int


@dataclass(frozen=True)
class TurnFull:
    """The turn is as long as it may be: sound is not taken any more. Said once."""

    turn: LiveTurn
    error: SessionError


ListenerEvent = TurnStarted | TurnProgressed | TurnStopped | TurnIdled | TurnFull


class Listener(ABC):
    """Turns of one session's user; ``turn`` is the one under way."""

    def __init__(self, encoder_worker: EncoderWorker, turn_s: float, start: int = 0) -> None:
        self.turn: LiveTurn | None = None
        self.position = start
        """The place that has been heard up to."""
        self._encoder_worker = encoder_worker
        self._maximum: float | None = None
        self.limit_turn(turn_s)

    def limit_turn(self, turn_s: float) -> None:
        """End turns, or take no more of them, after ``turn_s`` seconds."""
        self._longest_samples = int(turn_s * INPUT_RATE)

    @abstractmethod
    def hear(self, samples: Samples, *, audible: bool) -> AsyncIterator[ListenerEvent]:
        """Take more sound; ``audible``: the assistant can be heard meanwhile."""

    @abstractmethod
    async def commit(self, rest: Samples) -> LiveTurn:
        """End the turn by hand, ``rest`` included; raise SessionError if there is none."""

    def clear(self) -> None:
        """Forget the turn under way."""
        self.turn = None

    @abstractmethod
    def played(self, at: int, samples: Samples) -> None:
        """The assistant says this, (n,) at 16 kHz, from place ``at`` on; none: it stops there."""

    @abstractmethod
    def paused(self, at: int, samples: int) -> None:
        """Nothing was recorded for so many samples before place ``at``."""

    def _open(self, start: int) -> LiveTurn:
        self.turn = LiveTurn(start, start, self._encoder_worker.open(self._maximum))
        return self.turn

    async def _listen(self, turn: LiveTurn) -> AsyncIterator[ListenerEvent]:
        """Encode what waits, once it is enough to be worth a run."""
        if turn.waiting_samples >= _LISTEN_SAMPLES:
            await self._encoder_worker.encode(turn.codes, turn.due())
            yield TurnProgressed(turn)

    async def _finish(self, turn: LiveTurn) -> LiveTurn:
        self.turn = None
        await self._encoder_worker.encode(turn.codes, turn.due(), last=True)
        self._maximum = turn.codes.maximum
        return turn


class ManualListener(Listener):
    """A turn is all sound from one commit to the next."""

    _full_reported = False

    async def hear(self, samples: Samples, *, audible: bool) -> AsyncIterator[ListenerEvent]:
        """See ``Listener.hear``."""
        del audible
        turn = self.turn or self._open(self.position)
        self.position += len(samples)
        room = self._longest_samples - (turn.end - turn.start)
        turn.take(samples[:room])
        async for progressed in self._listen(turn):
            yield progressed
        if len(samples) > room and not self._full_reported:
            self._full_reported = True
            error = SessionError(
                ErrorCode.TURN_TOO_LONG,
                f"this turn is {self._longest_samples / INPUT_RATE:g} s long: sound is taken "
                "again once it is committed or cleared",
            )
            yield TurnFull(turn, error)

    async def commit(self, rest: Samples) -> LiveTurn:
        """See ``Listener.commit``."""
        turn = self.turn or self._open(self.position)
        turn.take(rest)
        length = turn.end - turn.start
        if length < _SHORTEST_SAMPLES:
            raise SessionError(
                ErrorCode.COMMIT_EMPTY,
                f"{1000 * length // INPUT_RATE} ms of sound are no turn: push at least "
                f"{SHORTEST_MS} ms before a commit",
            )
        self._full_reported = False
        return await self._finish(turn)

    def clear(self) -> None:
        """Forget the turn under way."""
        super().clear()
        self._full_reported = False

    def played(self, at: int, samples: Samples) -> None:
        """See ``Listener.played``: who ends turns by hand is not misled by an echo."""

    def paused(self, at: int, samples: int) -> None:
        """See ``Listener.paused``."""


class HandsFreeListener(Listener):
    """Turns begin and end where a detector of speech says so."""

    def __init__(
        self,
        encoder_worker: EncoderWorker,
        detection: turns.TurnDetection,
        turn_s: float,
        start: int = 0,
        *,
        echo_gate: bool = True,
    ) -> None:
        super().__init__(encoder_worker, turn_s, start)
        finder = encoder_worker.detector
        assert finder is not None, "hands-free without a detector of speech"
        self._state: Any = finder.start()
        self._detector = turns.TurnDetector(detection, minimum_speech_ms=finder.minimum_speech_ms)
        self._gate = EchoGate() if echo_gate else None
        self._played: list[PlayedAudio | InputGap] = []
        self._held_samples = 0
        self._origin = start
        self._recent = _RecentSamples(start)

    @property
    def gated(self) -> bool:
        """Whether the assistant's echo is told from the user's voice."""
        return self._gate is not None

    def configure(self, detection: turns.TurnDetection) -> None:
        """Take other settings from the next frame on."""
        self._detector.settings = detection

    async def hear(self, samples: Samples, *, audible: bool) -> AsyncIterator[ListenerEvent]:
        """See ``Listener.hear``."""
        self._recent.add(samples)
        self.position += len(samples)
        self._detector.playing = audible
        played, self._played = self._played, []
        self._state, frames = await self._encoder_worker.detect(
            self._state, samples, self._gate, played
        )
        self._held_samples = frames.frame_samples * (self._gate.held if self._gate else 0)
        for event in self._detector.push(frames):
            async for heard in self._on_detection(event):
                yield heard
        if self.turn:
            async for heard in self._continue_turn(self.turn):
                yield heard
        else:
            padding = self._detector.settings.prefix_padding_ms * INPUT_RATE // 1000
            self._recent.forget_before(self.position - padding - _KEPT_SAMPLES)

    async def commit(self, rest: Samples) -> LiveTurn:
        """See ``Listener.commit``; what is held back for resampling belongs to what follows."""
        del rest
        if not self.turn:
            raise SessionError(
                ErrorCode.COMMIT_EMPTY, "nobody is speaking: there is no turn to commit"
            )
        self._reset_detection()
        return await self._finish(self.turn)

    def clear(self) -> None:
        """Forget the turn under way, and that anybody spoke."""
        super().clear()
        self._reset_detection()

    def played(self, at: int, samples: Samples) -> None:
        """See ``Listener.played``; the gate hears of it with the next sound."""
        if self._gate:
            self._played.append(PlayedAudio(at - self._origin, samples))

    def paused(self, at: int, samples: int) -> None:
        """See ``Listener.paused``."""
        if self._gate:
            self._played.append(InputGap(at - self._origin, samples))

    def _reset_detection(self) -> None:
        self._detector.reset()
        if self._gate:
            self._gate.forget()

    async def _on_detection(self, event: turns.TurnEvent) -> AsyncIterator[ListenerEvent]:
        if isinstance(event, turns.SpeechStarted):
            turn = self._open(max(self._origin + event.start_samples, self._recent.start))
            yield TurnStarted(turn)
        elif isinstance(event, turns.SpeechStopped):
            assert self.turn, "speech that stopped had not begun"
            turn = self.turn
            self._extend(turn, self._origin + event.decided_samples)
            await self._finish(turn)
            yield TurnStopped(turn, self._origin + event.end_samples)
        else:
            start, end = (self._origin + at for at in (event.start_samples, event.at_samples))
            turn = self._open(max(start, self._recent.start))
            self._extend(turn, end)
            yield TurnIdled(await self._finish(turn), start)

    async def _continue_turn(self, turn: LiveTurn) -> AsyncIterator[ListenerEvent]:
        self._extend(turn, self.position - self._held_samples)
        self._recent.forget_before(turn.end)
        async for progressed in self._listen(turn):
            yield progressed
        if turn.end - turn.start >= self._longest_samples:
            self._detector.reset(turn.end - self._origin)
            await self._finish(turn)
            yield TurnStopped(turn, turn.end)

    def _extend(self, turn: LiveTurn, end: int) -> None:
        turn.take(self._recent.between(turn.end, max(end, turn.end)))


class _RecentSamples:
    """The latest samples, by their place."""

    def __init__(self, start: int) -> None:
        self.start = self._end = start
        self._pieces: deque[Samples] = deque()

    def add(self, samples: Samples) -> None:
        self._pieces.append(samples)
        self._end += len(samples)

    def forget_before(self, place: int) -> None:
        while self._pieces and self.start + len(self._pieces[0]) <= place:
            self.start += len(self._pieces.popleft())

    def between(self, start: int, end: int) -> Samples:
        return _joined(self._pieces)[start - self.start : end - self.start]


def _joined(pieces: list[Samples] | deque[Samples]) -> Samples:
    return np.concatenate([np.zeros(0, np.float32), *pieces])
