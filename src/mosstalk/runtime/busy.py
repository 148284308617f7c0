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
    """Seconds by the clock, of them those of the thread's processor, and those of a GPU."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    card_s: float = 0.0


@dataclass
class Work:
    """What is being done; ``part`` may be changed as long as it is."""

    part: BusyPart


_lock = threading.Lock()
_spent: dict[BusyPart, Busy] = {}


@contextmanager
def at_work(part: BusyPart) -> Iterator[Work]:
    """Count the time that this thread spends in here."""
    work, wall_s, cpu_s = Work(part), time.perf_counter(), time.thread_time()
    try:
        yield work
    finally:
        spend(work.part, time.perf_counter() - wall_s, time.thread_time() - cpu_s)


def spend(part: BusyPart, wall_s: float = 0.0, cpu_s: float = 0.0, card_s: float = 0.0) -> None:
    """Count seconds that ``part`` was at work."""
    with _lock:
        before = _spent.get(part, Busy())
        _spent[part] = Busy(before.wall_s + wall_s, before.cpu_s + cpu_s, before.card_s + card_s)


def taken() -> dict[BusyPart, Busy]:
    """What every part of this process has spent since this was last asked; from any thread."""
    global _spent
    with _lock:
        spent, _spent = _spent, {}
    return spent
