"""Every mosstalk command that the documents show is run, in their order."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from conftest import (
    GOLDENS,
    QUESTION,
    ROOT,
    Checkpoint,
    Run,
    command_environment,
    require_package,
    require_program,
)

from mosstalk.models.language_model import IN_LAYER, OUTSIDE_LAYERS

FIRST = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS = sorted([*FIRST, *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^    (?:\.venv/bin/)?mosstalk (.+)$", re.MULTILINE)
JUDGED = "bench "
"""Commands that need judges and voices: run with the other tests that do."""
ENDLESS = "--max-rows"
"""Chat on given folders gets a short limit: that it runs is seen in a few rows."""
SERVED = ("serve", "fleet")
"""A server never ends: here its options are read; ``test_server_*`` and ``test_fleet`` run it."""

SHOWN = ("build.md", "plan.md", "first-run.zh.md")
"""Slow: first-run.md builds as well and has its translation's commands; ``test_plan`` has plans."""


def commands_of(document: Path) -> list[str]:
    return COMMAND.findall(document.read_text())


@pytest.fixture
def desk(tiny: Checkpoint, tmp_path: Path) -> Path:
    """A folder with the files that the documents name."""
    shutil.copytree(tiny.model, tmp_path / "MOSS-Speech")
    shutil.copytree(tiny.codec, tmp_path / "MOSS-Speech-Codec")
    samples, rate = soundfile.read(QUESTION)
    for name in ("question.wav", "sample.wav"):
        soundfile.write(tmp_path / name, samples, rate)
    # Of the golden cases a few: the others are verified without a document.
    goldens = tmp_path / "tests" / "goldens"
    goldens.mkdir(parents=True)
    for name in ("README.md", "lm-square", "prompt-mel"):
        (goldens / name).symlink_to(GOLDENS / name)
    (tmp_path / "recorded").symlink_to(goldens)  # as if the recorder had written them
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    fleet = (ROOT / "docs" / "fleet.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "fleet.yaml").write_text(fleet)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(
            path,
            id=str(path.relative_to(ROOT)),
            marks=[pytest.mark.slow] if path.name in SHOWN else [],
        )
        for path in DOCUMENTS
    ],
)
def test_the_commands_of_a_document_run(document: Path, mosstalk: Run) -> None:
    for command in commands_of(document):
        if not command.startswith(JUDGED):
            limit = f" {ENDLESS} 6" if command.startswith("chat --model") else ""
            limit = " --print-config" if command.startswith(SERVED) else limit
            words = [
                name
                for word in shlex.split(command + limit)
                for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
            ]
            run = mosstalk(*words)
            assert run.returncode == 0, f"mosstalk {command}\n{run.stdout}\n{run.stderr}"


HOW_MUCH = re.compile(r" --(?:limit|every|html|json|model|codec|voice) \S+")
"""Options that say how much is judged, of which checkpoint, and where it is written."""

LITTLE = (
    ("bench quality --part answers", " --every 200"),
    ("bench quality", " --limit 1"),
    ("bench", ""),
)
"""What makes a bench of a document short enough for a test, by how its command begins."""


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_the_bench_commands_of_the_documents_run(desk: Path, cache_folder: Path) -> None:
    require_package("faster_whisper", "quality")
    require_program("festival")
    run = set[str]()
    for document in DOCUMENTS:
        for command in commands_of(document):
            if not command.startswith(JUDGED):
                continue
            if HOW_MUCH.sub("", command) in run:  # its document is that of the first like it
                for name in re.findall(r"--json (\S+)", command):
                    shutil.copy(desk / "quality.json", desk / name)
            else:
                run.add(HOW_MUCH.sub("", command))
                few = next(much for start, much in LITTLE if command.startswith(start))
                check_command(command + few, desk, cache_folder)


def check_command(command: str, desk: Path, cache: Path) -> None:
    run = subprocess.run(
        f"{shlex.quote(sys.executable)} -m mosstalk.cli {command}",
        shell=True,
        cwd=desk,
        env=command_environment(cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"mosstalk {command}\n{run.stdout}\n{run.stderr}"


def test_the_documents_show_commands() -> None:
    assert sum(len(commands_of(document)) for document in DOCUMENTS) >= 12


def test_the_chinese_first_run_shows_the_same_lines() -> None:
    english, chinese = (
        re.findall(r"^    (\S.+)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        for name in ("first-run.md", "first-run.zh.md")
    )
    assert len(english) > 10
    assert chinese == english


def test_the_table_of_names_is_complete() -> None:
    table = (ROOT / "docs" / "checkpoints.md").read_text()
    for ours, published in IN_LAYER.items():
        for name in published:
            assert f"`{name}`" in table
        assert len(published) == 1 or f"`{ours}`" in table
    for name in OUTSIDE_LAYERS:
        assert f"`{name}`" in table


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
