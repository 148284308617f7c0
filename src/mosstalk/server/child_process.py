"""Starting a process of this package at the other end of a socket pair, and its end with ours."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from select import poll

from mosstalk.environment import environment_of_a_child

_PR_SET_PDEATHSIG = 1
"""Which signal a process gets when its parent dies: prctl(2)."""


def start_child(module: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A fresh interpreter that runs ``module`` with its end's number, and our end.

    Nothing is shared with it but the socket: no fork of a process that has threads.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", module, str(theirs.fileno())]
        process = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment_of_a_child(),
        )
    return process, ours


def end_with_parent(descriptor: int) -> None:
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
