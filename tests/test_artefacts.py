"""Every fault that is planted in a real recording is named; the recording itself has none."""

import numpy as np
import pytest
from conftest import QUESTION

from evals.artefacts import KINDS, find_artefacts
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.constants import OUTPUT_RATE

AT = int(1.2 * OUTPUT_RATE)


@pytest.fixture(scope="module")
def speech() -> Samples:
    return read_audio(QUESTION, OUTPUT_RATE).samples


def planted(speech: Samples) -> dict[str, Samples]:
    silence = np.zeros(int(0.4 * OUTPUT_RATE), np.float32)
    word = speech[AT - int(0.5 * OUTPUT_RATE) : AT]
    quiet = speech.copy()
    quiet[: len(quiet) // 2] *= 0.05
    return {
        "silent": np.zeros_like(speech),
        "clipping": np.clip(speech * (4 / np.abs(speech).max()), -1, 1),
        "dropout": np.concatenate([speech[:AT], silence, speech[AT:]]),
        "cut short": speech[:AT],
        "runs on": np.concatenate([speech, speech[::-1]]),
        "repeated": np.concatenate([speech[:AT], word, word, speech[AT:]]),
        "level jump": quiet,
    }


def kinds(sound: Samples, teacher: Samples) -> list[str]:
    return [artefact.kind for artefact in find_artefacts(sound, teacher)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named(speech: Samples, kind: str) -> None:
    assert kind in kinds(planted(speech)[kind], speech)


def test_a_sound_recording_has_no_fault(speech: Samples) -> None:
    assert kinds(speech, speech) == []
    assert kinds(speech * np.float32(0.1), speech) == []


def test_a_dropout_is_named_with_its_place_and_length(speech: Samples) -> None:
    (found,) = find_artefacts(planted(speech)["dropout"], speech)
    assert found.detail == "400 ms of silence at 1.20 s"


def test_a_pause_of_300_ms_is_no_dropout(speech: Samples) -> None:
    pause = np.zeros(int(0.3 * OUTPUT_RATE), np.float32)
    assert kinds(np.concatenate([speech[:AT], pause, speech[AT:]]), speech) == []


def test_speech_that_stops_within_a_word_is_cut_short_at_any_length(speech: Samples) -> None:
    power = np.square(speech[: len(speech) // 480 * 480]).reshape(-1, 480).mean(axis=1)
    within = (20 + int(power[20:].argmax()) + 1) * 480
    found = find_artefacts(speech[:within], speech[:within])
    assert [(each.kind, each.detail) for each in found] == [("cut short", "still loud at its end")]


def test_nothing_at_all_is_silent(speech: Samples) -> None:
    assert kinds(np.zeros(0, np.float32), speech) == ["silent"]
