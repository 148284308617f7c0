"""``fit_threads`` and ``at_once``: what is computed by several threads, and who sees what."""

import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from threading import Barrier, get_ident

import pytest
import torch

from mosstalk.runtime.device import fit_threads
from mosstalk.runtime.sharing import Helpers, at_once

CPU = torch.device("cpu")
SMALL = torch.nn.Linear(4, 4)
NAME: ContextVar[str] = ContextVar("NAME", default="nobody")


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two helping threads, whatever the machine and its settings are."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(Helpers, "pool", None)
    monkeypatch.setattr(Helpers, "count", 0)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    fit_threads(CPU, [SMALL])
    yield
    pool = Helpers.pool
    assert pool is not None
    pool.shutdown()
    torch.set_num_threads(threads)


def alone() -> int:
    return get_ident()


@pytest.mark.usefixtures("helpers")
def test_parts_run_at_the_same_time_and_answer_in_their_order() -> None:
    meet = Barrier(3)

    def part(number: int) -> tuple[int, int]:
        meet.wait(timeout=20)  # nobody passes before all three are here
        return number, get_ident()

    found = at_once([partial(part, number) for number in range(3)], CPU)
    assert [number for number, _ in found] == [0, 1, 2]
    assert len({thread for _, thread in found}) == 3


@pytest.mark.usefixtures("helpers")
def test_parts_see_what_their_caller_set() -> None:
    meet = Barrier(2)

    def part() -> tuple[str, bool, int]:
        meet.wait(timeout=20)
        return NAME.get(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    token = NAME.set("caller")
    try:
        with torch.inference_mode():
            assert at_once([part, part], CPU) == [("caller", True, 1)] * 2
    finally:
        NAME.reset(token)


@pytest.mark.usefixtures("helpers")
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_is_raised_once_nothing_runs_any_more(failing: int) -> None:
    meet, ended = Barrier(2), list[int]()

    def part(number: int) -> None:
        meet.wait(timeout=20)
        if number == failing:
            raise ValueError(number)
        torch.ones(1000).cumsum(0)
        ended.append(number)

    with pytest.raises(ValueError, match=str(failing)):
        at_once([partial(part, number) for number in range(2)], CPU)
    assert ended == [1 - failing]


@pytest.mark.usefixtures("helpers")
def test_on_a_gpu_the_caller_does_everything() -> None:
    assert at_once([alone, alone], torch.device("cuda")) == [get_ident()] * 2


def test_whoever_chose_how_many_threads_gets_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Helpers, "pool", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fit_threads(CPU, [SMALL])
    assert at_once([alone, alone], CPU) == [get_ident()] * 2
