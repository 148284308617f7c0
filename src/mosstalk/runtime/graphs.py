"""CUDA graphs: captured before anybody waits, by bucket; how many there are, and what they hold.

A user of graphs lists its buckets and has them captured while a process starts. What comes later
runs in the smallest bucket that holds it, and is admitted only if there is one: a capture in the
middle of a reply would hold up everybody. Should one happen all the same it is logged and counts
as ``BusyPart.CAPTURE``.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any, Generic, TypeVar

import torch

from mosstalk.runtime.busy import BusyPart, at_work

_LOG = logging.getLogger(__name__)
DECODING, LISTENING, STEPPING = "decoding", "listening", "stepping"
"""What graphs are for that are captured on one stream."""
_ERRORS = "thread_local"
"""Only what the capturing thread must not do is an error: others go on with their work."""
_one_at_a_time = RLock()
Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")
"""What a captured call returned: tensors that each replay writes anew."""


@dataclass
class Captures:
    """What graphs of this process have taken: how many, and their memory in bytes.

    Attributes:
        late: those of ``count`` that were captured after ``expect_no_more``.
    """

    count: int = 0
    nbytes: int = 0
    late: int = 0

    def __str__(self) -> str:
        return f"{self.count} graphs, {self.nbytes / 2**30:.1f} GiB"


CAPTURES = Captures()
"""Of this process."""
_ready = False


def expect_no_more() -> None:
    """From now on somebody waits for replies: each further capture is logged as a fault."""
    global _ready
    _ready = True


@cache
def capture_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """The stream of ``device`` on which all graphs of one ``use`` are captured.

    cuBLAS has a workspace for every stream, 32 MiB on an H100, which a graph goes on working in:
    with a stream each, graphs would keep one each. Graphs that may run at the same time must not
    share one, so they are of different uses.
    """
    del use
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device, use: str) -> Iterator[torch.cuda.Stream]:
    """That stream, after all that was queued before, for one thread at a time."""
    with _one_at_a_time:
        stream, current = capture_stream(device, use), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        yield stream
        current.wait_stream(stream)


def captured(
    compute: Callable[[], None],
    device: torch.device,
    use: str,
    pool: Any,
    warm_ups: int = 1,
    *,
    empty_caches: bool = True,
) -> torch.cuda.CUDAGraph:
    """``compute`` as a graph, after as many calls as libraries need to make what they keep.

    ``pool``: torch's handle of memory that graphs share which never run at the same time, from
    ``torch.cuda.graph_pool_handle``; None is memory of its own. ``empty_caches``: wait for the
    device and return what memory is free to it before; to be turned off in the middle of a
    conversation. Other threads may be at work on the device meanwhile.
    """
    graph, begun_s = torch.cuda.CUDAGraph(), time.perf_counter()
    with at_work(BusyPart.CAPTURE), _beside(device, use) as stream, torch.cuda.stream(stream):
        for _ in range(warm_ups):
            compute()
        if empty_caches:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        graph.capture_begin(pool=pool, capture_error_mode=_ERRORS)
        try:
            compute()
        finally:
            graph.capture_end()
        left, _ = torch.cuda.mem_get_info(device)
        _note(use, max(0, free - left), time.perf_counter() - begun_s)
    return graph


def _note(use: str, nbytes: int, seconds: float) -> None:
    CAPTURES.count += 1
    CAPTURES.nbytes += nbytes
    if _ready:
        CAPTURES.late += 1
        _LOG.warning("a graph for %s was captured in traffic: %.0f ms", use, 1000 * seconds)


class Graphs(Generic[Key, Made]):
    """Graphs of one user, by bucket; they follow one another, and so share one pool of memory.

    ``enabled`` False, as on a CPU: there is none, and whoever asks computes without. The largest
    bucket should come first: what its graph works in, the others' graphs can work in too.
    """

    def __init__(
        self, device: torch.device, use: str, *, enabled: bool = True, warm_ups: int = 1
    ) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.nbytes = 0
        """Memory that they took."""
        self._device, self._use, self._warm_ups = device, use, warm_ups
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, Made]] = {}
        self._pool: Any = None  # torch's handle of their memory

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def __getitem__(self, key: Key) -> Made:
        """What the captured call of a bucket returned."""
        return self._captured[key][1]

    def ready(self, key: Key, compute: Callable[[], Made]) -> bool:
        """Capture ``compute`` for a bucket unless it was; False where there are to be no graphs.

        ``compute`` is run before, so what it reads must be inputs that change nothing.
        """
        if not self.enabled:
            return False
        if key not in self._captured:
            first = self._pool is None
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            before = CAPTURES.nbytes
            made = list[Made]()

            def run() -> None:
                made[:] = [compute()]

            # Memory of what ran before is returned once, and never in the middle of a reply.
            graph = captured(
                run, self._device, self._use, self._pool, self._warm_ups,
                empty_caches=first and not _ready,
            )  # fmt: skip
            self._captured[key] = graph, made[0]
            self.nbytes += CAPTURES.nbytes - before
        return True

    def replay(self, key: Key) -> Made:
        """Run the graph of a bucket on the current stream; what the captured call returned."""
        graph, made = self._captured[key]
        graph.replay()
        return made

    def forget(self) -> None:
        """Drop all of them: what they read has moved. Their pool of memory ends with them."""
        self._captured.clear()
        self._pool, self.nbytes = None, 0
