"""Where a turn's time goes: stages, their counts and shares, on a wall clock."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mosstalk.runtime.device import synchronize

STAGES = ("encode", "prefill", "step", "hop")


class Span(NamedTuple):
    """One run of a stage: when it began on ``time.perf_counter`` and how long it took."""

    stage: str
    start_s: float
    ms: float


@dataclass
class TurnTimings:
    """Milliseconds of every run of every stage of one turn, and what followed from them."""

    device: torch.device
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    starts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    rows_prefilled: int = 0
    committed_s: float | None = None
    first_audio_ms: float | None = None

    @classmethod
    def together(cls, turns: Sequence["TurnTimings"]) -> "TurnTimings":
        """Several turns of one device as one: their runs in order, the first one's first audio."""
        whole = cls(turns[0].device)
        for turn in turns:
            for name in STAGES:
                # A run is taken back by dropping its time alone.
                whole.stages[name] += turn.stages[name]
                whole.starts[name] += turn.starts[name][: len(turn.stages[name])]
            whole.rows_prefilled += turn.rows_prefilled
        whole.committed_s = turns[0].committed_s
        whole.first_audio_ms = turns[0].first_audio_ms
        return whole

    def commit(self) -> None:
        """Start the clock that first audio is measured by: the user's turn is complete."""
        if self.committed_s is None:
            self.committed_s = time.perf_counter()

    def note_first_audio(self) -> None:
        """The answer has sound: the first call after ``commit`` sets ``first_audio_ms``."""
        if self.first_audio_ms is None and self.committed_s is not None:
            self.first_audio_ms = 1000 * (time.perf_counter() - self.committed_s)

    @contextmanager
    def stage(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Time one run of a stage, waiting for the device before the clock is read.

        Without ``wait`` the stage has waited for what it made, and other work may be under way.
        """
        start = time.perf_counter()
        yield
        if wait:
            synchronize(self.device)
        self.stages[name].append(1000 * (time.perf_counter() - start))
        self.starts[name].append(start)

    def spans(self) -> list[Span]:
        """Every run of every stage in the order they began; runs taken back are left out."""
        # A run is taken back by dropping its time, always the last: ``zip`` drops its start.
        spans = [
            Span(name, start, ms)
            for name, runs in self.stages.items()
            for start, ms in zip(self.starts[name], runs, strict=False)
        ]
        return sorted(spans, key=lambda span: span.start_s)

    @property
    def total_ms(self) -> float:
        """Time spent in all stages."""
        return sum(map(sum, self.stages.values()))

    def real_time_factor(self, audio_s: float) -> float | None:
        """Compute time over the length of the answer's sound; below 1 keeps up with speech."""
        return self.total_ms / 1000 / audio_s if audio_s else None


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """Largest resident memory of this process, and of its tensors on a GPU, in MiB."""
    peaks: dict[str, float] = {}
    try:
        import resource
    except ImportError:  # Windows has no such counter
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peaks["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    if device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(device) / 2**20
    return peaks
