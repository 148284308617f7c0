"""What a build that was killed leaves: a hidden folder, which the next build of that name removes.

A lock of the system's says whether its maker is still at work: it goes with the process. On Windows
there is none such, and leftovers stay.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LOCK = ".building"


@contextmanager
def at_work(part: Path) -> Iterator[None]:
    """Mark the folder ``part`` as being written, for as long as the block runs."""
    lock = part / _LOCK
    with lock.open("w") as file:
        _taken(file)
        yield
    lock.unlink()


def clear_leftovers(out: Path) -> int:
    """Remove what killed builds of ``out`` left beside it; return how many there were."""
    found = [part for part in out.absolute().parent.glob(f".{out.name}.*.part") if _dead(part)]
    for part in found:
        shutil.rmtree(part, ignore_errors=True)
    return len(found)


def _dead(part: Path) -> bool:
    lock = part / _LOCK
    if not lock.is_file():
        return False
    with lock.open() as file:
        return _taken(file)


def _taken(file: IO[str]) -> bool:
    """Take a file's lock, unless another process has it; whether it was taken."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
