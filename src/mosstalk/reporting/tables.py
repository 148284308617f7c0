"""Figures as tables of words: the same for the terminal and for a page."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

NONE = "-"
_GAP = "  "
_NOTE_WIDTH = 90


@dataclass(frozen=True)
class Table:
    """A heading, what its figures mean, and rows of words; the first column names a row."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def as_text(self) -> str:
        """The table in columns, names to the left and figures to the right."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        body = [
            _GAP.join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        note = textwrap.wrap(self.note, _NOTE_WIDTH)
        return "\n".join((self.title, *(f"  {line}" for line in (*body, *note))))


def figure(value: float | None, digits: int = 0, unit: float = 1, *, signed: bool = False) -> str:
    """A cell: ``unit`` times ``value`` with so many digits; ``NONE`` where there is no value."""
    return NONE if value is None else f"{unit * value:{'+' if signed else ''}.{digits}f}"
