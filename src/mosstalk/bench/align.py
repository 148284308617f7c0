"""Least-edit alignment of two sequences (Levenshtein 1966), and what its edits count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_EDIT = 2**20
_SUBSTITUTION = _EDIT + 1
"""Dearer by so little that it only decides between ways with equally many edits."""


class Pair(NamedTuple):
    """One step of an alignment; None where the other side has something of its own."""

    reference: str | None
    hypothesis: str | None

    @property
    def kind(self) -> str:
        """``match``, ``substitution``, ``deletion`` (left out) or ``insertion`` (added)."""
        if self.reference is None:
            return "insertion"
        if self.hypothesis is None:
            return "deletion"
        return "match" if self.reference == self.hypothesis else "substitution"


@dataclass(frozen=True)
class Errors:
    """Edits of one hypothesis, and the length of its reference."""

    substitutions: int
    deletions: int
    insertions: int
    length: int

    @property
    def edits(self) -> int:
        """Substitutions, deletions and insertions together."""
        return self.substitutions + self.deletions + self.insertions


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Pair]:
    """The pairs, in order, that turn ``reference`` into ``hypothesis`` with the fewest edits.

    Of equally short ways one that leaves most items as they are is taken.
    """
    costs = _costs(reference, hypothesis)
    pairs, i, j = list[Pair](), len(reference), len(hypothesis)
    while i or j:
        if i and j:
            edit = _SUBSTITUTION if reference[i - 1] != hypothesis[j - 1] else 0
            if costs[i][j] == costs[i - 1][j - 1] + edit:
                i, j = i - 1, j - 1
                pairs.append(Pair(reference[i], hypothesis[j]))
                continue
        if i and costs[i][j] == costs[i - 1][j] + _EDIT:
            i -= 1
            pairs.append(Pair(reference[i], None))
        else:
            j -= 1
            pairs.append(Pair(None, hypothesis[j]))
    return pairs[::-1]


def _costs(reference: Sequence[str], hypothesis: Sequence[str]) -> list[list[int]]:
    """``costs[i][j]``: least cost from the first i of one to the first j of the other."""
    costs = [[j * _EDIT for j in range(len(hypothesis) + 1)]]
    for i, wanted in enumerate(reference, 1):
        row, above = [i * _EDIT], costs[-1]
        for j, found in enumerate(hypothesis, 1):
            changed = above[j - 1] + (_SUBSTITUTION if wanted != found else 0)
            row.append(min(changed, above[j] + _EDIT, row[-1] + _EDIT))
        costs.append(row)
    return costs


def count_errors(pairs: Sequence[Pair]) -> Errors:
    """What the edits of an alignment count."""
    kinds = [pair.kind for pair in pairs]
    return Errors(
        kinds.count("substitution"),
        kinds.count("deletion"),
        kinds.count("insertion"),
        len(kinds) - kinds.count("insertion"),
    )
