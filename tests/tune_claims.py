"""What tuning must do where kernels run: every division that it may choose computes the same.

``test_tune.py`` runs this file in a process of its own, in which Triton is an interpreter.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engine_rig import CONFIG, wild_model
from fast_rig import Scene, read

from mosstalk.build.tune import Call, Tuner
from mosstalk.engine.layers import LayerOptions
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, quantize_in_place
from mosstalk.numerics.fp8 import E4M3
from mosstalk.ops.launch import runs
from mosstalk.ops.linear_tiles import (
    KINDS,
    LIMITS,
    TRIED,
    Key,
    few_candidates,
    tuned_as,
    tuned_divisions,
)

SMALL = replace(CONFIG, num_shared_layers=1, num_modality_layers=1)
MIXES = {"one row": [(37, 38)], "rows": [(5, 6), (0, 1), (66, 67)], "many": [(0, 40), (30, 31)]}
BOUND = 0.1
"""A sum's last bit may move a number over the middle between two of 8 bits."""
DTYPES = torch.float16, E4M3


def small_model() -> LanguageModel:
    """Its shared block in E4M3, the others in float16."""
    model = wild_model(dtype=torch.float16, config=SMALL)
    quantize_in_place(model, Quantization("shared", "row"), {})
    return model


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def require_near(model: LanguageModel, mix: str) -> None:
    """Fast layers read what plain layers read."""
    expected = Scene.of(model, MIXES[mix])
    found = expected.own()
    layers = found.fast(model, LayerOptions(rows=96, singles=8))
    assert runs(found.store.keys)
    outputs, wanted = read(layers, found), read(expected.plain(model), expected)
    for one, other in zip(outputs, wanted, strict=True):
        assert relative(one, other) < BOUND


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("number", [1, TRIED - 1])
def test_layers_read_the_same_by_other_divisions(number: int, mix: str) -> None:
    keys: list[Key] = [(d, kind, limit) for d in DTYPES for kind in KINDS for limit in LIMITS]
    lists = {key: few_candidates(key) for key in keys}
    with tuned_as({key: found[min(number, len(found) - 1)] for key, found in lists.items()}):
        require_near(small_model(), mix)


def test_a_model_is_tuned_by_running_its_own_products() -> None:
    model, ran = small_model(), list[int]()

    def interpreted(calls: Sequence[Call]) -> float:
        """One of the calls, timed."""
        started = time.perf_counter()
        calls[0]()
        ran.append(len(calls))
        return (time.perf_counter() - started) * len(calls)

    found = Tuner(model, interpreted, lambda *_: None).run()
    kinds = {"normed", "gated", "plain"}  # few channels: none are deep
    assert set(found.choices) == {(d, kind, n) for d in DTYPES for kind in kinds for n in LIMITS}
    assert found.dropped == []
    assert len(ran) >= found.tried > 5 * len(found.choices)
    assert tuned_divisions() == {}
    for key, choice in found.choices.items():
        assert choice.divided in few_candidates(key)
        assert (choice.seconds < choice.package_s) == choice.replaced
    with tuned_as(found.divisions):
        for mix in MIXES:
            require_near(model, mix)
