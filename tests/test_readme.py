"""README.md is short, the Chinese one says the same, and each command runs as written, in order."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import soundfile
from browser_rig import browsing
from conftest import ROOT, Checkpoint, command_environment, require_program
from markdown_it import MarkdownIt
from server_rig import free_port

TEXT = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()
PROGRAMS = (".venv/bin/hf", ".venv/bin/mosstalk", "make")
MEASURED = ".venv/bin/mosstalk bench serve --at 1"
_LINK = re.compile(r"\]\(([^)]+)\)")


def commands(text: str) -> list[str]:
    """What stands in the blocks of code, line by line."""
    return re.findall(r"^    (\S.+)$", text, re.MULTILINE)


def test_it_takes_a_minute_to_read() -> None:
    assert len(TEXT.split()) <= 500


def test_what_it_links_to_is_there() -> None:
    for text in (TEXT, CHINESE):
        links = _LINK.findall(text)
        assert len(links) > 20
        for target in links:
            assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_chinese_one_shows_the_same_commands_and_links() -> None:
    assert commands(CHINESE) == commands(TEXT)
    assert MEASURED in TEXT
    assert MEASURED in CHINESE

    def other(target: str) -> str:
        return target.replace(".zh.md", ".md").replace("README.md", "")

    assert [*map(other, _LINK.findall(CHINESE))] == [*map(other, _LINK.findall(TEXT))]


LIKE_GITHUB = """<meta charset=utf-8><style>
body { max-width: 830px; margin: 24px auto; font: 16px/1.5 sans-serif } img { max-width: 100% }
h1 { font-size: 2em } h2 { font-size: 1.5em; margin-top: 24px } h1, h2 { padding-bottom: .3em }
h1, h2, p, pre { margin-bottom: 16px } h1, p, pre { margin-top: 0 }
pre { padding: 16px; font-size: 85% }
</style>"""


@pytest.mark.system
@pytest.mark.parametrize("text", [TEXT, CHINESE], ids=["English", "Chinese"])
def test_what_it_is_its_picture_and_both_commands_stand_on_the_first_screen(
    text: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(LIKE_GITHUB + MarkdownIt().render(text.replace("](docs", f"]({ROOT}/docs")))
    with browsing(None, viewport={"width": 1280, "height": 800}) as browser:
        shown = browser.new_page()
        shown.goto(page.as_uri())
        for what in ("p:has(a[href*=MOSS-Speech])", "pre:has-text('make talk')", "img >> nth=0"):
            box = shown.locator(what).first.bounding_box()
            assert box, what
            assert box["height"] > 40, what
            assert box["y"] + box["height"] <= 800, what


def test_each_line_of_code_is_a_command_of_the_set_up() -> None:
    lines = commands(TEXT)
    assert lines[:2] == ["make demo", "make talk"]
    assert len(lines) > 6
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines:
        program, *words = shlex.split(line)
        assert program in PROGRAMS
        assert program == "make" or entry_points(name=Path(program).name), "the set-up brings it"
        if program == "make":
            assert words[0] in targets


@pytest.fixture
def clone(tmp_path: Path, tiny: Checkpoint) -> Path:
    """What a clone holds, after its set-up: the tracked files, and programs in ``.venv/bin``.

    Those of the set-up are the ones that run this test. ``hf`` brings folders of random weights.
    """
    clone = tmp_path / "mosstalk"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if not name.startswith(("tests/", "docs/figures")) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (clone / ".venv" / "bin").mkdir(parents=True)
    bring = (
        f'case "$2" in fnlp/MOSS-Speech) cp -r {tiny.model} "$4";;'
        f' fnlp/MOSS-Speech-Codec) cp -r {tiny.codec} "$4";; *) exit 2;; esac'
    )
    programs = {
        "python": f'exec {sys.executable} "$@"',
        "mosstalk": f'exec {sys.executable} -m mosstalk.cli "$@"',
        "hf": bring,
    }
    for name, script in programs.items():
        program = clone / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return clone


@pytest.fixture
def environment(clone: Path, cache_folder: Path) -> dict[str, str]:
    """That of a user, whose browser tells a pipe which page it is to open."""
    opened, browser = clone.parent / "opened", clone.parent / "browser"
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    return command_environment(cache_folder) | {
        "BROWSER": str(browser),
        "OMP_NUM_THREADS": "1",
        "OPTIONS": f"--port {free_port()}",
        "PYTHONPATH": str(clone / "src"),
    }


@contextmanager
def running(command: str, clone: Path, environment: dict[str, str]) -> Iterator[Iterator[str]]:
    """A command that lasts until Ctrl-C, which the block's end gives; its lines within."""
    with subprocess.Popen(
        shlex.split(command), cwd=clone, env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            yield iter(process.stdout)
            os.killpg(process.pid, signal.SIGINT)
            # make ends as its caller told it to, once what it runs has ended.
            assert process.wait(60) in (0, -signal.SIGINT, 130)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run(command: str, clone: Path, environment: dict[str, str]) -> str:
    """Run a command to its end, and return what it printed."""
    done = subprocess.run(
        shlex.split(command),
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow  # two servers start, sentences are read aloud
@pytest.mark.timeout(600)
def test_every_command_runs_in_a_fresh_clone(clone: Path, environment: dict[str, str]) -> None:
    require_program("make")
    for command in commands(TEXT):
        if command.startswith("make setup"):
            assert "scripts/bootstrap.py --extras" in run(f"{command} -n", clone, environment)
        elif command == "make talk":
            with running(f"{command} -o setup-talk", clone, environment):
                page = (clone.parent / "opened").read_text()
                assert page.startswith("http://localhost:")
        elif command.startswith("make"):
            run(f"{command} -o setup-demo", clone, environment)
        elif " serve " in command:
            with running(f"{command} --port 0", clone, environment) as lines:
                assert any(line.startswith("ready: ") for line in lines)
        else:
            run(command, clone, environment)
    for sound in ("demo-output/answer-3.wav", "morning.wav"):
        assert soundfile.info(clone / sound).duration > 0.5


@pytest.mark.slow  # a minute of conversation
def test_the_number_can_be_measured_with_its_command(
    clone: Path, environment: dict[str, str]
) -> None:
    assert f"`{MEASURED}`" in TEXT
    printed = run(MEASURED, clone, environment)
    assert re.search(r"commit to first audio, ms +\d+ / \d+ / \d+", printed), printed
