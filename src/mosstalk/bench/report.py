"""``docs/from-the-reports.md``: the reports' rows beside what documents of benchmarks say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mosstalk.bench.documents import (
    NONE,
    Document,
    RowKey,
    figure,
    filled,
    markdown_table,
    require_row,
    sources,
)
from mosstalk.files import read_json
from mosstalk.plan.sizes import measured

NOT_STATED = "not stated"
NOT_YET = "not measured yet"
_TEMPLATE = Path(__file__).with_name("reports.md")
_COLUMNS = ("", "planned", "claimed", "really timed", "our limit", "we measured", "command")


class Row(BaseModel):
    """A row of the page: what it is of, and the document's row that fills it."""

    what: str
    wanted: RowKey | None = None


class ReportLine(Row):
    """What the source reports planned, claimed and timed, and where our figure comes from.

    ``peak`` names one of ``plan.measured``, ``whole`` a figure of the whole pipeline.
    """

    planned: str = NOT_STATED
    claimed: str = NOT_STATED
    timed: str = NOT_STATED
    peak: str | None = None
    whole: str | None = None
    command: str | None = None


class Elsewhere(Row):
    """A figure that others, or this project, took of another implementation.

    ``see``: where ours stands if no document has what is ``wanted``.
    """

    where: str
    figure: str
    see: str | None = None


_ROWS = read_json(Path(__file__).with_name("reports.json"))
LINES = [ReportLine(**row) for row in _ROWS["lines"]]
ELSEWHERE = [Elsewhere(**row) for row in _ROWS["elsewhere"]]
_ELSEWHERE = ("", "where", "figure", "ours")


def report_page(documents: Sequence[Document]) -> str:
    """The page in Markdown. A cell that no document fills says so.

    Raises:
        OptionError: two documents have the same row, or one has no row of the page.
    """
    for document in documents:
        _require_used(document)
    parts = {
        "lines": markdown_table(_COLUMNS, (_line(line, documents) for line in LINES)),
        "elsewhere": markdown_table(_ELSEWHERE, (_elsewhere(row, documents) for row in ELSEWHERE)),
        "documents": sources(documents),
    }
    return filled(_TEMPLATE, parts)


def _require_used(document: Document) -> None:
    if not document.whole:
        wanted = (each.wanted for each in (*LINES, *ELSEWHERE) if each.wanted)
        why = f"steps and prompts are taken in bfloat16 or fp8, this is {document.precision}"
        require_row(document, wanted, f"; {why}")


def _line(line: ReportLine, documents: Sequence[Document]) -> tuple[str, ...]:
    limit, ours = NONE, NOT_YET
    command = f"`{line.command}`" if line.command else NONE
    found = figure(documents, line.wanted)
    if line.wanted:
        limit_ms = found and found[1].get("limit_ms")
        limit = NOT_YET if limit_ms is None else f"{limit_ms:.2f} ms"
    if found:
        ours = _measured(*found)
    if line.whole:
        ours = "; ".join(_whole(line.whole, each) for each in documents if each.whole) or NOT_YET
    if line.peak:
        peak = next(peak for peak in measured().peaks if peak.name == line.peak)
        ours = NOT_YET if peak.gib is None else f"{peak.gib:.2f} GiB ({peak.device})"
        command = f"`{peak.command}`" if peak.command else NONE
    return line.what, line.planned, line.claimed, line.timed, limit, ours, command


def _measured(document: Document, row: dict[str, Any]) -> str:
    """Median, tail, first run of all; what it ran on is in the table of documents."""
    cold_ms = row.get("cold_ms")
    first = "" if cold_ms is None else f", first of all {cold_ms:.2f}"
    return (
        f"{row['p50_ms']:.2f} ms (p95 {row['p95_ms']:.2f}{first}; valid {row['valid']}/{row['n']}; "
        f"{document.settings['device']}, {document.weights} weights, {document.name})"
    )


def _whole(name: str, document: Document) -> str:
    """What the one turn of a document took."""
    value, settings = document.whole[name], document.settings
    shown = f"{value:.0f} ms" if name.endswith("_ms") else f"{value:.3f}"
    return (
        f"{shown} in {settings['precision']} (a turn after 8,000 rows, cap in GiB: "
        f"{settings.get('cap_gib', 'not stated')}; {settings['device']}, "
        f"{document.weights} weights, {document.name})"
    )


def _elsewhere(row: Elsewhere, documents: Sequence[Document]) -> tuple[str, ...]:
    found = figure(documents, row.wanted)
    return row.what, row.where, row.figure, _measured(*found) if found else row.see or NOT_YET
