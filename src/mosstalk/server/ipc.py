"""The processes of a server: what they say to each other, how one is started, what each does.

Messages are plain values, pickled, over stream sockets.

Pickle, because both ends are the same code at the same version, the socket pair between them has
no name that a third could open, and commands and events cross exactly as they are. Nothing that
came from a client is ever unpickled: it has been read as JSON and made into commands before.
"""

import asyncio
import ctypes
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from select import poll
from typing import Any

from mosstalk.conversation import Row
from mosstalk.environment import environment_of_a_child, share_the_processor
from mosstalk.errors import MosstalkError
from mosstalk.offline.text_normalizer import TextRules
from mosstalk.prepared.default_models import built_engine
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.busy import Busy, BusyPart
from mosstalk.server.logs import LogStyle, bounded_output
from mosstalk.session.commands import Command, Push, SessionSettings
from mosstalk.session.events import Event, KeptItem

LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 18
_UNSENT_BYTES = 1 << 20
"""Bytes on their way to the other process from which on ``send`` waits."""
_LONGEST_NOTE = 1 << 17
"""Bytes of a note that goes with a socket: the head of a request, which is a quarter at most."""


class Channel:
    """One end of a link; what is sent arrives whole and in order, or the link is broken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._posted = list[bytes]()
        writer.transport.set_write_buffer_limits(high=_UNSENT_BYTES)

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """A channel over one end of a socket pair, which it closes in the end."""
        return cls(*await asyncio.open_connection(sock=end))

    def post(self, message: Any) -> None:
        """Send without waiting, all of a moment at once; into a broken link it is lost."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._flush)
        packed = _packed(message)
        self._posted += (LENGTH.pack(len(packed)), packed)

    async def send(self, message: Any) -> None:
        """Send, and wait while too much is on its way; into a broken link it is lost."""
        self.post(message)
        self._flush()
        try:
            await self._writer.drain()
        except ConnectionError:
            self._writer.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the other end is closed."""
        held = bytearray()
        with suppress(ConnectionError):
            while came := await self._reader.read(_READ_BYTES):
                held += came
                start = 0
                # All that have come, without waiting in between: there are thousands a second.
                while (begin := start + LENGTH.size) <= len(held):
                    end = begin + LENGTH.unpack_from(held, start)[0]
                    if end > len(held):
                        break
                    yield _unpacked(held[begin:end])
                    start = end
                del held[:start]

    def close(self) -> None:
        """Close this end once all that was posted has gone."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        if posted and not self._writer.is_closing():
            self._writer.write(b"".join(posted))


def _packed(message: Any) -> bytes:
    """As bytes. A microphone's sound, most of what is sent, as its fields: ten times as fast."""
    if type(message) is SessionCommand and type(message.command) is Push:
        push = message.command
        message = message.number, push.command_id, push.pcm, push.rate, push.paused_s
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def _unpacked(packed: bytes | bytearray) -> Any:
    message = pickle.loads(packed)
    if type(message) is tuple:
        number, command_id, pcm, rate, paused_s = message
        return SessionCommand(number, Push(pcm, rate, paused_s, command_id=command_id))
    return message


BY_HAND = "none"
"""The detector that is none: clients must say where turns end."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker loads and how much it may take on.

    ``model`` and ``codec`` are as ``chosen_model`` takes them; ``voices`` are files by the name
    that sessions ask for, ``voice`` the name of those that ask for none. ``context_rows`` of one
    conversation must fit: None are the model's.
    ``detector`` is as ``open_detector`` takes it, or ``BY_HAND``. ``ear_processes`` look for speech
    beside the worker; None: on a GPU as many as sessions and processors make worth it, else 0.
    ``embeddings`` is as ``Pipeline.load`` takes it.
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
    ear_processes: int | None = None
    voices: Mapping[str, Path] = field(default_factory=dict)
    voice: str = "default"
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


# From a front to the worker, from the first one after its ``WorkerOptions``.


@dataclass(frozen=True)
class Open:
    """Open a session and call it ``number``; with ``rows`` send its rows with its last event.

    With ``keep`` send what another session needs to go on from each item; this one goes on from
    ``items``.
    """

    number: int
    settings: SessionSettings
    rows: bool = False
    keep: bool = False
    items: tuple[KeptItem, ...] = ()


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
    """Everything is loaded and warm: what there is.

    The first of ``voices`` speaks where a client asks for none. ``text`` is what the checkpoint
    asks of text that it reads aloud, ``device_name`` the GPU's own name, or the processor's kind
    and cores.
    """

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
    text: TextRules = field(default_factory=TextRules)
    device_name: str = ""


@dataclass(frozen=True)
class Failed:
    """The worker ends; ``by_input`` says that what it was given is at fault."""

    message: str
    by_input: bool = False


@dataclass(frozen=True)
class Refused:
    """Session ``number`` is not there: an exception of ``errors``, taken apart to be pickled."""

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
    """An event of a session, of which the first says that it is there.

    ``rows`` is the conversation as the model has read it, with the last event if asked for, and
    ``kept`` the item that the event changes.
    """

    number: int
    event: Event
    rows: list[Row] | None = None
    kept: KeptItem | None = None


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life, several times a second, and how things are.

    ``first_audio_ms`` is as ``Host`` has it, and the counts as ``HostFigures`` has them.
    ``engine_silent_s`` is for how long the engine's thread has not answered. ``done`` is how
    many commands each session has carried out or refused; ``steps_s`` how long each step took
    since the last heartbeat, and ``busy`` what each part of the worker spent and did.
    """

    memory_bytes: int
    engine_silent_s: float = 0.0
    sessions: int = 0
    replies: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_in_use: int = 0
    early_used: int = 0
    early_dropped: int = 0
    first_audio_ms: tuple[float, float] | None = None
    steps_s: tuple[float, ...] = ()
    busy: Mapping[BusyPart, Busy] = field(default_factory=dict)
    done: Mapping[int, int] = field(default_factory=dict)


ToFront = Loading | WorkerInfo | Failed | Refused | SessionEvent | Heartbeat


# Processes.

_CHILD = f"import sys; from {__name__} import run_child; run_child(*sys.argv[1:])"
_PR_SET_PDEATHSIG = 1
"""Which signal a process gets when its parent dies: prctl(2)."""
_TRIM_EVERY_S = 20.0


def start_child(
    module: str, *more: socket.socket
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A fresh interpreter that runs ``module.run`` with its end of a socket pair, and our end.

    It is given ``more`` sockets as well. Nothing else is shared with it: no fork of a process that
    has threads.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        given = [each.fileno() for each in (theirs, *more)]
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, module, *map(str, given)],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            env=environment_of_a_child(),
        )
    return process, ours


def run_child(module: str, *descriptors: str) -> None:
    """Run ``module`` to its end, then leave without waiting for threads that still compute.

    The first of ``descriptors`` is its end of the pair. It ends when it is told to, when it fails,
    and at once when the front is gone; signals that a terminal or a supervisor sends to the whole
    group are the front's to deal with.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    share_the_processor()
    ends = [socket.socket(fileno=int(each)) for each in descriptors]
    _end_with_parent(ends[0].fileno())
    with bounded_output():
        try:
            code = import_module(module).run(*ends)
        except BaseException:
            logging.getLogger(module).exception("the process ends")
            code = 1
    os._exit(code)


def socket_carrier() -> tuple[socket.socket, socket.socket]:
    """Both ends of a pair over which ``hand_over`` gives sockets to another process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


def hand_over(carrier: socket.socket, given: socket.socket, note: bytes = b"-") -> None:
    """Give the process at the other end a socket, with a note; this one may close it then.

    Raises:
        OSError: the process is gone, or has not taken what it was given before.
    """
    socket.send_fds(carrier, [note], [given.fileno()], socket.MSG_DONTWAIT)


def taken_over(carrier: socket.socket) -> tuple[socket.socket, bytes]:
    """The next socket that was handed over, and its note."""
    note, (descriptor,), *_ = socket.recv_fds(carrier, _LONGEST_NOTE, 1)
    return socket.socket(fileno=descriptor), note


def _end_with_parent(descriptor: int) -> None:
    """Have this process killed once the one that started it is gone, whatever this one does.

    ``descriptor`` is its end of the pair. On Linux the kernel kills it, even while code computes
    that keeps every other thread of Python waiting; elsewhere a thread does, which sees the pair
    broken. The kernel goes by the thread that called ``start_child``, so that must be one that
    lives as long as its process does.
    """
    threading.Thread(target=_end_when_closed, args=(descriptor,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_when_closed(descriptor: int) -> None:
    waiting = poll()
    waiting.register(descriptor, 0)  # nothing but that the other end was closed
    waiting.poll()
    os._exit(1)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes uvloop's event loops, where that is installed; None: asyncio's own."""
    return import_module("uvloop").new_event_loop if find_spec("uvloop") else None


def resident_bytes() -> int:
    """Resident memory of this process, 0 where that is not known."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def trim_memory_forever() -> None:
    """Every so often, give back what is free: GNU libc keeps it in holes between what is in use.

    Returning it at every release instead (``MALLOC_TRIM_THRESHOLD_``) makes a hop take twice as
    long. Where the C library cannot do it, this ends at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim:
        await asyncio.sleep(_TRIM_EVERY_S)
        await asyncio.to_thread(trim, 0)
