"""How long a GPU is at work for each part of a process, by its own clock.

Two events are queued around a part's work and read once both have passed, so nothing waits for
the device. A part's time is that from the first to the last of its work on its stream: what runs
beside it on other streams makes it longer, so that all parts together may take more than all of
the time.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mosstalk.runtime.busy import BusyPart, Work, spend

_MOST_WAITING = 4096
"""Work whose events nobody reads is not counted: their number has a bound."""


@dataclass(frozen=True)
class _Span:
    """A part's work on a stream of the card."""

    work: Work
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Clock:
    """Spans on their way, and events to use again."""

    def __init__(self) -> None:
        self.runs = False
        self._lock = threading.Lock()
        self._waiting: deque[_Span] = deque()
        self._free: list[torch.cuda.Event] = []

    def event(self) -> torch.cuda.Event:
        """An event that nobody waits for."""
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
    _clock.runs = on


@contextmanager
def on_card(work: Work | BusyPart, device: torch.device) -> Iterator[None]:
    """Count the time that ``device`` takes for what this thread queues in here, on one stream.

    A ``work`` that is given may change its part until it is counted. On a CPU nothing is done.
    """
    if not _clock.runs or device.type != "cuda":
        yield
        return
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
