"""The spread of one value over many sounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
