"""``make demo`` after its set-up: it reads aloud, writes down, answers, and says what to expect."""

import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from conftest import ROOT, command_environment


@pytest.mark.slow  # its three commands have tests of their own
@pytest.mark.timeout(300)
def test_the_demo_leaves_sound_to_hear_and_says_what_to_expect(
    cache_folder: Path, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", tmp_path / "demo"],
        env=command_environment(cache_folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for command in ("speak", "transcribe", "chat"):
        assert f"$ mosstalk {command} " in run.stdout
    # Lines of the transcript begin with the names of the files.
    for name in (f"{tmp_path}/demo/spoken.wav: ", "assets/librivox.flac: "):
        assert any(line.startswith(name) for line in run.stdout.splitlines())
    listen = run.stdout.rpartition("Now listen")[2]
    for name in ("spoken.wav", "answer.wav"):
        assert soundfile.info(tmp_path / "demo" / name).duration > 0.5
        assert name in listen
