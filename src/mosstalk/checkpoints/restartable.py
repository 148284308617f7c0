"""Writing a folder file by file so that a run that was killed goes on where it stopped.

The files grow in a hidden folder beside the target. Each is renamed into place when whole,
and a state file says which are; the folder takes its name only at the very end. Below it, what
others need who write, copy or compare such folders.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mosstalk.errors import CheckpointError, ConfigError, OutputError
from mosstalk.files import open_to_readers, read_json
from mosstalk.progress import Progress, no_progress

INDEX = "model.safetensors.index.json"
MANIFEST = "mosstalk.json"
"""Beside converted and quantised weights: what they were made of, and hashes."""
_STATE = "state.json"
_OS_ERROR = re.compile(r"os error (\d+)")
_HASH_BYTES = 1 << 24


Write = Callable[[Path], dict[str, Any] | None]
"""Writes a file at the path that it is given, and returns what the state should remember of it."""


def fingerprint(files: Sequence[Path]) -> dict[str, list[int]]:
    """Size and modification time of each file: enough to see that a source was changed."""
    stats = {path: path.stat() for path in files}
    return {str(path): [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def sha256(path: Path, tell: Progress = no_progress) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
            done += len(block)
            tell(f"hashing {path.name}", done, total)
    return digest.hexdigest()


class RestartableFolder:
    """A folder that is being written; ``notes`` is what finished files left to remember."""

    def __init__(self, out: Path, recipe: dict[str, Any]) -> None:
        self.out = out
        self.part = out.with_name(f".{out.name}.converting")
        self._recipe = json.loads(json.dumps(recipe))
        self.notes: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Take up a run that was stopped, or begin anew."""
        try:
            state = read_json(self.part / _STATE)
        except ConfigError:
            state = {}
        if state.get("recipe") == self._recipe:
            self.notes = dict(state["files"])
        else:
            shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True, exist_ok=True)
        # What was being written goes: safetensors does so under a name that it makes up.
        finished = {self.part / name for name in self.notes}
        for path in self.part.rglob("*"):
            if path.is_file() and path not in finished:
                path.unlink()
        self._save_state()

    def write(self, name: str, write: Write) -> None:
        """Write the file ``name`` of the folder, unless an earlier run did."""
        target = self.part / name
        if name in self.notes and target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        growing = target.with_name(f"{target.name}.part")
        note = write(growing)
        growing.replace(target)
        self.notes[name] = note or {}
        self._save_state()

    def write_json(self, name: str, values: Callable[[], Mapping[str, Any]]) -> None:
        """Write what ``values`` returns as JSON, unless an earlier run did."""

        def write(path: Path) -> None:
            path.write_text(json.dumps(values(), indent=2) + "\n")

        self.write(name, write)

    def copy(self, name: str, source: Path) -> None:
        """Copy ``source``, unless an earlier run did."""

        def write(path: Path) -> None:
            shutil.copyfile(source, path)

        self.write(name, write)

    def finish(self) -> None:
        """Give the folder its name."""
        (self.part / _STATE).unlink()
        open_to_readers(self.part)
        if self.out.is_dir():
            self.out.rmdir()
        self.part.replace(self.out)

    def discard(self) -> None:
        """Remove everything written so far."""
        shutil.rmtree(self.part, ignore_errors=True)

    def _save_state(self) -> None:
        growing = self.part / f"{_STATE}.part"
        growing.write_text(json.dumps({"recipe": self._recipe, "files": self.notes}))
        growing.replace(self.part / _STATE)


@contextmanager
def restartable(
    out: Path, sources: Sequence[Path], recipe: dict[str, Any]
) -> Iterator[RestartableFolder]:
    """Yield a folder to write; it appears as ``out`` when the block ends without error.

    A run that is killed leaves a hidden folder that the next run with the same sources and
    ``recipe`` takes up. An error leaves nothing.

    Raises:
        OutputError: ``out`` exists, or the disk is full or cannot be written.
        CheckpointError: a source changed while it was read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out}: exists already; remove it or choose another name")
    before = fingerprint(sources)
    folder = RestartableFolder(out, recipe | {"sources": before})
    try:
        folder.begin()
        yield folder
        if fingerprint(sources) != before:
            raise CheckpointError(f"{sources[0].parent}: changed while it was read; run it again")
        folder.finish()
    except OSError as error:
        folder.discard()
        raise OutputError(f"{out}: cannot be written ({error.strerror or error})") from None
    except Exception:
        folder.discard()
        raise


def require_space(out: Path, needed: int) -> None:
    """Raise OutputError when the disk under ``out`` has less than ``needed`` bytes free."""
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{out}: needs {needed / 2**20:,.0f} MiB and the disk has {free / 2**20:,.0f} MiB "
            "free; make room or write elsewhere"
        )


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; a disk that cannot take it raises OSError, as elsewhere."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise OSError(str(error)) from None
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def copy_folder(source: Path, out: Path, tell: Progress) -> None:
    """Copy a folder's files but hidden ones.

    Raises:
        OutputError: the disk has no room.
        CheckpointError: there is no such folder.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    names = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    files = [source / name for name in names if not any(p.startswith(".") for p in name.parts)]
    require_space(out, sum(path.stat().st_size for path in files))
    for done, path in enumerate(files):
        tell(f"copying {path.name}", done, len(files))
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def digests(folder: Path, tell: Progress) -> dict[str, str]:
    """SHA-256 of every file of a folder, those that its manifest lists not read again."""
    known: Mapping[str, dict[str, str]] = {}
    if (folder / MANIFEST).is_file():
        known = read_json(folder / MANIFEST).get("files", {})
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        listed = known.get(name, {}).get("sha256")
        found[name] = listed or sha256(path, tell)
    return found
