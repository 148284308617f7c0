"""How long the parts of a process are at work, for whoever asks what they cost.

The seconds are those of threads: by the clock, waits for a GPU included, and of the processor,
where the interpreter runs and, without a GPU, torch computes. And those of a GPU by its own clock:
two events are queued around a part's work and read once both have passed, so nothing waits for
the device. A part's time is that from the first to the last of its work on its stream: what runs
beside it on other streams makes it longer, so that all parts together may take more than all of
the time.

The front imports this, and no torch.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import add
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class BusyPart(StrEnum):
    """What a worker's threads do. What lies within another part counts for both."""

    STEP = "step"
    """The engine's steps that make rows of replies alone."""
    PREFILL = "prefill"
    """Steps that read rows of users' turns alone."""
    MIXED = "mixed"
    """Steps that do both."""
    EDIT = "edit"
    """Between steps: conversations that are opened, changed, read ahead and closed."""
    HOP = "hop"
    """Codes to sound."""
    PUSH = "push"
    """Sound to codes, as it comes."""
    REPAIR = "repair"
    """Such pushes in which codes from before had to be made again."""
    DETECT = "detect"
    """Where speech begins and ends."""
    CAPTURE = "capture"
    """CUDA graphs that are captured, within the parts above."""
    SESSION = "session"
    """The thread on which all sessions run, its processor's time alone."""


class Busy(NamedTuple):
    """Seconds by the clock, of them those of the thread's processor, and those of a GPU.

    ``items`` is how many all of the ``runs`` held, ``waited_s`` how long before each of these its
    most urgent item was there: seconds that they waited for a thread, or for others' turn.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    card_s: float = 0.0
    runs: int = 0
    items: int = 0
    waited_s: float = 0.0


@dataclass
class Work:
    """What is being done, for how many items; both may be changed as long as it is."""

    part: BusyPart
    items: int = 1


_lock = threading.Lock()
_spent: dict[BusyPart, Busy] = {}


@contextmanager
def at_work(part: BusyPart, items: int = 1, waited_s: float = 0.0) -> Iterator[Work]:
    """Count the time that this thread spends in here, and a run if it holds any items."""
    work, wall_s, cpu_s = Work(part, items), time.perf_counter(), time.thread_time()
    try:
        yield work
    finally:
        spent_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        spend(work.part, *spent_s, items=work.items, waited_s=waited_s)


def spend(
    part: BusyPart,
    wall_s: float = 0.0,
    cpu_s: float = 0.0,
    card_s: float = 0.0,
    *,
    items: int = 0,
    waited_s: float = 0.0,
) -> None:
    """Count seconds that ``part`` was at work, and a run of so many items if there are any."""
    spent = wall_s, cpu_s, card_s, int(items > 0), items, waited_s
    with _lock:
        _spent[part] = Busy(*map(add, _spent.get(part, Busy()), spent))


def taken() -> dict[BusyPart, Busy]:
    """What every part of this process has spent since this was last asked; from any thread."""
    global _spent
    with _lock:
        spent, _spent = _spent, {}
    return spent


# The time of a card.

_MOST_WAITING = 4096
"""Work whose events nobody reads is not counted: their number has a bound."""


@dataclass(frozen=True)
class _Span:
    """A part's work on a stream of the card."""

    work: Work
    begin: "torch.cuda.Event"
    end: "torch.cuda.Event"


class _Clock:
    """Spans on their way, and events to use again."""

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._waiting: deque[_Span] = deque()
        self._free: list[torch.cuda.Event] = []

    def event(self) -> "torch.cuda.Event":
        """An event that nobody waits for."""
        import torch

        with self._lock:
            return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def note(self, span: _Span) -> None:
        """Have a span counted once it is over."""
        with self._lock:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(span)

    def settle(self) -> None:
        """Count what is over."""
        with self._lock:
            going = deque[_Span]()
            for span in self._waiting:
                if span.end.query():
                    seconds = span.begin.elapsed_time(span.end) / 1000
                    spend(span.work.part, card_s=seconds)
                    self._free += [span.begin, span.end]
                else:
                    going.append(span)
            self._waiting = going


_clock = _Clock()


def count_card_time(*, on: bool = True) -> None:
    """Whether parts' time on a card is counted from now on; it is not unless somebody asks."""
    _clock.on = on


@contextmanager
def on_card(work: Work | BusyPart, device: "torch.device") -> Iterator[None]:
    """Count the time that ``device`` takes for what this thread queues in here, on one stream.

    A ``work`` that is given may change its part until it is counted. On a CPU nothing is done.
    """
    if not _clock.on or device.type != "cuda":
        yield
        return
    import torch

    begin, end = _clock.event(), _clock.event()
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    try:
        yield
    finally:
        end.record(stream)
        _clock.note(_Span(work if isinstance(work, Work) else Work(work), begin, end))


def settle_card_time() -> None:
    """Count what has ended on cards meanwhile; waits for nothing, from any thread."""
    _clock.settle()
