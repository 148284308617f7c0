"""Two documents of the quality bench beside each other: words of the same sentences, in pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from evals import intervals
from evals.intervals import Estimate, percent, points
from evals.quality import FORMAT
from evals.words import word_errors
from mosstalk.errors import BenchError
from mosstalk.files import read_json
from mosstalk.reporting.tables import Table

_SETTINGS = "checkpoint", "weights", "model"
Said: TypeAlias = dict[str, tuple[list[str], list[str]]]
"""What was to be said, and what was understood, by the name of a reading or group."""


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


@dataclass(frozen=True)
class Words:
    """What a document of the quality bench has for a comparison.

    ``settings``: what was measured; None for what the document does not say.
    """

    settings: dict[str, Any]
    said: Said

    @classmethod
    def read(cls, path: Path) -> "Words":
        """Of a file that ``mosstalk bench quality --json`` wrote.

        Raises:
            ConfigError: it is not readable as json.
            BenchError: it is no such document, or parts of it are missing.
        """
        return cls.of(read_json(path), str(path))

    @classmethod
    def of(cls, document: Mapping[str, Any], where: str) -> "Words":
        """Of a document; ``where``: its name in errors, which are those of ``read``."""
        if document.get("format") != FORMAT:
            raise BenchError(f"{where}: is no document of mosstalk bench quality --json")
        try:
            settings = {key: document["settings"].get(key) for key in _SETTINGS}
            return cls(settings, _heard(document) | _written(document))
        except (KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{where}: is not whole ({error!r}); write it again") from None


def compare(before: Said, after: Said) -> list[Compared]:
    """What both have: readings that judges heard, then groups written down.

    Raises:
        BenchError: they are of other sentences, or have nothing in common.
    """
    found = []
    for name in (name for name in before if name in after):
        if before[name][0] != after[name][0]:
            raise BenchError(f"{name}: the two documents are of other sentences")
        first, second = word_errors(*before[name]), word_errors(*after[name])
        rates = intervals.rate(first), intervals.rate(second)
        difference = intervals.rate_difference(second, first)
        found.append(Compared(name, len(first), *rates, difference))
    if not found:
        raise BenchError("the two documents have no reading in common")
    return found


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


def _heard(document: Mapping[str, Any]) -> Said:
    found: Said = {}
    for sentence in (*document["sentences"], *document.get("long_sentences", ())):
        for name, heard in sentence["heard"].items():
            said, understood = found.setdefault(f"heard: {name}", ([], []))
            said.append(sentence["text"])
            understood.append(heard)
    return found


def _written(document: Mapping[str, Any]) -> Said:
    return {
        f"written down: {row['group']}": (
            [line["said"] for line in row["lines"]],
            [line["own"] for line in row["lines"]],
        )
        for row in document["transcripts"]
    }
