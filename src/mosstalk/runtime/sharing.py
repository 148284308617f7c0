"""What many conversations share: a processor, threads that compute for all of them, and pages.

Storage of a page pool lies where it was allocated for as long as graphs read it, because a
captured graph holds addresses. So its size follows from a stated budget. Who finds too few pages
does without: the engine lets another reply wait, a decoder or a tokenizer refuses with a typed
error, and whoever asked them waits for others to end, for a bounded time, and asks again.
"""

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Condition, Thread, get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mosstalk.errors import EngineStoppedError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True, eq=False)
class _Claim:
    """A thread that waits or comes back: when its work is due, and turns in a row that it asks."""

    due_s: Callable[[], float]
    thread: int
    turns: int


_NOBODY = _Claim(lambda: math.inf, 0, 0)


class DeadlineLock:
    """Lets one thread compute at a time, the one whose work is due first.

    Side by side on one processor, or behind one interpreter lock, work that could wait makes
    work that cannot take twice as long. A thread whose work goes on in short turns says by
    ``expect`` that it is coming back: else whoever waits, however patiently, would enter between
    any two of them. Where others' turns are long, it may ask for several ``turns`` in a row.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: list[_Claim] = []
        """Who has waited for longest first."""
        self._inside = False
        self._row = 0, 0
        """The thread that was inside last, and how many turns in a row it has had."""
        self._expected = _NOBODY

    @property
    def queue(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(
        self, due_s: Callable[[], float], timeout_s: float | None = None, turns: int = 0
    ) -> bool:
        """Wait for one's turn; False if it did not come within ``timeout_s``.

        ``due_s`` may change meanwhile, where more urgent work comes in; any thread calls it. Who
        has had fewer than ``turns`` since somebody else's last goes first, whatever is due.
        """
        me = _Claim(due_s, get_ident(), turns)
        with self._changed:
            expected = self._expected.thread == me.thread
            if expected:  # here it is, perhaps with other work than it was expected with
                self._expected = _NOBODY
                self._changed.notify_all()
            self._waiting.append(me)
            come = self._changed.wait_for(lambda: self._is_next(me), timeout_s)
            self._waiting.remove(me)
            if come:
                self._inside, self._row = True, (me.thread, self._had(me.thread) + 1)
            else:
                self._expected = self._claim(due_s(), turns) if expected else self._expected
                self._changed.notify_all()
            return come

    def expect(self, due_s: float, turns: int = 0) -> None:
        """From now on keep out others whose work is due later than this thread's; infinity: none.

        While it has had fewer than ``turns`` since somebody else's last, all others are kept out.
        One thread alone may be expected.
        """
        with self._changed:
            self._expected = self._claim(due_s, turns)
            self._changed.notify_all()

    def leave(self) -> None:
        """Let the next one in."""
        with self._changed:
            self._inside = False
            self._changed.notify_all()

    @contextmanager
    def turn(self, due_s: Callable[[], float]) -> Iterator[None]:
        """Compute in here."""
        self.enter(due_s)
        try:
            yield
        finally:
            self.leave()

    def _claim(self, due_s: float, turns: int) -> _Claim:
        return _Claim(lambda: due_s, get_ident(), turns)

    def _had(self, thread: int) -> int:
        """Turns of a thread since somebody else's last."""
        return self._row[1] if self._row[0] == thread else 0

    def _order(self, claim: _Claim) -> float:
        return -math.inf if self._had(claim.thread) < claim.turns else claim.due_s()

    def _is_next(self, me: _Claim) -> bool:
        if self._inside or me is not min(self._waiting, key=self._order):
            return False
        return self._order(me) <= self._order(self._expected)


# Threads that compute for many askers: jobs one by one, calls many in a run.


@dataclass(frozen=True)
class Job(Generic[_T]):
    """Work for another thread, and what came of it."""

    work: Callable[[], _T]
    done: Future[_T] = field(default_factory=Future)

    def run(self) -> None:
        """Do the work, unless whoever asked has gone."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.work())
            except Exception as error:
                self.done.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """End the job undone."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


@dataclass(order=True)
class _Call:
    """What one asker gave, and what came of it. Those that are due first go first."""

    due_s: float
    number: int
    given: Any = field(compare=False)
    done: "asyncio.Future[Any]" = field(compare=False)
    """The asker's, to be changed on its loop alone."""
    asked_s: float = field(compare=False, default_factory=time.perf_counter)


class BatchWorker(Generic[_A, _B]):
    """One thread that does what is due first, together with up to ``most`` - 1 others in line.

    ``work`` gets what was given, the earliest first, and returns as many results, of which one
    may be an error for its asker. What it raises, all of that run get. A call whose asker has been
    cancelled is dropped unless it has begun. With a ``deadline_lock`` each run waits its turn among
    others who compute; who comes while it waits is still taken along.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[_A]], Sequence[_B | Exception]],
        most: int = sys.maxsize,
        deadline_lock: DeadlineLock | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        batch_delay_s: float = 0.0,
    ) -> None:
        """``within`` makes a context for each run and each job, such as a stream of a GPU.

        Calls without a ``due_s`` wait for others to share a run with: they begin one
        ``batch_delay_s`` after the run before it at the earliest, but go with any run.
        """
        self._work, self._most, self._deadline_lock = work, most, deadline_lock
        self._within, self._batch_delay_s, self._begun_s = within, batch_delay_s, -math.inf
        self._calls = list[_Call]()
        """A heap, guarded by ``_changed`` as ``_jobs`` and ``_stopped`` are."""
        self._jobs = deque[tuple[Job[Any], bool]]()
        """What is done by itself, and whether that waits its turn."""
        self._changed, self._stopped = Condition(), False
        self._numbers = count()
        self.waited_s = 0.0
        """How long the first of the calls that ``work`` was given had waited."""
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, given: _A, due_s: float = math.inf) -> "asyncio.Future[_B]":
        """This one's result, the earliest ``due_s`` first; without: it can wait for others.

        Raises:
            EngineStoppedError: the thread has been stopped.
        """
        done: asyncio.Future[_B] = asyncio.get_running_loop().create_future()
        call = _Call(due_s, next(self._numbers), given, done)
        with self._changed:
            if self._stopped:
                raise _stopped()
            heappush(self._calls, call)
            if self._calls[0] is call:  # else the thread wakes for one that goes before it
                self._changed.notify()
        return done

    def take_back(self, done: "asyncio.Future[_B]") -> bool:
        """Cancel what ``put`` gave; False, and it goes on, if it has begun."""
        with self._changed:
            call = next((call for call in self._calls if call.done is done), None)
            if call is None:
                return False
            self._calls.remove(call)
            heapify(self._calls)
        return done.cancel()

    async def run(self, job: Callable[[], _T]) -> _T:
        """What ``job`` returns; done on the thread before whatever waits, by itself and in turn."""
        return await asyncio.wrap_future(self._put(job, in_turn=True))

    def post(self, job: Callable[[], _T]) -> "Future[_T]":
        """``run`` without waiting for it, and at once: for what takes hardly any time."""
        return self._put(job, in_turn=False)

    def stop(self) -> None:
        """End the thread after the run that it is at; refuse all others."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        for job, _ in self._jobs:
            job.refuse(_stopped())
        _settle([(call, _stopped()) for call in self._calls])
        self._jobs.clear()
        self._calls.clear()

    def _put(self, work: Callable[[], _T], *, in_turn: bool) -> "Future[_T]":
        job = Job(work)
        with self._changed:
            if self._stopped:
                raise _stopped()
            self._jobs.append((job, in_turn))
            self._changed.notify()
        return job.done

    def _run(self) -> None:
        while self._wait():
            with self._deadline_lock.turn(self._due_s) if self._deadline_lock else nullcontext():
                self._do(self._next())

    def _wait(self) -> bool:
        """Wait for work, and do jobs that are quick; False at the end."""
        while True:
            with self._changed:
                while not (self._jobs or self._stopped) and (left_s := self._left_s()) > 0:
                    self._changed.wait(None if math.isinf(left_s) else left_s)
                if self._stopped:
                    return False
                if not self._jobs or self._jobs[0][1]:
                    return True
                job, _ = self._jobs.popleft()
            self._do(job)
            del job  # it may hold much, and the next one may be long in coming

    def _left_s(self) -> float:
        """For how long the calls in line wait for others; infinity: there are none."""
        if not self._calls:
            return math.inf
        if self._calls[0].due_s < math.inf:
            return 0.0
        return self._begun_s + self._batch_delay_s - time.monotonic()

    def _due_s(self) -> float:
        """When what is next is due by now."""
        with self._changed:
            return self._calls[0].due_s if self._calls and not self._jobs else -math.inf

    def _next(self) -> list[_Call] | Job[Any]:
        """A job, or else those calls that are due first whose askers still wait."""
        calls = list[_Call]()
        with self._changed:
            if self._jobs:
                return self._jobs.popleft()[0]
            while self._calls and len(calls) < self._most:
                call = heappop(self._calls)
                if not call.done.cancelled():
                    calls.append(call)
        return calls

    def _do(self, found: list[_Call] | Job[Any]) -> None:
        """Do a job, or calls in one run; a result may be an error for its asker."""
        if isinstance(found, Job):
            with self._within():
                found.run()
        elif found:
            self._begun_s = time.monotonic()
            self.waited_s = time.perf_counter() - found[0].asked_s
            results: Sequence[_B | Exception]
            try:
                with self._within():
                    results = self._work([call.given for call in found])
            except Exception as error:
                results = [error] * len(found)
            _settle(list(zip(found, results, strict=True)))


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the host is not running: it has ended")


def _settle(results: list[tuple[_Call, Any]]) -> None:
    """Give askers their results, all of one loop in one call of it."""

    def settle(loop: asyncio.AbstractEventLoop) -> None:
        for call, result in results:
            if call.done.get_loop() is not loop or call.done.done():
                continue
            if isinstance(result, Exception):
                call.done.set_exception(result)
            else:
                call.done.set_result(result)

    for loop in {call.done.get_loop() for call, _ in results}:
        with suppress(RuntimeError):  # it has ended, and nobody waits
            loop.call_soon_threadsafe(settle, loop)


class PagePool:
    """Pages by number, each free or somebody's. Plain bookkeeping: nothing here holds a page.

    Pages given back last are taken first: what was written to before is in caches, and need not be
    taken from the system anew. One thread may take while others give.
    """

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self._free = deque(pages)
        self._free.reverse()
        self.size = len(self._free)
        """All there are, free or not."""

    @property
    def free(self) -> int:
        """Pages that ``take`` can give."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that somebody holds."""
        return self.size - self.free

    def take(self, count: int) -> list[int] | None:
        """``count`` pages of one's own; None, and none is taken, where there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)

    def grow(self, pages: Iterable[int]) -> None:
        """Have more pages, taken after all others."""
        new = list(pages)
        self.size += len(new)
        self._free.extendleft(new)


# Parts of one computation.


_MOST_HELPERS = 2
"""Threads beside the caller's: no more parts than three are ever computed at once."""


class Helpers:
    """Threads that compute parts beside their caller; none where torch shares single operations."""

    pool: ThreadPoolExecutor | None = None
    count = 0

    @classmethod
    def begin(cls) -> None:
        """Have as many as there are other cores for this process, up to two."""
        # Not every system tells which cores a process may use.
        ours = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        cls.count = min(_MOST_HELPERS, len(ours) - 1)
        if cls.pool is None and cls.count:
            cls.pool = ThreadPoolExecutor(cls.count, "mosstalk-beside")


def at_once(parts: Sequence[Callable[[], _T]], device: "torch.device") -> list[_T]:
    """What each of ``parts``, which compute on ``device``, returns, in their order.

    They are begun in their order: by the caller alone, or by several threads where
    ``device.fit_threads`` found a small model on a CPU. One of their exceptions is raised once
    none of them runs.
    """
    import torch

    pool = Helpers.pool
    if pool is None or device.type != "cpu":
        return [part() for part in parts]
    numbers, results = iter(range(len(parts))), cast(list[_T], [None] * len(parts))
    mode = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(mode):
            for number in numbers:
                results[number] = parts[number]()

    beside = range(min(Helpers.count, len(parts) - 1))
    helpers = [pool.submit(copy_context().run, work) for _ in beside]
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()
    return results
