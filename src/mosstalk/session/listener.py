"""What a user says: pushed sound on its way to turns, and the codes of the turn under way.

Once it is resampled, sound is float at 16 kHz; a place in it is the number of samples before it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import soxr

from mosstalk.audio.sound import SHORTEST_MS, Resampler, Samples
from mosstalk.codec.tokenizer_state import LiveCodes
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE, OUTPUT_RATE
from mosstalk.errors import CodecFullError, SessionError
from mosstalk.session import events
from mosstalk.session.commands import SessionSettings
from mosstalk.session.events import ErrorCode, error_event, new_id
from mosstalk.session.sound import InputClock
from mosstalk.session.workers import Ear, EncoderWorker
from mosstalk.vad import turns
from mosstalk.vad.ears import GateChange

LISTEN_CODES = 5
"""Codes that are encoded at once, and read by the engine, while the user speaks: 400 ms."""
_LISTEN_SAMPLES = LISTEN_CODES * INPUT_SAMPLES_PER_CODE
_SHORTEST_SAMPLES = SHORTEST_MS * INPUT_RATE // 1000
_KEPT_SAMPLES = 3 * INPUT_RATE
"""Sound kept from before a turn, beside the detector's padding: speech is known only later."""
_STOPPING_SAMPLES = INPUT_RATE // 5
"""How long a player goes on after it was told to stop."""
_MOST_WAITING_SAMPLES = 2 * INPUT_RATE
"""Whoever sends faster than codes can be made waits once so much of a turn has none."""
_SILENCE = np.zeros(0, np.float32)


@dataclass
class LiveTurn:
    """A turn while it is spoken: the sound from ``start`` to before ``end``."""

    start: int
    end: int
    codes: LiveCodes
    item_id: str = field(default_factory=partial(new_id, "item"))
    is_full: bool = False
    """It is as long as it may be, and that was said."""
    waiting: list[Samples] = field(default_factory=list)
    """Sound that no code was made of yet."""
    due: int = _LISTEN_SAMPLES
    """How much of it is worth a run."""
    encoding: "asyncio.Future[Any] | None" = None
    """The run that the first of it waits for, or is in."""
    foreseen: "asyncio.Future[LiveCodes | None] | None" = None
    """What its codes will be if it ends at ``foreseen_end``."""
    foreseen_end: int = -1

    @property
    def samples(self) -> int:
        """How long it is."""
        return self.end - self.start

    @property
    def final_codes(self) -> list[int] | None:
        """Its codes if it ends here, once that is known."""
        run = self.foreseen if self.foreseen_end == self.end else None
        if run is None or not run.done() or run.cancelled() or run.exception():
            return None
        ended = run.result()
        return ended.codes if ended else None

    def take(self, samples: Samples) -> None:
        """Go on by these samples."""
        self.waiting.append(samples)
        self.end += len(samples)


TurnUpdate = tuple[LiveTurn, events.Event]
"""News of a turn: what is to be said of it."""


class Listener:
    """Pushed sound, resampled to 16 kHz and divided into turns; ``turn`` is the one under way.

    By hand a turn is all sound from one commit to the next. Hands-free, turns begin and end where
    a detector of speech says so.
    """

    def __init__(
        self,
        worker: EncoderWorker,
        settings: SessionSettings,
        on_codes: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        """``on_codes`` is called when the turn has new codes, or with why it will have none."""
        self._on_codes = on_codes
        self.rate = settings.input_rate
        """Hz of pushes that do not say."""
        self._worker = worker
        self._resampler, self._clock = Resampler(self.rate), InputClock(self.rate)
        self._position = 0
        """The place that has been heard up to."""
        self.turn: LiveTurn | None = None
        self._maximum: float | None = None
        self._finder: _SpeechFinder | None = None
        self.configure(settings)

    @property
    def clock(self) -> int:
        """Samples that came in, counted at 16 kHz."""
        return self._clock.samples

    @property
    def finds_turns(self) -> bool:
        """Whether a detector says where turns begin and end."""
        return self._finder is not None

    def configure(self, settings: SessionSettings) -> None:
        """Take new settings; a turn under way is lost if its end is now decided otherwise.

        Raises:
            SessionError: hands-free where nothing detects speech.
        """
        finder, detection = self._finder, settings.turn_detection
        if finder and detection and finder.ear.gated == settings.echo_gate:
            finder.detector.settings = detection
        elif finder or detection:
            # What was heard by hand is no part of a turn that is found, nor the other way round.
            self._start_over(settings)
        self._longest_samples = int(settings.durations.turn_s * INPUT_RATE)
        self.rate = settings.input_rate

    async def hear(
        self, samples: Samples, rate: int, audible: Callable[[], bool]
    ) -> AsyncIterator[TurnUpdate]:
        """Hear samples (n,) at ``rate`` Hz; ``audible``: can the assistant be heard now?

        What is said of turns is ``SpeechStarted``, ``SpeechStopped`` and ``IdleTimeout``, with
        codes that are final after the latter two, and once an ``ErrorRaised`` of a turn by hand
        that is as long as it may be.
        """
        self._clock.add(len(samples), rate)
        heard = self._resampler.push(samples, rate)
        self._position += len(heard)
        if self._finder:
            self._finder.add(heard)
            async for each in self._find(self._finder, samples, rate, audible()):
                yield each
        elif len(heard) and (error := self._collect(heard)):
            yield error
        await self._keep_up()

    async def commit(self) -> LiveTurn:
        """End the turn by hand; hands-free, what is held back for resampling belongs to the next.

        Raises:
            SessionError: there is none, or hardly any.
        """
        if self._finder:
            if not self.turn:
                raise SessionError(
                    ErrorCode.COMMIT_EMPTY, "nobody is speaking: there is no turn to commit"
                )
            found = await self._finish(self.turn)
            self._finder.forget_speech(found.end)
            return found
        turn = self.turn or self._open(self._position)
        turn.take(self._held_back())
        if turn.samples < _SHORTEST_SAMPLES:
            raise SessionError(
                ErrorCode.COMMIT_EMPTY,
                f"{1000 * turn.samples // INPUT_RATE} ms of sound are no turn: push at least "
                f"{SHORTEST_MS} ms before a commit",
            )
        return await self._finish(turn)

    def clear(self) -> None:
        """Forget the turn under way."""
        self._drop_turn()
        if self._finder:
            self._finder.forget_speech(self._position)
        else:
            self._held_back()

    def close(self) -> None:
        """Hear nothing more."""
        if self._finder:
            self._worker.close_ear(self._finder.ear)

    # What the echo gate must know of; who ends turns by hand is not misled by an echo.

    def played(self, samples: Samples, at_s: float) -> None:
        """The assistant says this, (n,) at 24 kHz, from the clock's ``at_s`` on."""
        if self._finder and self._finder.ear.gated:
            low = soxr.resample(samples, OUTPUT_RATE, INPUT_RATE, quality="LQ")
            sound, at = np.asarray(low, np.float32), round(at_s * INPUT_RATE)
            if len(sound):
                self._finder.tell_gate("played", sound, at=at)

    def stopped(self) -> None:
        """The assistant has been told to stop."""
        if self._finder:
            self._finder.tell_gate("stopped", at=self.clock + _STOPPING_SAMPLES)

    def paused(self, seconds: float) -> None:
        """Nothing was recorded for so long before the next sample."""
        if self._finder:
            samples = round(seconds * INPUT_RATE)
            self._finder.tell_gate("paused", samples, at=self.clock)

    def _start_over(self, settings: SessionSettings) -> None:
        detection, detector = settings.turn_detection, self._worker.detector
        if detection and detector is None:
            raise SessionError(
                ErrorCode.BAD_VALUE,
                "turns cannot be detected here: no detector of speech is installed",
            )
        self.close()
        self._drop_turn()
        self._maximum = self._finder = None
        if detection and detector:
            found = turns.TurnDetector(detection, minimum_speech_ms=detector.minimum_speech_ms)
            ear = self._worker.open_ear(gated=settings.echo_gate)
            self._finder = _SpeechFinder(found, ear, self.clock, self._position)

    def _held_back(self) -> Samples:
        """What resampling held back, (n,): it counts as heard from now on."""
        samples = self._resampler.flush()
        self._position += len(samples)
        return samples

    def _drop_turn(self) -> None:
        for run in (self.turn.encoding, self.turn.foreseen) if self.turn else ():
            if run:
                self._worker.take_back(run)
        self.turn = None

    def _open(self, start: int) -> LiveTurn:
        self.turn = LiveTurn(start, start, self._worker.open(self._maximum))
        return self.turn

    def _encode_due(self, turn: LiveTurn) -> None:
        """Have what waits encoded, if it is enough to be worth a run and none is under way.

        What comes meanwhile waits for the next one, and what was foreseen until more comes.
        """
        foreseen = turn.end == turn.foreseen_end
        if turn.encoding or foreseen or sum(map(len, turn.waiting)) < turn.due:
            return
        pieces = len(turn.waiting)
        turn.encoding = self._worker.encode_ahead(turn.codes, np.concatenate(turn.waiting))
        turn.encoding.add_done_callback(partial(self._encoded, turn, pieces))

    def _foresee(self, turn: LiveTurn) -> None:
        """Have it computed ahead what the turn will be, if all of its sound is there.

        Silence has begun, and more of it will end the turn; speech that comes first makes what
        was computed worth nothing.
        """
        finder = self._finder
        if finder is None or (sound_end := finder.detector.sound_end) is None:
            return
        if turn.end == turn.foreseen_end or turn.end < finder.origin + sound_end:
            return
        if turn.encoding and not self._worker.take_back(turn.encoding):
            return  # it has begun: ``_encoded`` comes back here
        turn.encoding, turn.foreseen_end = None, turn.end
        turn.foreseen = self._worker.foresee(turn.codes, np.concatenate([_SILENCE, *turn.waiting]))
        turn.foreseen.add_done_callback(self._foreseen)

    def _foreseen(self, done: "asyncio.Future[LiveCodes | None]") -> None:
        if not done.cancelled() and not isinstance(done.exception(), CodecFullError):
            self._on_codes(done.exception())

    async def _keep_up(self) -> None:
        turn = self.turn
        if turn and turn.encoding and sum(map(len, turn.waiting)) > _MOST_WAITING_SAMPLES:
            await asyncio.wait((turn.encoding,))

    def _encoded(self, turn: LiveTurn, pieces: int, done: "asyncio.Future[None]") -> None:
        """The first ``pieces`` of what waited are codes now, unless there was no memory."""
        if done.cancelled():
            return
        turn.encoding, error = None, done.exception()
        if isinstance(error, CodecFullError):
            turn.due = sum(map(len, turn.waiting)) + _LISTEN_SAMPLES
            return
        if not error:
            del turn.waiting[:pieces]
            turn.due = _LISTEN_SAMPLES
            if turn is self.turn:
                self._foresee(turn)
        self._on_codes(error)

    async def _finish(self, turn: LiveTurn) -> LiveTurn:
        """Make all that waits codes, in one run if none has begun, and the turn's codes final."""
        if turn.encoding and not self._worker.take_back(turn.encoding):
            await asyncio.wait((turn.encoding,))
        if not await self._end_as_foreseen(turn):
            samples = np.concatenate([_SILENCE, *turn.waiting])
            await self._worker.encode(turn.codes, samples, last=True)
        turn.waiting.clear()
        self.turn, self._maximum = None, turn.codes.maximum
        return turn

    async def _end_as_foreseen(self, turn: LiveTurn) -> bool:
        """Whether it was known, or is in a moment, what the turn will be; it is that then."""
        if turn.foreseen is None:
            return False
        if turn.foreseen_end != turn.end:
            if not self._worker.take_back(turn.foreseen):
                await asyncio.wait((turn.foreseen,))
            return False
        await asyncio.wait((turn.foreseen,))
        if isinstance(turn.foreseen.exception(), CodecFullError):
            return False
        ended = turn.foreseen.result()
        if ended:
            self._worker.end_as_foreseen(turn.codes)
            turn.codes = ended
        return ended is not None

    def _collect(self, samples: Samples) -> TurnUpdate | None:
        """By hand: take samples (n,) into the turn while there is room in it."""
        turn = self.turn or self._open(self._position - len(samples))
        room = max(0, self._longest_samples - turn.samples)
        turn.take(samples[:room])
        self._encode_due(turn)
        if len(samples) <= room or turn.is_full:
            return None
        turn.is_full = True
        error = SessionError(
            ErrorCode.TURN_TOO_LONG,
            f"this turn is {self._longest_samples / INPUT_RATE:g} s long: sound is taken "
            "again once it is committed or cleared",
        )
        return turn, error_event(error)

    async def _find(
        self, finder: "_SpeechFinder", samples: Samples, rate: int, audible: bool
    ) -> AsyncIterator[TurnUpdate]:
        """Hands-free: look for turns in samples (n,), and go on with the one under way.

        Ears hear them before turns have them, whose resampling holds them back.
        """
        if not len(samples):
            return
        finder.detector.playing = audible
        changes, heard = finder.gate_changes(), self.clock - finder.origin
        frames, held_frames = await self._worker.detect(
            finder.ear, samples, rate, changes, soon=finder.detector.may_end(heard)
        )
        held = frames.frame_samples * held_frames
        for found in finder.detector.push(frames, heard):
            yield await self._decided(finder, found)
        turn = self.turn
        if turn is None:
            padding = finder.detector.settings.prefix_padding_ms * INPUT_RATE // 1000
            finder.forget_before(self._position - padding - _KEPT_SAMPLES)
            return
        end, sound_end = self._position - held, finder.detector.sound_end
        # More of a silence is the turn's only if speech comes after it.
        end = end if sound_end is None else min(end, finder.origin + sound_end)
        turn.take(finder.between(turn.end, end))
        finder.forget_before(turn.end)
        self._encode_due(turn)
        self._foresee(turn)
        if turn.samples >= self._longest_samples:
            finder.detector.reset(turn.end - finder.origin)
            yield await self._stop(turn, turn.end, turn.end)

    async def _decided(self, finder: "_SpeechFinder", found: turns.TurnEvent) -> TurnUpdate:
        """A turn that begins or ends by what the detector found."""
        origin = finder.origin
        if isinstance(found, turns.SpeechStarted):
            turn = self._open(max(origin + found.start_samples, finder.start))
            return turn, events.SpeechStarted(turn.item_id, turn.start)
        if isinstance(found, turns.SpeechStopped):
            assert self.turn, "speech that stopped had not begun"
            self._take_until(finder, self.turn, origin + found.sound_end_samples)
            speech_end, decided = (origin + place for place in found)
            return await self._stop(self.turn, speech_end, decided)
        start = origin + found.start_samples
        turn = self._open(max(start, finder.start))
        self._take_until(finder, turn, origin + found.at_samples)
        await self._finish(turn)
        return turn, events.IdleTimeout(turn.item_id, start, turn.end)

    def _take_until(self, finder: "_SpeechFinder", turn: LiveTurn, place: int) -> None:
        """Have all sound before that place in the turn, what resampling holds back too."""
        if self._position < place:
            finder.add(self._held_back())
        turn.take(finder.between(turn.end, place))

    async def _stop(self, turn: LiveTurn, speech_end: int, decided: int) -> TurnUpdate:
        await self._finish(turn)
        places = turn.end, speech_end, decided - speech_end
        return turn, events.SpeechStopped(turn.item_id, *places)


@dataclass
class _SpeechFinder:
    """What is kept to find speech from place ``origin`` on: its ear, and the latest sound.

    ``start`` is the place of the first sample that is kept. What the ear's echo gate must know
    waits for the next sound.
    """

    detector: turns.TurnDetector
    ear: Ear
    origin: int
    start: int
    _pieces: deque[Samples] = field(default_factory=deque)
    _for_gate: list[GateChange] = field(default_factory=list)

    def add(self, samples: Samples) -> None:
        """Keep the next samples (n,)."""
        self._pieces.append(samples)

    def between(self, start: int, end: int) -> Samples:
        """The samples from one place to before another; none if that lies before it."""
        kept = np.concatenate([_SILENCE, *self._pieces])
        return kept[start - self.start : max(start, end) - self.start]

    def forget_before(self, place: int) -> None:
        """Drop whole pieces that end there."""
        while self._pieces and self.start + len(self._pieces[0]) <= place:
            self.start += len(self._pieces.popleft())

    def forget_speech(self, before: int) -> None:
        """Forget that anybody spoke; no later turn begins before this place."""
        self.detector.reset(before - self.origin)
        if self.ear.gated:
            self._for_gate.append(("forget", ()))

    def tell_gate(self, change: str, *given: Any, at: int) -> None:
        """Have the gate, if there is one, told so before the next sound; ``at`` is a place."""
        if self.ear.gated:
            self._for_gate.append((change, (*given, at - self.origin)))

    def gate_changes(self) -> list[GateChange]:
        """What the gate is told before the next sound."""
        changes, self._for_gate = self._for_gate, []
        return changes
