"""Detectors of speech and the echo gate with many voices: people's, and other programs'."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Run, require_package, require_program
from session_rig import pocket

from evals.intervals import points, rate_difference
from evals.kokoro_voices import HELD_OUT
from evals.readings import TEACHER, find_synthetic_voice, read_aloud, read_naturally
from evals.vad import measure_barge_in, measure_found
from evals.vad_clips import SETTINGS, Setting, clip_of
from evals.words import word_errors
from mosstalk import Pipeline
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.offline.pipeline import transcribe
from mosstalk.reporting.sentences import read_sentences
from mosstalk.vad import Detector, open_detector
from mosstalk.vad.turns import SpeechStarted, SpeechStopped, TurnDetector

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SENTENCES = read_sentences()[:8]
SPEAKERS = ("flite-rms", "flite-slt", "flite-awb", "espeak-us", "espeak-gb")
WORDS = ("No.", "Yes.", "Stop!", "Okay.", "Hi.", "Wait!")


def sounds(name: str, sentences: tuple[str, ...] = SENTENCES) -> list[Samples]:
    voice = find_synthetic_voice(name)
    if voice.program == "kokoro":
        require_package("onnxruntime", "quality")
    else:
        require_program(voice.program)
    return list(read_aloud(voice, sentences).heard)


@pytest.fixture(scope="module")
def assistant() -> list[Samples]:
    return sounds(TEACHER.name, read_sentences()[8:24])


@pytest.fixture(scope="module")
def users() -> list[Samples]:
    return [sound for name in SPEAKERS for sound in sounds(name)]


@pytest.fixture(scope="module")
def silero() -> Detector:
    return open_detector("silero")


@pytest.mark.parametrize(
    ("noise_db", "least_found", "most_false"),
    [(None, 0.95, 0.06), (10.0, 0.92, 0.06), (5.0, 0.9, 0.07)],
)
def test_silero_finds_every_voice_in_noise(
    silero: Detector,
    users: list[Samples],
    noise_db: float | None,
    least_found: float,
    most_false: float,
) -> None:
    clips = [clip_of(sound, noise_db, seed) for seed, sound in enumerate(users)]
    row = measure_found(silero, str(noise_db), clips)
    assert row.found > least_found
    assert row.false < most_false
    assert (row.missed, row.cut) == (0, 0)
    assert row.delay_ms.median is not None
    assert row.delay_ms.median < 180


@pytest.mark.parametrize("sentences", [20, pytest.param(40, marks=pytest.mark.faults)])
def test_no_word_is_lost_by_where_a_turn_ends(silero: Detector, sentences: int) -> None:
    """In pairs: what is written down of a turn, and of the same with all the silence after it."""
    require_package("onnxruntime", "quality")
    require_program("espeak-ng")
    reading = read_naturally("kokoro", HELD_OUT, read_sentences()[:sentences])
    pipeline = pocket()
    written: list[tuple[str, str]] = []
    for sound in reading.heard:
        quiet = np.random.default_rng(0).standard_normal(INPUT_RATE) * 1e-4
        heard = np.concatenate([quiet, sound, quiet]).astype(np.float32)
        _, frames = silero.push(silero.start(), heard)
        turns = TurnDetector(minimum_speech_ms=silero.minimum_speech_ms)
        events = turns.push(frames)
        (started,) = (each for each in events[:1] if isinstance(each, SpeechStarted))
        (stopped,) = (each for each in events[-1:] if isinstance(each, SpeechStopped))
        ends = stopped.sound_end_samples, stopped.decided_samples
        assert ends[1] - ends[0] > INPUT_RATE // 4
        short, long = (written_down(pipeline, heard[started.start_samples : end]) for end in ends)
        written.append((short, long))
    shorts, longs = (word_errors(reading.texts, each) for each in zip(*written, strict=True))
    lost = rate_difference(shorts, longs)
    print(f"words wrong, 160 ms after the last speech less 500 ms: {points(lost)}")
    assert lost.low <= 0
    assert lost.value < 0.01


def written_down(pipeline: Pipeline, samples: Samples) -> str:
    answer = transcribe(pipeline, samples)
    list(answer)
    return answer.text


@pytest.mark.parametrize("name", ["silero", "webrtc"])
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_a_single_short_word_is_a_turn(name: str, speaker: str) -> None:
    clips = [clip_of(sound) for sound in sounds(speaker, WORDS)]
    row = measure_found(open_detector(name), "clean", clips)
    assert row.missed <= (name == "webrtc")
    assert row.cut == 0


@pytest.mark.parametrize(
    "echo_db",
    [-6.0, -18.0, -30.0, *(pytest.param(n, marks=pytest.mark.faults) for n in (-12.0, -24.0))],
)
def test_no_reply_ends_itself(
    silero: Detector, assistant: list[Samples], users: list[Samples], echo_db: float
) -> None:
    row = measure_barge_in(silero, Setting(echo_db), assistant, users, range(10))
    assert row.replies == 30
    assert row.interrupted <= 1


# A user as loud as the echo is heard later over Kokoro's voice than over a synthesiser's of 2009.
@pytest.mark.parametrize(
    ("user_db", "soon", "late", "median_ms"),
    [(0, 0.4, 0.6, 650), (5, 0.6, 0.85, 400), (10, 0.85, 0.95, 400)],
)
def test_a_user_ends_a_reply_soon(
    silero: Detector,
    assistant: list[Samples],
    users: list[Samples],
    user_db: float,
    soon: float,
    late: float,
    median_ms: float,
) -> None:
    setting = Setting(-12.0, user_db, replies=2)
    row = measure_barge_in(silero, setting, assistant, users, range(24))
    assert row.soon is not None
    assert row.soon >= soon
    assert row.late is not None
    assert row.late >= late
    assert row.median_ms is not None
    assert row.median_ms < median_ms
    assert row.interrupted <= 1


def test_the_command_simulates_calls(process: Run, tmp_path: Path) -> None:
    require_package("onnxruntime", "quality")
    words = "bench", "vad", "--clips", "4", "--calls", "1", "--json", "all.json"
    run = process(*words, timeout=400)  # 74 s alone on a slow machine
    assert run.returncode == 0, run.stderr
    assert "Interruptions, in simulated rooms" in run.stdout
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["settings"]["assistant"] == TEACHER.name
    assert sum(row["interrupted"] for row in found["barge_in"]) <= 1
    assert sum(row["users"] for row in found["barge_in"]) == sum(
        setting.user_db is not None for setting in SETTINGS
    )
