"""The engine as programs use it: its thread, kept conversations, replies as async streams."""

import asyncio
import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mosstalk.constants import codes_heard
from mosstalk.conversation import Conversation, Mode, Reply, Row
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.errors import EngineStoppedError, OptionError
from mosstalk.ops.linear_tiles import FEW_ROWS
from mosstalk.ops.sampling_parts import HELD
from mosstalk.reply_options import Limits, SamplingOptions, Script
from mosstalk.runtime.busy import BusyPart, at_work
from mosstalk.runtime.sharing import DeadlineLock, Job


@dataclass(frozen=True)
class Edit:
    """``rows`` that take the place of a conversation's rows from ``start`` on."""

    start: int
    rows: tuple[Row, ...]


@dataclass
class CachedConversation:
    """``conversation`` says what the rows are, ``sequence`` what of them has been read.

    Both hold the same list of rows: an edit changes it from its first row on, and a reply under
    way appends to it. Between turns the sequence keeps its blocks as long as there is room for
    them. The rows that close a turn are read with the next one.
    """

    conversation: Conversation
    sequence: Sequence

    def __post_init__(self) -> None:
        assert not self.sequence.rows, "a conversation begins with a sequence of its own"
        self.sequence.rows = self.conversation.rows

    def rewrite(self, edit: Edit) -> None:
        """Change what was said; K and V of the rows before the change stay."""
        self.conversation.rewrite(edit.start, edit.rows)
        self.sequence.free_from(edit.start)

    def open_reply(self, *, speech: bool) -> None:
        """Begin a reply: its opening rows are the sequence's last."""
        self.conversation.open_reply(speech)

    @contextmanager
    def reply_opened(self, *, speech: bool) -> Iterator[None]:
        """``open_reply``, taken back if what is done with it fails."""
        self.open_reply(speech=speech)
        try:
            yield
        except Exception:
            self.sequence.free_from(self.conversation.withdraw_reply())
            raise

    def close_reply(self, request: Request, heard_ms: float | None = None) -> None:
        """Make history of an ended reply, of which the listener heard ``heard_ms``."""
        assert request.state is State.DONE, "the reply is still being made: cancel it first"
        codes = None if heard_ms is None else _codes(heard_ms)
        self.sequence.free_from(self.conversation.close_reply(request.reply, codes))

    def truncate(self, heard_ms: float) -> None:
        """Cut the reply that was closed last to what was heard of it.

        Changes nothing while the next reply is being made: cancel that and close it first.
        """
        if not self.conversation.reply_is_open:
            self.sequence.free_from(self.conversation.cut_last_reply(_codes(heard_ms)))


def _codes(heard_ms: float) -> int:
    """Codes of which anything was heard; a client's clock may be behind the reply's start."""
    if not math.isfinite(heard_ms):
        raise OptionError(f"what was heard must be a number of milliseconds, not {heard_ms}")
    return codes_heard(max(0.0, heard_ms))


# The engine on a thread of its own.


_T = TypeVar("_T")
_PATIENCE_S = 0.002
"""How long the engine waits for its turn before it looks for new jobs."""
_SOON_S = 0.3
"""A row that is due within this has ``steps_in_a_row``."""


@dataclass(frozen=True)
class NewRow:
    """A row of a reply as it was drawn: ``step`` counts from 1 within the reply."""

    step: int
    mode: Mode
    row: Row


@dataclass
class ReplyStream:
    """A reply under way: iterate for ``NewRow``s; at the end ``reply`` is whole.

    Iteration raises what ended the request early: ``PoisonedError``, ``EngineStoppedError``.
    The audio token of a text row may stand as ``audio_pad`` unless whole rows were asked for.
    """

    cached: CachedConversation
    request: Request
    cached_rows: int
    """Rows of the prompt that had been read before it was asked."""
    loop: asyncio.AbstractEventLoop
    """Of those who iterate."""
    queue: "asyncio.Queue[NewRow | None]" = field(default_factory=asyncio.Queue)
    _given: int = 0
    _failure: Exception | None = None

    @property
    def reply(self) -> Reply:
        """Rows, modes and, once ended, the finish reason."""
        return self.request.reply

    async def __aiter__(self) -> AsyncIterator[NewRow]:
        while (new := await self.queue.get()) is not None:
            yield new
        self.queue.put_nowait(None)  # whoever iterates again finds the end at once
        failure = self._failure or self.request.error
        if failure:
            raise failure

    def news(self, failure: Exception | None = None) -> list[NewRow | None]:
        """Rows since the last call, None after the last one; called on the engine's thread."""
        reply, first, self._given = self.request.reply, self._given, self.request.ready
        new = list[NewRow | None]()
        for place in range(first, self._given):
            new.append(NewRow(place + 1, reply.modes[place], reply.rows[place]))
        self._failure = failure
        if failure or self.request.state is State.DONE:
            new.append(None)
        return new


_News = tuple["asyncio.Queue[NewRow | None]", NewRow | None]


def _put(news: list[_News]) -> None:
    for queue, new in news:
        queue.put_nowait(new)


class AsyncEngine:
    """Runs an ``EngineCore`` on a thread of its own; every method may be called from asyncio.

    Use as an async context manager, or call ``start`` and ``stop``. With a ``deadline_lock`` it
    steps only when nobody else who uses it has more urgent work.
    """

    def __init__(
        self,
        core: EngineCore,
        deadline_lock: DeadlineLock | None = None,
        steps_in_a_row: int = 0,
    ) -> None:
        """While a row is due within 0.3 s, ``steps_in_a_row`` come between two turns of others."""
        self.core = core
        self._steps_in_a_row = steps_in_a_row
        self._deadline_lock = deadline_lock
        self.failure: Exception | None = None
        """What stopped the thread, if anything did: a supervisor should look at it."""
        self.ended: Future[None] = Future()
        """Done once the thread has ended, whatever ended it."""
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._streams: dict[int, ReplyStream] = {}
        self._open_lock = threading.Lock()
        self._open = False
        self._thread = threading.Thread(target=self._run, name="mosstalk-engine", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._open = True
        self._thread.start()

    def stop(self) -> None:
        """End all replies and the thread; harmless if it has ended."""
        self._shut()
        if self._thread.is_alive():
            self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    async def warm(self) -> None:
        """Have all that steps run compiled and captured; see ``warm_up``."""
        await self._on_thread(lambda: warm_up(self.core))

    def open(self, conversation: Conversation) -> CachedConversation:
        """Keep a conversation's K and V from now on."""
        return CachedConversation(conversation, self.core.open())

    async def rewrite(self, cached: CachedConversation, edit: Edit) -> None:
        """Change what was said, and read ahead what is new, while nothing else is to be done.

        The conversation must have no reply that is open.

        Raises:
            EngineInputError: a row has a token that the model does not know.
        """

        def job() -> None:
            cached.rewrite(edit)
            self.core.prefill_ahead(cached.sequence)

        await self._on_thread(job)

    async def submit(
        self,
        cached: CachedConversation,
        params: ReplyParams | None = None,
        *,
        speech: bool = True,
        edit: Edit | None = None,
    ) -> ReplyStream:
        """Ask for a reply to what was said, after a last ``edit`` of it.

        A reply that nobody reads goes on to its end; ``close`` ends it with its conversation.

        Raises:
            EngineInputError: a row has a token that the model does not know.
            ContextLengthError, EngineFullError: it cannot run ever, or not now; the
                conversation is as it was after the edit.
            EngineStoppedError: the engine has ended.
        """
        loop = asyncio.get_running_loop()

        def job() -> ReplyStream:
            if edit:
                cached.rewrite(edit)
            with cached.reply_opened(speech=speech):
                request = self.core.submit(cached.sequence, params)
            read = cached.sequence.read[Part.TRUNK]
            stream = self._streams[request.number] = ReplyStream(cached, request, read, loop)
            return stream

        return await self._on_thread(job)

    async def cancel(self, stream: ReplyStream) -> None:
        """End a reply before its next step; harmless if it has ended."""

        def job() -> None:
            self.core.cancel(stream.request)
            self._tell([stream.request])

        await self._on_thread(job)

    async def close_reply(self, stream: ReplyStream, heard_ms: float | None = None) -> None:
        """Make history of an ended reply, cut to what was heard of it."""
        await self._on_thread(lambda: stream.cached.close_reply(stream.request, heard_ms))

    async def truncate(self, cached: CachedConversation, heard_ms: float) -> None:
        """Cut the latest reply of a conversation to what was heard of it."""
        await self._on_thread(lambda: cached.truncate(heard_ms))

    async def close(self, cached: CachedConversation) -> None:
        """Forget a conversation and free its blocks; a reply of it under way is cancelled."""

        await self._on_thread(lambda: self._tell(self.core.close(cached.sequence)))

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        job = Job(work)
        with self._open_lock:
            if not self._open:
                raise _stopped(self.failure)
            self._jobs.put(job)
        return await asyncio.wrap_future(job.done)

    def _run(self) -> None:
        try:
            while self._do_jobs():
                self._tell(self._step())
        except Exception as error:
            self.failure = error
        self._end()

    def _step(self) -> list[Request]:
        """One step in turn; none if others were first for so long that jobs may have come."""
        lock = self._deadline_lock
        if not lock:
            return self.core.step()
        due_s, asked_s = self.core.due_s, time.perf_counter()
        if not lock.enter(lambda: due_s, _PATIENCE_S, self._turns(due_s)):
            return []
        try:
            return self.core.step(time.perf_counter() - asked_s)
        finally:
            due_s = self.core.due_s
            lock.expect(due_s, self._turns(due_s))
            lock.leave()

    def _turns(self, due_s: float) -> int:
        """How many steps in a row to ask for where the next row is due then."""
        return self._steps_in_a_row if due_s < self.core.clock() + _SOON_S else 0

    def _do_jobs(self) -> bool:
        """Do what was asked, waiting for it if there is nothing else; whether to go on."""
        try:
            job = self._jobs.get(block=not self.core.has_work)
            while job:
                with at_work(BusyPart.EDIT):
                    job.run()
                job = self._jobs.get_nowait()
        except Empty:
            return True
        return False

    def _tell(self, requests: Iterable[Request], failure: Exception | None = None) -> None:
        """Hand on what is new of requests, all of it in one call of the loop that reads it."""
        news = defaultdict[asyncio.AbstractEventLoop, list[_News]](list)
        for request in requests:
            stream = self._streams.get(request.number)
            if stream:
                news[stream.loop] += ((stream.queue, new) for new in stream.news(failure))
            if request.state is State.DONE:
                self._streams.pop(request.number, None)
        for loop, each in news.items():
            # A loop that has closed, perhaps just now, has nobody waiting on it any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_put, each)

    def _shut(self) -> None:
        """Take no more jobs; what was asked before is done, then the thread ends."""
        with self._open_lock:
            self._open = False
            self._jobs.put(None)

    def _end(self) -> None:
        self._shut()
        gone = _stopped(self.failure)
        if self._deadline_lock:
            self._deadline_lock.expect(math.inf)
        self._tell([stream.request for stream in self._streams.values()], gone)
        self._streams.clear()
        while job := self._jobs.get():
            job.refuse(gone)
        self.ended.set_result(None)


def _stopped(failure: Exception | None) -> EngineStoppedError:
    why = f"{type(failure).__name__}: {failure}" if failure else "it has ended, or never began"
    return EngineStoppedError(f"the engine is not running: {why}")


# Doing once, before anybody waits, all that steps do: kernels are compiled and graphs captured.


_CROWDS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 64, FEW_ROWS + 1, 80)
"""Replies at once: heads divide their rows otherwise past 1, 16, 32 and 64, what settles modes is
compiled for each power of two, and kernels once more for numbers that 16 divides."""
_SCRIPT = Script.parse("text:3,speech:3")
"""A reply with draws in both modes, put-off ones among them."""


def warm_up(core: EngineCore) -> None:
    """Compile and capture what a served engine runs: every size of pass, and every way to draw.

    References need nothing of the kind.
    """
    layers = core.runner.layers
    if layers.kernels:
        layers.warm(layers.limits.all())
        warm_draws(core)


def warm_draws(core: EngineCore) -> None:
    """Replies that change their mode: greedy, sampled from few tokens, and sampled from all.

    The last sort whole vocabularies by torch, one or several.
    """
    most = core.options.limits.slots
    for count in sorted({crowd for crowd in (*_CROWDS, most) if crowd <= most}):
        for options in (SamplingOptions(temperature=0.0), SamplingOptions(top_k=HELD)):
            _replies(core, count, options)
    for count in range(1, min(most, 2) + 1):
        _replies(core, count, SamplingOptions(top_k=0))


def _replies(core: EngineCore, count: int, options: SamplingOptions) -> None:
    """So many replies at the same time; nothing of them stays."""
    row: Row = (0, core.ids.audio_pad)
    params = ReplyParams(options, Limits(), _SCRIPT)
    sequences = [core.open([row] * 2) for _ in range(count)]
    for sequence in sequences:
        core.submit(sequence, params)
    core.run()
    for sequence in sequences:
        core.close(sequence)
