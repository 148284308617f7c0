"""How long the parts of a process are at work, for whoever asks what they cost.

The seconds are those of threads: by the clock, waits for a GPU included, and of the processor,
where the interpreter runs and, without a GPU, torch computes.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import add
from typing import NamedTuple


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
