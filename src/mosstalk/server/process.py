"""Processes of a server: what starts one, what every one does, and what is known of its memory.

``python -m mosstalk.server.process MODULE FD`` is such a process: it runs ``MODULE.run`` with its
end of a socket pair, whose number is ``FD``, as argument.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from select import poll

from mosstalk.environment import environment_of_a_child, share_the_processor
from mosstalk.server.logs import bounded_output

_PR_SET_PDEATHSIG = 1
"""Which signal a process gets when its parent dies: prctl(2)."""
_TRIM_EVERY_S = 20.0


def start_child(module: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A fresh interpreter that runs ``module.run`` with its end of a socket pair, and our end.

    Nothing is shared with it but the socket: no fork of a process that has threads.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", __name__, module, str(theirs.fileno())]
        process = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment_of_a_child(),
        )
    return process, ours


def main(module: str, descriptor: str) -> None:
    """Run ``module`` to its end, then leave without waiting for threads that still compute.

    It ends when it is told to, when it fails, and at once when the front is gone; signals that a
    terminal or a supervisor sends to the whole group are the front's to deal with.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    share_the_processor()
    end = socket.socket(fileno=int(descriptor))
    _end_with_parent(end.fileno())
    with bounded_output():
        try:
            code = import_module(module).run(end)
        except BaseException:
            logging.getLogger(module).exception("the process ends")
            code = 1
    os._exit(code)


def _end_with_parent(descriptor: int) -> None:
    """Have this process killed once the one that started it is gone, whatever this one does.

    ``descriptor`` is its end of the pair. On Linux the kernel kills it, even while code computes
    that keeps every other thread of Python waiting; elsewhere a thread does, which sees the pair
    broken. The kernel goes by the thread that called ``start_child``, so that must be one that
    lives as long as its process does.
    """
    threading.Thread(target=_end_when_closed, args=(descriptor,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_when_closed(descriptor: int) -> None:
    waiting = poll()
    waiting.register(descriptor, 0)  # nothing but that the other end was closed
    waiting.poll()
    os._exit(1)


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
        await asyncio.sleep(_TRIM_EVERY_S)
        await asyncio.to_thread(trim, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
