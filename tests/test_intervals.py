"""Intervals hold the truth about as often as they say, and pairing makes them narrow."""

import numpy as np
import pytest

from evals.intervals import mean, mean_difference, rate, rate_difference
from evals.words import Errors

EASY, HARD = Errors(0, 0, 0, 10), Errors(4, 1, 0, 10)


def test_a_rate_is_edits_over_all_words() -> None:
    assert rate([EASY, Errors(1, 1, 1, 5)]).value == pytest.approx(3 / 15)
    assert rate([EASY, HARD]).n == 2


def test_sentences_that_all_agree_leave_no_doubt() -> None:
    found = rate([HARD] * 10)
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_the_same_sentences_give_the_same_interval() -> None:
    errors = [EASY, HARD, HARD, EASY, HARD]
    assert rate(errors) == rate(errors)


def test_what_two_systems_find_equally_hard_makes_no_difference() -> None:
    errors = [EASY, HARD] * 10
    worse = [Errors(each.substitutions + 1, each.deletions, 0, 10) for each in errors]
    difference = rate_difference(worse, errors)
    assert [difference.low, difference.high] == pytest.approx([0.1, 0.1])
    assert rate(worse).high - rate(worse).low > 0.2


def test_intervals_hold_the_true_mean_nearly_as_often_as_they_say() -> None:
    draw = np.random.default_rng(1)
    found = [mean(draw.normal(3.0, 1.0, 40).tolist()) for _ in range(200)]
    held = sum(each.low <= 3.0 <= each.high for each in found)
    assert 178 <= held <= 198


def test_a_difference_is_that_of_the_means() -> None:
    first, second = [3.0, 4.0, 5.0], [2.0, 2.0, 5.0]
    assert mean_difference(first, second).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="shorter"):
        mean_difference(first, second[:2])
