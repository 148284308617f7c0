"""Notes which files run in this process: ``test_turn_files`` puts this folder on ``PYTHONPATH``.

After SIGUSR1 it begins anew, after SIGUSR2 it writes what has run since then, one path a line, into
the folder that ``TURN_FILES`` names. Every thread of the process is noted.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

FOLDER = os.environ.get("TURN_FILES")
_ran: set[str] = set()


def _note(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _ran.add(frame.f_code.co_filename)


def _begin(*_: object) -> None:
    _ran.clear()
    _write("begun", "")


def _tell(*_: object) -> None:
    _write("ran", "\n".join(_ran.copy()))


def _write(name: str, text: str) -> None:
    path = Path(str(FOLDER), f"{name}-{os.getpid()}")
    whole = path.with_suffix(".part")
    whole.write_text(text)
    whole.rename(path)


if FOLDER:
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _tell)
    threading.setprofile(_note)
    sys.setprofile(_note)
