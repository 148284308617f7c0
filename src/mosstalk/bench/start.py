"""How long a built folder takes from nothing to the first sound, beside what its disk gives."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.errors import BenchError
from mosstalk.prepared.default_models import BuiltEngine
from mosstalk.progress import Progress
from mosstalk.reporting.tables import Table

_BLOCK = 1 << 24
_MOST_READ = 8 << 30
"""Bytes after which the rate is known."""
PARTS = ("process", "imports", "weights", "warming up", "first audio")
_LONGEST_S = 1800


@dataclass(frozen=True)
class DiskRate:
    """Bytes read one after another, seconds, and the share of them that was in memory before.

    ``cached`` None: the system does not tell.
    """

    bytes: int
    seconds: float
    cached: float | None

    @property
    def gb_s(self) -> float:
        """In 10^9 bytes a second."""
        return self.bytes / self.seconds / 1e9

    def describe(self) -> str:
        """For people: the rate, and whether it is the disk's."""
        told = (
            "unknown whether from memory"
            if self.cached is None
            else f"{self.cached:.0%} of it from memory"
        )
        return f"{self.bytes / 1e9:.2f} GB at {self.gb_s:.2f} GB/s, {told}"


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in a folder and below it."""
    kinds = (".safetensors", ".pt")
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds)


def evict(files: Sequence[Path]) -> None:
    """Ask the system to forget what it holds of these files; it may decline."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[Path]) -> float | None:
    """Share of these files' pages that are in memory, by mincore(2); None where it is not told."""
    pages = [_resident(path) for path in files if path.stat().st_size]
    if not pages or None in pages:
        return None
    known = [each for each in pages if each]
    return sum(held for held, _ in known) / sum(count for _, count in known)


def read_rate(files: Sequence[Path]) -> DiskRate:
    """Read the files one after another, 8 GiB of them at most."""
    cached, done, buffer = cached_share(files), 0, bytearray(_BLOCK)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while done < _MOST_READ and (count := file.readinto(buffer)):
                done += count
    return DiskRate(done, time.perf_counter() - started, cached)


def _resident(path: Path) -> tuple[int, int] | None:
    """Pages in memory, and pages."""
    size = path.stat().st_size
    try:
        look = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        count = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        start = (ctypes.c_char * size).from_buffer(mapped)
        failed = look(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found)
        del start
        return None if failed else (sum(page & 1 for page in bytes(found)), count)


@dataclass(frozen=True)
class Starts:
    """All that was measured of one folder.

    ``starts``: what each start found, its name, and how much of the weights memory held before.
    """

    weight_bytes: int
    disk: DiskRate
    starts: list[dict[str, Any]]

    def table(self) -> Table:
        """For people."""
        lines = [
            (
                start["name"],
                "?" if start["cached"] is None else f"{start['cached']:.0%}",
                *(f"{start['parts_s'][part]:.2f}" for part in PARTS),
                f"{start['first_audio_s']:.2f}",
                str(start["compiled"]),
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


def _start(folder: Path, device: str, name: str, cached: float | None) -> dict[str, Any]:
    words = [sys.executable, "-m", "mosstalk.build.probe", str(folder), device]
    try:
        run = subprocess.run(
            [*words, str(time.time())],
            capture_output=True, text=True, timeout=_LONGEST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name} of {folder} made no sound within {_LONGEST_S} s") from None
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        why = run.stderr.strip().splitlines()
        raise BenchError(f"{name} of {folder} failed: {why[-1] if why else 'it printed nothing'}")
    found: dict[str, Any] = json.loads(lines[-1])
    return {"name": name, "cached": cached} | found
