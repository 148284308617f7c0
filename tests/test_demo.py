"""``make demo`` and ``make talk`` after their set-up: what a new user sees first."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile
from conftest import ROOT, command_environment
from server_rig import free_port

import demo

TALK = [sys.executable, str(ROOT / "scripts" / "talk.py")]


@pytest.mark.timeout(300)
def test_the_demo_leaves_three_answers_to_hear_and_says_what_was_asked(
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
    answers = sorted((tmp_path / "demo").iterdir())
    assert [path.name for path in answers] == [f"answer-{number}.wav" for number in (1, 2, 3)]
    for path in answers:
        samples, rate = soundfile.read(path)
        assert rate == 24_000
        assert len(samples) > rate // 2
        assert np.abs(samples).max() > 0.05, f"{path.name} is silent"
    asked = re.findall(r"It hears: +(.+)  \((.+)\)", run.stdout)
    assert asked == [(text, file) for file, text in demo.QUESTIONS.items()]
    told = re.findall(r"It says: +(.*)  \((.+)\)", run.stdout)
    assert [file for _, file in told] == [str(path) for path in answers]
    assert all(re.search("[a-z]{2}", written) for written, _ in told)
    assert "\nNext: make talk\n" in run.stdout


@pytest.mark.parametrize("words", [["--help"], ["--nothing"]])
def test_the_demo_asked_for_help_or_for_what_it_has_not_makes_no_folder(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == (0 if words == ["--help"] else 2)
    assert "usage: demo.py [-h] [folder]" in "".join(capsys.readouterr())
    assert not (ROOT / words[0]).exists()


def test_its_questions_are_recordings_that_models_hear_as_they_are() -> None:
    for file, text in demo.QUESTIONS.items():
        recording = soundfile.info(ROOT / file)
        assert (recording.samplerate, recording.channels) == (16_000, 1)
        assert 1 < recording.duration < 4
        licences = (ROOT / "assets" / "LICENSES.md").read_text()
        assert f'"{text}"' in licences, file


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("target", "more"), [("demo", ""), ("talk", ",transcribe,webrtc")])
def test_the_set_up_of_both_brings_what_a_server_needs(target: str, more: str) -> None:
    run = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "scripts/bootstrap.py --extras" in run.stdout
    assert f'",server,vad{more}"' in run.stdout
    assert f"scripts/{target}.py" in run.stdout


@pytest.fixture
def page(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment of someone whose browser writes down which page it is to open, and where."""
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    return {"BROWSER": str(browser)}, opened


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("scheme", "words"), [("http", ()), ("https", ("--tls-self-signed",))])
def test_talk_serves_opens_the_page_and_ends_at_ctrl_c(
    page: tuple[dict[str, str], Path], cache_folder: Path, scheme: str, words: tuple[str, ...]
) -> None:
    environment, opened = page
    port = "0" if scheme == "http" else str(free_port())
    talk = subprocess.Popen(
        [*TALK, "--port", port, "--vad", "none", *words],
        env=command_environment(cache_folder) | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = opened.read_text().strip()  # waits until the browser is called
        assert re.fullmatch(rf"{scheme}://localhost:{port if int(port) else '[0-9]+'}/", address)
        assert httpx.get(f"{address}ready", verify=False).status_code == 200
        assert "<title>" in httpx.get(address, verify=False).text
        talk.send_signal(signal.SIGINT)
        printed, _ = talk.communicate(timeout=60)
    finally:
        talk.kill()
    assert talk.returncode == 0
    assert f"opened {address} in your browser; Ctrl-C ends the server" in printed


def test_talk_says_when_its_port_is_taken(cache_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run(
            [*TALK, "--port", str(port)],
            env=command_environment(cache_folder),
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 1
    assert f"port {port} is taken" in run.stderr
    assert f"make talk OPTIONS='--port {port + 1}'" in run.stderr
