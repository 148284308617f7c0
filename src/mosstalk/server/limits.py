"""How much one client may ask for, how long one waits for it, and how many clients there may be."""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mosstalk.errors import OptionError
from mosstalk.session import commands

if TYPE_CHECKING:
    from mosstalk.server.observers import Metrics
    from mosstalk.server.tls import TlsProtocol
    from mosstalk.server.websocket import HttpProtocol, WebSocketProtocol

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

MIB = 1 << 20
_PROCESSOR_BURST_S = 2.0
"""The processor is shared now, whatever a client has left unused before."""


@dataclass(frozen=True)
class Limits:
    """What a connection may take, and what all of them together may.

    Attributes:
        message_bytes: longest message; a longer one closes the connection with code 1009.
        audio_bytes: most sound in one message.
        text_chars: longest text of an item or of instructions.
        kept_chars: most that is kept beside the session for the client's eyes alone: a session's
            fields, and items that the model does not read; and for each API key the words of
            spoken replies that a chat completion may name.
        tools_chars: longest ``tools`` of a session, as JSON.
        event_bytes: longest message without what sound takes in it; a longer one is refused
            before it is parsed.
        unsent_s: seconds of sound that may wait for a client that reads too slowly; beyond it
            the connection is closed with code 1008.
        unsent_bytes: the same for all bytes that wait.
        unsent_answers_bytes: the same without sound; beyond it the client is read no further
            until it has taken some.
        stalled_s: how long a single message may take to be taken off by the client.
        unheard_s: seconds of sound that may be on their way to a session; beyond it the client
            is read no further until they are heard.
        commands_per_s: how much a client may ask of its session in the long run, sound aside; long
            items count for several.
        undone_commands: what a client has asked for and its session has not done yet; beyond it
            the client is read no further until less is left.
        messages_per_s, bytes_per_s: how fast a client is read in the long run; bursts of
            ``burst_s`` seconds' worth are read at once. Bytes of answers, but for sound, count too.
        processor_share: how much of a processor's time the messages of a client may take in the
            long run; beyond it the client is read more slowly.
        control_frames_per_s: pings, pongs and fragments of next to nothing that a client may send
            in the long run; beyond them the connection is closed with code 1008.
        large_bytes: a message that is longer is large.
        large_messages: large messages that are read at a time, of all clients of a process with
            sockets together; others wait in theirs.
        message_s: how long a large message may take while others wait for its place; then the
            connection is closed with code 1008.
        per_key: connections at a time for one API key; None is any number.
        requests_per_minute: conversations, texts, files, chats and ephemeral keys that one API key
            may ask for in the long run, as many at once; None is any number.
        connections: open at a time, of all clients together and WebSockets or not; one more takes
            the place of the oldest that waits idly, or is answered 503.
        header_s: how long the first or next request of a connection may take to arrive.
        upload_bytes: longest body of a request that brings a file or a conversation.
        upload_s: how long such a body may take to arrive.
        uploads: requests at a time whose body is longer than ``large_bytes``, from then until
            they are answered, of all clients together; one more is answered 503.
        upload_sound_s: longest sound in a file.
        ping_s, pong_s: how often a client is asked whether it is there, and how long for.
    """

    message_bytes: int = 32 * MIB
    audio_bytes: int = 15 * MIB
    text_chars: int = 32_768
    kept_chars: int = MIB
    tools_chars: int = MIB // 8
    event_bytes: int = MIB
    unsent_s: float = 90.0
    unsent_bytes: int = 16 * MIB
    unsent_answers_bytes: int = MIB // 4
    stalled_s: float = 20.0
    unheard_s: float = 30.0
    commands_per_s: float = 50.0
    undone_commands: int = 256
    messages_per_s: float = 400.0
    bytes_per_s: float = 4.0 * MIB
    burst_s: float = 8.0
    processor_share: float = 0.05
    control_frames_per_s: float = 20.0
    large_bytes: int = MIB // 4
    large_messages: int = 2
    message_s: float = 20.0
    per_key: int | None = None
    requests_per_minute: int | None = None
    connections: int = 512
    header_s: float = 10.0
    upload_bytes: int = 25 * MIB
    upload_s: float = 120.0
    uploads: int = 16
    upload_sound_s: float = 3600.0
    ping_s: float = 20.0
    pong_s: float = 20.0

    def __post_init__(self) -> None:
        """Raise OptionError for a limit that lets nothing through."""
        for name, value in vars(self).items():
            if value is not None and not value > 0:  # nor is "nan", which no number exceeds
                raise OptionError(f"{name} must be above 0, not {value}")


def limits_of(given: Iterable[str]) -> Limits:
    """The limits with those that are given as ``NAME=VALUE``.

    Raises:
        OptionError: there is no such limit, or its value is none.
    """
    known: dict[str, Callable[[str], Any]] = {
        each.name: int if "int" in str(each.type) else float for each in fields(Limits)
    }
    chosen = {}
    for pair in given:
        name, _, value = pair.partition("=")
        try:
            chosen[name] = known[name](value)
        except (KeyError, ValueError):
            raise OptionError(
                f"--limit {pair}: give NAME=VALUE, NAME being one of {', '.join(known)}"
            ) from None
    return Limits(**chosen)


class TokenBucket:
    """A bucket that fills at ``per_s`` and holds ``burst_s`` seconds' worth."""

    def __init__(self, per_s: float, burst_s: float, now_s: float) -> None:
        self._per_s, self._most = per_s, per_s * burst_s
        self._left, self._then_s = self._most, now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Take ``amount``; how long to wait before taking more."""
        filled = (now_s - self._then_s) * self._per_s
        self._left = min(self._most, self._left + filled) - amount
        self._then_s = now_s
        return max(0.0, -self._left / self._per_s)

    def left(self, now_s: float) -> float:
        """How much is there."""
        self.wait_s(0.0, now_s)
        return max(0.0, self._left)

    def wait_for_s(self, amount: float, now_s: float) -> float:
        """Take ``amount`` if so much is there; else nothing, and say for how long it is not."""
        if self.wait_s(amount, now_s) == 0.0:
            return 0.0
        self._left += amount
        return (amount - self._left) / self._per_s


class TooSlowError(Exception):
    """More waits for a client than may."""


class SendQueue:
    """A queue of one writer and one reader in the same loop; never makes the writer wait."""

    def __init__(self, limits: Limits) -> None:
        self.unsent_s = 0.0
        self._limits, self._unsent_bytes, self._answers_bytes = limits, 0, 0
        self._messages: deque[tuple[str, float]] = deque()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False

    def put(self, message: str, seconds: float = 0.0) -> None:
        """Add a message that carries so many seconds of sound.

        Raises:
            TooSlowError: with it more would wait than the limits allow.
        """
        self.unsent_s += seconds
        self._unsent_bytes += len(message)
        self._answers_bytes += 0 if seconds else len(message)
        if self.unsent_s > self._limits.unsent_s:
            raise TooSlowError(f"{self.unsent_s:.0f} s of sound wait to be read")
        if self._unsent_bytes > self._limits.unsent_bytes:
            raise TooSlowError(f"{self._unsent_bytes} bytes wait to be read")
        self._messages.append((message, seconds))
        self._changed.set()

    @property
    def has_room(self) -> bool:
        """Whether no more than may be waits for the client, sound aside."""
        return self._answers_bytes <= self._limits.unsent_answers_bytes

    async def room(self) -> None:
        """Wait for that."""
        while not self.has_room:
            self._taken.clear()
            await self._taken.wait()

    def drop(self) -> None:
        """Nobody takes anything any more: what waits is lost."""
        self._messages.clear()
        self.unsent_s, self._unsent_bytes, self._answers_bytes = 0.0, 0, 0
        self._taken.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._changed.set()

    async def get(self) -> str | None:
        """The next message, once there is one; None at the end."""
        while not self._messages:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message, seconds = self._messages.popleft()
        self.unsent_s -= seconds
        self._unsent_bytes -= len(message)
        self._answers_bytes -= 0 if seconds else len(message)
        self._taken.set()
        return message


class Places:
    """How many may do something at a time."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def one(self) -> Iterator[Callable[[], bool]]:
        """Within it the function that is given takes a place, and says whether it has one."""
        taken = False

        def take() -> bool:
            nonlocal taken
            if not taken and self._left > 0:
                self._left -= 1
                taken = True
            return taken

        try:
            yield take
        finally:
            self._left += taken


_CHARS, _SAMPLES = 500, 6_000
"""So much text or recorded sound in an item costs as much again as an item without any."""


def work_of(command: commands.Command) -> float:
    """What a command costs the session, in short ones; sound is paced by its length."""
    if isinstance(command, commands.Push):
        return 0.0
    parts = (part for message in commands.messages_of(command) for part in message.parts)
    texts = sum(len(part) for part in parts if isinstance(part, str))
    samples = sum(commands.sample_count(sound.pcm) for sound in commands.sounds_of(command))
    return 1.0 + texts / _CHARS + samples / _SAMPLES


class ClientBudget:
    """What one client may cost: messages, bytes of them and of their answers, processor time, and
    commands for its session.

    As a context manager it counts the processor's time for what is done within, by the wall's
    clock: nothing within waits, and the thread's own clock takes longer to read than a frame of
    sound to hear.
    """

    def __init__(self, limits: Limits, now_s: float) -> None:
        burst_s = limits.burst_s
        self._buckets = (
            TokenBucket(limits.messages_per_s, burst_s, now_s),
            TokenBucket(limits.bytes_per_s, burst_s, now_s),
            TokenBucket(limits.processor_share, min(burst_s, _PROCESSOR_BURST_S), now_s),
            TokenBucket(limits.commands_per_s, burst_s, now_s),
        )
        self._costs = (0.0, 0.0, 0.0)
        self._entered_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.cost(processor_s=time.perf_counter() - self._entered_s)

    def cost(self, count: int = 0, processor_s: float = 0.0, commands: float = 0.0) -> None:
        """Something has been read, answered, computed or asked of its session for the client."""
        bytes_, processor, asked = self._costs
        self._costs = bytes_ + count, processor + processor_s, asked + commands

    def wait_s(self, now_s: float) -> float:
        """One message is done: how long to wait before the next, given what all has cost."""
        costs, self._costs = (1.0, *self._costs), (0.0, 0.0, 0.0)
        waits = [
            bucket.wait_s(cost, now_s) for bucket, cost in zip(self._buckets, costs, strict=True)
        ]
        return max(waits)


# Connections, of which a process may have so many.

_LOG = logging.getLogger("mosstalk.server")
OTHER_FILES = 512
"""Files that a front may have open beside its connections: recordings have a few each, and as many
newcomers as wait in line (``app.BACKLOG``) are accepted before the first is looked at."""
_LAST_FILES = 16
_LOG_EVERY_S = 10.0


def raise_file_limit(wanted: int = 0) -> int:
    """How many files this process may have open, after asking for as many as are wanted."""
    if resource is None:
        return sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if soft != endless and soft < wanted:
        soft = wanted if hard == endless else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == endless else soft


class ConnectionLimiter:
    """Counts connections and large messages."""

    def __init__(self, limits: Limits, metrics: "Metrics") -> None:
        self.limits, self._metrics = limits, metrics
        self.elsewhere: Callable[[], int] = lambda: 0
        """Connections that were handed over to other processes, and count all the same."""
        self.idle: dict[HttpProtocol | TlsProtocol, None] = {}
        """Connections that have asked for nothing, or for nothing more, the oldest first."""
        self._large: set[WebSocketProtocol] = set()
        self._in_line: deque[WebSocketProtocol] = deque()
        self._logged_s = float("-inf")

    def admit(self, connections: int, descriptor: int) -> bool:
        """Whether a new connection may stay; the oldest one that waits idly makes room for it.

        ``descriptor`` is the newcomer's. Systems give out the lowest that is free, so a high one
        says that they run out.
        """
        files, most = raise_file_limit(), self.limits.connections
        last = descriptor >= files - _LAST_FILES
        few = last or connections > files - min(OTHER_FILES, files // 2)
        connections += self.elsewhere()
        if not few and connections <= most:
            return True
        oldest = next(iter(self.idle), None)
        if oldest is None and not last and connections <= most:
            return True
        self._log(connections, files if few else None)
        if oldest is None:
            self._metrics.refusals.labels("connections").inc()
            return False
        oldest.timeout_keep_alive_handler()
        self.idle.pop(oldest, None)
        return True

    @property
    def others_wait(self) -> bool:
        """Whether connections wait in line with a large message."""
        return bool(self._in_line)

    def may_read_large(self, protocol: "WebSocketProtocol") -> bool:
        """Whether a connection may go on with a large message; if not, it is called later."""
        if protocol in self._large:
            return True
        if len(self._large) < self.limits.large_messages:
            self._large.add(protocol)
            return True
        if protocol not in self._in_line:
            self._in_line.append(protocol)
        return False

    def done_with_large(self, protocol: "WebSocketProtocol") -> None:
        """A connection has no large message, or none any more: the next in line has its turn."""
        if protocol in self._large:
            self._large.discard(protocol)
            if self._in_line:
                following = self._in_line.popleft()
                self._large.add(following)
                following.go_on()
        elif protocol in self._in_line:
            self._in_line.remove(protocol)

    def _log(self, connections: int, files: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = now_s
        if files is not None:
            _LOG.warning(
                "file descriptors run out: %d connections are open, and this process may have %d "
                "files; raise it with ulimit -n, or LimitNOFILE= of systemd",
                connections,
                files,
            )
        else:
            _LOG.warning(
                "%d connections are open, more than may be; raise it with --limit connections=",
                connections,
            )
