"""A fleet whose replicas come and go with its sessions: who must move, moves, and no turn fails."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import run
from fleet_rig import LOST, RESUMED, SPOKEN, Fleet, Talk, fleet_file, running_fleet
from resume_rig import Store

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TALKS, PLACES = 3, 2
"""Three conversations are two replicas' work where a replica is to have one of its two places used;
one conversation is one replica's."""
SCALING = "{min: 1, max: 2, used: 0.5, upscale_delay_s: 2, downscale_delay_s: 5}"


@pytest.fixture(scope="module")
def fleet(cache_folder: Path, store: Store) -> Iterator[Fleet]:
    """One replica, ready, and another one where it is needed."""
    file = fleet_file(SCALING, max_sessions=PLACES, store=store.url)
    with running_fleet(cache_folder, file, replicas=1) as running:
        yield running


def test_a_replica_comes_and_goes_and_no_turn_fails(fleet: Fleet, tmp_path: Path) -> None:
    talks = [Talk(tmp_path / f"{place}.wav") for place in range(TALKS)]
    over = [threading.Event() for _ in talks]

    def questions(place: int) -> Iterator[Path]:
        while not over[place].is_set():
            yield from SPOKEN

    async def main() -> None:
        first = [talks[place].hold(fleet.url, questions(place)) for place in range(PLACES)]
        talking = [asyncio.create_task(each) for each in first]
        await asyncio.to_thread(fleet.await_that, lambda: len(fleet.sessions()) == 2)
        last = talks[PLACES].hold(fleet.url, questions(PLACES))
        await asyncio.gather(*talking, last)

    begun_s = time.monotonic()
    with ThreadPoolExecutor() as beside:
        talking = beside.submit(run, main(), 800)
        try:
            fleet.await_that(lambda: bool(talks[PLACES].answers()) or talking.done())
            up_s = time.monotonic() - begun_s
            assert fleet.sessions() == [1, 2], "the last one is at the new replica"
            over[0].set()
            over[1].set()
            gone_s = time.monotonic()
            fleet.await_that(lambda: len(fleet.replicas()) == 1 or talking.done())
            down_s = time.monotonic() - gone_s
            answers = len(talks[PLACES].answers())
            fleet.await_that(lambda: len(talks[PLACES].answers()) > answers or talking.done())
        finally:
            for each in over:
                each.set()
        talking.result()
    said = [answer for talk in talks for answer in talk.answers()]
    assert all(answer.startswith("the answer is completed") for answer in said), said
    assert [len(talk.times(LOST)) for talk in talks] == [len(talk.times(RESUMED)) for talk in talks]
    moves = sum(len(talk.times(RESUMED)) for talk in talks)
    print(
        f"of {TALKS} conversations the last was answered by a second replica in {up_s:.0f} s; that "
        f"had ended {down_s:.0f} s after two of them; {len(said)} turns, none failed; {moves} moved"
    )
