"""What many conversations share: a processor, for whoever's sound runs out first, and pages.

Storage of a page pool lies where it was allocated for as long as graphs read it, because a
captured graph holds addresses. So its size follows from a stated budget. Who finds too few pages
does without: the engine lets another reply wait, a decoder or a tokenizer refuses with a typed
error, and whoever asked them waits for others to end, for a bounded time, and asks again.
"""

from collections import deque
from collections.abc import Iterable, Iterator
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
