"""Sound files of every kind become the same 16 kHz mono samples."""

import math
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from mosstalk.audio.sound import Samples, audio_blocks, read_audio
from mosstalk.errors import AudioError, AudioWarning

RATE = 16_000
TONE_HZ = 440.0
LEVEL = 0.5
SECONDS = 0.8
RATES = (8_000, 16_000, 22_050, 44_100, 48_000)
LOSSLESS = (
    ("wav", "PCM_16"),
    ("wav", "PCM_24"),
    ("wav", "PCM_32"),
    ("wav", "FLOAT"),
    ("flac", "PCM_16"),
    ("flac", "PCM_24"),
    ("aiff", "PCM_16"),
)
LOSSY = (("wav", "ULAW"), ("ogg", "VORBIS"), ("mp3", "MPEG_LAYER_III"))


def tone(rate: int, seconds: float = SECONDS, hz: float = TONE_HZ) -> Samples:
    times = np.arange(round(rate * seconds)) / rate
    samples: Samples = (LEVEL * np.sin(2 * np.pi * hz * times)).astype(np.float32)
    return samples


def written(path: Path, samples: npt.NDArray[np.floating], rate: int, subtype: str) -> Path:
    if subtype not in soundfile.available_subtypes(path.suffix[1:].upper()):
        pytest.skip(f"this libsndfile does not write {subtype}")
    soundfile.write(path, samples, rate, subtype=subtype)
    return path


def loudest(samples: Samples) -> tuple[float, float]:
    """Frequency in Hz and amplitude of the strongest sine in (n,) samples at 16 kHz."""
    window = np.hanning(len(samples))
    padded = 8 * len(samples)
    spectrum = np.abs(np.fft.rfft(samples * window, padded)) * 2 / window.sum()
    peak = int(spectrum.argmax())
    return peak * RATE / padded, float(spectrum[peak])


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("suffix", "subtype"), [*LOSSLESS, *LOSSY])
def test_a_tone_keeps_its_length_pitch_and_level(
    tmp_path: Path, suffix: str, subtype: str, rate: int, channels: int
) -> None:
    both = np.repeat(tone(rate)[:, None], channels, axis=1)
    heard = read_audio(written(tmp_path / f"tone.{suffix}", both, rate, subtype), RATE)
    assert (heard.rate, heard.source_rate, heard.source_channels) == (RATE, rate, channels)
    assert heard.samples.dtype == np.float32
    # An mp3 is padded to whole frames where its decoder does not know the encoder's delay.
    tolerance = 2 * 1152 * RATE / rate if suffix == "mp3" else 1
    assert len(heard.samples) == pytest.approx(SECONDS * RATE, abs=tolerance)
    hz, level = loudest(heard.samples)
    assert hz == pytest.approx(TONE_HZ, abs=0.5)
    assert level == pytest.approx(LEVEL, rel=0.05 if (suffix, subtype) in LOSSY else 0.002)


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > RATE])
def test_what_16_khz_cannot_hold_is_filtered_and_not_folded_back(tmp_path: Path, rate: int) -> None:
    # 10 kHz would come back as 6 kHz, in the middle of speech.
    mixed = tone(rate) / 2 + tone(rate, hz=10_000.0)
    heard = read_audio(written(tmp_path / "mix.wav", mixed, rate, "FLOAT"), RATE)
    assert loudest(heard.samples)[0] == pytest.approx(TONE_HZ, abs=0.5)
    spectrum = np.abs(np.fft.rfft(heard.samples * np.hanning(len(heard.samples))))
    folded = spectrum[round(5_500 * SECONDS) : round(6_500 * SECONDS)]
    assert folded.max() < 1e-4 * spectrum.max()


def test_stereo_is_averaged(tmp_path: Path) -> None:
    left, right = tone(RATE), tone(RATE, hz=1000.0)
    path = written(tmp_path / "two.wav", np.stack([left, right], 1), RATE, "FLOAT")
    np.testing.assert_allclose(read_audio(path, RATE).samples, (left + right) / 2, atol=1e-7)


@pytest.mark.parametrize("channel", [1, 2, 5])
def test_a_channel_is_picked_from_1(tmp_path: Path, channel: int) -> None:
    voices = [tone(RATE, hz=300.0 * number) for number in range(1, 6)]
    path = written(tmp_path / "five.wav", np.stack(voices, 1), RATE, "FLOAT")
    heard = read_audio(path, RATE, channel=channel).samples
    np.testing.assert_array_equal(heard, voices[channel - 1])


@pytest.mark.parametrize("channel", [0, -1, 3])
def test_a_channel_that_is_not_there_is_refused(tmp_path: Path, channel: int) -> None:
    path = written(tmp_path / "two.wav", np.stack([tone(RATE)] * 2, 1), RATE, "PCM_16")
    with pytest.raises(AudioError, match=f"2 channels; --channel {channel} is not one"):
        read_audio(path, RATE, channel=channel)


# Headers that lie.

DATA_SIZE_AT = 40
"""Where a plain wav header holds the number of bytes of its samples."""


def with_data_size(path: Path, size: int) -> Path:
    content = bytearray(path.read_bytes())
    assert content[DATA_SIZE_AT - 4 : DATA_SIZE_AT] == b"data"
    content[DATA_SIZE_AT : DATA_SIZE_AT + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("claimed", [0xFFFFFFFF, 2**31 - 2, 0x7FFFFFFF - 36])
def test_a_wav_header_of_a_recorder_that_streams_costs_nothing(
    tmp_path: Path, claimed: int
) -> None:
    # They leave about the largest size in the header.
    path = written(tmp_path / "stream.wav", tone(RATE), RATE, "PCM_16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heard = read_audio(with_data_size(path, claimed), RATE, longest_s=60)
    assert len(heard.samples) == round(SECONDS * RATE)


@pytest.mark.parametrize(("suffix", "subtype"), [*LOSSLESS, *LOSSY])
def test_a_whole_file_is_read_without_a_warning(tmp_path: Path, suffix: str, subtype: str) -> None:
    for rate in RATES:
        path = written(tmp_path / f"whole.{suffix}", tone(rate, seconds=3), rate, subtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_audio(path, RATE)


@pytest.mark.parametrize(
    ("suffix", "subtype", "said"),
    [
        ("wav", "PCM_16", r"promises 20\.0 s of sound, and the 10\.0 s that are there"),
        ("wav", "FLOAT", r"promises 20\.0 s of sound, and the 10\.0 s that are there"),
        ("aiff", "PCM_16", r"promises 20\.0 s of sound, and the 10\.0 s that are there"),
        ("au", "PCM_16", r"promises 20\.0 s of sound, and the 10\.0 s that are there"),
        ("mp3", "MPEG_LAYER_III", r"promises 20\.0 s of sound, and the (9\.9|10\.\d) s"),
        ("ogg", "VORBIS", r"its last page is missing, and the \d+\.\d s that are there"),
    ],
)
def test_a_file_that_was_cut_is_used_as_far_as_it_goes_and_that_is_said(
    tmp_path: Path, suffix: str, subtype: str, said: str
) -> None:
    noise = np.random.default_rng(0).uniform(-LEVEL, LEVEL, 20 * RATE).astype(np.float32)
    path = written(tmp_path / f"cut.{suffix}", noise, RATE, subtype)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.warns(AudioWarning, match=rf"cut\.{suffix}: the file is cut short: .*{said}"):
        heard = read_audio(path, RATE)
    assert 8 < heard.seconds < 11


@pytest.mark.parametrize("rate", [1, 3_999, 768_001, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_refused(tmp_path: Path, rate: int) -> None:
    path = written(tmp_path / "rate.wav", tone(RATE), rate, "PCM_16")
    with pytest.raises(AudioError, match=rf"claims {rate} samples a second.*export it again"):
        read_audio(path, RATE)


def test_a_wav_header_that_promises_less_is_taken_at_its_word(tmp_path: Path) -> None:
    path = written(tmp_path / "less.wav", tone(RATE), RATE, "PCM_16")
    heard = read_audio(with_data_size(path, 2 * 4000), RATE)
    np.testing.assert_allclose(heard.samples, tone(RATE)[:4000], atol=1 / 32768)


def test_a_flac_cut_short_of_its_header_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "cut.flac", tone(RATE, seconds=3), RATE, "PCM_16")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(AudioError, match=r"cut\.flac: not a readable sound file"):
        read_audio(path, RATE)


def test_a_recording_may_be_exactly_as_long_as_the_context_and_no_longer(tmp_path: Path) -> None:
    path = written(tmp_path / "long.wav", tone(RATE, seconds=9), RATE, "PCM_16")
    assert read_audio(path, RATE, longest_s=9).seconds == 9
    with pytest.raises(AudioError, match=r"9 s of sound .* at most 8 s"):
        read_audio(path, RATE, longest_s=8)


def test_the_quietest_sound_that_is_heard_is_minus_66_db(tmp_path: Path) -> None:
    for peak, heard in ((17 / 32768, True), (15 / 32768, False)):
        path = written(tmp_path / "quiet.wav", tone(RATE) * peak / LEVEL, RATE, "FLOAT")
        if heard:
            assert read_audio(path, RATE).samples.any()
        else:
            with pytest.raises(AudioError, match="is silent"):
                read_audio(path, RATE)


def test_a_tenth_of_a_second_is_the_shortest_at_any_rate(tmp_path: Path) -> None:
    for rate in RATES:
        path = written(tmp_path / "short.wav", tone(rate, seconds=0.1), rate, "PCM_16")
        assert read_audio(path, RATE).seconds == pytest.approx(0.1, abs=1 / RATE)
        soundfile.write(path, tone(rate)[: math.ceil(rate / 10) - 1], rate)
        with pytest.raises(AudioError, match="too short"):
            read_audio(path, RATE)


INT16 = stn.arrays(
    np.int16,
    st.integers(1600, 4000),
    elements=st.integers(-32768, 32767),
    fill=st.integers(-32768, 32767),
)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
@given(samples=INT16)
def test_16_bit_samples_at_16_khz_are_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, samples: npt.NDArray[np.int16]
) -> None:
    samples[7] = 20_000  # Never silent.
    path = tmp_path_factory.getbasetemp() / f"exact.{suffix}"
    soundfile.write(path, samples, RATE, subtype="PCM_16")
    heard = read_audio(path, RATE).samples
    np.testing.assert_array_equal(heard * 32768, samples.astype(np.float32))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("suffix", "subtype"), [("wav", "PCM_24"), ("mp3", "MPEG_LAYER_III")])
def test_blocks_are_the_samples_that_are_read_at_once(
    tmp_path: Path, suffix: str, subtype: str, rate: int, channels: int
) -> None:
    path = written(
        tmp_path / f"a.{suffix}", np.repeat(tone(rate)[:, None], channels, 1), rate, subtype
    )
    whole = read_audio(path, RATE).samples
    blocks = list(audio_blocks(path.read_bytes(), RATE, 2 * SECONDS))
    np.testing.assert_allclose(np.concatenate(blocks), whole, atol=1e-6)
    with pytest.raises(AudioError, match="at most 0 s"):
        next(audio_blocks(path.read_bytes(), RATE, SECONDS / 4))
