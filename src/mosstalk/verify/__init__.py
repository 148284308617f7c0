"""Golden cases: what other implementations computed, against what this one computes."""

from enum import StrEnum


class ComputePath(StrEnum):
    """``reference`` is plain and one row a step; ``fast`` is what serves people."""

    REFERENCE = "reference"
    FAST = "fast"
