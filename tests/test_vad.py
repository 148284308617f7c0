"""Detectors of speech: found where it is, the same however the sound is cut and batched."""

import copy
import os
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import QUESTION, ROOT, examples
from hypothesis import given
from hypothesis import strategies as st

from evals.vad import measure_alarm, measure_found
from evals.vad_clips import clip_of, sounds_without_speech
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.errors import AudioError, DetectorError
from mosstalk.vad import Detector, Frames, SileroDetector, WebRtcDetector, open_detector

SPEECH = [
    read_audio(path, 16_000).samples for path in (QUESTION, ROOT / "assets" / "librivox.flac")
]
ASKED = ("capital", "sum", "spain")
NOTHING = np.zeros(0, np.float32)
SILERO, WEBRTC = SileroDetector(), WebRtcDetector()
BOTH = pytest.mark.parametrize("detector", [SILERO, WEBRTC], ids=lambda detector: detector.name)


def heard(detector: Detector, samples: Samples) -> Frames:
    return detector.push(detector.start(), samples)[1]


# What is found.


@BOTH
def test_speech_is_found_and_silence_around_it_is_not(detector: Detector) -> None:
    row = measure_found(detector, "clean", [clip_of(sound) for sound in SPEECH])
    assert row.found > 0.85
    assert row.false < 0.06
    assert (row.missed, row.cut) == (0, 0)
    assert row.delay_ms.highest is not None
    assert row.delay_ms.highest < 550
    assert row.end_ms.highest is not None
    assert row.end_ms.lowest is not None
    assert -150 < row.end_ms.lowest < row.end_ms.highest < 200


def test_silero_finds_speech_in_noise_as_loud_as_a_third_of_its_power() -> None:
    row = measure_found(SILERO, "5 dB", [clip_of(sound, 5.0) for sound in SPEECH])
    assert row.found > 0.8
    assert row.false < 0.06
    assert (row.missed, row.cut) == (0, 0)


def test_webrtc_ends_turns_in_noise() -> None:
    row = measure_found(WEBRTC, "10 dB", [clip_of(sound, 10.0) for sound in SPEECH])
    assert row.found > 0.35
    assert row.false < 0.05
    assert row.missed == 0
    assert row.end_ms.n == len(SPEECH)


@pytest.mark.parametrize("name", sounds_without_speech(1.0))
def test_silero_takes_no_other_sound_for_a_turn(name: str) -> None:
    row = measure_alarm(SILERO, name, sounds_without_speech(10.0)[name])
    assert row.false < 0.03
    assert row.turns == 0


@pytest.mark.parametrize("name", ["silence", "white noise, -30 dB", "pink noise, -30 dB"])
def test_webrtc_takes_no_steady_sound_for_a_turn(name: str) -> None:
    row = measure_alarm(WEBRTC, name, sounds_without_speech(10.0)[name])
    assert row.false < 0.03
    assert row.turns == 0


def test_silero_gives_what_its_own_package_gives() -> None:
    model = import_module("silero_vad").load_silero_vad(onnx=True)
    sound = SPEECH[0][: len(SPEECH[0]) // 512 * 512]
    expected = model.audio_forward(torch.from_numpy(sound), 16_000)[0].numpy()
    found = heard(SILERO, sound).speech.reshape(-1, 8)
    kept = found.max(axis=1)
    np.testing.assert_allclose(kept[:80], expected[:80], atol=1e-6)
    # Behind the last word it still says yes, at the level of the noise.
    assert expected[80:84].min() > 0.5
    np.testing.assert_allclose(kept[80:], np.where(kept[80:] > 0, expected[80:], 0), atol=1e-6)
    # Of a window all frames are the same but for silence at its ends.
    assert set(np.unique(found / np.maximum(kept, 1e-9)[:, None])) == {0.0, 1.0}
    assert (np.diff(found > 0, axis=1).sum(axis=1) <= 2).all()


@pytest.mark.parametrize(("noise_db", "alone_ms"), [(None, 72), (30.0, 58)])
def test_silence_counts_from_the_last_word_on_where_that_is_far_above_the_noise(
    noise_db: float | None, alone_ms: int
) -> None:
    words = [read_audio(ROOT / f"assets/{name}.flac", 16_000) for name in ASKED]
    row = measure_found(SILERO, "", [clip_of(each.samples, noise_db) for each in words])
    assert (row.missed, row.cut) == (0, 0)
    assert row.end_ms.median is not None
    assert row.end_ms.median <= alone_ms - 50, "Silero alone says yes for so long"


@examples(10)
@given(gain_db=st.integers(-30, 0))
def test_a_quiet_voice_is_speech_as_a_loud_one_is(gain_db: int) -> None:
    sound = SPEECH[0] * np.float32(10 ** (gain_db / 20))
    quiet, loud = (heard(SILERO, each).speech >= 0.5 for each in (sound, SPEECH[0]))
    assert (quiet != loud).mean() < 0.1


# Streams.


@BOTH
def test_frames_lie_side_by_side_and_wait_until_their_window_is_whole(detector: Detector) -> None:
    window, each = detector.window_samples, detector.window_samples // detector.frame_samples
    voiced = SPEECH[0][len(SPEECH[0]) // 3 :]
    state, frames = detector.push(detector.start(), np.zeros(9 * window, np.float32))
    assert (frames.start_samples, len(frames)) == (0, 9 * each)
    state, frames = detector.push(state, voiced[: window + 7])
    assert (frames.start_samples, len(frames)) == (9 * window, each)
    for start, end, wanted in (
        (window + 7, window + 7, 0),
        (window + 7, 2 * window - 1, 0),
        (2 * window - 1, 2 * window, each),
    ):
        state, more = detector.push(state, voiced[start:end])
        assert (more.start_samples, len(more)) == (10 * window, wanted)
    first, *_, last = frames
    assert first.end_samples - first.start_samples == detector.frame_samples
    assert first.start_samples == frames.start_samples
    assert frames.end_samples == last.end_samples == 10 * window


@BOTH
def test_silence_is_told_before_its_window_is_whole(detector: Detector) -> None:
    window, frame = detector.window_samples, detector.frame_samples
    sound = clip_of(SPEECH[0]).samples
    sound = sound[: len(sound) // window * window]
    state, _ = detector.push(detector.start(), sound)
    silence = np.zeros(window, np.float32)
    state, frames = detector.push(state, silence[: window - 1])
    whole = (window - 1) // frame
    assert (frames.start_samples, len(frames)) == (len(sound), whole)
    assert not frames.speech.any()
    state, frames = detector.push(state, silence[:1])
    assert (frames.end_samples, len(frames)) == (len(sound) + window, 1)
    # Speech in a window that began with silence waits for all of it.
    state, frames = detector.push(state, silence[: window // 2])
    assert len(frames) == window // 2 // frame
    voiced = SPEECH[0][len(SPEECH[0]) // 3 :][: window - window // 2]
    state, frames = detector.push(state, voiced[:-1])
    assert len(frames) == 0
    state, frames = detector.push(state, voiced[-1:])
    assert frames.end_samples == len(sound) + 2 * window


@BOTH
@examples(25)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40))
def test_sound_in_any_pieces_gives_the_same_probabilities(
    detector: Detector, sizes: list[int]
) -> None:
    sound = SPEECH[0][: sum(sizes)]
    state, got = detector.start(), []
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        state, frames = detector.push(state, sound[end - size : end])
        got.append(frames.speech)
    np.testing.assert_array_equal(np.concatenate(got), heard(detector, sound).speech)


@BOTH
def test_a_stream_in_a_batch_gives_what_it_gives_alone(detector: Detector) -> None:
    sounds = [SPEECH[0], NOTHING, SPEECH[1][5000:], SPEECH[0][:700], 0.1 * SPEECH[1]]
    states = [detector.start() for _ in sounds]
    got: list[list[Samples]] = [[] for _ in sounds]
    # Streams reach their whole frames at different times.
    for start in range(0, 40_000, 1000):
        pieces = [sound[start + 90 * row :][:1000] for row, sound in enumerate(sounds)]
        found = detector.push_many(states, pieces)
        states = [state for state, _ in found]
        for row, (_, frames) in enumerate(found):
            got[row].append(frames.speech)
    for row, sound in enumerate(sounds):
        pieces = [sound[start + 90 * row :][:1000] for start in range(0, 40_000, 1000)]
        alone = heard(detector, np.concatenate(pieces)).speech
        np.testing.assert_allclose(np.concatenate(got[row]), alone, atol=1e-5)


@BOTH
def test_a_batch_of_none_is_nothing(detector: Detector) -> None:
    assert detector.push_many([], []) == []


def test_an_old_state_of_silero_still_holds() -> None:
    state, _ = SILERO.push(SILERO.start(), SPEECH[0][:10_000])
    kept = copy.deepcopy(state)
    first = SILERO.push(state, SPEECH[0][10_000:])[1]
    SILERO.push_many([state, SILERO.start()], [SPEECH[1], SPEECH[1]])
    np.testing.assert_array_equal(state.memory, kept.memory)
    np.testing.assert_array_equal(SILERO.push(state, SPEECH[0][10_000:])[1].speech, first.speech)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sound_that_is_not_finite_is_refused_and_leaves_the_state(
    detector: Detector, bad: float
) -> None:
    state, _ = detector.push(detector.start(), SPEECH[0][:10_000])
    with pytest.raises(AudioError, match="NaN or infinite"):
        detector.push(state, np.full(600, bad, np.float32))
    after = detector.push(state, SPEECH[0][10_000:])[1]
    np.testing.assert_array_equal(after.speech, heard(detector, SPEECH[0]).speech[-len(after) :])


def test_too_loud_sound_is_clipped_not_wrapped_around() -> None:
    loud = 4 * SPEECH[0] / np.abs(SPEECH[0]).max()
    clipped = loud.clip(-1, 1)
    assert WEBRTC.push(WEBRTC.start(), loud)[1].speech.mean() == pytest.approx(
        heard(WEBRTC, clipped).speech.mean(), abs=0.05
    )


# Which one, and what where there is none.


def test_silero_is_the_first_choice_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mosstalk.vad"):
        detector = open_detector()
    assert detector.name == "silero"
    assert [record.message for record in caplog.records] == [
        f"speech is found by {detector.description}"
    ]


@pytest.mark.parametrize("kind", ["silero", "webrtc"])
def test_the_one_asked_for_is_opened(kind: str) -> None:
    assert open_detector(kind).name == kind


def test_an_unknown_detector_is_refused() -> None:
    with pytest.raises(DetectorError, match="choose from auto, silero, webrtc"):
        open_detector("radar")


PROBE = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
from mosstalk.errors import DetectorError
from mosstalk.vad import open_detector
try:
    detector = open_detector(sys.argv[1])
except DetectorError as error:
    sys.exit(f"refused: {error}")
print(detector.name, "torch" in sys.modules)
"""


def opened_without(
    folder: Path, missing: tuple[str, ...], kind: str
) -> "subprocess.CompletedProcess[str]":
    """Open a detector in a Python that has all packages of this one but ``missing``."""
    for place in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith(missing):
                (folder / entry.name).symlink_to(entry)
    return subprocess.run(
        [sys.executable, "-S", "-c", PROBE, kind],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(folder)))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_silero_is_opened_without_importing_torch(tmp_path: Path) -> None:
    run = opened_without(tmp_path, ("torchaudio",), "auto")
    assert run.stdout.split() == ["silero", "False"], run.stderr


@pytest.mark.parametrize("name", ["silero-vad", "onnxruntime"])
def test_without_silero_webrtc_stands_in_and_says_so(tmp_path: Path, name: str) -> None:
    run = opened_without(tmp_path, (name.replace("-", "_"),), "auto")
    assert run.stdout.split() == ["webrtc", "False"], run.stderr
    assert run.stderr.startswith("WARNING finding speech needs the package " + name)
    assert "make setup EXTRAS=vad; until then" in run.stderr


@pytest.mark.parametrize(
    ("kind", "package"), [("silero", "silero-vad"), ("webrtc", "webrtcvad-wheels"), ("auto", "")]
)
def test_a_missing_package_is_refused_with_what_to_install(
    tmp_path: Path, kind: str, package: str
) -> None:
    run = opened_without(tmp_path, ("silero_vad", "webrtcvad", "_webrtcvad"), kind)
    assert run.stderr.startswith(f"refused: finding speech needs the package {package}")
    assert "make setup EXTRAS=vad" in run.stderr


def test_a_damaged_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "silero_vad" / "data").mkdir(parents=True)
    (tmp_path / "silero_vad" / "data" / "silero_vad.onnx").write_bytes(b"no model")
    run = opened_without(tmp_path, ("silero_vad",), "silero")
    assert run.stderr.startswith(f"refused: {tmp_path}")
    assert "install silero-vad again" in run.stderr
