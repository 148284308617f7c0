"""Files and folders that are there whole or not at all, and JSON read with care."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosstalk.errors import ConfigError, OutputError

_DEEPEST = 100
"""Levels of lists and objects in a json text; checkpoints and tokenizers have fewer than ten."""
_TOO_DEEP = f"lists and objects are nested more than {_DEEPEST} levels deep"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the name ``path`` once the block ends without error.

    Raises:
        OutputError: something stands at ``path`` already, or the disk cannot take it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputError(f"{path}: exists already; remove it or choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    except OSError as error:
        raise OutputError(f"{path}: cannot be made ({error.strerror})") from None
    try:
        yield part
        open_to_readers(part)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that is there whole or not at all; what stood at ``path`` stays until then.

    ``mode``: who may read and write it, less what this process gives nobody (umask).

    Raises:
        OutputError: the disk cannot take it.
    """
    # The process id keeps two that write the same file at once out of each other's part.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            part.touch(mode)
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from None


def open_to_readers(folder: Path) -> None:
    """Give everything in a folder the usual permissions; temporary files begin with narrower."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a json file, which may begin with a byte order mark.

    Raises:
        ConfigError: the file is missing, unreadable, nested too deeply, or holds no json object.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this the right folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as json ({error}); fetch it again") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no json object; fetch it again")
    return value


def parse_json(text: str) -> Any:
    """Return the value of a json text that somebody else wrote.

    Raises:
        ConfigError: it is no json, or nested too deeply for code that walks through it; the
            message names no file and no remedy.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None
    except ValueError as error:  # no json, or a number of thousands of digits
        raise ConfigError(f"not readable as json ({error})") from None
    if deeper_than(value, _DEEPEST):
        raise ConfigError(_TOO_DEEP)
    return value


def deeper_than(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` levels deep; it never recurses."""
    nests = (dict, list)
    level = [value] if isinstance(value, nests) else []
    for _ in range(most):
        if not level:
            return False
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, nests)
        ]
    return bool(level)


def as_text(document: Mapping[str, Any] | Sequence[Any], indent: int | None = 1) -> str:
    """The document as strict JSON (NaN and infinity are refused), ending with a newline."""
    return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"


def require_target(path: Path, *, replace: bool = True) -> None:
    """Raise OutputError where no file ``path`` can be put, before any work is done for it."""
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such folder; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give a file name")
    if path.is_file() and not replace:
        raise OutputError(f"{path}: exists already; add --force or choose another name")


def write_document(
    path: Path, document: Mapping[str, Any] | Sequence[Any], indent: int | None = 1
) -> None:
    """Write a JSON file that is there whole or not at all.

    Raises:
        OutputError: the disk cannot take it.
    """
    write_whole(path, as_text(document, indent).encode())
