"""Where a user's turns begin and end: speech probabilities in, events out, time in samples.

Knows no model of speech and no sound: any detector's frames will do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from mosstalk.constants import INPUT_RATE
from mosstalk.errors import OptionError
from mosstalk.vad.frames import Frame, Frames

HYSTERESIS = 0.15
"""Speech has ended below the threshold less this: Silero's own ``neg_threshold``."""
_LOWEST_THRESHOLD = 0.01
_SAMPLES_PER_MS = INPUT_RATE // 1000
TRAILING_MS = 160
"""Sound after its last speech that belongs to a turn, however long the silence that ends it: what
can be known at the end of a word can be computed while the detector waits."""

Eagerness: TypeAlias = Literal["low", "medium", "high", "auto"]
_SILENCE_MS: dict[Eagerness, int] = {"low": 1200, "medium": 700, "high": 400, "auto": 700}


@dataclass(frozen=True)
class TurnDetection:
    """When speech counts as a turn; names and defaults are the Realtime API's ``server_vad``.

    Attributes:
        threshold: probability from which a frame is speech.
        prefix_padding_ms: sound before the first speech that belongs to the turn.
        silence_duration_ms: how long a silence ends the turn.
        idle_timeout_ms: silence after the assistant's last sound that is reported; None never.

    Raises:
        OptionError: a threshold outside (0, 1), or a duration below zero.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        for name in ("prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms"):
            _check_duration(name, getattr(self, name))

    @classmethod
    def for_eagerness(cls, eagerness: Eagerness = "auto") -> "TurnDetection":
        """What stands in for ``semantic_vad``: no words are judged, only silence is waited for.

        Raises:
            OptionError: there is no such eagerness.
        """
        if eagerness not in _SILENCE_MS:
            known = ", ".join(get_args(Eagerness))
            raise OptionError(f"unknown eagerness {eagerness!r}; choose from {known}")
        return cls(silence_duration_ms=_SILENCE_MS[eagerness])


@dataclass(frozen=True)
class BargeIn:
    """What speech takes to count as a turn while the assistant can be heard.

    Attributes:
        threshold: probability from which a frame is speech.
        minimum_speech_ms: how much speech makes a turn.
        prefix_padding_ms: sound before the first speech that belongs to the turn, where
            ``TurnDetection`` asks for less: a quiet voice is told from the assistant's echo only
            some words after its beginning (`mosstalk bench vad` prints how many turns are whole).

    Raises:
        OptionError: a threshold outside (0, 1), or a duration below zero.
    """

    threshold: float = 0.7
    minimum_speech_ms: int = 180
    prefix_padding_ms: int = 450

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        for name in ("minimum_speech_ms", "prefix_padding_ms"):
            _check_duration(name, getattr(self, name))


class SpeechStarted(NamedTuple):
    """A turn begins at ``start_samples``, prefix included; speech does at ``speech_samples``.

    ``decided_samples`` is the end of the frame that showed it. No sample is in two turns: the
    prefix reaches back to where the last turn's sound ended, at most.
    """

    start_samples: int
    speech_samples: int
    decided_samples: int


class SpeechStopped(NamedTuple):
    """The last speech ended before ``end_samples``.

    ``decided_samples`` is where the silence was long enough.
    """

    end_samples: int
    decided_samples: int

    @property
    def sound_end_samples(self) -> int:
        """Where the turn's sound ends: ``TRAILING_MS`` after its last speech at most."""
        return min(self.decided_samples, _sound_end(self.end_samples))


class IdleTimeout(NamedTuple):
    """Nobody has spoken from ``start_samples``, where playing ended, until ``at_samples``."""

    start_samples: int
    at_samples: int


TurnEvent: TypeAlias = SpeechStarted | SpeechStopped | IdleTimeout


class TurnDetector:
    """Turns of one stream.

    ``settings`` and ``barge_in`` may be replaced between frames, and hold from the next one on.
    ``minimum_speech_ms`` keeps clicks from being turns: how long a click looks like speech
    depends on the detector, which has the number (``Detector.minimum_speech_ms``). Speech is
    summed up until silence has outweighed it, so one weak frame does not start the count anew.
    """

    def __init__(
        self,
        settings: TurnDetection | None = None,
        barge_in: BargeIn | None = None,
        *,
        minimum_speech_ms: int = 96,
    ) -> None:
        _check_duration("minimum_speech_ms", minimum_speech_ms)
        self.settings = settings or TurnDetection()
        self.barge_in = barge_in or BargeIn()
        self.minimum_speech_ms = minimum_speech_ms
        self._playing = False
        self._position = self._heard = 0
        self._earliest = 0
        self._idle_from: int | None = None
        self._forget()

    @property
    def speaking(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._speaking

    @property
    def position(self) -> int:
        """End of the last frame, in samples of the stream."""
        return self._position

    @property
    def sound_end(self) -> int | None:
        """Where the turn's sound ends if the silence goes on; None while there is speech."""
        return None if self._silent_from is None else _sound_end(self._silent_from)

    @property
    def playing(self) -> bool:
        """Whether the assistant can be heard now; the caller says so."""
        return self._playing

    @playing.setter
    def playing(self, audible: bool) -> None:
        """Hear more strictly while the assistant can be heard; idle time runs from its end."""
        if audible:
            self._idle_from = None
        elif self._playing and not self._speaking:
            self._idle_from = self._position
        self._playing = audible

    def reset(self, at_samples: int | None = None) -> None:
        """Forget speech heard so far: the turn was ended by hand, or its sound thrown away.

        No later turn begins before ``at_samples``, or without it before the last frame's end.
        """
        self._earliest = self._position if at_samples is None else at_samples
        self._idle_from = None
        self._forget()

    def push(self, frames: Frames, heard_samples: int = 0) -> list[TurnEvent]:
        """Hear the next frames, and return what they decided, in order.

        ``heard_samples`` of the stream have come: fewer than a frame of them, behind these frames,
        are taken to be as silent as the last one was.
        """
        assert frames.start_samples >= self._position, (frames.start_samples, self._position)
        events = [event for frame in frames for event in self._step(frame)]
        self._heard = max(self._position, heard_samples)
        if self._silent_from is not None and heard_samples - self._position < frames.frame_samples:
            stopped = self._stopped(self._silent_from, heard_samples)
            events += [stopped] if stopped else []
        return events

    def may_end(self, heard_samples: int) -> bool:
        """Whether the turn or its sound ends with so much of the stream, unless there is speech."""
        if self._silent_from is None:
            return False
        wanted = self.settings.silence_duration_ms * _SAMPLES_PER_MS
        ends = _sound_end(self._silent_from), self._silent_from + wanted
        return any(self._heard < end <= heard_samples for end in ends)

    def _forget(self) -> None:
        self._speaking = False
        self._speech_from: int | None = None
        self._speech_samples = 0
        self._silent_from: int | None = None
        self._quiet_from: int | None = None

    def _step(self, frame: Frame) -> Iterator[TurnEvent]:
        self._position = frame.end_samples
        event = self._stop(frame) if self._speaking else self._start(frame)
        if event:
            yield event
        if self._idle_is_over():
            assert self._idle_from is not None
            yield IdleTimeout(self._idle_from, self._position)
            self._idle_from = None

    def _start(self, frame: Frame) -> SpeechStarted | None:
        strict = self.barge_in if self._playing else None
        threshold = strict.threshold if strict else self.settings.threshold
        length = frame.end_samples - frame.start_samples
        if self._speech_from is None:
            if frame.speech < threshold:
                return None
            self._speech_from = frame.start_samples
        still = frame.speech >= _end_threshold(threshold)
        self._speech_samples += length if still else -length
        if self._speech_samples <= 0:
            self._forget()
            return None
        wanted_ms = strict.minimum_speech_ms if strict else self.minimum_speech_ms
        if not still or self._speech_samples < wanted_ms * _SAMPLES_PER_MS:
            return None
        prefix_ms = max(self.settings.prefix_padding_ms, strict.prefix_padding_ms if strict else 0)
        return self._started(self._speech_from, prefix_ms * _SAMPLES_PER_MS)

    def _started(self, speech: int, prefix: int) -> SpeechStarted:
        self._forget()
        self._speaking = True
        self._idle_from = None
        return SpeechStarted(max(speech - prefix, self._earliest), speech, self._position)

    def _stop(self, frame: Frame) -> SpeechStopped | None:
        """As Silero does it: a doubtful frame prolongs speech, but does not end a silence.

        That begins with the quiet end of the last window with speech.
        """
        quiet_from = frame.start_samples if self._quiet_from is None else self._quiet_from
        if frame.speech >= self.settings.threshold:
            self._silent_from = None
        elif self._silent_from is None and frame.speech < _end_threshold(self.settings.threshold):
            self._silent_from = quiet_from
        self._quiet_from = quiet_from if frame.quiet else None
        if self._silent_from is None:
            return None
        return self._stopped(self._silent_from, frame.end_samples)

    def _stopped(self, end: int, now: int) -> SpeechStopped | None:
        """The turn's end, if the silence that began at ``end`` is long enough by now."""
        if now - end < self.settings.silence_duration_ms * _SAMPLES_PER_MS:
            return None
        self._forget()
        stopped = SpeechStopped(end, now)
        self._earliest = stopped.sound_end_samples
        return stopped

    def _idle_is_over(self) -> bool:
        limit = self.settings.idle_timeout_ms
        waiting = self._idle_from is not None and self._speech_from is None
        if limit is None or not waiting:
            return False
        assert self._idle_from is not None
        return self._position - self._idle_from >= limit * _SAMPLES_PER_MS


def _sound_end(speech_end: int) -> int:
    return speech_end + TRAILING_MS * _SAMPLES_PER_MS


def _end_threshold(threshold: float) -> float:
    return max(threshold - HYSTERESIS, _LOWEST_THRESHOLD)


def _check_threshold(threshold: float) -> None:
    if not 0 < threshold < 1:
        raise OptionError(f"threshold must lie between 0 and 1, not {threshold}")


def _check_duration(name: str, ms: int | None) -> None:
    if ms is not None and ms < 0:
        raise OptionError(f"{name} must be 0 or more, not {ms}")
