"""Tests by node id at two commits: those that are gone, new, and moved to another file."""

import os
import re
import subprocess
import sys
from pathlib import Path


def node_ids(checkout: Path) -> set[str]:
    """What pytest collects there; raises RuntimeError where it cannot."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{checkout}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return set(re.findall(r"^tests/\S+::.+$", run.stdout, re.MULTILINE))


def print_tests(old: Path, new: Path) -> int:
    """Print ids that are gone, each with where a test of its name is now; the exit code, 0."""
    was, now = node_ids(old), node_ids(new)
    places: dict[str, list[str]] = {}
    for each in now - was:
        places.setdefault(_name(each), []).append(each)
    moved, gone = list[str](), list[str]()
    for each in sorted(was - now):
        found = places.get(_name(each))
        if found:
            moved.append(f"moved  {each} -> {found.pop(0)}")
        else:
            gone.append(f"gone   {each}")
    came = sorted(each for rest in places.values() for each in rest)
    print(*moved, *gone, *(f"new    {each}" for each in came), sep="\n")
    print(f"{len(was & now)} kept, {len(moved)} moved, {len(gone)} gone, {len(came)} new")
    return 0


def _name(node_id: str) -> str:
    return node_id.partition("::")[2]
