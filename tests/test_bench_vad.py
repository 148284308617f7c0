"""``mosstalk bench vad``: its figures on sounds whose speech is known, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import QUESTION, Run, refused

from evals.vad import measure_found
from evals.vad_clips import (
    ASSISTANT_DB,
    Clip,
    Setting,
    clip_of,
    pink_noise,
    simulate,
    sounds_without_speech,
    speech_level,
)
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.vad import Frames, open_detector

SPEECH = read_audio(QUESTION, 16_000).samples


class Oracle:
    """A detector that is told where speech is, one frame too late."""

    name = "oracle"
    description = "oracle"
    window_samples = frame_samples = 320
    minimum_speech_ms = 60

    def __init__(self, clip: Clip) -> None:
        said = np.append(0, clip.speech[::2])[: len(clip.samples) // 320]
        self.speech = said.astype(np.float32)

    def start(self) -> int:
        return 0

    def push(self, state: int, samples: Samples) -> tuple[int, Frames]:
        end = state + len(samples)
        first = state // 320
        return end, Frames(320 * first, 320, self.speech[first : end // 320])

    def push_many(self, states: object, sounds: object) -> list[tuple[int, Frames]]:
        raise NotImplementedError


def test_figures_are_those_of_where_speech_is() -> None:
    tone = np.sin(np.arange(16_000) / 5).astype(np.float32)
    clip = clip_of(tone)
    assert (clip.onset_samples, clip.end_samples) == (16_000, 32_000)
    assert clip.speech.sum() == 100
    row = measure_found(Oracle(clip), "clean", [clip])
    # 20 ms of 1 s are missed at the start, and 20 ms too many are found at the end.
    assert row.found == pytest.approx(0.98)
    assert row.false == pytest.approx(0.01)
    assert row.delay_ms.median == pytest.approx(20 + 60)
    assert row.end_ms.median == pytest.approx(20)
    assert (row.clips, row.missed, row.cut) == (1, 0, 0)


def test_noise_lies_as_far_below_the_speech_as_asked() -> None:
    clean, noisy = clip_of(SPEECH), clip_of(SPEECH, 10.0, seed=3)
    noise = noisy.samples - clean.samples
    assert 20 * np.log10(speech_level(SPEECH) / noise.std()) == pytest.approx(10, abs=0.1)
    np.testing.assert_array_equal(noisy.speech, clean.speech)


def test_pink_noise_has_the_same_power_in_every_octave() -> None:
    power = np.square(np.abs(np.fft.rfft(pink_noise(2**17, 0.1, 0))))
    hz = np.fft.rfftfreq(2**17, 1 / 16_000)
    octaves = [power[(hz >= low) & (hz < 2 * low)].sum() for low in (250, 500, 1000, 2000)]
    assert max(octaves) / min(octaves) < 1.1


def test_every_sound_without_speech_is_as_long_as_asked() -> None:
    assert {len(sound) for sound in sounds_without_speech(3.0).values()} == {48_000}


def test_a_simulated_call_is_as_loud_as_asked() -> None:
    call = simulate(Setting(-12.0, replies=2), [SPEECH], [SPEECH], seed=0)
    assert call.user_samples is None
    assert len(call.played) == len(call.microphone)
    assert 20 * np.log10(speech_level(call.played)) == pytest.approx(ASSISTANT_DB, abs=1)
    assert 20 * np.log10(speech_level(call.microphone)) == pytest.approx(ASSISTANT_DB - 12, abs=2)
    with_user = simulate(Setting(-12.0, 10.0, replies=2), [SPEECH], [SPEECH], seed=0)
    assert with_user.user_samples is not None
    (_, (start, end)) = with_user.replies
    assert start + 16_000 <= with_user.user_samples < end
    before = slice(0, with_user.user_samples)
    np.testing.assert_array_equal(with_user.microphone[before], call.microphone[before])


@pytest.mark.slow
def test_the_command_measures_what_is_at_hand(mosstalk: Run, tmp_path: Path) -> None:
    run = mosstalk("bench", "vad", "--clips", "1", "--calls", "0", "--json", "all.json")
    assert run.returncode == 0, run.stderr
    assert "Speech: how much of it is found" in run.stdout
    assert "silero, clean" in run.stdout
    assert "Cost on this machine" in run.stdout
    found = json.loads((tmp_path / "all.json").read_text())
    rows = {(row["detector"], row["noise"]): row for row in found["found"]}
    assert rows["silero", "clean"]["found"] > 0.85
    assert rows["webrtc", "clean"]["missed"] == 0
    assert {row["detector"] for row in found["costs"]} == {"silero", "webrtc"}
    assert found["barge_in"] == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--detector", "radar"), "--detector must be silero or webrtc, not 'radar'"),
        (("--json", "nowhere/all.json"), "nowhere: no such folder"),
    ],
)
def test_a_wrong_option_is_refused_at_once(
    mosstalk: Run, options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused(mosstalk("bench", "vad", *options))


def test_the_description_names_the_package_and_its_version() -> None:
    assert "silero-vad 6" in open_detector("silero").description
    assert "webrtcvad-wheels 2" in open_detector("webrtc").description
