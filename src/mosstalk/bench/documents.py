"""Documents that benchmarks wrote with ``--json``, as the pages of figures read them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mosstalk.errors import BenchError, ConfigError, OptionError
from mosstalk.files import read_json

STEP, CODEC, WHOLE = "mosstalk-step-1", "mosstalk-codec-1", "mosstalk-24gb-1"
"""Formats of ``bench step`` (--prefill, too), ``bench codec`` and ``tests/gpu_24gb.py``."""
SERVE, STARTS = "mosstalk-serve-1", "mosstalk-starts-1"
"""Formats of ``bench serve`` and ``bench start``."""
FORMATS = (STEP, CODEC, WHOLE, SERVE, STARTS)
FIRST_AUDIO, REAL_TIME = "commit_to_first_audio_ms", "real_time_factor"
"""Figures of the whole pipeline, one of each in a document."""
_FIRST_TEXT = "commit_to_first_text_ms"
_DECIDING = "silence, until the server decides"
_READING, _SPEAKING = "to the reply's first text", "from there to its first sound"
_BOTH, _WAY = "to the reply's first sound", "to the client, and all else"
_FP8 = re.compile("fp8|float8", re.IGNORECASE)
NONE = "-"
"""In a table, what there is not."""
_COLUMNS = ("document", "device", "weights", "precision", "torch", "commit", "rates")

Stages = dict[str, float]
"""By name, in the order in which they come, how long each took."""


@dataclass(frozen=True)
class RowKey:
    """A row of a document: its format, a pattern for its whole name and for its table's title.

    ``precision``: see ``Document.precision``; None is any. ``engine``: a pattern for the whole
    setting of that name.
    """

    format: str
    row: str
    table: str = ".*"
    precision: str | None = None
    engine: str = ".*"


@dataclass(frozen=True)
class ServedCrowd:
    """What a crowd of ``bench serve`` met.

    Attributes:
        clients: conversations at a time.
        turns: how many turns were spoken in all.
        first_audio_ms: median and 95th percentile of what the bound is of; None for a crowd that
            was not let in.
        broken: turns in which the sound broke off.
        breaches: which bounds were broken, in words.
        stages_ms: means over the turns, from the turn's end to first audio; empty where the
            server did not tell.
    """

    clients: int
    turns: int
    first_audio_ms: tuple[float, float] | None
    broken: int
    breaches: tuple[str, ...]
    stages_ms: Stages


@dataclass(frozen=True)
class Document:
    """A benchmark's document.

    Attributes:
        name: its file's.
        format: one of ``FORMATS``.
        settings: what it was measured on, and how.
        weights: their kind: synthetic, pocket or real.
        tables: by title, rows of timed runs in milliseconds.
        whole: figures of the whole pipeline.
        crowds: of ``bench serve``, in the order in which they talked.
        hands_free: of ``bench serve``, whether the server found where turns ended.
        bound_ms: of ``bench serve``, the most for the 95th percentile to first audio.
        starts_s: of ``bench start``, the parts of each start in seconds.
    """

    name: str
    format: str
    settings: dict[str, str]
    weights: str
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    crowds: tuple[ServedCrowd, ...] = ()
    hands_free: bool = False
    bound_ms: float = 0.0
    starts_s: tuple[Stages, ...] = ()

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
        if not re.fullmatch(wanted.engine, self.settings.get("engine", "")):
            return
        for title, rows in self.tables.items():
            for row in rows:
                if re.fullmatch(wanted.table, title) and re.fullmatch(wanted.row, row["name"]):
                    yield row


Figure = tuple[Document, dict[str, Any]]
"""A row and the document that it is of."""


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
        settings = values["settings"]
        if values["format"] == SERVE:
            told = {"precision": settings.get("dtype", "not stated")}
            settings = told | {"commit": settings.get("clients' commit", NONE)} | settings
        document = Document(
            path.name, values["format"], settings, values["weights"], **_found(values)
        )
        _require_valid(document)
        missing = {"device", "precision"} - document.settings.keys()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not as the benchmark writes it ({error!r})") from None
    if missing:
        raise ConfigError(f"{path}: not as the benchmark writes it (no {', '.join(missing)})")
    return document


def _found(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a document found, as arguments of ``Document``."""
    if values["format"] == WHOLE:
        whole = {name: float(values[name]) for name in (FIRST_AUDIO, REAL_TIME)}
        once = {"name": FIRST_AUDIO, "n": 1, "valid": 1, "p50_ms": whole[FIRST_AUDIO]}
        return {"tables": {"": [once]}, "whole": whole}
    if values["format"] == SERVE:
        hands_free = bool(values["load"]["pattern"]["hands_free"])
        crowds = (_crowd(crowd, hands_free) for crowd in values["crowds"] if not crowd["read"])
        bound_ms = float(values["load"]["bounds"]["first_audio_ms"])
        return {"crowds": tuple(crowds), "hands_free": hands_free, "bound_ms": bound_ms}
    if values["format"] == STARTS:
        return {"starts_s": tuple(dict(start["parts_s"]) for start in values["starts"])}
    timed = values["timed"]
    return {"tables": timed if isinstance(timed, dict) else {"": timed}}


def _crowd(values: Mapping[str, Any], hands_free: bool) -> ServedCrowd:
    found = values["quantiles"]
    first = found["decision_to_audio_ms" if hands_free else "commit_to_audio_ms"]
    turns = [_stages(turn, hands_free) for turn in values["turns"]]
    told = [turn for turn in turns if turn]
    return ServedCrowd(
        values["clients"],
        len(turns),
        (first[0], first[1]) if first else None,
        values["broken"],
        tuple(values["breaches"]),
        {name: fmean(turn.get(name, 0.0) for turn in told) for name in dict.fromkeys(_names(told))},
    )


def _names(turns: Iterable[Stages]) -> Iterator[str]:
    return (name for turn in turns for name in turn)


def _stages(turn: Mapping[str, Any], hands_free: bool) -> Stages:
    """A turn's stages from its end to first audio, milliseconds; none where not all is known."""
    told, whole = turn.get("server_ms", {}), turn["commit_to_audio_ms"]
    if FIRST_AUDIO not in told or whole is None:
        return {}
    after = turn["decision_to_audio_ms"] if hands_free else whole
    if after is None:
        return {}
    first, text = told[FIRST_AUDIO], told.get(_FIRST_TEXT, 0.0)
    after = max(after, first)  # the client is told of the decision a moment later
    stages = {_DECIDING: whole - after} if hands_free else {}
    if 0 < text < first:
        stages |= {_READING: text, _SPEAKING: first - text}
    else:
        stages[_BOTH] = first
    return stages | {_WAY: after - first}


def _require_valid(document: Document) -> None:
    for rows in document.tables.values():
        for row in rows:
            if row["valid"] != row["n"] or not row["n"]:
                raise BenchError(
                    f"{document.name}: {row['name']}: valid {row['valid']}/{row['n']}; measure it "
                    "again"
                )


def figure(documents: Sequence[Document], wanted: RowKey | None) -> Figure | None:
    """The one row of ``documents`` that is ``wanted``, with its own; None where there is none.

    Raises:
        OptionError: two documents have it.
    """
    found = [(each, row) for each in documents if wanted for row in each.rows(wanted)]
    if len(found) > 1:
        names = " and ".join(document.name for document, _ in found[:2])
        raise OptionError(f"{found[0][1]['name']} is in {names}: give one of them")
    return found[0] if found else None


def require_row(document: Document, wanted: Iterable[RowKey], why: str = "") -> None:
    """Check that a document has one of the rows that a page wants.

    Raises:
        OptionError: it has none; ``why`` says more of that.
    """
    if not any(any(document.rows(each)) for each in wanted):
        raise OptionError(f"{document.name}: nothing in it has a row on the page{why}")


def filled(template: Path, parts: Mapping[str, str]) -> str:
    """A page made of its template, in which each part's name stands once, in double braces."""
    page = template.read_text(encoding="utf-8")
    for name, text in parts.items():
        place = f"{{{{{name}}}}}"
        assert page.count(place) == 1, place
        page = page.replace(place, text)
    return page


def sources(documents: Sequence[Document]) -> str:
    """Which documents a page is of, and what they were measured on, in Markdown."""
    if not documents:
        return "None yet."
    lines = (
        (
            document.name,
            *(document.settings.get("device", NONE), document.weights),
            *(document.settings.get(key, NONE) for key in _COLUMNS[3:]),
        )
        for document in documents
    )
    return markdown_table(_COLUMNS, lines)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without an end of line."""
    rule = "|".join("---" for _ in columns)
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, *rows))
    head, *body = (f"| {line} |" for line in lines)
    return "\n".join((head, f"|{rule}|", *body))
