"""Which pages of a storage are free: the same for K and V, flow and tokenizer.

Storage of a page pool lies where it was allocated for as long as graphs read it, because a
captured graph holds addresses. So its size follows from a stated budget. Who finds too few pages
does without: the engine lets another reply wait, a decoder or a tokenizer refuses with a typed
error, and whoever asked them waits for others to end, for a bounded time, and asks again.
"""

from collections import deque
from collections.abc import Iterable


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
