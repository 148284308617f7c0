"""The table of faults: every process killed, ended or held up in every state, with real clients.

``make test-faults`` runs it, for some minutes, and prints the table of docs/faults.md as measured.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from faults_rig import GOES_ON, HELD_UP_S, Fault, do, require_told, row, seen, until_gone
from resume_rig import Store
from server_rig import POLL_S, QUICK, Server, Talker, typed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = (*QUICK, "--script", "speech:100")
"""Every answer lasts 8 s, which a processor makes in two or three."""
WATCHDOG_S, SOON_S = 6, 60.0
MODULES = {"worker": "mosstalk.server.worker", "second front": "mosstalk.server.front_process"}
MEASURED: list[str] = []


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


async def ended(server: Server, promised: str) -> str:
    """How the server goes on once its client knows: with its exit code, if it has one soon."""
    end_s = time.monotonic() + (HELD_UP_S if promised == GOES_ON else SOON_S)
    while server.process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)
    return GOES_ON if server.process.poll() is None else str(server.process.returncode)


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
            free_s = time.monotonic() - begun_s
            said = (fault.process, fault.done, fault.state, client, f"{took_s:.1f} s", left)
            MEASURED.append(row(*said, f"{free_s:.1f} s"))
            assert (client, left) == (fault.client, fault.server)
            assert not fault.within_s or took_s <= fault.within_s
        finally:
            server.stop()

    run(main(), 200)


def test_the_table_is_the_one_in_the_documents(capsys: pytest.CaptureFixture[Any]) -> None:
    with capsys.disabled():
        print("", *MEASURED, sep="\n")
    require_told(MEASURED)
