"""The layers in NumPy, as a CPU computes them, beside those in plain torch."""

from random import Random

import pytest
import torch
from engine_rig import engine_core, random_rows, wild_model

from mosstalk.engine.engine_core import EngineCore
from mosstalk.models.language_model import Logits
from mosstalk.ops.attention_decode import adjacent

BLOCK_ROWS = 4


def in_torch(core: EngineCore) -> EngineCore:
    """The same engine, whose layers are the operations' references."""
    core.runner.layers.cpu_layers.clear()
    return core


def read(core: EngineCore, seed: int) -> list[Logits]:
    """Logits of two conversations that grow in turns, so that neither has its blocks in a row."""
    both = [core.open(), core.open()]
    random, found = Random(seed), list[Logits]()
    for count in (1, 6, 1, 9, 1):
        for sequence in both:
            sequence.rows += random_rows(random, count)
            assert sequence.make_room(len(sequence.rows))
            found.append(core.runner.logits(sequence))
    assert not any(adjacent(sequence.table) for sequence in both)
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_are_those_of_plain_torch(seed: int) -> None:
    model = wild_model(seed=seed)
    cores = [engine_core(model, block_rows=BLOCK_ROWS) for _ in range(2)]
    assert cores[0].runner.layers.cpu_layers, "these compute on a CPU"
    for found, wanted in zip(read(cores[0], seed), read(in_torch(cores[1]), seed), strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_other_precisions_are_computed_by_torch() -> None:
    core = engine_core(wild_model(dtype=torch.bfloat16), block_rows=BLOCK_ROWS)
    assert not core.runner.layers.cpu_layers
