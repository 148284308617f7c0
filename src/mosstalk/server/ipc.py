"""What the two processes of a server say to each other: plain values, pickled.

Pickle, because both ends are the same code at the same version, the socket pair between them has
no name that a third could open, and commands and events cross exactly as they are. Nothing that
came from a client is ever unpickled: it has been read as JSON and made into commands before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mosstalk import errors
from mosstalk.codec.sound_request import SoundRequest
from mosstalk.conversation import Row
from mosstalk.errors import EngineFullError, MosstalkError, SessionError
from mosstalk.runtime.busy import Busy, BusyPart
from mosstalk.server.logs import LogStyle
from mosstalk.session.commands import Command
from mosstalk.session.events import Event
from mosstalk.session.settings import SessionSettings

BY_HAND = "none"
"""The detector that is none: clients must say where turns end."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker loads and how much it may take on.

    ``model`` and ``codec`` are as ``chosen_model`` takes them; ``voices`` are files by the name
    that sessions ask for. ``context_rows`` of one conversation must fit: None are the model's.
    ``detector`` is as ``open_detector`` takes it, or ``BY_HAND``. ``embeddings`` is as
    ``Pipeline.load`` takes it.
    """

    model: Path | None = None
    codec: Path | None = None
    device: str = "auto"
    dtype: str | None = None
    sound: SoundRequest = field(default_factory=SoundRequest)
    sessions: int = 64
    memory_bytes: int | None = None
    context_rows: int | None = None
    detector: str = "auto"
    voices: Mapping[str, Path] = field(default_factory=dict)
    log: LogStyle = field(default_factory=LogStyle)
    batch_invariant: bool = False
    embeddings: str = "device"


# From the front to the worker.


@dataclass(frozen=True)
class Start:
    """The first message: load what is said there."""

    options: WorkerOptions


@dataclass(frozen=True)
class Open:
    """Open a session and call it ``number``; with ``rows`` send its rows before its last event."""

    number: int
    settings: SessionSettings
    rows: bool = False


@dataclass(frozen=True, eq=False)
class SessionCommand:
    """A command for a session."""

    number: int
    command: Command


@dataclass(frozen=True)
class Stop:
    """Close every session and end."""


# From the worker to the front.


@dataclass(frozen=True)
class Loading:
    """``done`` of ``total`` parts of ``what`` are loaded."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker has loaded."""

    weights_kind: str
    model: str
    device: str
    dtype: str
    voices: tuple[str, ...]
    detector: str | None
    context_rows: int
    blocks: int
    block_rows: int
    warm_up_s: float


@dataclass(frozen=True)
class Ready:
    """Everything is loaded and warm."""

    info: WorkerInfo


@dataclass(frozen=True)
class Failed:
    """The worker ends; ``by_input`` says that what it was given is at fault."""

    message: str
    by_input: bool = False


@dataclass(frozen=True)
class Opened:
    """Session ``number`` is there; its events follow."""

    number: int


@dataclass(frozen=True)
class Refused:
    """Session ``number`` is not: ``error`` is the name of an exception in ``errors``."""

    number: int
    error: str
    message: str
    code: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, number: int, error: MosstalkError) -> "Refused":
        """What an error says, without the error."""
        code = error.code if isinstance(error, SessionError) else ""
        retry = error.retry_after_s if isinstance(error, EngineFullError) else 0.0
        return cls(number, type(error).__name__, str(error), code, retry)

    def raised(self) -> MosstalkError:
        """The error again, to be raised on this side."""
        kind = getattr(errors, self.error, MosstalkError)
        if kind is EngineFullError:
            return EngineFullError(self.message, self.retry_after_s)
        if kind is SessionError:
            return SessionError(self.code, self.message)
        error: MosstalkError = kind(self.message)
        return error


@dataclass(frozen=True)
class SessionEvent:
    """An event of a session."""

    number: int
    event: Event


@dataclass(frozen=True)
class Rows:
    """The conversation of a session as the model has read it, at its end."""

    number: int
    rows: list[Row]


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life, several times a second, and how things are.

    ``engine_silent_s`` is for how long the engine's thread has not answered. ``done`` is how
    many commands each session has carried out or refused; ``steps_s`` how long each step took
    since the last pulse, and ``busy`` what each part of the worker spent.
    """

    engine_silent_s: float
    sessions: int
    replies: int
    waiting: int
    blocks: int
    blocks_in_use: int
    memory_bytes: int
    steps_s: tuple[float, ...] = ()
    busy: Mapping[BusyPart, Busy] = field(default_factory=dict)
    done: Mapping[int, int] = field(default_factory=dict)


ToWorker = Start | Open | SessionCommand | Stop
ToFront = Loading | Ready | Failed | Opened | Refused | SessionEvent | Rows | Heartbeat
