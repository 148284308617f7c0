"""What a session tells: plain values that another process can read.

``clock`` is the session's time: samples of input so far, counted at 16 kHz whatever rate they
came in. Positions in the input are on the same clock, so ``clock // 16`` are milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from secrets import token_hex

from mosstalk import errors
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.conversation import Mode, Row
from mosstalk.errors import MosstalkError
from mosstalk.session import commands
from mosstalk.session.commands import ReplyMode, SessionSettings


class ErrorCode(StrEnum):
    """What can go wrong, for programs."""

    HALF_SAMPLE = "half_sample"
    WRONG_RATE = "wrong_rate"
    BAD_SOUND = "bad_sound"
    COMMIT_EMPTY = "commit_empty"
    TURN_TOO_LONG = "turn_too_long"
    RESPONSE_ACTIVE = "response_active"
    RESPONSE_NOT_ACTIVE = "response_not_active"
    UNKNOWN_ITEM = "unknown_item"
    DUPLICATE_ITEM = "duplicate_item"
    BAD_ITEM = "bad_item"
    BAD_VALUE = "bad_value"
    UNKNOWN_VOICE = "unknown_voice"
    CONTEXT_FULL = "context_full"
    ENGINE_FULL = "engine_full"
    ENGINE_STOPPED = "engine_stopped"
    RESPONSE_FAILED = "response_failed"
    INTERNAL = "internal"


class ItemStatus(StrEnum):
    """How far an item is."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class ResponseStatus(StrEnum):
    """How a response ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class Reason(StrEnum):
    """Why a response did not complete."""

    TURN_DETECTED = "turn_detected"
    CLIENT_CANCELLED = "client_cancelled"
    SESSION_CLOSED = "session_closed"
    MAX_LENGTH = "max_length"
    """Its rows or seconds are used up."""
    CONTEXT = "context"
    """The model's context is."""
    REPETITION = "repetition"
    """Its codes went round in a cycle."""
    ERROR = "error"


class CloseReason(StrEnum):
    """Why a session ended; the reason of a ``Close`` command may be any other word."""

    CLIENT = "client"
    IDLE = "idle"
    LONGEST = "longest"
    ENGINE = "engine"
    HOST = "host"
    ERROR = "error"


@dataclass(frozen=True)
class Item:
    """A turn of the conversation as it stands: who said it, and its text or length.

    ``text`` is what was typed or what the model wrote: never a transcript that others made.
    ``text_is_spoken``: the model wrote it first and then spoke it. ``audio_ms`` is how long its
    sound lasts, None where it has none. ``response_id`` is set for what a response made.
    """

    item_id: str
    role: str
    text: str | None = None
    audio_ms: int | None = None
    status: ItemStatus = ItemStatus.COMPLETED
    response_id: str | None = None
    text_is_spoken: bool = False


@dataclass(frozen=True)
class KeptItem:
    """An item with all that another session needs to go on from it.

    ``rows`` are those that the model reads, or of a reply those that were drawn, each with its
    mode; ``modes`` None: it is no reply. ``heard_codes`` of a spoken reply count, None are all.
    ``begins`` rows come before these, and were told earlier of a reply that is being made.
    """

    item: Item
    rows: tuple[Row, ...]
    modes: tuple[Mode, ...] | None = None
    heard_codes: int | None = None
    speech: bool = False
    begins: int = 0


@dataclass(frozen=True)
class Usage:
    """Rows that a response read and made, by what they hold; ``cached`` were read before it."""

    input_text: int = 0
    input_audio: int = 0
    cached: int = 0
    output_text: int = 0
    output_audio: int = 0


@dataclass(frozen=True)
class Timings:
    """Where a response's time went, wall clock; None where there is nothing to measure.

    ``commit_to_first_audio_ms`` begins when the command or the sound arrived that ended the
    user's turn. ``speech_to_first_audio_ms`` begins at the last sample of speech and has
    ``vad_wait_ms`` in it, which is counted in samples. ``real_time_factor`` is the time from
    asking to the last sound over the length of the sound.
    """

    commit_to_first_audio_ms: float | None = None
    commit_to_first_text_ms: float | None = None
    speech_to_first_audio_ms: float | None = None
    vad_wait_ms: float | None = None
    total_ms: float = 0.0
    audio_s: float = 0.0
    real_time_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have: when they were told, which is set as they are."""

    clock: int = 0

    @property
    def clock_ms(self) -> int:
        """Milliseconds of input so far."""
        return ms_of(self.clock)


@dataclass(frozen=True)
class SessionOpened(Event):
    """The first event: the session is there."""

    session_id: str
    settings: SessionSettings


@dataclass(frozen=True)
class SettingsUpdated(Event):
    """``UpdateSettings`` was done."""

    settings: SessionSettings
    command_id: str | None = None


@dataclass(frozen=True)
class SpeechStarted(Event):
    """The user began to speak; the turn will be item ``item_id`` and begins at ``start``.

    ``start`` lies before the first sample of speech by the detector's padding.
    """

    item_id: str
    start: int

    @property
    def start_ms(self) -> int:
        """``start`` in milliseconds."""
        return ms_of(self.start)


@dataclass(frozen=True)
class SpeechStopped(Event):
    """The user has finished: the turn ends at ``end``; ``speech_end`` is its last speech.

    ``wait`` samples of silence went by before that was said.
    """

    item_id: str
    end: int
    speech_end: int
    wait: int

    @property
    def end_ms(self) -> int:
        """``end`` in milliseconds."""
        return ms_of(self.end)

    @property
    def wait_ms(self) -> int:
        """``wait`` in milliseconds."""
        return ms_of(self.wait)


@dataclass(frozen=True)
class IdleTimeout(Event):
    """Nobody spoke for the detector's ``idle_timeout_ms`` after a reply was played.

    The silence from ``start`` to ``end`` is the turn ``item_id``.
    """

    item_id: str
    start: int
    end: int


@dataclass(frozen=True)
class InputPaused(Event):
    """Before the next sound nothing was recorded for ``seconds``, while the wall clock went on.

    Said of pauses in or after a reply that are too long for a stalled microphone.
    """

    seconds: float


@dataclass(frozen=True)
class TurnCommitted(Event):
    """A turn of the user is complete and is item ``item_id``, after ``previous_item_id``."""

    item_id: str
    previous_item_id: str | None
    command_id: str | None = None


@dataclass(frozen=True)
class InputCleared(Event):
    """``Clear`` was done."""

    command_id: str | None = None


@dataclass(frozen=True)
class ItemAdded(Event):
    """An item stands in the conversation, after ``previous_item_id`` (None: it is the first).

    With ``in_conversation`` off it is an item of a response apart.
    """

    item: Item
    previous_item_id: str | None
    in_conversation: bool = True
    command_id: str | None = None


@dataclass(frozen=True)
class ItemDone(Event):
    """An item is whole, or as whole as it will be."""

    item: Item
    previous_item_id: str | None
    in_conversation: bool = True
    command_id: str | None = None


@dataclass(frozen=True)
class ItemTruncated(Event):
    """A spoken reply was cut: ``audio_ms`` of it were heard, of which ``codes`` codes remain.

    ``by_session``: the session's own clock said so, not the client. ``said`` is the share of its
    words that the conversation keeps, where the model writes what it says.
    """

    item_id: str
    audio_ms: int
    codes: int
    by_session: bool
    command_id: str | None = None
    said: str | None = None


@dataclass(frozen=True)
class ItemDeleted(Event):
    """An item is no longer in the conversation."""

    item_id: str
    command_id: str | None = None


@dataclass(frozen=True)
class ContextDropped(Event):
    """The oldest items made room: ``rows`` of the conversation's are left."""

    item_ids: tuple[str, ...]
    rows: int


@dataclass(frozen=True)
class ResponseStarted(Event):
    """A response is being made."""

    response_id: str
    reply: ReplyMode
    in_conversation: bool
    metadata: Mapping[str, str] = field(default_factory=dict)
    command_id: str | None = None


@dataclass(frozen=True)
class AudioDelta(Event):
    """Sound of a response as it is made: little-endian int16, mono, 24 kHz.

    ``start`` is the first sample's place within the item, at 24 kHz.
    """

    response_id: str
    item_id: str
    start: int
    pcm: bytes

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.pcm) // 2

    @property
    def audio_ms(self) -> float:
        """How long they last."""
        return 1000 * self.samples / OUTPUT_RATE


@dataclass(frozen=True)
class TextDelta(Event):
    """Text of a response as it is written; never half a character.

    ``spoken``: it is what the response's sound is going to say.
    """

    response_id: str
    item_id: str
    text: str
    spoken: bool = False


@dataclass(frozen=True)
class ResponseDone(Event):
    """A response has ended; ``items`` are what it made.

    Unless it completed, ``reason`` says why, and after a failure ``message`` says more.
    """

    response_id: str
    status: ResponseStatus
    reason: Reason | None
    items: tuple[Item, ...]
    usage: Usage
    timings: Timings
    in_conversation: bool = True
    message: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorRaised(Event):
    """Something was refused or failed; the session goes on unless ``fatal``.

    ``command`` is the name of the command that caused it and ``command_id`` its id, if any.
    """

    code: ErrorCode
    message: str
    command: str | None = None
    command_id: str | None = None
    retry_after_s: float | None = None
    fatal: bool = False


@dataclass(frozen=True)
class Closed(Event):
    """The last event: the session is over, its memory is free."""

    reason: str


def ms_of(samples: int) -> int:
    """Milliseconds of so many samples of input."""
    return samples * 1000 // INPUT_RATE


_CODES: dict[type[MosstalkError], ErrorCode] = {
    errors.AudioError: ErrorCode.BAD_SOUND,
    errors.ContextLengthError: ErrorCode.CONTEXT_FULL,
    errors.EngineFullError: ErrorCode.ENGINE_FULL,
    errors.EngineStoppedError: ErrorCode.ENGINE_STOPPED,
    errors.OptionError: ErrorCode.BAD_VALUE,
    errors.ScriptError: ErrorCode.BAD_VALUE,
    errors.TextError: ErrorCode.BAD_ITEM,
    errors.VoiceError: ErrorCode.UNKNOWN_VOICE,
}


def error_event(error: MosstalkError, command: commands.Command | None = None) -> ErrorRaised:
    """The event that tells of an error which a command, if any, has met with."""
    if isinstance(error, errors.SessionError):
        code = ErrorCode(error.code)
    else:
        known = (code for kind, code in _CODES.items() if isinstance(error, kind))
        code = next(known, ErrorCode.INTERNAL)
    return ErrorRaised(
        code,
        str(error),
        type(command).__name__ if command else None,
        command.command_id if command else None,
        error.retry_after_s if isinstance(error, errors.EngineFullError) else None,
    )


def new_id(kind: str) -> str:
    """An id that nobody else has: ``item_...``, ``resp_...``, ``sess_...``."""
    return f"{kind}_{token_hex(8)}"
