"""What ``mosstalk build`` leaves: a folder with ``model``, ``codec``, ``cache``, ``engine.json``.

Read here without torch: whoever chooses a model looks here first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import read_json

ENGINE_FILE = "engine.json"
FORMAT = "mosstalk-engine-1"
MODEL, CODEC, CACHE = "model", "codec", "cache"


def is_built(folder: Path) -> bool:
    """Whether this is such a folder."""
    return (folder / ENGINE_FILE).is_file()


@dataclass(frozen=True)
class BuiltEngine:
    """A folder and what its ``engine.json`` says."""

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "BuiltEngine":
        """Read ``engine.json``.

        Raises:
            CheckpointError: there is none, it cannot be read, or another version wrote it.
        """
        path = folder / ENGINE_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: has no {ENGINE_FILE}; make one with: mosstalk build")
        try:
            values = read_json(path)
        except ConfigError:
            raise CheckpointError(f"{path}: damaged; build it again") from None
        found = values.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{path}: the format is {found!r}, and this mosstalk reads {FORMAT!r}; build it "
                "again"
            )
        return cls(folder, values)

    @property
    def model(self) -> Path:
        """The language model's folder."""
        return self.folder / MODEL

    @property
    def codec(self) -> Path:
        """The codec's folder."""
        return self.folder / CODEC

    @property
    def cache(self) -> Path:
        """Compiled kernels."""
        return self.folder / CACHE

    @property
    def sessions(self) -> int:
        """Sessions at once that it was built for."""
        return int(self.values["settings"]["max_sessions"])

    @property
    def rows(self) -> int:
        """Rows of the longest conversation that it was built for."""
        return int(self.values["settings"]["max_rows"])

    @property
    def embeddings(self) -> str:
        """Where the table of text embeddings shall be: ``device`` or ``host``."""
        return str(self.values["settings"].get("embeddings", "device"))

    @property
    def flow_memory_mib(self) -> int | None:
        """Memory of a GPU for voices and replies; None where it was built on a CPU."""
        found = self.values["settings"]["codec_memory_mib"]
        return None if found is None else int(found)


def built_engine(folder: Path | None) -> BuiltEngine | None:
    """The built engine that a folder is; None for any other.

    Raises:
        CheckpointError: see ``BuiltEngine.read``.
    """
    return BuiltEngine.read(folder) if folder and is_built(folder) else None
