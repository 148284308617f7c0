"""What all commands have in common: where results, notes and files go, and what is replaced."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import soundfile
from conftest import QUESTION, ROOT, Checkpoint, Run, refused
from typer.testing import CliRunner

from mosstalk.bench import codec
from mosstalk.cli import app, options
from mosstalk.plan.limits import ALL, CARDS
from mosstalk.runtime.device import pick_dtype
from mosstalk.vad.detectors import DetectorKind

SPOKEN = ("speak", "Good morning.", "--script", "speech:6")
PLAN = ("plan", "--gpu-memory", "80GB")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Documents.


def test_a_document_goes_to_its_file_and_the_text_to_stdout(mosstalk: Run, tmp_path: Path) -> None:
    text = mosstalk(*PLAN).stdout
    run = mosstalk(*PLAN, "--json", "plan.json")
    assert (run.returncode, run.stdout) == (0, text)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["format"] == "mosstalk-plan-1"
    assert json.loads(mosstalk(*PLAN, "--json", "-").stdout) == document


@pytest.mark.parametrize("words", [(*PLAN, "--json"), ("plan", "--json", *PLAN[1:])])
def test_a_bare_json_is_stdout_as_it_was_when_it_was_a_flag(
    mosstalk: Run, words: tuple[str, ...]
) -> None:
    assert mosstalk(*words).stdout == mosstalk(*PLAN, "--json", "-").stdout


@pytest.mark.parametrize("option", ["--json", "--trace", "--out"])
def test_a_file_that_exists_is_replaced_by_force_alone(
    here: Run, tmp_path: Path, option: str
) -> None:
    older = tmp_path / "older.wav"
    older.write_bytes(b"from before")
    line = refused(here(*SPOKEN, option, older.name))
    assert line == "error: older.wav: exists already; add --force or choose another name"
    assert older.read_bytes() == b"from before"
    assert names(tmp_path) == ["older.wav"]
    assert here(*SPOKEN, option, older.name, "--force").returncode == 0
    assert older.read_bytes() != b"from before"


def test_sound_without_a_name_goes_to_a_new_file(here: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert here(*SPOKEN).returncode == 0
    assert names(tmp_path) == ["spoken-2.wav", "spoken.wav"]
    turns = ("chat", "--text", "a", "--text", "b", "--script", "speech:3")
    for _ in range(2):
        assert here(*turns).returncode == 0
    assert names(tmp_path)[:4] == [
        "answer-1.wav", "answer-2-1.wav", "answer-2-2.wav", "answer-2.wav",
    ]  # fmt: skip


# Pipes.


def test_sound_on_stdout_is_the_wav_that_a_file_would_hold(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    assert here(*SPOKEN, "-o", "file.wav").returncode == 0
    folders = ("--model", str(tiny.model), "--codec", str(tiny.codec))
    run = CliRunner().invoke(app, [*SPOKEN, "-o", "-", *folders], catch_exceptions=False)
    assert run.exit_code == 0
    piped, rate = soundfile.read(io.BytesIO(run.stdout_bytes), dtype="int16")
    kept, _ = soundfile.read(tmp_path / "file.wav", dtype="int16")
    assert rate == 24_000
    np.testing.assert_array_equal(piped, kept)
    assert "standard output: 0.48 s of sound" in run.stderr
    assert names(tmp_path) == ["file.wav"]


def test_sound_is_heard_from_standard_input(here: Run) -> None:
    words = ("--script", "text:9", "--json")
    from_file = json.loads(here("transcribe", QUESTION, *words).stdout)["files"][0]
    run = here("transcribe", "-", *words, stdin=QUESTION.read_bytes())
    piped = json.loads(run.stdout)["files"][0]
    assert piped["file"] == "-"
    assert (piped["text"], piped["seconds"]) == (from_file["text"], from_file["seconds"])
    asked = here("chat", "--speech", "-", "--script", "speech:3", stdin=QUESTION.read_bytes())
    assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SPOKEN, "--out", "-", "--json"), "--out - and --json - both want stdout"),
        (("chat", "--text", "a", "--text", "b", "--out", "-"), "--out - takes one answer"),
        (("transcribe", "-"), "standard input: the file is empty (0 bytes)"),
    ],
)
def test_what_a_pipe_cannot_take_is_refused(here: Run, words: tuple[str, ...], said: str) -> None:
    assert said in refused(here(*words))


# What is said.


def test_a_run_says_whose_weights_they_are_and_one_line_of_result(here: Run) -> None:
    run = here(*SPOKEN)
    notice, result = run.stderr.splitlines()
    assert notice.startswith("The weights of this model are random")
    assert result.startswith("spoken.wav: 0.48 s of sound; scripted speech:6")
    assert run.stdout == ""


def test_quiet_leaves_results_and_errors_alone(here: Run, tmp_path: Path) -> None:
    run = here(*SPOKEN, "-q")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert names(tmp_path) == ["spoken.wav"]
    words = ("transcribe", QUESTION, "--script", "text:9")
    said = here(*words).stdout
    run = here(*words, "--quiet", "--stats")
    assert (run.stdout, run.stderr) == (said, "")
    assert "none.wav: no such file" in refused(here("transcribe", "none.wav", "-q"))


# Completion, by the protocol between a shell and the command.

Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(cache_folder: Path) -> Complete:
    """What bash is offered in place of the last word, which is as far as it was typed."""

    def offers(typed: str) -> list[str]:
        asked = {
            "_MOSSTALK_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split(" ")) - 1),
            "MOSSTALK_CACHE": str(cache_folder),
        }
        return CliRunner().invoke(app, prog_name="mosstalk", env=asked).stdout.split()

    return offers


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("mosstalk speak --model ", ["pocket", "synthetic"]),
        ("mosstalk speak --model syn", ["synthetic"]),
        ("mosstalk speak --model=po", ["pocket"]),
        ("mosstalk checkpoint inspect ", ["pocket", "synthetic"]),
        ("mosstalk serve --vad ", ["auto", *get_args(DetectorKind)[1:], "none"]),
        ("mosstalk serve --log-format j", ["json"]),
        ("mosstalk build --precision ", ["bf16", "fp8"]),
        ("mosstalk chat --device c", ["cpu", "cuda"]),
        ("mosstalk plan --gpu ", [*CARDS, ALL]),
        ("mosstalk chat --te", ["--text", "--temperature"]),
    ],
)
def test_a_shell_completes_what_is_one_of_a_few_words(
    complete: Complete, typed: str, words: list[str]
) -> None:
    assert complete(typed) == words


def test_dtypes_and_parts_that_are_offered_are_those_that_are_taken(complete: Complete) -> None:
    assert complete("mosstalk chat --dtype ") == list(options.DTYPES)
    for name in complete("mosstalk verify --dtype "):
        assert str(pick_dtype(name)) == f"torch.{name}"
    assert complete("mosstalk bench codec --part ")[: len(codec.PARTS)] == list(codec.PARTS)


def test_a_shell_completes_voices_of_the_codec_that_was_named(
    complete: Complete, tiny: Checkpoint, tmp_path: Path
) -> None:
    own = tiny.copy(tmp_path)
    shutil.copyfile(own.codec / "voices/default.safetensors", own.codec / "voices/ada.safetensors")
    folders = f"--model {own.model} --codec {own.codec}"
    assert complete(f"mosstalk speak {folders} --voice ") == ["ada", "default"]
    assert complete(f"mosstalk voice inspect --codec {own.codec} a") == ["ada"]
    assert complete("mosstalk serve --voice ") == ["default"]
    assert complete(f"mosstalk speak --model {tmp_path} --voice ") == []


# Extras that are not installed.


@pytest.mark.parametrize("command", [("serve",), ("replay", "recording")])
def test_what_needs_the_extra_server_names_it(
    mosstalk: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for package in ("uvicorn", "websockets"):
        monkeypatch.setitem(sys.modules, package, None)
    line = refused(mosstalk(*command))
    assert "needs the extra server, of which uvicorn, websockets are missing" in line
    assert line.endswith("run: make setup EXTRAS=server")


def test_a_session_with_a_detector_is_not_replayed_without_one(
    mosstalk: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(ROOT / "tests/recordings/format-1", folder)
    facts = json.loads((folder / "session.json").read_text())
    facts["worker"]["detector"] = "silero: silero-vad 6.2.3"
    (folder / "session.json").write_text(json.dumps(facts))
    for package in ("silero_vad", "webrtcvad"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "run: make setup EXTRAS=vad" in refused(mosstalk("replay", folder))
