"""How long a built folder takes from nothing to the first sound, beside what its disk gives."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.bench.disk import DiskRate, cached_share, evict, read_rate, weight_files
from mosstalk.bench.tables import Table
from mosstalk.errors import BenchError
from mosstalk.prepared.folder import BuiltEngine
from mosstalk.progress import Progress

PARTS = ("process", "imports", "weights", "warming up", "first audio")
_LONGEST_S = 1800


@dataclass(frozen=True)
class Start:
    """One start: what it found, and how much of the weights memory held before."""

    name: str
    cached: float | None
    found: dict[str, Any]

    def as_values(self) -> dict[str, Any]:
        """For documents."""
        return {"name": self.name, "cached": self.cached} | self.found


@dataclass(frozen=True)
class Starts:
    """All that was measured of one folder."""

    weight_bytes: int
    disk: DiskRate
    starts: list[Start]

    def table(self) -> Table:
        """For people."""
        lines = [
            (
                start.name,
                "?" if start.cached is None else f"{start.cached:.0%}",
                *(f"{start.found['parts_s'][part]:.2f}" for part in PARTS),
                f"{start.found['first_audio_s']:.2f}",
                str(start.found["compiled"]),
            )
            for start in self.starts
        ]
        floor = self.weight_bytes / 1e9 / self.disk.gb_s
        note = (
            f"Seconds from the process's start to the first sound of a reply. Read beforehand: "
            f"{self.disk.describe()}; at that rate the {self.weight_bytes / 1e9:.2f} GB of weights "
            f"take {floor:.2f} s. In memory: share of the weights that the system held before."
        )
        columns = ("", "in memory", *PARTS, "all", "kernels compiled")
        return Table("Starts", note, columns, tuple(lines))


def measure_starts(engine: BuiltEngine, device: str, runs: int, tell: Progress) -> Starts:
    """Read the weights once from the disk, then start so many times, the first from the disk.

    Raises:
        BenchError: a start failed.
    """
    files = weight_files(engine.folder)
    evict(files)
    tell("reading the weights", 0, runs + 1)
    disk = read_rate(files)
    evict(files)
    starts = []
    for run in range(runs):
        tell(f"start {run + 1}", run + 1, runs + 1)
        starts.append(_start(engine.folder, device, f"start {run + 1}", cached_share(files)))
    return Starts(sum(path.stat().st_size for path in files), disk, starts)


def _start(folder: Path, device: str, name: str, cached: float | None) -> Start:
    words = [sys.executable, "-m", "mosstalk.build.probe", str(folder), device]
    run = subprocess.run(
        [*words, str(time.time())],
        capture_output=True, text=True, timeout=_LONGEST_S, check=False,
    )  # fmt: skip
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        why = run.stderr.strip().splitlines()
        raise BenchError(f"{name} of {folder} failed: {why[-1] if why else 'it printed nothing'}")
    return Start(name, cached, json.loads(lines[-1]))
