"""The quality bench with real voices and real judges, on a few sentences."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import QUESTION, SYNTHETIC, Run, lacking, require_package, require_program

import mosstalk
from evals.judges import NaturalnessJudge, PhonemeJudge, WhisperJudge
from evals.readings import (
    SLT_HTS,
    TEACHER,
    UNSEEN,
    VOICES,
    librivox_clips,
    read_aloud,
    telephone_prompts,
)
from evals.sound_scores import pesq, stoi
from evals.words import error_rate
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.reporting.sentences import HELD_OUT_LONG, read_sentences

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SENTENCES = read_sentences()[:3]


@pytest.fixture(scope="module", autouse=True)
def extra() -> None:
    require_package("faster_whisper", "quality")


@pytest.fixture(scope="module")
def speech() -> Samples:
    return read_audio(QUESTION, OUTPUT_RATE).samples


@pytest.fixture(scope="module")
def noise(speech: Samples) -> Samples:
    draw = np.random.default_rng(0).standard_normal(len(speech))
    return (draw * speech.std()).astype(np.float32)


def test_the_bench_tells_speech_from_random_weights(process: Run, tmp_path: Path) -> None:
    require_program("festival")
    run = process(
        *("bench", "quality", *SYNTHETIC, "--limit", "3", "--beside", "flite-slt"),
        *("--json", "all.json", "--html", "page.html"),
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    wer = {row["name"]: row["words"]["value"] for row in found["speech"]}
    assert wer["teacher"] < 0.15
    assert wer["flite-slt"] < 0.3
    assert min(wer["noise alone"], wer["read aloud"], wer["resynthesised"]) > 0.8
    assert all(row["own"]["value"] > 0.8 > row["judge"]["value"] for row in found["transcripts"])
    groups = {"teacher", "3 voices of older programs", "held-out natural voices, British"}
    assert groups <= {row["group"] for row in found["transcripts"]}
    assert found["streaming"]["seams"]["n"] > 10
    assert found["speed"]["first_audio_ms"]["n"] == 3
    assert "scripted" in found["settings"]["replies"]
    assert "scripted" in run.stdout
    assert (tmp_path / "page.html").read_text().count("<audio") == 3 * 4
    # A quarter as many long sentences, at least one; random weights say none of their words.
    (line,) = found["long_sentences"]
    assert line["text"] == read_sentences(HELD_OUT_LONG)[0]
    assert wer["teacher, long sentences"] < 0.15 < 0.8 < wer["read aloud, long sentences"]
    found_lengths = [row["words"] for row in found["lengths"]]
    assert found_lengths == ["1 to 8 words", "9 to 14 words", "24 to 28 words"]
    headline = run.stdout.splitlines()[-1]
    assert headline.startswith("words wrong, read aloud: ")
    assert "of 3 sentences of 8 to 10 words; " in headline
    assert "of 1 sentence of 27 words" in headline


def test_the_shipped_model_reads_long_sentences_and_numbers_so_that_they_are_understood() -> None:
    long = read_sentences(HELD_OUT_LONG)[:3]
    numbers = (
        "The ticket costs $3.50 and the train leaves at 3:45 pm.",
        "It is 5 km to the lake, and it is 20 °C outside.",
        "Dr. Smith works for the U.S.A. and has 2 dogs.",
    )
    judge, pipeline = WhisperJudge(), mosstalk.Pipeline.load()
    for texts, most in ((long, 0.15), (numbers, 0.4)):
        heard = []
        for text in texts:
            samples = np.concatenate([*mosstalk.speak(pipeline, text)])
            heard.append(judge.transcribe(samples, OUTPUT_RATE))
        said = [text.replace("°C", "degrees Celsius").replace("U.S.A.", "USA") for text in texts]
        assert error_rate(said, heard) < most, heard


def test_a_json_document_on_stdout_stands_alone(process: Run) -> None:
    require_program("festival")
    run = process("bench", "quality", "--judges", "--limit", "1", "--json", "-", timeout=200)
    assert run.returncode == 0, run.stderr
    assert [row["name"] for row in json.loads(run.stdout)["speech"]] == ["teacher", "noise alone"]
    assert "Speech: words" in run.stderr


def test_recordings_take_the_place_of_festival(process: Run, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    shutil.copy(QUESTION, folder)
    said = "Which folder should I save this message to?"
    (folder / "transcripts.txt").write_text(f"question.flac\t{said}\n")
    run = process(
        *("bench", "quality", *SYNTHETIC, "--recordings", folder, "--json", "all.json"),
        *("--people", folder),
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    assert [line["text"] for line in found["sentences"]] == [said]
    assert found["settings"]["teacher"] == "recordings given"
    assert "people: teacher" in {row["group"] for row in found["transcripts"]}
    run = process("bench", "compare", "all.json", "all.json", "--json")
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["words"]
    assert {"heard: teacher", "written down: people: teacher"} <= {row["name"] for row in rows}
    assert all(row["difference"]["value"] == 0 for row in rows)


def test_without_festival_and_flite_what_needs_them_is_skipped_by_name(
    process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = process("bench", "quality", *SYNTHETIC, "--limit", "1", "--json", "-", timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert "teacher" in {row["name"] for row in found["speech"]}
    skipped = "\n".join(found["skipped"])
    assert "flite-slt: flite is not installed; apt install flite" in skipped
    assert f"unseen synthetic voice, {UNSEEN.name}: festival is not installed" in skipped


def test_the_judges_hear_a_person_and_hear_nothing_in_noise(
    speech: Samples, noise: Samples
) -> None:
    whisper, phonemes, naturalness = WhisperJudge(), PhonemeJudge(), NaturalnessJudge()
    said = "which folder should i save this message to"
    assert error_rate([said], [whisper.transcribe(speech, OUTPUT_RATE)]) <= 0.25
    assert error_rate([said], [whisper.transcribe(noise, OUTPUT_RATE)]) >= 0.8
    heard = phonemes.transcribe(speech, OUTPUT_RATE)
    assert len(heard) > 20
    assert {"f", "m"} <= set(heard)
    assert len(phonemes.transcribe(noise, OUTPUT_RATE)) < len(heard) / 2
    assert naturalness.score(speech, OUTPUT_RATE) > naturalness.score(noise, OUTPUT_RATE) + 1


@pytest.mark.parametrize("judge", [WhisperJudge, PhonemeJudge], ids=lambda judge: judge.__name__)
def test_a_judge_hears_nothing_in_no_sound(
    judge: Callable[[], WhisperJudge | PhonemeJudge],
) -> None:
    assert not judge().transcribe(np.zeros(0, np.float32), OUTPUT_RATE)


def test_no_sound_is_not_natural() -> None:
    assert 1 <= NaturalnessJudge().score(np.zeros(0, np.float32), OUTPUT_RATE) < 2.5


def test_a_judge_hears_the_same_each_time(speech: Samples) -> None:
    first, second = WhisperJudge(), WhisperJudge()
    assert first.transcribe(speech, OUTPUT_RATE) == second.transcribe(speech, OUTPUT_RATE)


@pytest.mark.parametrize("name", VOICES)
def test_a_voice_reads_every_sentence_so_that_it_is_understood(name: str) -> None:
    voice = VOICES[name]
    require_program(voice.program)
    reading = read_aloud(voice, SENTENCES)
    assert reading.texts == SENTENCES
    assert all(1.0 < len(sound) / OUTPUT_RATE < 6.0 for sound in reading.sounds)
    judge = WhisperJudge()
    heard = [judge.transcribe(sound, OUTPUT_RATE) for sound in reading.sounds]
    assert error_rate(reading.texts, heard) < 0.3


def test_the_teacher_reads_the_same_each_time() -> None:
    require_program("festival")
    first, second = (read_aloud(TEACHER, SENTENCES[:1]).sounds[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_quotes_and_backslashes_are_read_like_blanks() -> None:
    require_program("festival")
    plain, quoted = read_aloud(SLT_HTS, ["Say yes or no.", 'Say "yes" or \\ no.']).sounds
    assert len(quoted) == pytest.approx(len(plain), rel=0.25)


def test_scores_fall_from_the_recording_itself_to_noise(speech: Samples, noise: Samples) -> None:
    require_package("pesq", "pesq")
    worse = (speech + 0.3 * noise).astype(np.float32)
    for score in (pesq, stoi):
        best, middle, least = (score(speech, other) for other in (speech, worse, noise))
        assert best is not None
        assert middle is not None
        assert least is not None
        assert best > middle > least
    assert pesq(speech, np.zeros_like(speech)) is None


def test_people_are_heard_where_their_packages_are_installed() -> None:
    judge = WhisperJudge()
    try:
        readings = (librivox_clips(), telephone_prompts(5))
    except BenchError as error:
        lacking(str(error))
    for reading in readings:
        assert len(reading) == 5
        heard = [judge.transcribe(sound, OUTPUT_RATE) for sound in reading.sounds]
        assert error_rate(reading.texts, heard) < 0.3
