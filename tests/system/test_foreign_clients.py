"""Other people's clients, unmodified, against a running server.

They are installed into a virtual environment of their own, from a package index.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, require_package
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from server_rig import QUICK, RATE, Server, free_port, serving, silence

from mosstalk.audio.sound import read_audio
from mosstalk.session.sound import pcm_of

CLIENTS = Path(__file__).parent / "clients"
INSTALL_S, TALK_S = 900, 240
BYTES_PER_S = 2 * RATE

pytestmark = [pytest.mark.system, pytest.mark.timeout(INSTALL_S + TALK_S)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the clients."""
    folder = tmp_path_factory.mktemp("clients") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["-r", str(CLIENTS / "requirements.txt")]
    got = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S)
    if got.returncode:
        pytest.skip(f"the clients cannot be installed here: {got.stderr[-300:]}")
    return python


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that finds turns by itself."""
    with serving("--temperature", "0", "--seed", "0", cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def talker(cache_folder: Path) -> Iterator[Server]:
    """One whose replies have a length: nobody knows what a model says that was cut short."""
    drawn = ("--temperature", "0", "--seed", "0", "--script", "text:8,speech:38")
    with serving(*drawn, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Someone who says a sentence in a quiet room, as PCM."""
    said = pcm_of(read_audio(ROOT / "assets" / "question.flac", RATE).samples)
    file = tmp_path_factory.mktemp("speech") / "speech.pcm"
    file.write_bytes(silence(0.5) + said + silence(1.2))
    return file


def told(program: Path, script: str, server: Server, *words: str) -> dict[str, Any]:
    """What a client's script has to tell after its talk."""
    command = [str(program), str(CLIENTS / script), server.url, *words]
    talk = subprocess.run(command, capture_output=True, text=True, timeout=TALK_S)
    assert talk.returncode == 0, talk.stderr[-3000:]
    said: dict[str, Any] = json.loads(talk.stdout.splitlines()[-1])
    return said


def test_livekit_talks_interrupts_and_keeps_its_chat_in_step(
    foreign: Path, talker: Server, speech: Path
) -> None:
    said = told(foreign, "with_livekit.py", talker, str(speech))
    assert said["items"] == ["lk_system", "lk_user", "lk_assistant"]
    assert said["with_call"] == [*said["items"], "lk_call", "lk_out"]
    assert said["user_initiated"], "the reply that was asked for is known by its metadata"
    for turn in ("asked", "spoken"):
        item_id, samples, modalities = said[turn]
        assert item_id.startswith("item_")
        assert samples > RATE // 10
        assert modalities == ["audio", "text"]
    assert said["left"] == []
    assert said["metrics"] >= 3
    assert said["errors"] == []


def test_openai_agents_types_speaks_and_interrupts(
    foreign: Path, talker: Server, speech: Path
) -> None:
    said = told(foreign, "with_agents.py", talker, str(speech))
    assert said["typed"] > BYTES_PER_S // 10
    assert said["spoken"] > BYTES_PER_S // 10
    assert {"audio_interrupted", "usage", "turn_ended", "item_updated"} <= set(said["raw"])
    assert said["history"] == ["user", "assistant"] * 4
    assert said["errors"] == []


def test_livekit_hears_and_speaks_by_its_own_classes(
    foreign: Path, server: Server, speech: Path
) -> None:
    said = told(foreign, "with_livekit_speech.py", server, str(speech))
    assert "folder" in said["heard_en"]
    assert said["heard_zh"]
    for kind in ("mp3", "pcm"):
        assert said[f"spoken_{kind}"] > RATE // 2
    streamed = said["streamed"]
    assert len(streamed["texts"]) == 2
    turn = ["interim_transcript", "final_transcript", "recognition_usage"]
    bounds = ("start_of_speech", "end_of_speech")
    assert [kind for kind in streamed["kinds"] if kind in bounds] == [*bounds] * 2
    assert [kind for kind in streamed["kinds"] if kind in turn[1:]] == turn[1:] * 2


def test_pipecat_hears_and_speaks_by_its_own_classes(
    foreign: Path, server: Server, speech: Path
) -> None:
    said = told(foreign, "with_pipecat_speech.py", server, str(speech))
    assert "folder" in said["heard"]
    assert said["spoken"] > BYTES_PER_S // 2
    for turn in ("by_hand", "hands_free"):
        assert said[turn]["text"] == said[turn]["interim"] != ""


def test_transcribed_by_whisper_they_hear_the_words(
    foreign: Path, cache_folder: Path, speech: Path
) -> None:
    require_package("faster_whisper", "transcribe")
    with serving("--transcriber", "whisper-tiny", cache=cache_folder) as server:
        said = told(foreign, "with_livekit_speech.py", server, str(speech))
        assert all("folder" in each for each in (said["heard_en"], *said["streamed"]["texts"]))
        said = told(foreign, "with_pipecat_speech.py", server, str(speech))
        texts = (said["heard"], said["by_hand"]["text"], said["hands_free"]["text"])
        assert all("folder" in each for each in texts)
        server.await_nothing_held()


def test_transcribed_by_whisper_their_histories_have_the_words_of_both_sides(
    foreign: Path, cache_folder: Path, speech: Path
) -> None:
    require_package("faster_whisper", "transcribe")
    with serving("--transcriber", "whisper-tiny", cache=cache_folder) as server:
        said = told(foreign, "with_livekit.py", server, str(speech), "words")
        assert "folder" in said["heard"]
        assert all(said["words"])
        assert said["errors"] == []
        said = told(foreign, "with_agents.py", server, str(speech), "words")
        assert "folder" in said["words"][2]
        assert all(said["words"][:4]), "the model's own as well"
        assert said["errors"] == []


INSTALLED = re.compile(r"^    pip install (.+)$", re.M)


def packages_of(python: Path, page: str, folder: Path) -> dict[str, str]:
    """An environment with what the page has installed, and what that brings, but nothing else.

    The other pages' packages would hide that one is missing. Needs Python's ``-S``.
    """
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    there = {canonicalize_name(each.name): each for each in distributions(path=[str(site)])}
    wanted = [Requirement(each.strip("'")) for each in INSTALLED.findall(page)[0].split()]
    seen = set[str]()
    for each in wanted:  # grows on the way
        found = there[canonicalize_name(each.name)]
        assert each.specifier.contains(found.version, prereleases=True), each
        for extra in sorted(each.extras | {""}):
            if f"{found.name}[{extra}]" not in seen:
                seen.add(f"{found.name}[{extra}]")
                needs = map(Requirement, found.requires or ())
                wanted += [n for n in needs if not n.marker or n.marker.evaluate({"extra": extra})]
    for name in {each.partition("[")[0] for each in seen}:
        for file in there[canonicalize_name(name)].files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                os.link(site / file, folder / file)
    return os.environ | {"PYTHONPATH": str(folder)}


PAGES = ("openai-python", "agents-python", "livekit", "pipecat")
PROGRAM = re.compile(
    r"^`(\w+\.py)` .*?^```python\n(.+?)^```(?:.*?^```text\n(.+?)^```)?", re.M | re.S
)
"""Its name, its lines, and what the page says that it prints."""
HEARING = ("transcribe.py", "write_down.py")
"""Programs that have nothing spoken."""
MADE = "mosstalk_audio_out_seconds_total"


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_its_page_do_what_the_page_says(
    foreign: Path, server: Server, page: str, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "clients" / f"{page}.md").read_text()
    programs = [found for part in text.split("\n## ") for found in PROGRAM.findall(part)]
    assert len(programs) == text.count("```python") > 0, "each block of code is run"
    packages = packages_of(foreign, text, tmp_path / "packages")
    for name, code, shown in programs:
        assert "localhost:8000" in code
        (tmp_path / name).write_text(code.replace("localhost:8000", server.url.split("/")[-1]))
        server.await_nothing_held()
        before_s = server.metrics()[MADE]
        ran = subprocess.run(
            [str(foreign), "-S", name], cwd=tmp_path, env=packages, capture_output=True, text=True,
            timeout=TALK_S,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert beginnings(ran.stdout) == beginnings(shown)
        if name not in HEARING:
            check_sound(server, before_s, [tmp_path / each for each in SOUND.findall(code)])


SOUND = re.compile(r'"(\w+\.(?:wav|pcm))"')


def check_sound(server: Server, before_s: float, files: list[Path]) -> None:
    """The server has spoken, and each of the files has all of it."""
    now = server.await_metrics(lambda now: now[MADE] > before_s + 1)
    for file in files:
        raw = file.suffix == ".pcm"
        samples = file.stat().st_size // 2 if raw else len(read_audio(file, RATE).samples)
        assert abs(samples / RATE - (now[MADE] - before_s)) < 0.2


def beginnings(printed: str) -> list[list[str]]:
    """The first six words of each line; how a number is written depends on who listens."""
    return [re.findall(r"\w+", line.lower())[:6] for line in printed.splitlines()]


def test_livekit_comes_back_after_a_restart_with_what_was_said(
    foreign: Path, cache_folder: Path
) -> None:
    words = (*QUICK, "--port", str(free_port()))
    with serving(*words, cache=cache_folder) as server:
        command = [str(foreign), str(CLIENTS / "with_livekit_restart.py"), server.url]
        talk = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert talk.stdout
        assert talk.stdout.readline() == "talked\n", talk.stderr and talk.stderr.read()[-3000:]
    with serving(*words, cache=cache_folder) as server:
        out, errors = talk.communicate(timeout=TALK_S)
        assert talk.returncode == 0, errors[-3000:]
        said = json.loads(out.splitlines()[-1])
    assert said["before"]
    assert said["after"]
    assert [role for role, _ in said["items"]] == ["user", *["assistant"] * 3]
    assert [text for _, text in said["items"]][1:] == [
        "Good morning, Ada.", said["before"], said["after"],
    ]  # fmt: skip
    before, after = (tokens for tokens in said["read"] if tokens)
    assert after > before, "the items that it sent again are read, and its first reply as well"
    assert said["fatal"] == []


TURNS = ("first", "spoken", "interrupted", "after")
LEGAL = ("mixed", "input", "nothing", "telephone", "again")
"""Text and sound in one item, a response to other input, another format from turn to turn."""


@pytest.mark.parametrize(
    ("modes", "turns"),
    [(["hands-free"], TURNS), (["manual"], TURNS), (["manual", "legal"], TURNS + LEGAL)],
)
def test_pipecat_talks_and_is_still_listening_after_interruptions(
    foreign: Path, talker: Server, speech: Path, modes: list[str], turns: tuple[str, ...]
) -> None:
    said = told(foreign, "with_pipecat.py", talker, str(speech), *modes)
    for turn in turns:
        assert said[turn] > BYTES_PER_S // 10, turn
    assert said["listening"], "an error event ends its loop"
    assert said["errors"] == []


def test_nothing_is_held_for_clients_that_have_gone(server: Server, talker: Server) -> None:
    server.await_nothing_held()
    talker.await_nothing_held()
