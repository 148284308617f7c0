"""Threads for the heavy work of many sessions: by deadline, or gathered into one run."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Any, Generic, TypeVar

from mosstalk.engine.async_engine import Job
from mosstalk.errors import EngineStoppedError
from mosstalk.runtime.deadline_lock import DeadlineLock

_T = TypeVar("_T")
_A = TypeVar("_A")
_B = TypeVar("_B")
_AT_ONCE = float("-inf")
_GONE = EngineStoppedError("the host is not running: it has ended")


class _Door:
    """Lets nobody in any more once it is shut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shut = False

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._lock:
            if self._shut:
                raise EngineStoppedError("the host is not running: it has ended")
            yield

    def shut(self) -> None:
        with self._lock:
            self._shut = True


@dataclass(frozen=True)
class _Call(Generic[_A, _B]):
    """What one asker gave, and what came of it."""

    given: _A
    done: Future[_B] = field(default_factory=Future)

    def refuse(self, error: Exception) -> None:
        """End it undone."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


def _do_calls(
    work: Callable[[list[_A]], Sequence[_B | Exception]], calls: "list[_Call[_A, _B]]"
) -> None:
    """Do those whose askers still wait, in one run; a result that is an error is raised there."""
    calls = [call for call in calls if call.done.set_running_or_notify_cancel()]
    try:
        results = work([call.given for call in calls]) if calls else []
    except Exception as error:
        for call in calls:
            call.done.set_exception(error)
        return
    for call, result in zip(calls, results, strict=True):
        if isinstance(result, Exception):
            call.done.set_exception(result)
        else:
            call.done.set_result(result)


class DeadlineBatcher(Generic[_A, _B]):
    """One thread that does what is due first, together with up to ``most`` - 1 others in line.

    ``work`` gets what was given, the earliest first, and returns as many results, of which one
    may be an error for its asker. What it raises, all of that run get. A call whose asker has been
    cancelled is dropped unless it has begun. With a ``deadline_lock`` each run waits its turn among
    others who compute.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[_A]], Sequence[_B | Exception]],
        most: int,
        deadline_lock: DeadlineLock | None = None,
    ) -> None:
        self._work, self._most, self._deadline_lock = work, most, deadline_lock
        self._door = _Door()
        self._queue: PriorityQueue[tuple[float, int, _Call[_A, _B] | Job[Any] | None]]
        self._queue = PriorityQueue()
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, given: _A, due_s: float) -> _B:
        """This one's result; the earliest ``due_s`` first."""
        call = _Call[_A, _B](given)
        self._put(due_s, call)
        return await asyncio.wrap_future(call.done)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns; done on the thread before whatever waits, by itself."""
        return await asyncio.wrap_future(self.post(work))

    def post(self, work: Callable[[], _T]) -> "Future[_T]":
        """``run`` without waiting for it."""
        job = Job(work)
        self._put(_AT_ONCE, job)
        return job.done

    def stop(self) -> None:
        """End the thread after the run that it is at; refuse all others."""
        self._door.shut()
        self._queue.put((_AT_ONCE, -1, None))
        self._thread.join()
        while not self._queue.empty():
            waiting = self._queue.get()[2]
            if waiting:
                waiting.refuse(_GONE)

    def _put(self, due_s: float, what: "_Call[_A, _B] | Job[Any]") -> None:
        with self._door.open():
            self._queue.put((due_s, next(self._numbers), what))

    def _run(self) -> None:
        while True:
            due_s, _, first = self._queue.get()
            if first is None:
                return
            with self._deadline_lock.turn(due_s) if self._deadline_lock else nullcontext():
                if isinstance(first, Job):
                    first.run()
                elif not first.done.cancelled():
                    _do_calls(self._work, [first, *self._joining()])
            del first  # it may hold much, and the next one may be long in coming

    def _joining(self) -> "Iterator[_Call[_A, _B]]":
        """Who is in line after the first, up to the first that must be done by itself."""
        room = self._most - 1
        while room:
            try:
                due_s, number, what = self._queue.get_nowait()
            except Empty:
                return
            if not isinstance(what, _Call):
                self._queue.put((due_s, number, what))
                return
            if not what.done.cancelled():
                room -= 1
                yield what


class Batcher(Generic[_A, _B]):
    """One thread that does what many have asked for since it last looked in one run.

    ``work`` gets what was given, in order, and returns as many results, of which one may be an
    error for its asker. What it raises, all of that run get.
    """

    def __init__(self, name: str, work: Callable[[list[_A]], Sequence[_B | Exception]]) -> None:
        self._work = work
        self._door = _Door()
        self._calls: SimpleQueue[_Call[_A, _B] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, given: _A) -> _B:
        """This one's result."""
        call = _Call[_A, _B](given)
        with self._door.open():
            self._calls.put(call)
        return await asyncio.wrap_future(call.done)

    def stop(self) -> None:
        """End the thread after what it was asked so far; refuse what comes later."""
        self._door.shut()
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Nothing of a run is kept while the next one is waited for: it may be large.
        while calls := self._next():
            _do_calls(self._work, calls)
            calls.clear()

    def _next(self) -> "list[_Call[_A, _B]]":
        """All that was asked, at least one; nothing at the end."""
        calls: list[_Call[_A, _B]] = []
        call = self._calls.get()
        with suppress(Empty):
            while call:
                calls.append(call)
                call = self._calls.get_nowait()
            if calls:
                self._calls.put(None)  # the end, after these
        return calls
