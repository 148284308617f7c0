"""``tiles.json``: the tiles and splits that autotuning chose for a card, and by which rule.

A ``Division`` of ``ops.linear_tiles`` is a tile and what goes beside it, a product is a matmul of
the language model. Nothing is measured here: ``choose`` is given clocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mosstalk.errors import CheckpointError, ConfigError
from mosstalk.files import parse_json
from mosstalk.ops.linear_tiles import ANY_ROWS, KINDS, Division, Key
from mosstalk.ops.tiles import Tile
from mosstalk.prepared.machine import foreign

TILES_FILE = "tiles.json"
TILES_FORMAT = "mosstalk-tiles-1"
MARGIN = 0.02
"""By this share of its time another division must be faster than the package's own."""
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_ROWS = {"1": 1, "16": 16, "32": 32, "more": ANY_ROWS}
_SAID = {"1": "1 row", "16": "8 rows", "32": "32 rows", "more": "64 rows"}
_TILE = ("rows", "columns", "inner", "warps", "stages")
_MACHINE = ("card", "capability", "torch", "triton")
_LARGEST = 1 << 16
_MOST_WARPS = 32
_LEAST_RUN = 16
"""Bytes that one request may ask for."""
Clock = Callable[[Division], float]
"""Seconds that a product divided so takes; infinity where it does not do here."""


@dataclass(frozen=True)
class Choice:
    """The division for a line of the tables, with the seconds of a product by it and by the
    package's own: infinite where that does not run on the card.
    """

    divided: Division
    seconds: float
    package_s: float
    replaced: bool


def choose(package: Division, others: Sequence[Division], first: Clock, second: Clock) -> Choice:
    """The fastest if it beats the package's own by ``MARGIN`` twice, else the package's own.

    ``first`` is read once for each; ``second`` for the fastest and for the package's own alone.
    """
    own = first(package)
    seconds = {divided: first(divided) for divided in others}
    best = min(seconds, key=seconds.__getitem__, default=package)
    if best != package and _beats(seconds[best], own):
        again, own_again = second(best), second(package)
        if _beats(again, own_again):
            return Choice(best, again, own_again, replaced=True)
    return Choice(package, own, own, replaced=False)


def _beats(seconds: float, other: float) -> bool:
    return seconds < (1 - MARGIN) * other


@dataclass
class Tuning:
    """What was found on a card: choices by lines of the tables; by the most rows, the seconds of
    all layers' products with these choices and with the package's divisions; how many divisions
    were ``tried``, and what was ``dropped`` of them, and why.
    """

    choices: dict[Key, Choice] = field(default_factory=dict)
    passes: dict[int, tuple[float, float]] = field(default_factory=dict)
    tried: int = 0
    dropped: list[str] = field(default_factory=list)

    @property
    def divisions(self) -> dict[Key, Division]:
        """Those that are to stand in place of the package's own."""
        found = self.choices.items()
        return {key: choice.divided for key, choice in found if choice.replaced}

    def as_values(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """The document that is kept as ``TILES_FILE``."""
        tables: dict[str, Any] = {}
        for (dtype, kind, limit), choice in self.choices.items():
            lines = tables.setdefault(_name(_DTYPES, dtype), {}).setdefault(kind, {})
            lines[_name(_ROWS, limit)] = _line_values(choice)
        return {
            "format": TILES_FORMAT,
            "machine": {name: machine[name] for name in _MACHINE},
            "margin": MARGIN,
            "tables": tables,
            "passes": {
                _name(_ROWS, limit): {"us": _us(tuned), "package_us": _us(package)}
                for limit, (tuned, package) in self.passes.items()
            },
            "tried": self.tried,
            "dropped": self.dropped,
        }

    def summary(self) -> dict[str, Any]:
        """For ``engine.json``: how many lines were replaced, and the share of time saved by them
        in all layers' products; None where the package's divisions do not run.
        """
        return {
            "lines": len(self.choices),
            "replaced": len(self.divisions),
            "tried": self.tried,
            "dropped": len(self.dropped),
            "gain": {
                _name(_ROWS, limit): _gain(tuned, package)
                for limit, (tuned, package) in self.passes.items()
            },
        }


def describe(summary: Mapping[str, Any] | None) -> str:
    """What a summary says, on a line."""
    if summary is None:
        return "the package's: not tuned"
    saved = [
        f"{_SAID[rows]}: {'none before' if gain is None else f'{-gain:+.1%}'}"
        for rows, gain in summary["gain"].items()
        if gain != 0
    ]
    of = f"{summary['replaced']} of {summary['lines']} replaced, {summary['tried']} tried"
    return of + (f"; time of all layers' products at {', '.join(saved)}" if saved else "")


def tiles_for(path: Path, here: Mapping[str, Any]) -> tuple[dict[Key, Division], str | None]:
    """The divisions that a file has for this machine, and why it has none, if it has none.

    ``here`` is what ``machine_of`` says. Without a file there are none, and nothing is said.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return {}, None
    try:
        values = parse_json(path.read_text())
        kind = values["format"]
        if isinstance(kind, str) and kind != TILES_FORMAT:
            return {}, f"the format is {kind!r}, and this mosstalk reads {TILES_FORMAT!r}"
        strange = foreign({name: values["machine"][name] for name in _MACHINE}, here)
        found = _divisions(values["tables"])
    except KeyError as error:
        raise CheckpointError(f"{path}: damaged: no {error}; build it again") from None
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; build it again") from None
    return ({}, "; ".join(strange)) if strange else (found, None)


def _divisions(tables: Any) -> dict[Key, Division]:
    found: dict[Key, Division] = {}
    for dtype, kinds in tables.items():
        for kind, lines in kinds.items():
            for rows, line in lines.items():
                name = f"{dtype} {kind} {rows}"
                if dtype not in _DTYPES or kind not in KINDS or rows not in _ROWS:
                    raise ValueError(f"there is no line {name!r} in the tables")
                key = _DTYPES[dtype], kind, _ROWS[rows]
                divided = _division(line, key, name)
                if line["replaced"] is True:
                    found[key] = divided
    return found


def _division(line: Any, key: Key, name: str) -> Division:
    """The division of a line, which a kernel can be compiled for."""
    dtype, kind, limit = key
    numbers = {part: line["tile"][part] for part in _TILE}
    numbers |= {part: line[part] for part in ("splits", "ask", "run")}
    for part, number in numbers.items():
        least = 0 if part == "ask" else 1
        if type(number) is not int or not least <= number <= _LARGEST:
            raise ValueError(f"{name}: {part} is {number!r}")
        if part not in ("stages", "splits", "ask") and number & (number - 1):
            raise ValueError(f"{name}: {part} is {number}, which is no power of two")
    flags = [line[part] for part in ("apart", "one", "replaced")]
    if any(type(flag) is not bool for flag in flags):
        raise ValueError(f"{name}: apart, one and replaced must be true or false")
    found = Division(
        Tile(*(numbers[part] for part in _TILE)),
        numbers["splits"], numbers["ask"], numbers["run"], flags[0], flags[1],
    )  # fmt: skip
    normed = kind in ("normed", "gated") and dtype != torch.float8_e4m3fn
    fits = (
        found.tile.warps <= _MOST_WARPS
        and found.run >= _LEAST_RUN
        and (limit == found.tile.rows == 1 if found.one else found.tile.rows >= 16)
        and (found.splits == 1 or found.apart or not normed)
    )
    if not fits:
        raise ValueError(f"{name}: there is no product that is divided so")
    return found


def _gain(tuned: float, package: float) -> float | None:
    """The share of time saved; None where the package's divisions do not run, and these do."""
    if math.isinf(package):
        return 0.0 if math.isinf(tuned) else None
    return 1 - tuned / package


def _line_values(choice: Choice) -> dict[str, Any]:
    divided = asdict(choice.divided)
    divided["tile"] = {part: divided["tile"][part] for part in _TILE}
    times = {"us": _us(choice.seconds), "package_us": _us(choice.package_s)}
    return {"replaced": choice.replaced, **times, **divided}


def _us(seconds: float) -> float | None:
    """Microseconds; None for what did not run."""
    return round(1e6 * seconds, 3) if math.isfinite(seconds) else None


def _name(names: Mapping[str, Any], value: Any) -> str:
    return next(name for name, known in names.items() if known == value)
