"""A card's time is counted for the part that it worked for, and nobody waits for it."""

import time
from collections.abc import Iterator

import pytest
import torch

from mosstalk.bench.serve import Meanwhile
from mosstalk.runtime.busy import Busy, BusyPart, Work, spend, taken
from mosstalk.runtime.card_time import count_card_time, on_card, settle_card_time


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
