"""Writing folders and files so that they are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mosstalk.errors import OutputError


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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; what stood at ``path`` stays until then.

    Raises:
        OutputError: the disk cannot take it.
    """
    # The process id keeps two that write the same file at once out of each other's part.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
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
