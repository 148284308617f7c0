"""A jump in the loudness of speech is heard, and ordinary speech has none."""

from pathlib import Path

import numpy as np
import pytest
from conftest import QUESTION, ROOT

from mosstalk.audio.loudness import loudness_jump
from mosstalk.audio.sound import Samples, read_audio

RATE = 16_000
SPEECH = [QUESTION, ROOT / "assets" / "librivox.flac"]


def speech(path: Path) -> Samples:
    return read_audio(path, RATE).samples


@pytest.mark.parametrize("path", SPEECH, ids=lambda path: path.stem)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_one_person_speaking_is_no_jump(path: Path, gain: float) -> None:
    once = speech(path)
    pause = np.random.default_rng(0).standard_normal(2 * RATE).astype(np.float32) * 0.003
    assert loudness_jump(once, RATE) is None
    assert loudness_jump(np.concatenate([once, once * np.float32(gain)]), RATE) is None
    assert loudness_jump(np.concatenate([once, pause, once]), RATE) is None
    assert loudness_jump(np.concatenate([once, 0 * pause, once]), RATE) is None


@pytest.mark.parametrize("path", SPEECH, ids=lambda path: path.stem)
def test_a_part_that_is_20_db_quieter_is_a_jump_and_where_it_is_is_known(path: Path) -> None:
    once = speech(path)
    seconds = len(once) / RATE
    for parts, loud, quiet in (((1.0, 0.1), 0, 1), ((0.1, 1.0), 1, 0), ((1.0, 0.1, 1.0), None, 1)):
        jump = loudness_jump(np.concatenate([once * np.float32(gain) for gain in parts]), RATE)
        assert jump is not None
        assert jump.decibels == pytest.approx(20, abs=3)
        assert quiet - 0.2 < jump.quiet_s / seconds < quiet + 1
        if loud is not None:
            assert loud - 0.2 < jump.loud_s / seconds < loud + 1


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1.0])
def test_sound_without_speech_is_no_jump(noise: float) -> None:
    samples = np.random.default_rng(0).standard_normal(4 * RATE).astype(np.float32) * 0.1
    samples[: 2 * RATE] *= np.float32(noise)
    assert loudness_jump(samples, RATE) is None
    assert loudness_jump(samples[:100], RATE) is None
