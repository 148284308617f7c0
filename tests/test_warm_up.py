"""What is done before anybody waits leaves nothing behind, and nothing for a reply to wait for."""

import pytest
import torch
from engine_rig import (
    GREEDY,
    SILENT,
    engine_core,
    play,
    random_tasks,
    reference,
    require_same,
    wild_model,
)

from mosstalk.engine.async_engine import warm_draws, warm_up
from mosstalk.engine.engine_core import EngineCore, ReplyParams
from mosstalk.engine.layers import LayerOptions, Layers
from mosstalk.reply_options import Limits
from mosstalk.runtime.graphs import CAPTURES, Captures, Graphs


def fast_core(slots: int = 3) -> EngineCore:
    """An engine whose kernels are replaced by their references, without a GPU."""
    core = engine_core(wild_model(), slots=slots)
    runner = core.runner
    given = core.model, runner.store, runner.layers.latest
    runner.layers = Layers(*given, LayerOptions(rows=40, singles=slots, kernels=True))
    return core


def test_replies_of_a_warmed_engine_are_those_of_another() -> None:
    tasks = random_tasks(seed=3, count=4)
    core = fast_core()
    warm_up(core)
    warm_draws(core)
    assert core.pool.in_use == 0
    assert not core.has_work
    for request, task in zip(play(core, tasks), tasks, strict=True):
        require_same(request, reference(wild_model(), task))


def test_as_many_replies_are_made_as_there_are_slots() -> None:
    core, crowds = fast_core(slots=5), set[int]()
    step = core.runner.launch

    def launch(works, fresh=()):  # type: ignore[no-untyped-def]
        crowds.add(sum(work.draws for work in works))
        return step(works, fresh)

    core.runner.launch = launch  # type: ignore[method-assign]
    warm_draws(core)
    assert crowds == {1, 2, 4, 5}


def test_without_a_gpu_there_is_no_graph() -> None:
    graphs, before = Graphs[int, None](torch.device("cpu"), "tests"), CAPTURES.count
    assert not graphs.ready(1, lambda: pytest.fail("run for nothing"))
    assert (len(graphs), CAPTURES.count) == (0, before)


def test_what_graphs_took_is_said_in_words() -> None:
    assert str(Captures(84, round(1.2 * 2**30))) == "84 graphs, 1.2 GiB"


@pytest.mark.gpu
def test_a_warmed_engine_captures_and_compiles_nothing_more() -> None:
    from triton import knobs

    core = engine_core(wild_model("cuda", torch.bfloat16), slots=20)
    warm_up(core)
    captured, compiled = CAPTURES.count, list[object]()
    knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)
    try:
        for count in (1, 3, 20):
            for length in (1, 30, 100):
                rows = [(1, SILENT)] * length
                asked = [ReplyParams(GREEDY, Limits(20)) for _ in range(count)]
                for params in asked:
                    core.submit(core.open(rows), params)
            core.run()
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert (CAPTURES.count - captured, len(compiled)) == (0, 0)
