"""Recordings of a folder are read with their words; what does not fit is refused by line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import QUESTION, ROOT

from evals.readings import asset_recordings, noise_like, read_recordings
from evals.words import normalised
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import AudioError, BenchError
from mosstalk.reporting.sentences import HELD_OUT, HELD_OUT_LONG, read_sentences

SAID = "Which folder should I save this message to?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(QUESTION, tmp_path / "a.flac")
    shutil.copy(ROOT / "assets" / "librivox.flac", tmp_path / "b.flac")
    (tmp_path / "transcripts.txt").write_text(f"a.flac\t{SAID}\n\nb.flac\tHe was not ill.\n")
    return tmp_path


def test_recordings_are_read_in_the_order_of_their_transcripts(folder: Path) -> None:
    reading = read_recordings(folder, "someone")
    assert (reading.name, reading.texts) == ("someone", (SAID, "He was not ill."))
    assert [len(sound) / OUTPUT_RATE for sound in reading.sounds] == pytest.approx(
        [2.87, 2.99], 0.01
    )
    assert reading.seconds == pytest.approx(5.86, 0.01)


def test_sentences_are_found_whatever_their_spelling(folder: Path) -> None:
    reading = read_recordings(folder, "someone")
    only = reading.only(["he was NOT ill"])
    assert np.array_equal(only.sounds[0], reading.sounds[1])
    with pytest.raises(BenchError, match="no recording of 'who is it'"):
        reading.only(["who is it"])


def test_a_folder_without_transcripts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"transcripts\.txt: cannot be read"):
        read_recordings(tmp_path, "no one")


def test_a_line_without_words_is_refused_by_number(folder: Path) -> None:
    (folder / "transcripts.txt").write_text(f"a.flac\t{SAID}\nb.flac\n")
    with pytest.raises(BenchError, match="line 2 is not a file's name, a tab and the words"):
        read_recordings(folder, "someone")


def test_a_missing_recording_is_refused(folder: Path) -> None:
    (folder / "b.flac").unlink()
    with pytest.raises(AudioError, match=r"b\.flac: no such file"):
        read_recordings(folder, "someone")


def test_the_recordings_in_assets_have_their_words() -> None:
    reading = asset_recordings()
    assert len(reading) == 2
    assert SAID in reading.texts


def test_noise_is_as_long_and_as_loud_and_the_same_each_time(folder: Path) -> None:
    reading = read_recordings(folder, "someone")
    noise = noise_like(reading)
    for sound, other in zip(reading.sounds, noise.sounds, strict=True):
        assert len(sound) == len(other)
        assert other.std() == pytest.approx(sound.std(), rel=0.02)
    again = noise_like(reading)
    assert all(map(np.array_equal, noise.sounds, again.sounds))


def test_the_held_out_sentences_are_a_hundred_short_plain_ones() -> None:
    sentences = read_sentences()
    assert len({" ".join(normalised(sentence)) for sentence in sentences}) == 100
    assert all(5 <= len(sentence.split()) <= 14 for sentence in sentences)
    assert not any(letter.isdigit() for sentence in sentences for letter in sentence)
    assert sentences == tuple(HELD_OUT.read_text().splitlines())


def test_the_long_sentences_are_two_dozen_that_no_reply_holds_whole() -> None:
    sentences = read_sentences(HELD_OUT_LONG)
    assert len({" ".join(normalised(sentence)) for sentence in sentences}) == 24
    assert all(24 <= len(sentence.split()) <= 33 for sentence in sentences)
    assert sum(len(sentence.split()) >= 29 for sentence in sentences) >= 8
    assert min(map(len, sentences)) > 90
    assert not any(letter.isdigit() for sentence in sentences for letter in sentence)
    assert sentences == tuple(HELD_OUT_LONG.read_text().splitlines())


def test_sentences_of_ones_own_are_read_without_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("It\u2019s late.\n\n  Go home. \n", encoding="utf-8")
    assert read_sentences(path) == ("It's late.", "Go home.")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no sentence"),
        ("Hello.\nÜber uns.\n", "line 2 has letters beyond ASCII"),
    ],
)
def test_sentences_that_cannot_be_read_aloud_are_refused(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchError, match=complaint):
        read_sentences(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_sentences(tmp_path / "absent.txt")
