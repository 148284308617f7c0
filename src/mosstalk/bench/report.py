"""``docs/from-the-reports.md``: the reports' rows beside what documents of benchmarks say."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mosstalk.errors import BenchError, ConfigError, OptionError
from mosstalk.files import read_json
from mosstalk.plan.sizes import measured

STEP, CODEC, WHOLE = "mosstalk-step-1", "mosstalk-codec-1", "mosstalk-24gb-1"
"""Formats of ``bench step`` (--prefill, too), ``bench codec`` and ``tests/gpu_24gb.py``."""
FORMATS = (STEP, CODEC, WHOLE)
FIRST_AUDIO, REAL_TIME = "commit_to_first_audio_ms", "real_time_factor"
"""Figures of the whole pipeline, one of each in a document."""
_FP8 = re.compile("fp8|float8", re.IGNORECASE)
NOT_STATED = "not stated"
NOT_YET = "not measured yet"
_NONE = "-"
_TEMPLATE = Path(__file__).with_name("reports.md")
_COLUMNS = ("", "planned", "claimed", "really timed", "our limit", "we measured", "command")
_DOCUMENTS = ("document", "device", "weights", "precision", "torch", "commit", "rates")


@dataclass(frozen=True)
class RowKey:
    """A row of a document: its format, a pattern for its whole name and for its table's title.

    ``precision``: see ``Document.precision``; None is any.
    """

    format: str
    row: str
    table: str = ".*"
    precision: str | None = None


@dataclass(frozen=True)
class Document:
    """A benchmark's document; ``name`` is its file's, ``whole`` has figures of the pipeline."""

    name: str
    format: str
    settings: dict[str, str]
    weights: str
    tables: dict[str, list[dict[str, Any]]]
    whole: dict[str, float] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """``fp8`` where any of the settings says so, else as they are: bfloat16, float32, ..."""
        said = (value for key, value in self.settings.items() if key != "rates")
        if any(_FP8.search(str(value)) for value in said):
            return "fp8"
        return self.settings["precision"]

    def rows(self, wanted: RowKey) -> Iterator[dict[str, Any]]:
        """Those that are ``wanted``; milliseconds."""
        if self.format != wanted.format or wanted.precision not in (None, self.precision):
            return
        for title, rows in self.tables.items():
            for row in rows:
                if re.fullmatch(wanted.table, title) and re.fullmatch(wanted.row, row["name"]):
                    yield row


_Figure = tuple[Document, dict[str, Any]]


def read_document(path: Path) -> Document:
    """Read a document whose runs were all valid.

    Raises:
        ConfigError: the file is no json, or lacks what a document has.
        OptionError: a format that is not known here.
        BenchError: a run was not right, so that its time says nothing.
    """
    values = read_json(path)
    if values.get("format") not in FORMATS:
        raise OptionError(
            f"{path}: the format is {values.get('format')!r}, not one of {', '.join(FORMATS)}"
        )
    try:
        tables: dict[str, list[dict[str, Any]]] = {}
        whole: dict[str, float] = {}
        if values["format"] == WHOLE:
            whole = {name: float(values[name]) for name in (FIRST_AUDIO, REAL_TIME)}
        else:
            timed = values["timed"]
            tables = timed if isinstance(timed, dict) else {"": timed}
        document = Document(
            path.name, values["format"], values["settings"], values["weights"], tables, whole
        )
        _require_valid(document)
        missing = {"device", "precision"} - document.settings.keys()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not as the benchmark writes it ({error!r})") from None
    if missing:
        raise ConfigError(f"{path}: not as the benchmark writes it (no {', '.join(missing)})")
    return document


def _require_valid(document: Document) -> None:
    for rows in document.tables.values():
        for row in rows:
            if row["valid"] != row["n"] or not row["n"]:
                raise BenchError(
                    f"{document.name}: {row['name']}: valid {row['valid']}/{row['n']}; measure it "
                    "again"
                )


def figure(documents: Sequence[Document], wanted: RowKey | None) -> _Figure | None:
    """The one row of ``documents`` that is ``wanted``, with its own; None where there is none.

    Raises:
        OptionError: two documents have it.
    """
    found = [(each, row) for each in documents if wanted for row in each.rows(wanted)]
    if len(found) > 1:
        names = " and ".join(document.name for document, _ in found[:2])
        raise OptionError(f"{found[0][1]['name']} is in {names}: give one of them")
    return found[0] if found else None


class Row(BaseModel):
    """A row of the page: what it is of, and the document's row that fills it."""

    what: str
    wanted: RowKey | None = None


class ReportLine(Row):
    """The reports' three words on it, and ours.

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
    if not any(any(document.rows(wanted)) for wanted in rows):
        raise OptionError(
            f"{document.name}: nothing in it has a row on the page; steps and prompts are taken in "
            f"bfloat16 or fp8, this is {document.precision}"
        )


def _line(line: ReportLine, documents: Sequence[Document]) -> tuple[str, ...]:
    limit, ours = _NONE, NOT_YET
    command = f"`{line.command}`" if line.command else _NONE
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
        command = f"`{peak.command}`" if peak.command else _NONE
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
