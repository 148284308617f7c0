"""What commands that measure leave behind: tables for people, a document, and a page."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.files import (
    STANDARD_OUTPUT,
    deliver,
    human_text_on_stderr,
    require_target,
    write_whole,
)
from mosstalk.reporting.tables import Table


@dataclass(frozen=True)
class Outputs:
    """Where the document and the page go; ``json`` may be ``-`` for standard output."""

    json: str | None
    html: Path | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is a document or a page to write."""
        return bool(self.json or self.html)

    def require(self) -> None:
        """Raise OutputError for a place where nothing can be written."""
        for target in (self.json if self.json != STANDARD_OUTPUT else None, self.html):
            if target:
                require_target(Path(target))

    def text_for_people(self) -> AbstractContextManager[None]:
        """Keep stdout for the document where that goes there: what is printed goes to stderr."""
        return human_text_on_stderr(self.json == STANDARD_OUTPUT)

    def write(self, document: Mapping[str, Any], page: Callable[[], str] | None = None) -> None:
        """Write the document, and the page where one is asked for."""
        deliver(document, self.json)
        if self.html and page:
            write_whole(self.html, page().encode())


def measured_document(name: str, settings: Mapping[str, str], **figures: Any) -> dict[str, Any]:
    """The document of a format: settings, the kind of weights, and all figures."""
    head = {"format": name, "settings": settings, "weights": settings["weights"]}
    return head | figures


def print_found(
    settings: Mapping[str, Any],
    tables: Iterable[Table],
    skipped: Iterable[str] = (),
    *,
    width: int | None = None,
) -> None:
    """Print settings, tables, and what was not measured; see ``print_settings``."""
    print_settings(settings, width)
    print_tables(tables)
    for line in skipped:
        print(f"\nnot measured: {line}")


def print_settings(settings: Mapping[str, Any], width: int | None = None) -> None:
    """Print a setting a line, values after ``width`` characters or the longest name."""
    width = max(map(len, settings), default=0) if width is None else width
    for name, value in settings.items():
        print(f"{name:<{width}} {value}")


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables, an empty line before each."""
    for table in tables:
        print(f"\n{table.as_text()}")
