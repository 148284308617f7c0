"""Threads for the heavy work of many sessions: by deadline, or gathered into one run."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Any, Generic, TypeVar

from mosstalk.engine.jobs import Job
from mosstalk.engine.turnstile import Turnstile
from mosstalk.errors import EngineStoppedError

_T = TypeVar("_T")
_A = TypeVar("_A")
_B = TypeVar("_B")
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


class Workers:
    """Threads that always take the job that is due first.

    A job whose asker has been cancelled is dropped unless it has begun. With a ``turnstile``
    each waits its turn among others who compute.
    """

    def __init__(self, name: str, threads: int, turnstile: Turnstile | None = None) -> None:
        self._turnstile = turnstile
        self._door = _Door()
        self._jobs: PriorityQueue[tuple[float, int, Job[Any] | None]] = PriorityQueue()
        self._numbers = count()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], _T], due_s: float = 0.0) -> _T:
        """What ``work`` returns; done on one of the threads, the earliest ``due_s`` first."""
        job = Job(work)
        with self._door.open():
            self._jobs.put((due_s, next(self._numbers), job))
        return await asyncio.wrap_future(job.done)

    def stop(self) -> None:
        """End the threads after the jobs they are at; refuse all others."""
        self._door.shut()
        for _ in self._threads:
            self._jobs.put((float("-inf"), next(self._numbers), None))
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            job = self._jobs.get()[2]
            if job:
                job.refuse(_GONE)

    def _run(self) -> None:
        while True:
            due_s, _, job = self._jobs.get()
            if job is None:
                return
            with self._turnstile.turn(due_s) if self._turnstile else nullcontext():
                job.run()
            del job  # it may hold much, and the next one may be long in coming


@dataclass(frozen=True)
class _Call(Generic[_A, _B]):
    """What one asker gave, and what came of it."""

    given: _A
    done: Future[_B] = field(default_factory=Future)


class Gathering(Generic[_A, _B]):
    """One thread that does what many have asked for since it last looked in one run.

    ``work`` gets what was given, in order, and returns as many results. What it raises, all of
    that run get: what can be wrong with one must be checked before.
    """

    def __init__(self, name: str, work: Callable[[list[_A]], list[_B]]) -> None:
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
            self._do([call for call in calls if call.done.set_running_or_notify_cancel()])
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

    def _do(self, calls: "list[_Call[_A, _B]]") -> None:
        try:
            results = self._work([call.given for call in calls]) if calls else []
        except Exception as error:
            for call in calls:
                call.done.set_exception(error)
            return
        for call, result in zip(calls, results, strict=True):
            call.done.set_result(result)
