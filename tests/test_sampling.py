"""Penalty, warpers and draws."""

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.engine.sampler import draw as draw_rows
from mosstalk.errors import OptionError
from mosstalk.models.generation import draw, forbid, penalise, warp
from mosstalk.ops.sampling_parts import FREE, HELD, DrawSettings
from mosstalk.reply_options import SamplingOptions

LOGITS = st.lists(st.integers(-400, 400), min_size=2, max_size=40).map(
    lambda values: torch.tensor(values).float() / 50
)


@given(logits=LOGITS, penalty=st.floats(0.5, 2), data=st.data())
@examples(100)
def test_penalty_pushes_each_seen_id_once(
    logits: torch.Tensor, penalty: float, data: st.DataObject
) -> None:
    seen = data.draw(st.sets(st.integers(0, len(logits) - 1)))
    found = penalise(logits, torch.tensor(sorted(seen), dtype=torch.long), penalty)
    for index, (before, after) in enumerate(zip(logits.tolist(), found.tolist(), strict=True)):
        if index not in seen:
            assert after == before
        else:
            assert after == pytest.approx(before * penalty if before < 0 else before / penalty)


@given(logits=LOGITS, top_k=st.integers(1, 50))
@examples(100)
def test_top_k_keeps_the_k_largest_and_ties_at_the_edge(logits: torch.Tensor, top_k: int) -> None:
    kept = warp(logits, 1.0, top_k, 1.0).isfinite()
    ranked = sorted(logits.tolist(), reverse=True)
    edge = ranked[min(top_k, len(ranked)) - 1]
    assert kept.tolist() == [value >= edge for value in logits.tolist()]


@given(logits=LOGITS, top_p=st.floats(0.01, 0.999))
@examples(100)
def test_top_p_keeps_the_smallest_set_with_that_mass(logits: torch.Tensor, top_p: float) -> None:
    kept = warp(logits, 1.0, 0, top_p).isfinite()
    mass = logits.softmax(-1)
    assert kept[logits.argmax()]
    assert float(mass[kept].sum()) >= top_p - 1e-5
    smallest = float(mass[kept].min())
    assert float(mass[kept].sum()) - smallest < top_p + 1e-5
    assert float(mass[~kept].max() if (~kept).any() else 0) <= smallest + 1e-7


def test_warpers_that_are_off_change_nothing_but_the_temperature() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(warp(logits, 2.0, 0, 1.0), logits / 2)


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert draw(logits, SamplingOptions(temperature=0), 0, 1) == 1


def test_draws_follow_the_warped_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    options = SamplingOptions(temperature=0.8, top_k=4, top_p=1.0, seed=11)
    count = 2000
    drawn = torch.tensor([draw(logits, options, 0, step) for step in range(count)])
    expected = warp(logits, 0.8, 4, 1.0).softmax(-1)
    found = drawn.bincount(minlength=5) / count
    # Five standard deviations of a share near one half.
    assert float((found - expected).abs().max()) < 5 * 0.5 / count**0.5
    assert found[4] == 0


@given(seed=st.integers(0, 2**63), step=st.integers(1, 5000), channel=st.sampled_from([0, 1]))
@examples(50)
def test_a_draw_is_a_pure_function_of_seed_channel_and_step(
    seed: int, step: int, channel: int
) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(step))
    options = SamplingOptions(seed=seed)
    assert draw(logits, options, channel, step) == draw(logits.clone(), options, channel, step)


def test_forbidden_ids_are_never_drawn() -> None:
    logits = forbid(torch.tensor([9.0, 8.0, 0.0]), {0, 1})
    options = SamplingOptions(temperature=5.0, top_k=0, top_p=1.0)
    assert {draw(logits, options, 0, step) for step in range(50)} == {2}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(
    options: dict[str, float], word: str
) -> None:
    with pytest.raises(OptionError, match=word):
        SamplingOptions(**options)  # type: ignore[arg-type]


@given(data=st.data(), top_k=st.integers(1, HELD), top_p=st.sampled_from([0.3, 0.95, 1.0]))
@examples(60)
def test_few_tokens_are_drawn_as_from_all(data: st.DataObject, top_k: int, top_p: float) -> None:
    rows, tokens = 4, 300
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    # Of few levels, so that there are ties, at times more of them than are held.
    levels = data.draw(st.sampled_from([3, 20, 1 << 20]))
    logits = (torch.randn(rows, tokens, generator=generator) * levels).round() / levels * 4
    temperature = data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0]))
    settings = DrawSettings(
        slots=torch.arange(rows),
        steps=torch.arange(rows) + data.draw(st.integers(0, 1000)),
        seeds=torch.randint(1 << 60, (rows,), generator=generator),
        forced=torch.full((rows,), FREE),
        top_k=torch.full((rows,), top_k),
        temperature=torch.full((rows,), temperature),
        tail=torch.full((rows,), 1 - top_p),
        penalty=torch.ones(rows),
        never=torch.full((rows, 1), FREE),
    )
    seen = torch.zeros(rows, tokens, dtype=torch.bool)
    all_of_them = draw_rows(logits, seen, settings, 1)
    few = draw_rows(logits, seen, settings, 1, few_only=True)
    assert few.tokens.tolist() == all_of_them.tokens.tolist()
