"""Claims about kernels, run in a process in which Triton interprets or compiles."""

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

Outcomes = list[ElementTree.Element]


def outcomes_of(
    claims: str, folder: Path, *, interpret: bool, limit_s: int | None = None
) -> Outcomes:
    """Run ``tests/CLAIMS``, each claim for ``limit_s`` at most; what came of each.

    In a process of its own: Triton is an interpreter or a compiler for the whole of one, from
    when it is first imported.
    """
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    report = folder / "claims.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += [] if limit_s is None else [f"--timeout={limit_s}"]
    run = subprocess.run(
        [*words, f"--junitxml={report}", str(ROOT / "tests" / claims)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret))},
        capture_output=True,
        text=True,
        check=False,
    )
    ran = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert run.returncode in ran, run.stdout + run.stderr
    return list(ElementTree.parse(report).iter("testcase"))


def require_kept(outcomes: Outcomes, *, skipped: Collection[str] = (), least: int = 1) -> None:
    """Check that there are ``least`` claims, all kept, and all run but those in ``skipped``."""
    assert len(outcomes) >= least
    broken = {
        outcome.get("name"): [
            part.get("message")
            for part in outcome
            if part.tag != "skipped" or outcome.get("name") not in skipped
        ]
        for outcome in outcomes
    }
    assert {name: messages for name, messages in broken.items() if messages} == {}
