"""Which of the ways to compute the same thing is verified."""

from enum import StrEnum


class ComputePath(StrEnum):
    """``reference`` is plain and one row a step; ``fast`` is what serves people."""

    REFERENCE = "reference"
    FAST = "fast"
