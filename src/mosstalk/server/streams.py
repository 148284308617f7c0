"""Standard output and error as streams that never make their writer wait.

Whoever reads a server's output may stop reading: a full pipe would then hold up the whole process
at its next line.
"""

import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STDOUT, _STDERR = 1, 2
_LAST_LINES_S = 1.0
"""How long the last lines may take to be read at the end."""


def _plainly(lost: int) -> str:
    return f"warning: {lost} lines were dropped here: nobody read this output"


class BoundedStream(io.TextIOBase):
    """Lines of text on their way to a file descriptor, written by a thread of its own.

    At most ``most`` characters wait for their reader. Lines beyond that are dropped and counted;
    once there is room again ``lost_line`` makes the line that says how many they were.
    """

    def __init__(self, descriptor: int, most: int = 1 << 20) -> None:
        self.lost_line: Callable[[int], str] = _plainly
        self._descriptor, self._most = descriptor, most
        self._begun, self._lost = "", 0
        self._lines: deque[str] = deque()
        self._waiting = 0
        """Characters in ``_lines``, with those of the line that is being written."""
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name=f"output-{descriptor}", daemon=True).start()

    def fileno(self) -> int:
        """The file descriptor that lines are written to."""
        return self._descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Take text without waiting; it goes on its way line by line."""
        with self._changed:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > self._most:
                lines, self._begun = [*lines, self._begun], ""
            for line in lines:
                self._take(f"{line}\n")
        return len(text)

    def drain(self, most_s: float) -> bool:
        """Wait until everything is written, at most so long; whether it is."""
        with self._changed:
            if self._begun:
                self.write("\n")
            return self._changed.wait_for(lambda: not self._waiting, most_s)

    def _take(self, line: str) -> None:
        if self._lost:
            lost = f"{self.lost_line(self._lost)}\n"
            if self._waiting + len(lost) + len(line) > self._most:
                self._lost += 1
                return
            self._lost = 0
            self._append(lost)
        if self._waiting + len(line) > self._most:
            self._lost += 1
            return
        self._append(line)

    def _append(self, line: str) -> None:
        self._lines.append(line)
        self._waiting += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            written = self._written(line.encode(errors="backslashreplace"))
            with self._changed:
                self._waiting -= len(line)
                if not written:
                    self._lost += 1
                elif self._lost and not self._lines:
                    self._append(f"{self.lost_line(self._lost)}\n")
                    self._lost = 0
                self._changed.notify_all()

    def _written(self, data: bytes) -> bool:
        """Write as soon as the reader takes it; whether there is a reader."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody who shares it has made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


@contextmanager
def bounded_output() -> Iterator[None]:
    """Have standard output and error of this process be ``BoundedStream``s in the block.

    What waits at its end has a second to be read; the rest is dropped.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    streams = BoundedStream(_STDOUT), BoundedStream(_STDERR)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        end_s = time.monotonic() + _LAST_LINES_S
        for stream in streams:
            stream.drain(max(0.0, end_s - time.monotonic()))
        sys.stdout, sys.stderr = before
