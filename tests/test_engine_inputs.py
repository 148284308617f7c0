"""Nothing missing, misshapen or stale is ever launched: it is refused by its name."""

import pytest
import torch
from conftest import examples
from engine_rig import GREEDY, HOT, IDS, SILENT, engine_core, wild_model
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.engine.engine_core import EngineOptions, ReplyParams
from mosstalk.engine.sampler import Draw, DrawInputs, warp_rows
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.errors import EngineInputError, OptionError
from mosstalk.models.generation import warp
from mosstalk.reply_options import SamplingOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("row", "message"), [((30, 0), "30 text ids"), ((1, 20), "20 audio ids"), ((-1, 0), "-1")]
)
def test_ids_that_the_model_does_not_know_are_refused_when_asked(
    row: tuple[int, int], message: str
) -> None:
    core = engine_core(wild_model())
    with pytest.raises(EngineInputError, match=message):
        core.submit(core.open([(1, SILENT), row]))
    assert not core.busy


def test_options_that_mean_nothing_are_refused() -> None:
    for limits in ({"step_rows": 0}, {"slots": 0}, {"waiting": -1}):
        with pytest.raises(OptionError, match=next(iter(limits))):
            SchedulerLimits(**limits)
    with pytest.raises(OptionError, match="0 blocks"):
        EngineOptions(blocks=0)
    with pytest.raises(OptionError, match="first_due_s"):
        ReplyParams(first_due_s=float("nan"))


def test_a_seed_or_top_k_of_any_size_runs() -> None:
    core = engine_core(wild_model())
    for options in (HOT, GREEDY):
        big = type(options)(temperature=0.7, top_k=1 << 80, seed=-(1 << 99))
        core.submit(core.open([(1, SILENT)]), ReplyParams(big))
    core.run()


@given(
    logits=st.lists(
        st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=20, max_size=20),
        min_size=1, max_size=4,
    ),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    top_k=st.integers(0, 25),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.8, 0.75, 0.5, 0.1]),
)  # fmt: skip
@examples(300)
def test_warping_many_rows_keeps_the_same_ids_as_warping_each(
    logits: list[list[float]], temperature: float, top_k: int, top_p: float
) -> None:
    rows = torch.tensor(logits)
    expected = torch.stack([warp(row, temperature, top_k, top_p) for row in rows])
    found = warp_rows(
        rows,
        torch.full((len(rows),), temperature),
        torch.full((len(rows),), top_k),
        torch.full((len(rows),), 1 - top_p),
    )
    assert torch.equal(found, expected)


def test_top_p_is_rounded_as_the_reference_rounds_it() -> None:
    core = engine_core(wild_model())
    request = core.submit(core.open([(1, SILENT)]), ReplyParams(SamplingOptions(top_p=0.95)))
    core.scheduler.plan()
    draws = [Draw(request, 1, request.rule, 1, request.mode)]
    made = DrawInputs(1, IDS, CPU).fill(draws, 0, 1)
    once, twice = torch.tensor(1 - 0.95), 1 - torch.tensor(0.95)
    assert once != twice
    assert made["tail"].item() == once


def test_a_conversation_longer_than_the_context_is_not_read_ahead() -> None:
    core = engine_core(wild_model())
    longest = core.model.config.max_position_embeddings
    sequence = core.open([(1, SILENT)] * longest)
    core.prefill_ahead(sequence)
    sequence.rows.append((1, SILENT))
    core.prefill_ahead(sequence)
    while core.has_work:
        core.step()
    assert sequence.unread > 0
