"""``docs/from-the-reports.md``: the reports' rows beside what documents of benchmarks say."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mosstalk.bench.report_figures import Document, Figure, figure
from mosstalk.bench.report_rows import ELSEWHERE, LINES, Elsewhere, Line
from mosstalk.errors import OptionError
from mosstalk.plan.measured import measured

NOT_YET = "not measured yet"
_NONE = "-"
_TEMPLATE = Path(__file__).with_name("reports.md")
_COLUMNS = ("", "planned", "claimed", "really timed", "our limit", "we measured", "command")
_ELSEWHERE = ("", "where", "figure", "ours")
_DOCUMENTS = ("document", "device", "weights", "precision", "torch", "commit", "rates")


def report_page(documents: Sequence[Document]) -> str:
    """The page in Markdown. A cell that no document fills says so.

    Raises:
        OptionError: two documents have the same row, or one has no row of the page.
    """
    for document in documents:
        _require_used(document)
    filled = {
        "{{lines}}": _table(_COLUMNS, (_line(line, documents) for line in LINES)),
        "{{elsewhere}}": _table(_ELSEWHERE, (_elsewhere(row, documents) for row in ELSEWHERE)),
        "{{documents}}": _sources(documents),
    }
    page = _TEMPLATE.read_text(encoding="utf-8")
    for place, text in filled.items():
        assert page.count(place) == 1, place
        page = page.replace(place, text)
    return page


def _require_used(document: Document) -> None:
    if document.whole:
        return
    rows = (each.wanted for each in (*LINES, *ELSEWHERE) if each.wanted)
    if not any(any(document.figures(wanted)) for wanted in rows):
        raise OptionError(
            f"{document.name}: nothing in it has a row on the page; steps and prompts are taken in "
            f"bfloat16 or fp8, this is {document.precision}"
        )


def _line(line: Line, documents: Sequence[Document]) -> tuple[str, ...]:
    limit, ours = _NONE, NOT_YET
    command = f"`{line.command}`" if line.command else _NONE
    found = figure(documents, line.wanted) if line.wanted else None
    if line.wanted:
        limit = _limit(found)
    if found:
        ours = _measured(found)
    if line.whole:
        ours = "; ".join(_whole(line.whole, each) for each in documents if each.whole) or NOT_YET
    if line.peak:
        peak = next(peak for peak in measured().peaks if peak.name == line.peak)
        ours = NOT_YET if peak.gib is None else f"{peak.gib:.2f} GiB ({peak.device})"
        command = f"`{peak.command}`" if peak.command else _NONE
    return line.what, line.planned, line.claimed, line.timed, limit, ours, command


def _limit(found: Figure | None) -> str:
    limit = found.ms("limit") if found else None
    return NOT_YET if limit is None else f"{limit:.2f} ms"


def _measured(found: Figure) -> str:
    """Median, tail, first run of all; what it ran on is in the table of documents."""
    document, row = found.document, found.row
    cold = found.ms("cold")
    first = "" if cold is None else f", first of all {cold:.2f}"
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
    found = figure(documents, row.wanted) if row.wanted else None
    return row.what, row.where, row.figure, _measured(found) if found else row.see or NOT_YET


def _sources(documents: Sequence[Document]) -> str:
    if not documents:
        return "None yet."
    lines = (
        (
            document.name,
            *(document.settings.get("device", _NONE), document.weights),
            *(document.settings.get(key, _NONE) for key in _DOCUMENTS[3:]),
        )
        for document in documents
    )
    return _table(_DOCUMENTS, lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = "|".join("---" for _ in columns)
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, *rows))
    head, *body = (f"| {line} |" for line in lines)
    return "\n".join((head, f"|{rule}|", *body))
