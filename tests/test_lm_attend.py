"""The kernels around attention keep what ``lm_attend_claims.py`` says, interpreted or compiled."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is there on Linux alone")

CLAIMS = ROOT / "tests" / "lm_attend_claims.py"


def kept(folder: Path, *, interpret: bool) -> None:
    """Run the claims, in a process in which Triton is one thing or the other; check each."""
    report = folder / "claims.xml"
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CLAIMS))
    run = subprocess.run(
        [*words, f"--junitxml={report}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), run.stdout + run.stderr
    outcomes = list(ElementTree.parse(report).iter("testcase"))
    assert outcomes
    broken = {one.get("name"): [part.get("message") for part in one] for one in outcomes}
    assert {name: messages for name, messages in broken.items() if messages} == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_interpreted_kernels_keep_their_claims(tmp_path: Path) -> None:
    kept(tmp_path, interpret=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_keep_their_claims(tmp_path: Path) -> None:
    kept(tmp_path, interpret=False)
