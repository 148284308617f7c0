"""Sound encoded and stretched while it comes."""

import io
from itertools import pairwise

import numpy as np
import pytest
import soundfile
from conftest import ROOT, examples
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.audio.encoding import FORMATS, SoundEncoder
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.audio.time_stretch import TimeStretch
from mosstalk.session.sound import pcm_of

RATE = 24_000
SPEECH = read_audio(ROOT / "assets" / "librivox.flac", RATE).samples
PCM = pcm_of(SPEECH)
_TOTAL_AT = 21
"""Where a FLAC file's header (RFC 9639, 8.2) begins to say how many samples there are."""


def encoded(name: str, piece: int = 4800) -> list[bytes]:
    """What each push of so many bytes gives, and the end."""
    encoder = SoundEncoder(name, RATE)
    pieces = [encoder.push(PCM[start : start + piece]) for start in range(0, len(PCM), piece)]
    return [*pieces, encoder.finish()]


def decoded(name: str, file: bytes) -> Samples:
    """A file's samples."""
    if name == "pcm":
        return np.frombuffer(file, "<i2").astype(np.float32) / np.float32(32768)
    if name == "flac":  # libsndfile reads none whose length is unknown
        count = len(PCM) // 2
        size = bytes((file[_TOTAL_AT] & 0xF0,)) + count.to_bytes(4, "big")
        file = file[:_TOTAL_AT] + size + file[_TOTAL_AT + 5 :]
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    assert rate == RATE
    return np.asarray(samples, np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_a_streamed_file_holds_the_sound(name: str) -> None:
    sound, given_ = decoded(name, b"".join(encoded(name))), np.frombuffer(PCM, "<i2") / 32768
    if name in ("wav", "pcm", "flac"):
        assert np.array_equal(sound * 32768, given_ * 32768)
        return
    assert 0 <= len(sound) - len(given_) < 0.12 * RATE, "frames and padding"
    delays = np.correlate(sound, given_[: RATE + 1], "valid")
    shifted = sound[int(delays.argmax()) :][: len(given_)]
    original = given_[: len(shifted)]
    assert np.corrcoef(shifted, original)[0, 1] > 0.9, "what is lost is hardly heard"


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_begins_to_come_with_the_first_second_of_sound(name: str) -> None:
    pieces = encoded(name)
    assert pieces[0], "the header at least"
    assert sum(map(len, pieces[:12])) > 0.2 * sum(map(len, pieces[:24])), "not all at the end"


def test_a_wav_says_that_its_length_is_unknown() -> None:
    head = encoded("wav")[0][:44]
    assert (head[4:8], head[40:44]) == (b"\xff\xff\xff\xff",) * 2


def stretched(speed: float, *pieces: Samples) -> Samples:
    """Speech at another pace."""
    stretch = TimeStretch(speed, RATE)
    return np.concatenate([*map(stretch.push, pieces), stretch.finish()])


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    tone = (0.3 * np.sin(2 * np.pi * 220 * np.arange(2 * RATE) / RATE)).astype(np.float32)
    faster = stretched(speed, tone)
    assert len(faster) == round(len(tone) / speed)
    spectrum = np.abs(np.fft.rfft(faster * np.hanning(len(faster))))
    assert spectrum.argmax() * RATE / len(faster) == pytest.approx(220, abs=2.5)
    middle = faster[len(faster) // 4 : -len(faster) // 4]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.3 / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_words_stay_where_they_belong_at_another_speed(speed: float) -> None:
    def loudness(samples: Samples, step: int) -> Samples:
        frames = samples[: len(samples) // step * step].reshape(-1, step)
        return np.sqrt(np.mean(frames**2, axis=1))

    before, after = loudness(SPEECH, 2400), loudness(stretched(speed, SPEECH), round(2400 / speed))
    count = min(len(before), len(after))
    assert np.corrcoef(before[:count], after[:count])[0, 1] > 0.9


def test_at_speed_1_nothing_changes() -> None:
    assert np.array_equal(stretched(1.0, SPEECH), SPEECH)


@examples(20)
@given(speed=st.floats(0.25, 4), cuts=st.lists(st.integers(0, RATE), max_size=6))
def test_a_stretched_stream_is_the_same_however_it_is_cut(speed: float, cuts: list[int]) -> None:
    sound = SPEECH[:RATE]
    places = [0, *sorted(cuts), RATE]
    pieces = [sound[start:end] for start, end in pairwise(places)]
    assert np.array_equal(stretched(speed, *pieces), stretched(speed, sound))


@pytest.mark.parametrize("count", [0, 1, 100, 1500])
@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_hardly_any_sound_is_stretched_too(count: int, speed: float) -> None:
    found = stretched(speed, SPEECH[:count])
    assert len(found) == round(count / speed)
    assert np.isfinite(found).all()
