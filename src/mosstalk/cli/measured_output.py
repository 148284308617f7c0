"""What commands that measure print, and how their documents begin."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.reporting.tables import Table


def measured_document(name: str, settings: Mapping[str, str], **figures: Any) -> dict[str, Any]:
    """The document of a format: settings, the kind of weights, and all figures."""
    return {"format": name, "settings": settings, "weights": settings["weights"]} | figures


def print_found(
    settings: Mapping[str, Any],
    tables: "Iterable[Table]",
    skipped: Iterable[str] = (),
    *,
    width: int | None = None,
) -> None:
    """Print settings, tables with an empty line before each, and what was not measured.

    A setting is a line, its value after ``width`` characters or the longest name.
    """
    width = max(map(len, settings), default=0) if width is None else width
    for name, value in settings.items():
        print(f"{name:<{width}} {value}")
    for table in tables:
        print(f"\n{table.as_text()}")
    for line in skipped:
        print(f"\nnot measured: {line}")


def numbers(option: str, words: str) -> list[int]:
    """The numbers of ``1,8,32``, each above 0.

    Raises:
        OptionError: ``words`` say something else.
    """
    parts = [word.strip() for word in words.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"{option} {words}: give numbers above 0, like 1,8,32")
    return list(map(int, parts))
