"""Two documents of the quality bench beside each other: words of the same sentences, in pairs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.bench import intervals
from mosstalk.bench.document import FORMAT
from mosstalk.bench.intervals import Estimate
from mosstalk.bench.tables import Table, percent, points
from mosstalk.bench.words import word_errors
from mosstalk.errors import BenchError


@dataclass(frozen=True)
class Compared:
    """Word error rates of one reading or group by both checkpoints, and the later less the earlier.

    Rates are fractions; the interval of the difference is that of pairs of the same sentences.
    """

    name: str
    n: int
    before: Estimate
    after: Estimate
    difference: Estimate


def read_quality(path: Path) -> dict[str, Any]:
    """A document that ``mosstalk bench quality --json`` wrote.

    Raises:
        BenchError: it is none, or parts of it are missing.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BenchError(f"{path}: is no document of mosstalk bench quality --json")
    try:
        _heard(values), _written(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path}: is not whole ({error!r}); write it again") from None
    return values


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Compared]:
    """What both documents have: readings that judges heard, then groups written down.

    Raises:
        BenchError: they are of other sentences, or have nothing in common.
    """
    pairs = [*_pairs(_heard(before), _heard(after)), *_pairs(_written(before), _written(after))]
    if not pairs:
        raise BenchError("the two documents have no reading in common")
    return pairs


def comparison_table(found: Sequence[Compared]) -> Table:
    """For people."""
    rows = [
        (each.name, str(each.n), percent(each.before), percent(each.after), points(each.difference))
        for each in found
    ]
    note = (
        "Word error rates in %, and the second less the first in points, of the same sentences. In "
        f"brackets: {intervals.SETTINGS}."
    )
    return Table("Words", note, ("", "n", "first", "second", "difference"), tuple(rows))


_Said = dict[str, tuple[list[str], list[str]]]
"""What was to be said, and what was understood, by the name of a reading or group."""


def _heard(document: Mapping[str, Any]) -> _Said:
    found: _Said = {}
    for sentence in document["sentences"]:
        for name, heard in sentence["heard"].items():
            said, understood = found.setdefault(f"heard: {name}", ([], []))
            said.append(sentence["text"])
            understood.append(heard)
    return found


def _written(document: Mapping[str, Any]) -> _Said:
    return {
        f"written down: {row['group']}": (
            [line["said"] for line in row["lines"]],
            [line["own"] for line in row["lines"]],
        )
        for row in document["transcripts"]
    }


def _pairs(before: _Said, after: _Said) -> Iterator[Compared]:
    for name in (name for name in before if name in after):
        if before[name][0] != after[name][0]:
            raise BenchError(f"{name}: the two documents are of other sentences")
        first, second = word_errors(*before[name]), word_errors(*after[name])
        yield Compared(
            name,
            len(first),
            intervals.rate(first),
            intervals.rate(second),
            intervals.rate_difference(second, first),
        )
