"""One at a time on one processor: whoever's sound runs out first."""

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Condition


class DeadlineLock:
    """Lets one thread compute at a time, the one whose work is due first.

    Side by side on one processor, or behind one interpreter lock, work that could wait makes
    work that cannot take twice as long.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._numbers = count()
        self._waiting: list[tuple[float, int]] = []
        self._inside = False

    @property
    def queue(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, due_s: float, timeout_s: float | None = None) -> bool:
        """Wait for one's turn; False if it did not come within ``timeout_s``."""
        me = (due_s, next(self._numbers))
        with self._changed:
            heappush(self._waiting, me)
            come = self._changed.wait_for(lambda: self._is_next(me), timeout_s)
            if come:
                heappop(self._waiting)
                self._inside = True
            else:
                self._waiting.remove(me)
                heapify(self._waiting)
                self._changed.notify_all()
            return come

    def leave(self) -> None:
        """Let the next one in."""
        with self._changed:
            self._inside = False
            self._changed.notify_all()

    @contextmanager
    def turn(self, due_s: float) -> Iterator[None]:
        """Compute in here."""
        self.enter(due_s)
        try:
            yield
        finally:
            self.leave()

    def _is_next(self, me: tuple[float, int]) -> bool:
        return not self._inside and self._waiting[0] == me
