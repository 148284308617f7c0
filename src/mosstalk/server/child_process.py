"""Starting a process of this package at the other end of a socket pair."""

import socket
import subprocess
import sys

from mosstalk.settings import environment_of_a_child


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
