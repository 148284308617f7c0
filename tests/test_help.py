"""``--help`` is quick and teaches."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from mosstalk.cli import app

USUAL_S = 0.09
"""What ``STANDARD`` takes on the machine for which half a second is the goal."""
STANDARD = "import argparse, asyncio, dataclasses, inspect, json, typing"


def test_help_comes_within_half_a_second() -> None:
    # A processor that others use as well is slower even by its own clock.
    slower = max(1.0, of_python("-c", STANDARD) / USUAL_S)
    assert 0 < of_python("-m", "mosstalk.cli", "--help") < 0.5 * slower


def of_python(*words: str) -> float:
    """Seconds of a processor that Python takes for this, the least of three times."""
    seconds = []
    for _ in range(3):
        started = of_children()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        seconds.append(of_children() - started)
    return min(seconds)


def of_children() -> float:
    """Seconds of a processor that processes took which have ended, whoever else wanted it."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_imports_neither_torch_nor_numpy() -> None:
    words = (sys.executable, "-X", "importtime", "-m", "mosstalk.cli", "chat", "--help")
    run = subprocess.run(words, check=True, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy"}


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "--speech", "nowhere.wav"),
        ("transcribe", "nowhere.wav"),
        ("speak", "--file", "nowhere.txt"),
        ("speak", "Hello.", "--model", "nowhere", "--codec", "nowhere"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_told_before_torch_is_imported(words: tuple[str, ...]) -> None:
    command = (sys.executable, "-X", "importtime", "-m", "mosstalk.cli", *words)
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = run.stderr.splitlines()
    assert run.returncode == 2
    assert any(line.startswith("error: nowhere") for line in lines)
    assert "torch" not in {line.rpartition("|")[2].strip() for line in lines}


def commands(group: typer.core.TyperGroup, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands(typer.main.get_group(app))), ids=" ".join)
def test_the_help_of_every_command_has_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="PROGRAM")
    assert f"mosstalk {' '.join(path)} " in result.output
    assert CliRunner().invoke(app, [*path, "-h"], prog_name="PROGRAM").output == result.output


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("bench prefill", "bench step --prefill"),
        ("bench judges", "bench quality --judges"),
        ("report", "doctor --report FILE"),
        ("engine", "checkpoint inspect"),
    ],
)
def test_a_command_that_moved_says_where_it_is(old: str, now: str) -> None:
    result = CliRunner().invoke(app, [*old.split(), "--rows", "512", "folder", "--help"])
    assert result.exit_code == 2
    assert f"mosstalk {old} is gone; use: mosstalk {now}" in result.output
