"""What was measured, or is set aside, and cannot be computed from sizes: ``measured.json``."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mosstalk.errors import ConfigError
from mosstalk.files import read_json

FORMAT = "mosstalk-measured-1"
MIB = 2**20
_FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Room:
    """Memory that every process takes; ``basis``: measured, set aside or assumed."""

    name: str
    bytes: int
    basis: str
    source: str


@dataclass(frozen=True)
class Peak:
    """Device memory of a whole pipeline; ``gib`` None: not stated or not measured."""

    name: str
    device: str | None
    gib: float | None
    command: str | None


@dataclass(frozen=True)
class Measured:
    """All of it."""

    rooms: tuple[Room, ...]
    peaks: tuple[Peak, ...]


@cache
def measured(path: Path = _FILE) -> Measured:
    """Read the file of the package, or another of its form.

    Raises:
        ConfigError: it is of another form.
    """
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise ConfigError(f"{path}: the format is {values.get('format')!r}, not {FORMAT!r}")
    rooms = (
        Room(room["name"], room["mib"] * MIB, room["basis"], room["source"])
        for room in values["rooms"]
    )
    return Measured(tuple(rooms), tuple(Peak(**peak) for peak in values["peaks"]))
