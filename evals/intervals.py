"""How sure a figure over sentences is: bootstrap intervals with a fixed seed.

Percentile bootstrap (Efron and Tibshirani 1993; for word error rates Bisani and Ney 2004):
sentences are drawn again with replacement, and the figure is computed on each draw. Two
systems that read the same sentences are compared on the same draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evals.words import Errors
from mosstalk.reporting.tables import NONE, figure

DRAWS = 2000
SEED = 0
SETTINGS = f"95% percentile bootstrap over sentences, {DRAWS} draws, seed {SEED}"
_ENDS = (2.5, 97.5)
_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure, the ends of its 95% interval, and how many sentences it rests on."""

    value: float
    low: float
    high: float
    n: int


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value a sentence."""
    array = np.asarray(values, np.float64)
    return _estimate(float(array.mean()), array[_draws(len(array))].mean(axis=1), len(array))


def mean_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of ``values`` less that of ``others``, of the same sentences in order."""
    return mean([value - other for value, other in zip(values, others, strict=True)])


def rate(errors: Sequence[Errors]) -> Estimate:
    """Error rate over all sentences: edits over length."""
    return _estimate(*_rates(errors), len(errors))


def rate_difference(errors: Sequence[Errors], others: Sequence[Errors]) -> Estimate:
    """Error rate of ``errors`` less that of ``others``, of the same sentences in order."""
    (whole, again), (other_whole, other_again) = _rates(errors), _rates(others)
    return _estimate(whole - other_whole, again - other_again, len(errors))


def _rates(errors: Sequence[Errors]) -> tuple[float, _Values]:
    """Edits over reference lengths, of all and of each draw; an empty reference has length 1."""
    edits = np.array([each.edits for each in errors], np.float64)
    lengths = np.array([max(each.length, 1) for each in errors], np.float64)
    drawn = _draws(len(errors))
    return edits.sum() / lengths.sum(), edits[drawn].sum(1) / lengths[drawn].sum(1)


def _draws(count: int) -> npt.NDArray[np.int64]:
    """Sentence indices (draws, count); the same for all figures of as many sentences."""
    return np.random.default_rng(SEED).integers(0, count, (DRAWS, count))


def _estimate(value: float, drawn: _Values, count: int) -> Estimate:
    low, high = np.percentile(drawn, _ENDS)
    return Estimate(float(value), float(low), float(high), count)


@dataclass(frozen=True)
class Spread:
    """Mean, median and ends of ``n`` values; None where there are none."""

    n: int
    mean: float | None
    median: float | None
    lowest: float | None
    highest: float | None


def spread(values: Sequence[float]) -> Spread:
    """The spread of ``values``, which may be empty."""
    if not values:
        return Spread(0, None, None, None, None)
    array = np.asarray(values, np.float64)
    figures = (array.mean(), np.median(array), array.min(), array.max())
    return Spread(len(array), *map(float, figures))


def percent(rate: Estimate | None) -> str:
    """A rate, a fraction, in percent, with the ends of its interval."""
    return _with_ends(rate, 100, 1, signed=False)


def points(rate: Estimate | None) -> str:
    """A difference of rates in points of percent, with its sign and its interval."""
    return _with_ends(rate, 100, 1, signed=True)


def score(score: Estimate | None, *, signed: bool = False) -> str:
    """A score, or a difference of two with its sign, with the ends of its interval."""
    return _with_ends(score, 1, 2, signed=signed)


def _with_ends(estimate: Estimate | None, unit: int, digits: int, *, signed: bool) -> str:
    if estimate is None:
        return NONE
    value, low, high = (
        figure(each, digits, unit, signed=signed)
        for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"
