"""Scores of sound against sound, on a real recording changed in known ways."""

import numpy as np
import pytest
from conftest import QUESTION

from evals.sound_scores import aligned, log_spectral_distance, seam_jumps
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.constants import OUTPUT_RATE


@pytest.fixture(scope="module")
def speech() -> Samples:
    return read_audio(QUESTION, OUTPUT_RATE).samples


def noisy(speech: Samples, decibels: float) -> Samples:
    noise = np.random.default_rng(0).standard_normal(len(speech))
    return (speech + noise * speech.std() * 10 ** (-decibels / 20)).astype(np.float32)


def test_a_sound_has_no_distance_from_itself_at_any_volume(speech: Samples) -> None:
    assert log_spectral_distance(speech, speech) == 0
    assert log_spectral_distance(speech, speech * np.float32(0.25)) == pytest.approx(0, abs=1e-4)


def test_distance_grows_with_noise(speech: Samples) -> None:
    distances = [log_spectral_distance(speech, noisy(speech, level)) for level in (40, 20, 0)]
    assert distances == sorted(distances)
    assert distances[0] > 0.2


def test_half_a_spectrum_lowered_by_20_db_is_20_times_the_root_of_a_half() -> None:
    noise = np.random.default_rng(0).standard_normal(2 * OUTPUT_RATE).astype(np.float32)
    spectrum = np.fft.rfft(noise)
    lowered = spectrum.copy()
    lowered[len(spectrum) // 2 :] *= 0.1
    other = np.fft.irfft(lowered, len(noise)).astype(np.float32)
    # Bringing both to one root mean square raises the other half by 3 dB.
    wanted = np.sqrt((2.97**2 + 17.03**2) / 2)
    assert log_spectral_distance(noise, other) == pytest.approx(wanted, rel=0.02)


def test_what_cannot_be_compared_is_refused(speech: Samples) -> None:
    for first, second in ((speech, speech[:-1]), (speech[:500], speech[:500])):
        with pytest.raises(ValueError, match="one length"):
            log_spectral_distance(first, second)


@pytest.mark.parametrize("late_ms", [-80, -7, 0, 3, 55])
def test_a_shift_of_up_to_a_tenth_of_a_second_is_found(speech: Samples, late_ms: int) -> None:
    shift = late_ms * OUTPUT_RATE // 1000
    moved = np.pad(speech, (shift, 0)) if shift > 0 else speech[-shift:]
    first, second = aligned(speech, moved)
    assert len(first) == len(second) >= len(speech) - abs(shift) - 1
    assert np.array_equal(first, second)


def test_even_a_short_sound_keeps_most_of_itself(speech: Samples) -> None:
    short = speech[: OUTPUT_RATE // 10]
    first, second = aligned(short, short[::-1].copy())
    assert len(first) == len(second) >= 0.7 * len(short)


def test_a_step_at_a_seam_stands_out_and_smooth_seams_do_not(speech: Samples) -> None:
    seams = range(9600, len(speech), 9600)
    assert max(seam_jumps(speech, seams)) < 1
    broken = speech.copy()
    broken[seams[2] :] += 0.5
    jumps = seam_jumps(broken, seams)
    assert int(np.argmax(jumps)) == 2
    assert jumps[2] > 2


def test_the_ends_of_a_sound_are_no_seams(speech: Samples) -> None:
    assert seam_jumps(speech, (0, len(speech))) == []
