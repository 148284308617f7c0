"""Two recorded folders, item by item, beside a list of known differences."""

import difflib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .results import apart, read_items
from .subject import HERE

KNOWN = HERE / "differences.toml"
_MOST_LINES = 12


@dataclass
class Known:
    """A difference that is meant: in items and places that match, with the reason."""

    items: str
    reason: str
    places: str = "*"
    samples_within: float | None = None
    used: int = 0

    def covers(self, item: str, difference: "Difference") -> bool:
        """Whether it speaks of this; of sounds only as far as they are within the bound."""
        if not (fnmatchcase(item, self.items) and fnmatchcase(difference.place, self.places)):
            return False
        if self.samples_within is None:
            return True
        return difference.apart is not None and difference.apart <= self.samples_within


@dataclass(frozen=True)
class Difference:
    """A place in an item, such as ``events/3/response/usage``, and what is there."""

    place: str
    old: Any
    new: Any
    apart: float | None = None
    """Of two sounds of one length: how far, full scale being 1."""


@dataclass
class Verdict:
    """What was found of one item."""

    item: str
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """equal, known or DIFFERS."""
        if self.differences:
            return "DIFFERS"
        return "known" if self.reasons else "equal"


def read_known() -> list[Known]:
    """The list of known differences."""
    tables = tomllib.loads(KNOWN.read_text()).get("difference", [])
    return [Known(**table) for table in tables]


def frozen_commit() -> str:
    """The commit that is compared with unless another is named."""
    return str(tomllib.loads(KNOWN.read_text())["frozen"])


def compare(old: Path, new: Path, known: list[Known], only: str = "*") -> list[Verdict]:
    """A verdict for every item that either folder has; of jobs ``only``, those that are new."""
    was, now = read_items(old), read_items(new)
    names = was.keys() | now.keys() if only == "*" else now.keys()
    return [
        _verdict(name, was.get(name), now.get(name), (old, new), known) for name in sorted(names)
    ]


def _verdict(
    name: str, was: Any, now: Any, folders: tuple[Path, Path], known: list[Known]
) -> Verdict:
    verdict = Verdict(name)
    for difference in differences(was, now, folders):
        reasons = [each for each in known if each.covers(name, difference)]
        if reasons:
            reasons[0].used += 1
            if reasons[0].reason not in verdict.reasons:
                verdict.reasons.append(reasons[0].reason)
        else:
            verdict.differences.append(difference)
    return verdict


def differences(was: Any, now: Any, folders: tuple[Path, Path], at: str = "") -> list[Difference]:
    """All places in which two items differ."""
    return list(_differences(was, now, folders, at))


def _differences(was: Any, now: Any, folders: tuple[Path, Path], at: str) -> Iterator[Difference]:
    if was == now and type(was) is type(now):
        return
    if isinstance(was, dict) and isinstance(now, dict):
        if {"sha256", "samples"} <= was.keys() & now.keys():
            how_far = apart(*folders, (was["sha256"], now["sha256"]))
            yield Difference(at, was, now, how_far)
            return
        for key in [*was, *(key for key in now if key not in was)]:
            yield from _differences(was.get(key), now.get(key), folders, f"{at}/{key}".strip("/"))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _differences(one, other, folders, f"{at}/{place}".strip("/"))
    else:
        yield Difference(at, was, now)


def lines_of(difference: Difference) -> list[str]:
    """A difference to be read."""
    if difference.apart is not None:
        return [
            f"{difference.place}: sounds are {difference.apart:.2e} of full scale apart at most"
        ]
    was, now = (_lines(value) for value in (difference.old, difference.new))
    if len(was) == len(now) == 1:
        return [f"{difference.place}: {was[0]} -> {now[0]}"]
    diff = list(difflib.unified_diff(was, now, lineterm="", n=1))[2:]
    more = [f"... {len(diff) - _MOST_LINES} more lines"] if len(diff) > _MOST_LINES else []
    return [f"{difference.place}:", *diff[:_MOST_LINES], *more]


def _lines(value: Any) -> list[str]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value or ["[]"]
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return text.splitlines() if len(text) > 100 else [json.dumps(value, ensure_ascii=False)]


def report(verdicts: list[Verdict], known: list[Known]) -> int:
    """Print what differs, then a table; the exit code."""
    for verdict in verdicts:
        for difference in verdict.differences[:5]:
            first, *rest = lines_of(difference)
            print(f"{verdict.item}: {first}", *(f"    {line}" for line in rest), sep="\n")
        if len(verdict.differences) > 5:
            print(f"{verdict.item}: ... {len(verdict.differences) - 5} more places")
    print(f"\n{'':<14}{'items':>7}{'equal':>7}{'known':>7}{'DIFFER':>8}")
    groups: dict[str, list[str]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.item.split("/")[0], []).append(verdict.word)
    for name, words in [*groups.items(), ("all", [v.word for v in verdicts])]:
        counts = [words.count(word) for word in ("equal", "known", "DIFFERS")]
        print(f"{name:<14}{len(words):>7}{counts[0]:>7}{counts[1]:>7}{counts[2]:>8}")
    for each in known:
        print(f"known, in {each.used} places: {each.items} {each.places}: {each.reason}")
    return int(any(verdict.differences for verdict in verdicts))
