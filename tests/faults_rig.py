"""What the tables of faults share: what is done to a process, and what a client sees of it."""

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from server_rig import POLL_S, Talker, typed
from websockets.exceptions import ConnectionClosed

HELD_UP_S = 2.0
GOES_ON = "goes on"
SIGNALS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM}
PAGE = ROOT / "docs" / "faults.md"


@dataclass(frozen=True)
class Fault:
    """What is done to which process in which state, and what was promised for it.

    ``client`` is what it sees: ``GOES_ON``, or the code of its close frame, 1006 where there is
    none. ``server`` is ``GOES_ON`` or the code that it exits with, -9 where it was killed.
    """

    process: str
    done: str
    state: str
    client: str
    within_s: float
    server: str

    @property
    def name(self) -> str:
        """Its id as a test."""
        return f"{self.process}, {self.done}, {self.state}".replace(" ", "-")


async def do(fault: Fault, process: int) -> None:
    """Do it. A process that is held up goes on by itself; one that hangs does not."""
    if number := SIGNALS.get(fault.done):
        os.kill(process, number)
        return
    os.kill(process, signal.SIGSTOP)
    if fault.done == "held up":
        await asyncio.sleep(HELD_UP_S)  # as long as it lasts: nothing is waited for
        os.kill(process, signal.SIGCONT)


async def seen(talker: Talker, *, asks: bool) -> str:
    """What a client sees of it: the answer that it waits for, or the end of its connection."""
    try:
        if asks:
            await talker.send(typed("Good morning."), {"type": "response.create"})
        done = (await talker.wait("response.done"))["response"]
    except ConnectionClosed:
        return str(talker.socket.close_code)
    assert done["status"] in ("completed", "incomplete"), done
    return GOES_ON


async def until_gone(processes: list[int], most_s: float = 3.0) -> None:
    """Wait until all of them have ended."""
    end_s = time.monotonic() + most_s
    while any(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < end_s, "a process is left"
        await asyncio.sleep(POLL_S)


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def require_told(measured: list[str]) -> None:
    """Check that the page has each line that was measured, but for its times."""
    known = [_words(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for line in measured:
        assert _words(line) in known, line


def _words(line: str) -> list[str]:
    """The cells of a line that are no times."""
    cells = (cell.strip() for cell in line.strip("| ").split("|"))
    return [cell for cell in cells if not re.fullmatch(r"[\d.]+ s", cell)]
