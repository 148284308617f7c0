"""Host buffers that are copied to a GPU while the host goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

Held = TypeVar("Held")
_ENTRIES = 8


class PinnedRing(Generic[Held]):
    """Entries that take turns, each with a buffer from which copies go to ``device``.

    On a GPU there are eight, whose buffers are pinned, and each is handed out again only after
    its last copy has ended, which has long been so. A CPU has ended a copy at once: there is one.
    ``make`` makes an entry; it is told whether to pin.
    """

    def __init__(self, device: torch.device, make: Callable[[bool], Held]) -> None:
        self._pinned = device.type == "cuda"
        self._entries = [make(self._pinned) for _ in range(_ENTRIES if self._pinned else 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._entries)
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[Held]:
        """The next entry, free to be written; its copy must be queued within, on this stream."""
        self._turn = (self._turn + 1) % len(self._entries)
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        yield self._entries[self._turn]
        if self._pinned:
            copied = self._copied[self._turn] = copied or torch.cuda.Event()
            copied.record()
