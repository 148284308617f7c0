"""The program that the session's document shows is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import soundfile
from conftest import ROOT


def test_the_program_of_the_document_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs/session.md").read_text(), re.S)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "completed" in run.stdout
    assert soundfile.info(tmp_path / "answer.wav").duration > 0.5
