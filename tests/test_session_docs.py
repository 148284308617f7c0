"""The program that the session's document shows is run."""

import re
import runpy
from pathlib import Path

import pytest
import soundfile
from conftest import ROOT


def test_the_program_of_the_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs/session.md").read_text(), re.S)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py", run_name="__main__")
    assert "completed" in capsys.readouterr().out
    assert soundfile.info(tmp_path / "answer.wav").duration > 0.5
