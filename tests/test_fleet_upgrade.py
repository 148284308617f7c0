"""A rolling upgrade of a fleet while people talk with it: they move on, and no turn fails."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import run
from fleet_rig import LOST, REPLICAS, RESUMED, SPOKEN, Fleet, Talk, fleet_file, running_fleet
from resume_rig import Store
from server_rig import ask

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TALKS = 4
PLACES = TALKS, TALKS + 1
"""Of each replica, before and after: one that is replaced sends all its talks to the other."""


@pytest.fixture(scope="module")
def fleet(cache_folder: Path, store: Store) -> Iterator[Fleet]:
    """Two replicas, ready."""
    file = fleet_file(max_sessions=PLACES[0], store=store.url)
    with running_fleet(cache_folder, file) as running:
        yield running


def test_no_turn_fails_while_every_replica_is_replaced(
    fleet: Fleet, store: Store, tmp_path: Path
) -> None:
    talks = [Talk(tmp_path / f"{place}.wav") for place in range(TALKS)]
    over = threading.Event()

    def questions() -> Iterator[Path]:
        while not over.is_set():
            yield from SPOKEN

    async def main() -> None:
        await asyncio.gather(*(talk.hold(fleet.url, questions()) for talk in talks))

    before = set(fleet.replicas())
    with ThreadPoolExecutor() as beside:
        talking = beside.submit(run, main(), 500)
        try:
            fleet.await_that(lambda: all(talk.answers() for talk in talks) or talking.done())
            fleet.describe(fleet_file(max_sessions=PLACES[1], store=store.url))
            fleet.process.send_signal(signal.SIGHUP)
            begun_s = time.monotonic()
            fleet.await_that(lambda: "\nupgraded: " in fleet.printed() or talking.done())
            took_s = time.monotonic() - begun_s
        finally:
            over.set()
        talking.result()
    after = set(fleet.replicas())
    assert len(after) == REPLICAS
    assert not before & after
    told = ask("GET", f"{fleet.url}/v1/capacity").json()
    assert told["places"]["total"] == PLACES[1], told
    answers = [answer for talk in talks for answer in talk.answers()]
    assert all(answer.startswith("the answer is completed") for answer in answers), answers
    moves = [
        back_s - lost_s
        for talk in talks
        for lost_s, back_s in zip(talk.times(LOST), talk.times(RESUMED), strict=True)
    ]
    assert all(talk.times(LOST) for talk in talks), "everybody had to move"
    print(
        f"both replicas replaced in {took_s:.0f} s; {len(answers)} turns of {TALKS} conversations, "
        f"none failed; {len(moves)} moves, the longest {max(moves):.2f} s"
    )


def test_a_file_that_is_wrong_changes_nothing(fleet: Fleet) -> None:
    before = set(fleet.replicas())
    fleet.describe("replica: 3\n")
    fleet.process.send_signal(signal.SIGHUP)
    fleet.await_that(lambda: "\nno upgrade: " in fleet.printed())
    assert "replica is unknown" in fleet.printed()
    assert set(fleet.replicas()) == before
