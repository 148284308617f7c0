"""The fast layers keep what ``fast_claims.py`` says of them where Triton interprets."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is there on Linux alone")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_claimed_of_fast_layers_holds_in_the_interpreter() -> None:
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600")
    run = subprocess.run(
        [*words, str(ROOT / "tests" / "fast_claims.py")],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout
