"""A card's time is counted for the part that it worked for, and nobody waits for it."""

import time
from collections.abc import Iterator

import pytest
import torch

from mosstalk.bench.serve import Crowd, Meanwhile
from mosstalk.bench.serve_report import not_measured
from mosstalk.runtime.busy import (
    Busy,
    BusyPart,
    Work,
    at_work,
    count_card_time,
    on_card,
    settle_card_time,
    spend,
    taken,
)


@pytest.fixture
def counting() -> Iterator[None]:
    taken()
    count_card_time()
    yield
    count_card_time(on=False)
    taken()


@pytest.mark.usefixtures("counting")
def test_a_parts_times_are_summed_each_apart() -> None:
    spend(BusyPart.HOP, 2.0, 1.0)
    spend(BusyPart.HOP, card_s=0.5)
    spend(BusyPart.HOP, card_s=0.25)
    assert taken() == {BusyPart.HOP: Busy(2.0, 1.0, 0.75)}


@pytest.mark.usefixtures("counting")
def test_a_run_is_counted_with_its_items_for_the_part_that_it_became_and_none_without() -> None:
    with at_work(BusyPart.EDIT), at_work(BusyPart.HOP, 3), at_work(BusyPart.PUSH) as push:
        push.part, push.items = BusyPart.HOP, 2
    with at_work(BusyPart.STEP, 0):
        pass
    counted = {part: (spent.runs, spent.items) for part, spent in taken().items()}
    assert counted == {BusyPart.HOP: (2, 5), BusyPart.EDIT: (1, 1), BusyPart.STEP: (0, 0)}


@pytest.mark.usefixtures("counting")
def test_a_cpu_is_no_card() -> None:
    with on_card(BusyPart.HOP, torch.device("cpu")):
        torch.ones(3).sum()
    settle_card_time()
    assert taken() == {}


def test_a_server_with_a_card_tells_its_shares_and_another_none() -> None:
    name = 'mosstalk_card_seconds_total{part="%s"}'
    before = {name % "hop": 1.0, name % "step": 4.0, name % "detect": 0.0}
    after = {name % "hop": 6.0, name % "step": 4.0, name % "detect": 0.0}
    assert Meanwhile.between(before, after, 10.0).card == {"hop": 0.5}
    assert Meanwhile.between({}, {"mosstalk_sessions": 1.0}, 10.0).card == {}


def test_a_server_tells_its_runs_and_an_older_one_that_it_does_not() -> None:
    def told(hops: float, replies: float) -> dict[str, float]:
        counts = {"runs": hops, "items": replies, "seconds": 9.0, "waited_seconds": hops / 100}
        found = {f'mosstalk_busy_{name}_total{{part="hop"}}': n for name, n in counts.items()}
        return found | {
            "process_cpu_seconds_total": 1.0,
            'mosstalk_busy_runs_total{part="push"}': 0,
        }

    new = Meanwhile.between(told(10, 10), told(30, 70), 10.0)
    assert new.runs.keys() == {"hop"}
    assert new.runs["hop"] == pytest.approx((2.0, 3.0, 10.0))
    old = Meanwhile.between({}, {n: v for n, v in told(1, 1).items() if "seconds" in n}, 10.0)
    assert old.runs == {}
    assert not_measured([Crowd(1, [], [], None, new)]) == []
    assert not_measured([Crowd(1, [], [], None, old)]) == [
        "how much the worker's parts do in a run: this server does not count it"
    ]


@pytest.mark.usefixtures("counting")
@pytest.mark.gpu
def test_a_cards_time_is_its_own_and_of_the_part_that_it_became() -> None:
    device, work = torch.device("cuda"), Work(BusyPart.PUSH)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin.record()
        with on_card(work, device):
            torch.cuda._sleep(50_000_000)
        end.record()
        work.part = BusyPart.REPAIR
        settle_card_time()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    settle_card_time()
    spent = taken()
    assert spent.keys() == {BusyPart.REPAIR}
    taken_s = begin.elapsed_time(end) / 1000
    assert 0.9 * taken_s < spent[BusyPart.REPAIR].card_s <= taken_s


@pytest.mark.usefixtures("counting")
@pytest.mark.gpu
def test_counting_takes_less_than_20_microseconds() -> None:
    device = torch.device("cuda")

    def mean_s(*, on: bool) -> float:
        count_card_time(on=on)
        begun_s = time.perf_counter()
        for _ in range(2000):
            with on_card(BusyPart.STEP, device):
                pass
        return (time.perf_counter() - begun_s) / 2000

    mean_s(on=True)
    settle_card_time()
    more_s = mean_s(on=True) - mean_s(on=False)
    print(f"counting a part's time on the card: {1e6 * more_s:.1f} microseconds")
    assert more_s < 20e-6
