"""Questions spoken by other programs, in formats other programs write, heard and answered."""

import re
import subprocess
from pathlib import Path

import pytest
import soundfile
from conftest import Run, refused, require_program

from mosstalk import Pipeline
from mosstalk.audio.sound import read_audio
from mosstalk.errors import AudioError

pytestmark = pytest.mark.system

WORDS = "What will the weather be like tomorrow?"

FLITE = ("flite", "-o", "question.wav", "-t", WORDS, "-voice")
ESPEAK = ("espeak-ng", "-w", "question.wav", "-v")
SPEAKERS = {
    "flite-slt": (*FLITE, "slt"),
    "flite-rms": (*FLITE, "rms"),
    "flite-awb": (*FLITE, "awb"),
    "flite-kal16": (*FLITE, "kal16"),
    "espeak-ng": (*ESPEAK, "en", WORDS),
    "espeak-ng-german": (*ESPEAK, "de", "Wie spät ist es?"),
}

FORMATS = {
    "mu-law-8khz.wav": ("-r", "8000", "-e", "mu-law"),
    "8-bit-11khz.wav": ("-r", "11025", "-e", "unsigned-integer", "-b", "8"),
    "24-bit-96khz.wav": ("-r", "96000", "-b", "24"),
    "float.wav": ("-e", "floating-point", "-b", "32"),
    "stereo-44khz.aiff": ("-r", "44100", "-c", "2"),
    "stereo-48khz.flac": ("-r", "48000", "-c", "2"),
    "vorbis-22khz.ogg": (
        "-r",
        "22050",
    ),
    "stereo-44khz.mp3": ("-r", "44100", "-c", "2"),
    "sun.au": (),
}


def run_program(folder: Path, name: str, *words: str) -> None:
    command = [require_program(name), *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question spoken by flite: 16 kHz mono."""
    folder = tmp_path_factory.mktemp("question")
    run_program(folder, *SPEAKERS["flite-slt"])
    return folder / "question.wav"


def converted(source: Path, target: Path, *options: str) -> Path:
    run_program(target.parent, "sox", str(source), *options, target.name)
    return target


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_a_spoken_question_is_answered(process: Run, tmp_path: Path, speaker: str) -> None:
    run_program(tmp_path, *SPEAKERS[speaker])
    run = process("chat", "--speech", "question.wav", "--script", "speech:5", "--stats")
    assert run.returncode == 0, run.stderr
    heard = re.search(r"heard +question.wav: (\S+) s .* = (\d+) codes", run.stderr)
    assert heard is not None
    info = soundfile.info(tmp_path / "question.wav")
    assert float(heard[1]) == pytest.approx(info.duration, abs=0.01)
    assert int(heard[2]) == pytest.approx(info.duration / 0.08, abs=1)
    assert soundfile.info(tmp_path / "answer.wav").frames == 5 * 1920


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_heard_as_long_as_the_original(
    pipeline: Pipeline, question: Path, tmp_path: Path, name: str
) -> None:
    original = len(pipeline.chat().hear(read_audio(question, 16_000).samples))
    path = converted(question, tmp_path / name, *FORMATS[name])
    codes = len(pipeline.chat().hear(read_audio(path, 16_000).samples))
    assert codes == pytest.approx(original, abs=1)


def test_lossless_formats_are_heard_as_the_same_codes(
    pipeline: Pipeline, question: Path, tmp_path: Path
) -> None:
    original = pipeline.chat().hear(read_audio(question, 16_000).samples)
    for name in ("question.flac", "question.aiff", "question.au"):
        path = converted(question, tmp_path / name)
        assert pipeline.chat().hear(read_audio(path, 16_000).samples) == original


def test_one_of_eight_channels_is_heard_like_the_original(
    pipeline: Pipeline, question: Path, tmp_path: Path
) -> None:
    # Silence everywhere but in the third.
    remix = ("remix", "0", "0", "1", "0", "0", "0", "0", "0")
    path = tmp_path / "eight.wav"
    run_program(tmp_path, "sox", str(question), path.name, *remix)
    assert soundfile.info(path).channels == 8
    with pytest.raises(AudioError, match="8 channels; say which one to hear"):
        read_audio(path, 16_000)
    third = pipeline.chat().hear(read_audio(path, 16_000, channel=3).samples)
    assert third == pipeline.chat().hear(read_audio(question, 16_000).samples)
    with pytest.raises(AudioError, match="is silent"):
        read_audio(path, 16_000, channel=4)


def test_a_format_that_libsndfile_lacks_is_told_with_what_to_do(
    process: Run, question: Path, tmp_path: Path
) -> None:
    path = converted(question, tmp_path / "question.amr-nb")
    run = process("chat", "--speech", path, "--script", "speech:5")
    line = refused(run)
    assert "question.amr-nb: not a readable sound file" in line
    assert "convert it to wav or flac" in line


# What these tests do where a program is missing.


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with nothing on it."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("bare_path")
def test_a_missing_program_skips_by_name_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs the program flite; .*system-packages"):
        require_program("flite")


@pytest.mark.usefixtures("bare_path")
def test_a_missing_program_fails_where_ci_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"needs the program flite; .*system-packages"):
        require_program("flite")
