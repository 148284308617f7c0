"""Texts and recordings that tasks cannot take: one line says why, and nothing is lost."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import QUESTION, SYNTHETIC, Run, refused

from mosstalk import Pipeline, speak, transcribe
from mosstalk.audio.sound import Samples
from mosstalk.errors import AudioError, TextError

RATE = 16_000
OLDER = b"from before"


def recording(path: Path, samples: Samples, rate: int = RATE) -> Path:
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


Damage = Callable[[Path], object]
TONE = (0.5 * np.sin(np.arange(RATE) / 6)).astype(np.float32)
RECORDINGS: dict[str, tuple[Damage, str]] = {
    "missing": (lambda path: path.unlink(missing_ok=True), "no such file"),
    "folder": (lambda path: path.mkdir(), "not a file"),
    "empty": (lambda path: path.touch(), "the file is empty (0 bytes)"),
    "no-samples": (lambda path: recording(path, TONE[:0]), "holds no samples"),
    "silent": (lambda path: recording(path, 0 * TONE), "is silent"),
    "short": (lambda path: recording(path, TONE[:160]), "10 ms of sound is too short"),
    "nan": (lambda path: recording(path, np.append(TONE, np.nan)), "NaN"),
    "corrupt": (lambda path: path.write_bytes(QUESTION.read_bytes()[:900]), "not a readable sound"),
    "text": (lambda path: path.write_text("Good morning"), "not a readable sound file"),
    "1-hz": (lambda path: recording(path, TONE, rate=1), "claims 1 samples a second"),
    "array": (lambda path: recording(path, np.stack([TONE] * 8, 1)), "has 8 channels"),
}


@pytest.mark.parametrize("fault", RECORDINGS)
def test_a_recording_that_cannot_be_heard_is_refused_before_anything_is_written(
    here: Run, tmp_path: Path, fault: str
) -> None:
    make, said = RECORDINGS[fault]
    path = tmp_path / "bad.wav"
    make(path)
    run = here("transcribe", QUESTION, path)
    assert said in refused(run)
    assert str(path) in run.stderr
    assert run.stdout == ""


def test_of_a_recording_that_was_cut_what_is_there_is_written_down_with_one_warning(
    mosstalk: Run, tmp_path: Path
) -> None:
    path = recording(tmp_path / "cut.wav", np.resize(TONE, 2 * RATE))
    path.write_bytes(path.read_bytes()[: 4 * RATE])
    run = mosstalk("transcribe", path, "--script", "text:4", *SYNTHETIC)
    assert run.returncode == 0
    assert run.stdout.strip()
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("warning: "))
    assert line.startswith(f"warning: {path}: the file is cut short: its header promises 2.0 s")
    assert "AudioWarning" not in run.stderr


def test_one_of_eight_channels_is_written_down_when_it_is_named(here: Run, tmp_path: Path) -> None:
    array = np.zeros((3 * RATE, 8), np.float32)
    array[:, 2] = np.resize(TONE, 3 * RATE)
    path = recording(tmp_path / "array.wav", array)
    alone = recording(tmp_path / "alone.wav", array[:, 2])
    third = here("transcribe", path, "--channel", "3", "--script", "text:9")
    assert third.stdout == here("transcribe", alone, "--script", "text:9").stdout
    assert "channel 9 is not one" in refused(here("transcribe", path, "--channel", "9"))


SPEAK_REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "say what to read aloud: TEXT, - for standard input, or --file FILE"),
    "both": (("Hi.", "--file", "text.txt"), "say what to read aloud"),
    "empty": (("",), "the text is empty"),
    "blank": ((" \n\t",), "the text is empty"),
    "empty-stdin": (("-",), "the text is empty"),
    "latin-1": (("caf\udce9",), "not valid unicode"),
    "latin-1-file": (("--file", "latin-1.txt"), "latin-1.txt: is no UTF-8 text"),
    "no-file": (("--file", "none.txt"), "none.txt: cannot be read (No such file"),
    "folder": (("--file", "."), "cannot be read (Is a directory)"),
    "mp3": (("Hi.", "--out", "a.mp3"), "a.mp3: write to one of .wav, .flac, .ogg"),
    "no-folder": (("Hi.", "--out", "none/a.wav"), "none: no such folder"),
    "voice": (("Hi.", "--voice", "bob"), "unknown voice 'bob'"),
    "top-p": (("Hi.", "--top-p", "2"), "top_p must be above 0"),
    "script": (("Hi.", "--script", "song:2"), "'song:2'"),
    "trace": (("Hi.", "--trace", "none/t.json"), "none: no such folder"),
    "one-folder": (("Hi.", "--model", "."), "--model and --codec belong together"),
    "no-model": (("Hi.", "--model", "none", "--codec", "none"), "none"),
}


@pytest.mark.parametrize("fault", SPEAK_REFUSALS)
def test_what_cannot_be_read_aloud_is_refused_and_the_older_file_stays(
    here: Run, tmp_path: Path, fault: str
) -> None:
    words, said = SPEAK_REFUSALS[fault]
    (tmp_path / "latin-1.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "spoken.wav").write_bytes(OLDER)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert said in refused(here("speak", *words, "--force"))
    assert (tmp_path / "spoken.wav").read_bytes() == OLDER
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("speak", "Hi.", "--voice", "bob"), "unknown voice", id="voice"),
        pytest.param(("transcribe", "none.wav"), "none.wav: no such file", id="recording"),
        pytest.param(("transcribe", QUESTION, "--model", "a", "--codec", "b"), "a", id="model"),
    ],
)
def test_it_is_refused_with_one_line_and_exit_code_2(
    mosstalk: Run, words: tuple[str | Path, ...], said: str
) -> None:
    model = () if "--model" in words else SYNTHETIC
    assert said in refused(mosstalk(*words, *model))


@pytest.mark.parametrize(
    "samples",
    [TONE[:0], np.stack([TONE, TONE]), np.append(TONE, np.inf)],
    ids=["none", "two-dimensional", "infinite"],
)
def test_samples_that_are_no_sound_are_refused_by_the_library(
    pipeline: Pipeline, samples: Samples
) -> None:
    with pytest.raises(AudioError, match=r"finite samples \(n,\), mono at 16 kHz"):
        transcribe(pipeline, samples)


def test_an_empty_text_is_refused_by_the_library(pipeline: Pipeline) -> None:
    with pytest.raises(TextError, match="the text is empty"):
        speak(pipeline, " \n")
