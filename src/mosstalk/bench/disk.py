"""How fast a disk gives files, and how much of them the system holds in memory already."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 24
_MOST_READ = 8 << 30
"""Bytes after which the rate is known."""


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
        told = "unknown whether from memory" if self.cached is None else _share(self.cached)
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


def _share(cached: float) -> str:
    return f"{cached:.0%} of it from memory"
