"""README.md is short, the Chinese one says the same, and each command runs as written, in order."""

import json
import os
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import soundfile
from browser_rig import browsing
from clone_rig import Shell, await_ready, commands, make_clone
from conftest import ROOT, Checkpoint, require_program
from markdown_it import MarkdownIt
from server_rig import free_port

TEXT = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()
PROGRAMS = (".venv/bin/hf", ".venv/bin/mosstalk", "make")
MEASURED = ".venv/bin/mosstalk bench serve --at 1"
_LINK = re.compile(r"\]\(([^)]+)\)")


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


def test_its_number_is_the_one_that_was_measured() -> None:
    document = json.loads((ROOT / "docs/figures/beside/serve-pocket-by-hand.json").read_text())
    one = next(crowd for crowd in document["crowds"] if crowd["clients"] == 1)
    seconds = f"{one['quantiles']['commit_to_audio_ms'][0] / 1000:.1f}"
    picture = (ROOT / "docs/img/while-you-speak.svg").read_text()
    assert f"starts to speak {seconds} seconds after" in TEXT
    assert f"{seconds} 秒后" in CHINESE
    assert f">{seconds} s</text>" in picture
    assert f"{seconds} seconds after you finish" in picture


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
def shell(tmp_path: Path, tiny: Checkpoint, cache_folder: Path) -> Shell:
    """That of a user in a clone, whose browser tells a pipe which page it is to open.

    ``hf`` brings folders of random weights.
    """
    clone, opened, browser = (tmp_path / name for name in ("mosstalk", "opened", "browser"))
    bring = (
        f'case "$2" in fnlp/MOSS-Speech) cp -r {tiny.model} "$4";;'
        f' fnlp/MOSS-Speech-Codec) cp -r {tiny.codec} "$4";; *) exit 2;; esac'
    )
    make_clone(clone, {"hf": bring}, without=("tests/", "docs/figures"))
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    shell = Shell.of(clone, cache_folder)
    shell.env.update(BROWSER=str(browser), OPTIONS=f"--port {free_port()}")
    return shell


@pytest.mark.slow  # two servers start, sentences are read aloud
@pytest.mark.timeout(600)
def test_every_command_runs_in_a_fresh_clone(shell: Shell) -> None:
    require_program("make")
    for command in commands(TEXT):
        if command.startswith("make setup"):
            assert "scripts/bootstrap.py --extras" in shell.run(f"{command} -n")
        elif command == "make talk":
            with shell.running(f"{command} -o setup-talk"):
                page = (shell.folder.parent / "opened").read_text()
                assert page.startswith("http://localhost:")
        elif command.startswith("make"):
            shell.run(f"{command} -o setup-demo")
        elif " serve " in command:
            with shell.running(f"{command} --port 0") as server:
                await_ready(server)
        else:
            shell.run(command)
    for sound in ("demo-output/answer-3.wav", "morning.wav"):
        assert soundfile.info(shell.folder / sound).duration > 0.5


@pytest.mark.slow  # a minute of conversation
def test_the_number_can_be_measured_with_its_command(shell: Shell) -> None:
    assert f"`{MEASURED}`" in TEXT
    printed = shell.run(MEASURED)
    assert re.search(r"commit to first audio, ms +\d+ / \d+ / \d+", printed), printed
