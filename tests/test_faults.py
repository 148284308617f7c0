"""The table of faults: every process killed, ended or held up in every state, with real clients.

``make test-faults`` runs it, for some minutes, and prints the table of docs/faults.md as measured.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, run
from resume_rig import Store
from server_rig import POLL_S, QUICK, Server, Talker, typed
from websockets.exceptions import ConnectionClosed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = (*QUICK, "--script", "speech:100")
"""Every answer lasts 8 s, which a processor makes in two or three."""
WATCHDOG_S, HELD_UP_S = 6, 2.0
GOES_ON, SOON_S = "goes on", 60.0
MODULES = {"worker": "mosstalk.server.worker", "second front": "mosstalk.server.front_process"}
SIGNALS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM}
MEASURED: list[str] = []
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


FAULTS = [
    Fault("worker", "killed", "loading", "-", 0, "70"),
    Fault("worker", "killed", "idle", "1011", 1, "70"),
    Fault("worker", "killed", "speaking", "1011", 1, "70"),
    Fault("worker", "killed", "draining", "1011", 1, "70"),
    Fault("worker", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("worker", "hung", "speaking", "1011", WATCHDOG_S + 4, "70"),
    Fault("front", "killed", "loading", "-", 0, "-9"),
    Fault("front", "killed", "idle", "1006", 1, "-9"),
    Fault("front", "killed", "speaking", "1006", 1, "-9"),
    Fault("front", "killed", "draining", "1006", 1, "-9"),
    Fault("front", "ended", "loading", "-", 0, "0"),
    Fault("front", "ended", "idle", "1012", 1, "0"),
    Fault("front", "ended", "speaking", "1012", 30, "0"),
    Fault("front", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("second front", "killed", "idle", "1006", 1, GOES_ON),
    Fault("second front", "killed", "speaking", "1006", 1, GOES_ON),
    Fault("second front", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("store", "killed", "idle", GOES_ON, 0, GOES_ON),
    Fault("store", "killed", "speaking", GOES_ON, 0, GOES_ON),
    Fault("store", "killed", "draining", "1012", 30, "0"),
    Fault("store", "held up", "speaking", GOES_ON, 0, GOES_ON),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A Redis of its own."""
    with Store.running(tmp_path) as redis:
        yield redis


def process_of(fault: Fault, server: Server, store: Store) -> int:
    """The id of the process that it is about."""
    if fault.process == "store":
        assert store.process
        return store.process.pid
    if fault.process == "front":
        return server.process.pid
    return server.child_id(MODULES[fault.process])


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


async def ended(server: Server, promised: str) -> str:
    """How the server goes on once its client knows: with its exit code, if it has one soon."""
    end_s = time.monotonic() + (HELD_UP_S if promised == GOES_ON else SOON_S)
    while server.process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)
    return GOES_ON if server.process.poll() is None else str(server.process.returncode)


async def until_gone(processes: list[int], most_s: float = 3.0) -> None:
    """Wait until all of them have ended."""
    end_s = time.monotonic() + most_s
    while any(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < end_s, "a process is left"
        await asyncio.sleep(POLL_S)


def children(server: Server) -> list[int]:
    """Its workers and further fronts."""
    return [each for module in MODULES.values() for each in server.child_ids(module)]


async def while_loading(fault: Fault, server: Server, store: Store) -> tuple[str, float, str]:
    """Do it before anybody is let in."""
    await asyncio.to_thread(server.await_line, r"tensors\)$")
    await do(fault, process_of(fault, server, store))
    begun_s = time.monotonic()
    code = await asyncio.to_thread(server.wait, SOON_S)
    return "-", time.monotonic() - begun_s, str(code)


async def with_a_client(fault: Fault, server: Server, store: Store) -> tuple[str, float, str]:
    """Do it while somebody is connected: what is seen, after how many seconds, and what is left."""
    await asyncio.to_thread(server.ready)
    async with Talker(server) as talker:
        if fault.state != "idle":
            await talker.send(typed("Good morning."), {"type": "response.create"})
            await talker.wait("response.output_audio.delta")
        if fault.state == "draining":
            server.signal(signal.SIGTERM)
            await asyncio.to_thread(server.await_metrics, lambda m: m["mosstalk_draining"] == 1)
        await do(fault, process_of(fault, server, store))
        begun_s = time.monotonic()
        client = GOES_ON
        if fault.state != "idle" or fault.client == GOES_ON:
            client = await seen(talker, asks=fault.state == "idle")
        if client == GOES_ON and fault.client != GOES_ON:  # an answer was let finish
            client = str((await talker.closed())[0])
        took_s = time.monotonic() - begun_s
    return client, took_s, await ended(server, fault.server)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_client_sees_is_what_was_promised(
    fault: Fault, store: Store, cache_folder: Path
) -> None:
    words = ["--store", store.url, "--watchdog", str(WATCHDOG_S)]
    if fault.process == "second front":
        words += ["--front-processes", "1"]

    async def main() -> None:
        server = Server(*LONG, *words, cache=cache_folder)
        try:
            case = while_loading if fault.state == "loading" else with_a_client
            helpers: list[int] = []
            task = asyncio.create_task(case(fault, server, store))
            while not task.done():
                with suppress(OSError):
                    helpers = children(server) or helpers
                await asyncio.sleep(POLL_S * 10)
            client, took_s, left = await task
            begun_s = time.monotonic()
            if left == GOES_ON:
                await asyncio.to_thread(server.await_nothing_held)
            else:
                await until_gone(helpers)
            MEASURED.append(row(fault, client, took_s, left, time.monotonic() - begun_s))
            assert (client, left) == (fault.client, fault.server)
            assert not fault.within_s or took_s <= fault.within_s
        finally:
            server.stop()

    run(main(), 200)


def row(fault: Fault, client: str, took_s: float, left: str, free_s: float) -> str:
    """A line of the table."""
    times = f"{took_s:.1f} s", f"{free_s:.1f} s"
    shown = [fault.process, fault.done, fault.state, client, times[0], left, times[1]]
    return f"| {' | '.join(shown)} |"


def test_the_table_is_the_one_in_the_documents(capsys: pytest.CaptureFixture[Any]) -> None:
    """Of the rows that were measured: their words, not their times."""
    with capsys.disabled():
        print("", *MEASURED, sep="\n")
    told = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for measured in (line.split(" | ") for line in MEASURED):
        assert any(measured[:4] + measured[5:6] == each[:4] + each[5:6] for each in told), measured
