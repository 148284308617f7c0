"""One file that says enough about an installation to find a fault from afar.

What it must never hold: sound, text that a user typed, weights, paths. Every string passes
``without_paths`` at the end, so that a message from any library is covered too.
"""

import datetime
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any

from mosstalk.diagnostics.doctor import examine
from mosstalk.environment import cache_folder
from mosstalk.files import require_target, write_document
from mosstalk.prepared.default_models import require_pair

FORMAT = "mosstalk-report-1"
SCRIPT = "speech:25"
"""Reply of the timed turn."""
_POSIX_PATH = re.compile(r"(?<![\w.])~?(?:/[^\s/:;,'\"()]+)+/?")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:[\\/](?:[^\s\\/:;,'\"()]+[\\/]?)+")
_BELOW = r"(?!\.?[\w-])((?:[\\/][^\s\\/:;,'\"()]+)*)"
"""What may follow a known folder: a path below it, and no letter: ``/home/ann`` is not where
``/home/anna/x`` begins. Cut there, the rest of that path would stay."""


@dataclass(frozen=True)
class Wanted:
    """What to report on."""

    cases: tuple[Path, ...]
    model: Path | None
    codec: Path | None
    device: str
    dtype: str | None


def write_report(out: Path, wanted: Wanted, *, force: bool = False) -> str:
    """Write the report and return what to tell the user about it.

    A fault of the model or of a case is part of the report, not an error.

    Raises:
        OutputError: ``out`` exists (without ``force``) or cannot be written.
        ConfigError: only one of model and codec was given.
        DeviceError: the device or dtype does not exist here.
    """
    require_target(out, replace=force)
    require_pair(wanted.model, wanted.codec)
    document = {
        "format": FORMAT,
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "doctor": examine().as_dict(),
        "packages": package_versions(),
        **_measured(wanted),
    }
    given = (path for path in (*wanted.cases, wanted.model, wanted.codec) if path)
    ours = (Path(__file__).parents[1], cache_folder(), Path(sys.prefix))
    known = [*given, *ours, Path.cwd(), Path.home()]
    document = without_paths(document, known)
    write_document(out, document)
    return _summary(out, document)


def _measured(wanted: Wanted) -> dict[str, Any]:
    """Verdict, turn and config files; where packages are broken, the reason in their place."""
    try:
        from mosstalk.diagnostics import figures
    except Exception as error:  # a broken package can raise anything on import
        why = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        return {"verify": why, "turn": why | {"weights": "unknown"}, "config_files": {}}
    return figures.measured(wanted)


def package_versions() -> dict[str, str]:
    """Versions of mosstalk and of what it asks for, optional packages and CUDA's included."""
    asked = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requires("mosstalk") or []}
    names = {_canonical(name) for name in asked | {"mosstalk"}}
    found = {_canonical(dist.name): dist.version for dist in distributions()}
    return {
        name: number
        for name, number in sorted(found.items())
        if name in names or name.startswith("nvidia-")
    }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def without_paths(value: Any, known: list[Path]) -> Any:
    """The same json values with every path cut to its last component.

    ``known`` are folders whose names may hold blanks, which no pattern could see the end of.
    """
    if isinstance(value, dict):
        return {
            without_paths(key, known): without_paths(item, known) for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_paths(item, known) for item in value]
    return _cut(value, known) if isinstance(value, str) else value


def _cut(text: str, known: list[Path]) -> str:
    for spelling, name in sorted(_spellings(known), key=lambda pair: -len(pair[0])):
        below = re.compile(re.escape(spelling) + _BELOW)
        text = below.sub(partial(_tail_or, name), text)
    text = _WINDOWS_PATH.sub(lambda found: _last(found[0]), text)
    return _POSIX_PATH.sub(lambda found: _last(found[0]), text)


def _tail_or(name: str, found: re.Match[str]) -> str:
    return _last(found[1]) or name


def _last(path: str) -> str:
    """The last component of a path in either spelling."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _spellings(known: list[Path]) -> Iterator[tuple[str, str]]:
    """Each way to write a known folder, with what stands for it; a home is its user's name."""
    home = Path.home()
    for path in known:
        for spelling in {str(path), str(path.absolute()), str(path.resolve())}:
            if len(Path(spelling).parts) > 1:
                yield spelling, "~" if Path(spelling) == home else Path(spelling).name


def _summary(out: Path, document: dict[str, Any]) -> str:
    """What is in the report and what is not, for the user to read before sending it."""
    verify, turn, doctor = document["verify"], document["turn"], document["doctor"]
    totals = verify.get("totals")
    cases = verify.get("skipped") or verify.get("error")
    if totals:
        cases = (
            f"{totals['cases']} cases, {totals['within_bounds']} of {totals['comparisons']} "
            f"comparisons within bounds, {totals['unreadable']} folders unreadable"
        )
    timed = turn.get("error") or f"{turn['steps']} steps, {turn['total_ms']:.0f} ms in all stages"
    states = [finding["state"] for finding in doctor["findings"]]
    files = sum(map(len, document["config_files"].values()))
    return "\n".join(
        (
            f"{out} holds:",
            f"  doctor    {states.count('ok')} of {len(states)} things ok",
            f"  verify    {cases}",
            f"  turn      a scripted one ({SCRIPT}), weights {turn['weights']}: {timed}",
            f"  packages  versions of {len(document['packages'])}",
            f"  configs   size and SHA-256 of {files} files, not of weights",
            "It holds no sound, no text that you typed, and no paths: of folders only the last "
            "part of their names. Read it before you send it.",
        )
    )
