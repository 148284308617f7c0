"""Figures of benchmarks' json documents, found by what they are of."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mosstalk.errors import BenchError, ConfigError, OptionError
from mosstalk.files import read_json

STEP, CODEC, WHOLE = "mosstalk-step-1", "mosstalk-codec-1", "mosstalk-24gb-1"
"""Formats of ``bench step`` (--prefill, too), ``bench codec`` and ``tests/gpu_24gb.py``."""
FORMATS = (STEP, CODEC, WHOLE)
FIRST_AUDIO, REAL_TIME = "commit_to_first_audio_ms", "real_time_factor"
"""Figures of the whole pipeline, one of each in a document."""
_FP8 = re.compile("fp8|float8", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """A row of a document: its format, a pattern for its whole name and for its table's title.

    ``precision``: see ``Document.precision``; None is any.
    """

    format: str
    row: str
    table: str = ".*"
    precision: str | None = None


@dataclass(frozen=True)
class Figure:
    """A measured row and what it was measured on; milliseconds."""

    table: str
    row: dict[str, Any]
    document: "Document"

    def ms(self, name: str) -> float | None:
        """``p50``, ``p95``, ``cold`` or ``limit``."""
        value = self.row.get(f"{name}_ms")
        return None if value is None else float(value)


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

    def figures(self, wanted: Wanted) -> Iterator[Figure]:
        """Rows that are ``wanted``."""
        if self.format != wanted.format or wanted.precision not in (None, self.precision):
            return
        for title, rows in self.tables.items():
            for row in rows:
                if re.fullmatch(wanted.table, title) and re.fullmatch(wanted.row, row["name"]):
                    yield Figure(title, row, self)


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


def figure(documents: Sequence[Document], wanted: Wanted) -> Figure | None:
    """The one figure of ``documents`` that is ``wanted``; None where there is none.

    Raises:
        OptionError: two documents have it.
    """
    found = [each for document in documents for each in document.figures(wanted)]
    if len(found) > 1:
        names = " and ".join(each.document.name for each in found[:2])
        raise OptionError(f"{found[0].row['name']} is in {names}: give one of them")
    return found[0] if found else None
