"""How long something takes: warm-ups apart, a cold run on its own, every run checked.

A run whose output is not right is no run: the figures of a measurement with one such run are
not given (``Timed.require_valid``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from mosstalk.errors import BenchError
from mosstalk.numerics.fp8 import E4M3, Fp8Weight
from mosstalk.ops.linear_fp8 import fp8_library, library_takes
from mosstalk.plan.limits import Ceilings
from mosstalk.reporting.tables import NONE, Table
from mosstalk.runtime.device import synchronize

_T = TypeVar("_T")
COLUMNS = ("", "n", "mean", "std", "min", "p50", "p95", "max", "cold", "limit", "valid")
NOTE = (
    "Milliseconds. cold: the first run of all, with all that is made once. limit: what the bytes "
    "or the operations take at the rates measured in this run. valid: runs whose output had the "
    "right shape, was finite, wholly written, and equal to that of an untimed run."
)
_COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
_SIDE = {"cuda": 8192, "cpu": 1024}
_RUNS = 5


@dataclass(frozen=True)
class Timed:
    """``runs_ms`` after ``warm_ups`` others; ``wrong`` says of each run that was not right why.

    ``limit_ms`` is what the hardware allows at the least, where it is known.
    """

    name: str
    cold_ms: float | None
    warm_ups: int
    runs_ms: tuple[float, ...]
    wrong: tuple[str, ...] = ()
    limit_ms: float | None = None

    @property
    def n(self) -> int:
        """Timed runs."""
        return len(self.runs_ms)

    @property
    def p50_ms(self) -> float:
        """The median."""
        return self.percentile(50)

    def percentile(self, share: float) -> float:
        """The time that ``share`` % of the runs kept to."""
        return float(np.percentile(self.runs_ms, share))

    def require_valid(self) -> "Timed":
        """Itself.

        Raises:
            BenchError: a run was wrong, so that its time says nothing.
        """
        if self.wrong:
            raise BenchError(
                f"{self.name}: valid {self.n - len(self.wrong)}/{self.n}, no time is given: "
                f"{self.wrong[0]}"
            )
        return self

    def figures(self) -> dict[str, Any]:
        """As plain values."""
        runs = np.asarray(self.runs_ms)
        return {
            "name": self.name,
            "warm_ups": self.warm_ups,
            "n": self.n,
            "mean_ms": float(runs.mean()),
            "std_ms": float(runs.std(ddof=1)) if self.n > 1 else 0.0,
            "min_ms": float(runs.min()),
            "p50_ms": self.p50_ms,
            "p95_ms": self.percentile(95),
            "max_ms": float(runs.max()),
            "cold_ms": self.cold_ms,
            "limit_ms": self.limit_ms,
            "valid": self.n - len(self.wrong),
        }


def timed_table(title: str, rows: Sequence[Timed], note: str = "") -> Table:
    """A row for each measurement; all must be valid."""
    lines = [_line(row.require_valid()) for row in rows]
    return Table(title, f"{note} {NOTE}".strip(), COLUMNS, tuple(lines))


def _line(row: Timed) -> tuple[str, ...]:
    figures = row.figures()
    names = ("mean_ms", "std_ms", "min_ms", "p50_ms", "p95_ms", "max_ms", "cold_ms", "limit_ms")
    cells = [NONE if figures[name] is None else f"{figures[name]:.2f}" for name in names]
    return (row.name, str(row.n), *cells, f"{figures['valid']}/{row.n}")


@dataclass(frozen=True)
class Run(Generic[_T]):
    """One run: what it gave, and how long it took with the device waited for."""

    ms: float
    output: _T


def run_timed(work: Callable[[], _T], device: torch.device) -> Run[_T]:
    """Do ``work`` on an idle device and wait until the device has done it."""
    synchronize(device)
    start = time.perf_counter()
    output = work()
    synchronize(device)
    return Run(1000 * (time.perf_counter() - start), output)


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Ceilings:
    """Measure on ``device``; takes up to 8 GiB of it for a moment. ``fp8``: on a GPU, E4M3 too."""
    in_fp8 = _fp8_per_s(device, dtype) if fp8 and device.type == "cuda" else None
    return Ceilings(_copied_per_s(device), _multiplied_per_s(device, dtype), dtype, in_fp8)


def _copied_per_s(device: torch.device) -> float:
    size = _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_s(device, lambda: target.copy_(source))


def _multiplied_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE.get(device.type, _SIDE["cpu"])
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    product = torch.empty_like(a)
    return 2 * side**3 / _best_s(device, lambda: torch.mm(a, b, out=product))


def _fp8_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """By torch's product of rows and channels that have a scale each; None: it has none."""
    side = _SIDE["cuda"]
    values = torch.randn(side, side, device=device).to(dtype)
    weight, out = Fp8Weight.of(values), torch.empty_like(values)
    if not library_takes(weight, dtype):
        return None
    scale = torch.ones(side, device=device)
    rows = values.to(E4M3)
    return 2 * side**3 / _best_s(device, lambda: fp8_library(rows, scale, weight, out))


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    return min(run_timed(work, device).ms for _ in range(_RUNS + 1)) / 1000
