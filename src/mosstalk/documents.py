"""JSON documents for scripts: written whole or not at all, or alone on standard output."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from mosstalk.atomic import write_whole
from mosstalk.errors import OutputError


def as_text(document: Mapping[str, Any], indent: int | None = 1) -> str:
    """The document as strict JSON (NaN and infinity are refused), ending with a newline."""
    return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"


def require_target(path: Path, *, replace: bool = True) -> None:
    """Raise OutputError where no file ``path`` can be put, before any work is done for it."""
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such folder; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give a file name")
    if path.exists() and not replace:
        raise OutputError(f"{path}: exists already; add --force or choose another name")


def write_document(path: Path, document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file that is there whole or not at all.

    Raises:
        OutputError: the disk cannot take it.
    """
    write_whole(path, as_text(document, indent).encode())


STANDARD_OUTPUT = "-"
"""In place of a file: the document goes to stdout, and everything for people to stderr."""


def deliver(document: Mapping[str, Any], to: str | None) -> None:
    """Print the document, write it to the file ``to``, or neither where that is None."""
    if to == STANDARD_OUTPUT:
        print(as_text(document), end="")
    elif to:
        write_document(Path(to), document)


@contextmanager
def human_text_on_stderr(wanted: bool = True) -> Iterator[None]:
    """Send what is printed in the block to stderr: stdout is kept for one document."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
