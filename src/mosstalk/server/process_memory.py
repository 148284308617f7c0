"""Memory of a process that lives long: how much it holds, and giving back what it does not use."""

import asyncio
import ctypes
import os
from pathlib import Path

TIDY_S = 20.0


def resident_bytes() -> int:
    """Resident memory of this process, 0 where that is not known."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def trim_memory_forever() -> None:
    """Every so often, give back what is free: GNU libc keeps it in holes between what is in use.

    Returning it at every release instead (``MALLOC_TRIM_THRESHOLD_``) makes a hop take twice as
    long. Where the C library cannot do it, this ends at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim:
        await asyncio.sleep(TIDY_S)
        await asyncio.to_thread(trim, 0)
