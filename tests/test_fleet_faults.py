"""The table of faults of a fleet: its processes killed or stopped, with clients of both replicas.

``make test-faults`` runs it, for some minutes, and prints the table of docs/faults.md as measured.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import run
from faults_rig import GOES_ON, Fault, do, require_told, row, seen, until_gone
from fleet_rig import REPLICAS, Fleet, fleet_file, running_fleet
from server_rig import Talker, typed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

FILE = fleet_file(vad="none", max_sessions=2, script="speech:100")
"""Every answer lasts 8 s, which a processor makes in two or three."""
WHOLE_S, HUNG_S = 120.0, 40.0
MEASURED: list[str] = []

FAULTS = [
    Fault("ingress", "held up", "idle", GOES_ON, 0, GOES_ON),
    Fault("ingress", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("ingress", "killed", "idle", "1006", 1, GOES_ON),
    Fault("ingress", "killed", "speaking", "1006", 1, GOES_ON),
    Fault("replica", "held up", "idle", GOES_ON, 0, GOES_ON),
    Fault("replica", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("replica", "killed", "idle", "1006", 1, GOES_ON),
    Fault("replica", "killed", "speaking", "1006", 1, GOES_ON),
    Fault("replica", "hung", "speaking", "1006", HUNG_S, GOES_ON),
    Fault("ingress", "hung", "speaking", "1006", HUNG_S, GOES_ON),
    Fault("head", "held up", "idle", GOES_ON, 0, GOES_ON),
    Fault("head", "held up", "speaking", GOES_ON, 0, GOES_ON),
    Fault("head", "killed", "idle", "1006", 10, "70"),
    Fault("head", "killed", "speaking", "1006", 10, "70"),
]
"""In an order in which those that end a fleet come last."""


class Fleets:
    """One fleet after the other: another one where the last has ended."""

    def __init__(self, cache: Path) -> None:
        self._cache, self._stack = cache, ExitStack()
        self._fleet: Fleet | None = None

    def whole(self) -> Fleet:
        """One whose replicas are all there, and nobody else."""
        if self._fleet is None or self._fleet.process.poll() is not None:
            self.close()
            self._fleet = self._stack.enter_context(running_fleet(self._cache, FILE))
        return self._fleet

    def close(self) -> None:
        """End it."""
        self._stack.close()


@pytest.fixture(scope="module")
def fleets(cache_folder: Path) -> Iterator[Fleets]:
    """Fleets of two replicas."""
    made = Fleets(cache_folder)
    yield made
    made.close()


def process_of(fault: Fault, fleet: Fleet) -> int:
    """The id of the process that it is about: of the replicas the one that has a client."""
    if fault.process == "replica":
        fleet.await_that(lambda: sorted(fleet.sessions_by_process().values()) == [0, 1])
        (found,) = [pid for pid, number in fleet.sessions_by_process().items() if number]
        return found
    return {"ingress": fleet.ingress, "head": fleet.head}[fault.process]()


def is_whole(fleet: Fleet) -> bool:
    """Whether all its replicas are there, and have room, and the ingress knows of them.

    A new ingress answers 404 for a moment.
    """
    with suppress(httpx.HTTPError, KeyError, ValueError):
        known = httpx.get(f"{fleet.url}/ready").status_code == 200
        return known and fleet.sessions() == [0] * REPLICAS
    return False


async def until_whole(fleet: Fleet) -> float:
    """How many seconds it takes until somebody new is answered, and all replicas are there."""
    begun_s = time.monotonic()
    await asyncio.to_thread(fleet.await_that, lambda: is_whole(fleet), WHOLE_S)
    took_s = time.monotonic() - begun_s
    async with Talker(fleet) as newcomer:
        assert await seen(newcomer, asks=True) == GOES_ON
    await asyncio.to_thread(fleet.await_that, lambda: is_whole(fleet))
    return took_s


async def ended(fleet: Fleet) -> str:
    """The code that it exits with."""
    return str(await asyncio.to_thread(fleet.process.wait, WHOLE_S))


async def with_clients(fault: Fault, fleet: Fleet) -> tuple[str, float, str, str]:
    """Do it with a client of each replica: what one sees, after how long, and what the other."""
    async with AsyncExitStack() as stack:
        # Their own pings would find out what the fleet has to.
        talker = await stack.enter_async_context(Talker(fleet, ping_interval=None))
        process = await asyncio.to_thread(process_of, fault, fleet)
        other = await stack.enter_async_context(Talker(fleet, ping_interval=None))
        if fault.state == "speaking":
            for each in (talker, other):
                await each.send(typed("Good morning."), {"type": "response.create"})
            for each in (talker, other):
                await each.wait("response.output_audio.delta")
        await do(fault, process)
        begun_s = time.monotonic()

        async def client() -> tuple[str, float]:
            asks = fault.state == "idle" and fault.client == GOES_ON
            said = await seen(talker, asks=asks)
            return said, time.monotonic() - begun_s

        (saw, took_s), others = await asyncio.gather(
            client(), seen(other, asks=fault.state == "idle")
        )
    return saw, took_s, others, await ended(fleet) if fault.server != GOES_ON else GOES_ON


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_clients_of_a_fleet_see_is_what_was_promised(fault: Fault, fleets: Fleets) -> None:
    async def main() -> None:
        fleet = await asyncio.to_thread(fleets.whole)
        processes = list(fleet.processes())
        saw, took_s, others, left = await with_clients(fault, fleet)
        if left == GOES_ON:
            whole_s = await until_whole(fleet)
        else:
            begun_s = time.monotonic()
            await until_gone(processes, WHOLE_S)
            whole_s = time.monotonic() - begun_s
        said = (fault.process, fault.done, fault.state, saw, f"{took_s:.1f} s", others, left)
        MEASURED.append(row(*said, f"{whole_s:.1f} s"))
        print(MEASURED[-1])
        assert (saw, left) == (fault.client, fault.server)
        assert not fault.within_s or took_s <= fault.within_s
        alone = fault.process == "replica"  # all have the others in common
        assert others == (GOES_ON if alone else saw)

    run(main(), 360)


def test_the_table_of_a_fleet_is_the_one_in_the_documents(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    with capsys.disabled():
        print("", *MEASURED, sep="\n")
    require_told(MEASURED)
