"""What is claimed of the fast layers where kernels run, interpreted or compiled.

Run by ``test_engine_fast_kernels.py`` in a process in which Triton interprets.
"""

from dataclasses import replace

import pytest
import torch
from engine_rig import (
    CONFIG,
    Task,
    engine_core,
    play,
    random_tasks,
    reference,
    require_same,
    wild_model,
)
from fast_rig import Scene, read, same
from torch import Tensor

from mosstalk.engine.layers import LayerOptions
from mosstalk.ops.launch import Launch, runs
from mosstalk.ops.sampling_parts import AUDIO, TEXT

SMALL = replace(CONFIG, num_shared_layers=1, num_modality_layers=1)
MIXES = {
    "one row": [(37, 38)],
    "rows": [(5, 6), (0, 1), (66, 67)],
    "stretches": [(13, 33), (0, 5)],
    "mixed": [(9, 10), (0, 5), (30, 31)],
}
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-2}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_kernels_read_what_plain_layers_read(dtype: torch.dtype, invariant: bool, mix: str) -> None:
    model = wild_model(dtype=dtype, config=SMALL)
    expected = Scene.of(model, MIXES[mix])
    found, untouched = expected.own(), expected.own()
    layers = found.fast(model, LayerOptions(rows=96, singles=8, invariant=invariant))
    assert runs(found.store.keys)
    plain = expected.plain(model)
    outputs, wanted = read(layers, found), read(plain, expected)
    with torch.inference_mode():
        outputs += [layers.logits(channel, outputs[channel]) for channel in (TEXT, AUDIO)]
        wanted += [plain.logits(channel, wanted[channel]) for channel in (TEXT, AUDIO)]
    for one, other in zip(outputs + found.written(), wanted + expected.written(), strict=True):
        assert one.shape == other.shape
        assert relative(one, other) < BOUNDS[dtype]
    assert same(found.foreign(), untouched.foreign())


def test_without_kernels_none_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launch: Launch) -> None:
        raise AssertionError(f"{launch.kernel} was launched")

    model = wild_model(config=SMALL)
    expected = Scene.of(model, MIXES["mixed"])
    found = expected.own()
    monkeypatch.setattr(Launch, "run", refuse)
    with pytest.raises(AssertionError, match="was launched"):
        read(found.own().fast(model), found)
    pairs = zip(read(found.exact(model), found), read(expected.plain(model), expected), strict=True)
    assert all(relative(one, other) < BOUNDS[torch.float32] for one, other in pairs)


def small_top_k(task: Task) -> Task:
    """The same task, of a kind whose ids kernels draw."""
    return replace(task, params=replace(task.params, options=replace(task.params.options, top_k=5)))


@pytest.mark.parametrize("late", [True, False])
def test_replies_whose_ids_kernels_draw_are_the_references(late: bool) -> None:
    model = wild_model()
    tasks = [small_top_k(task) for task in random_tasks(seed=29, count=6)]
    core = engine_core(model, late=late, slots=3)
    for request, task in zip(play(core, tasks), tasks, strict=True):
        require_same(request, reference(model, task))
