"""Log-mel features: the filters, the floors, how far they see, and how many frames they give."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mosstalk.models.features import FLOW_MEL, MelSpec, mel_filters, vocoder_mel, whisper_log_mel

BIGVGAN_22K = MelSpec(22_050, 1024, 256, 80, 0.0, 11_025.0)
BIGVGAN_22K_8K = MelSpec(22_050, 1024, 256, 80, 0.0, 8000.0)
HOP = 160
CODE = 1280

Matrix = npt.NDArray[np.float64]


def to_mel(hz: float) -> float:
    """Slaney: 3 mel to 200 Hz up to 1 kHz, then 27 mel to a factor of 6.4."""
    return hz * 3 / 200 if hz < 1000 else 15 + 27 * float(np.log(hz / 1000) / np.log(6.4))


def to_hz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else float(1000 * 6.4 ** ((mel - 15) / 27))


def plain_filters(rate: int, n_fft: int, bins: int, low: float, high: float) -> Matrix:
    """The filters bin by bin, as one would draw them: triangles of area one in Hz."""
    edges = [to_hz(mel) for mel in np.linspace(to_mel(low), to_mel(high), bins + 2)]
    table = np.zeros((bins, n_fft // 2 + 1))
    for band in range(bins):
        left, centre, right = edges[band : band + 3]
        for index in range(n_fft // 2 + 1):
            hz = index * rate / n_fft
            if left < hz <= centre:
                table[band, index] = (hz - left) / (centre - left)
            elif centre < hz < right:
                table[band, index] = (right - hz) / (right - centre)
        table[band] *= 2 / (right - left)
    return table


def plain_spectra(padded: Matrix, n_fft: int, hop: int) -> npt.NDArray[np.complex128]:
    """One column a frame, through a periodic Hann window."""
    window = np.sin(np.pi * np.arange(n_fft) / n_fft) ** 2
    starts = range(0, len(padded) - n_fft + 1, hop)
    return np.stack([np.fft.rfft(padded[at : at + n_fft] * window) for at in starts], axis=1)


def noise(samples: int, level: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(samples, generator=generator) * 2 - 1) * level


def highest(features: Tensor) -> float:
    """Log power of the loudest band, back from the (x + 4) / 4 of the features."""
    return float(features.max()) * 4 - 4


@pytest.mark.parametrize(
    ("rate", "n_fft", "bins", "low", "high"),
    [
        (16_000, 400, 128, 0.0, 8000.0),
        (24_000, 1920, 80, 0.0, 8000.0),
        (22_050, 1024, 80, 0.0, 11_025.0),
        (24_000, 1024, 100, 60.0, 12_000.0),
    ],
)
def test_mel_filters_are_slaneys_triangles(
    rate: int, n_fft: int, bins: int, low: float, high: float
) -> None:
    found = mel_filters(rate, n_fft, bins, low, high).numpy()
    expected = plain_filters(rate, n_fft, bins, low, high)

    assert found.shape == expected.shape
    assert found.dtype == np.float32
    # Float32's rounding of values up to 0.04.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-9)


def test_whisper_features_equal_the_formula_in_double_precision() -> None:
    pcm = noise(4 * CODE, 0.3)

    padded = np.pad(pcm.double().numpy(), 200, mode="reflect")
    power = np.abs(plain_spectra(padded, 400, HOP)[:, :-1]) ** 2
    log_mel = np.log10(np.maximum(plain_filters(16_000, 400, 128, 0, 8000) @ power, 1e-10))
    expected = (np.maximum(log_mel, log_mel.max() - 8) + 4) / 4

    np.testing.assert_allclose(whisper_log_mel(pcm).numpy(), expected, atol=2e-5)


def test_vocoder_features_equal_the_formula_in_double_precision() -> None:
    pcm = noise(24_000, 0.3)

    padded = np.pad(pcm.double().numpy(), 720, mode="reflect")
    spectra = plain_spectra(padded, 1920, 480)
    magnitude = np.sqrt(spectra.real**2 + spectra.imag**2 + 1e-9)
    expected = np.log(np.maximum(plain_filters(24_000, 1920, 80, 0, 8000) @ magnitude, 1e-5)).T

    np.testing.assert_allclose(vocoder_mel(pcm).numpy(), expected, atol=2e-4)


@examples(20)
@given(frames=st.integers(2, 400), bins=st.sampled_from([80, 128]))
def test_whisper_features_are_one_frame_for_160_samples(frames: int, bins: int) -> None:
    assert whisper_log_mel(noise(HOP * frames, 0.1), bins).shape == (bins, frames)


def test_silence_has_every_feature_at_the_absolute_floor() -> None:
    # log10(1e-10) = -10; the relative floor, 8 below it, is never reached.
    assert torch.all(whisper_log_mel(torch.zeros(CODE)) == (-10 + 4) / 4)


def test_features_never_lie_more_than_eight_decades_below_the_loudest() -> None:
    pcm = torch.cat([noise(CODE, 0.9), torch.zeros(4 * CODE)])
    features = whisper_log_mel(pcm)

    # Two decades of power are half a unit of the features.
    assert float(features.max() - features.min()) == pytest.approx(2.0, abs=1e-6)
    assert torch.all(features[:, -8:] == features.min())


@pytest.mark.parametrize("codes", [1, 3, 7])
def test_a_codes_features_hear_39_samples_past_it_and_no_more(codes: int) -> None:
    # A loud first code keeps the floor where it is, whatever the click does.
    pcm = torch.cat([noise(CODE, 0.9), noise(9 * CODE, 0.05, seed=1)])
    before, frames = whisper_log_mel(pcm), CODE * codes // HOP

    def with_click(at: int) -> Tensor:
        clicked = pcm.clone()
        clicked[at] = 0.9
        return whisper_log_mel(clicked)[:, :frames]

    assert torch.equal(with_click(CODE * codes + 40), before[:, :frames])
    heard = with_click(CODE * codes + 39)
    assert torch.equal(heard[:, :-1], before[:, : frames - 1])
    assert not torch.equal(heard[:, -1], before[:, frames - 1])


def test_a_louder_frame_changes_earlier_ones_through_the_floor_alone() -> None:
    quiet = torch.cat([noise(2 * CODE, 0.01), torch.zeros(2 * CODE), noise(2 * CODE, 0.01, seed=1)])
    loud = torch.cat([quiet[: 5 * CODE], noise(CODE, 0.9, seed=2)])
    safe = 5 * CODE // HOP - 2  # frames that hear nothing of the sixth code

    before, after = whisper_log_mel(quiet), whisper_log_mel(loud)
    floor = (highest(after) - 8 + 4) / 4

    assert not torch.equal(after[:, :safe], before[:, :safe])
    # The absolute floor of the silence lies below both, so nothing else can differ.
    raised = before[:, :safe].clamp_min(floor)
    torch.testing.assert_close(after[:, :safe], raised, rtol=0, atol=1e-6)


@examples(30)
@given(samples=st.integers(721, 60_000))
def test_the_flows_mel_is_one_frame_for_480_samples(samples: int) -> None:
    assert vocoder_mel(noise(samples, 0.1)).shape == (samples // 480, 80)


@examples(20)
@given(
    samples=st.integers(385, 40_000),
    spec=st.sampled_from([BIGVGAN_22K, BIGVGAN_22K_8K, MelSpec(24_000, 1024, 256, 100, 0, 12_000)]),
)
def test_other_vocoders_mels_are_one_frame_for_their_hop(samples: int, spec: MelSpec) -> None:
    mel = vocoder_mel(noise(samples, 0.1), spec)

    assert mel.shape == (samples // spec.hop, spec.bins)
    assert bool(mel.isfinite().all())


def test_the_variants_of_one_rate_differ_in_their_upper_end() -> None:
    # 10 kHz lies above the one variant's bands and inside the other's.
    tone = torch.sin(2 * torch.pi * 10_000 / 22_050 * torch.arange(22_050)) * 0.5

    whole, cut = (float(vocoder_mel(tone, s)[40].max()) for s in (BIGVGAN_22K, BIGVGAN_22K_8K))
    assert whole - cut > 5  # e^5 in magnitude: the window's side lobes are all that is left


def test_silence_is_at_the_vocoder_mels_floor() -> None:
    # The bands of sqrt(1e-9) lie below 1e-5, so the clamp decides.
    assert torch.all(vocoder_mel(torch.zeros(4800)) == torch.tensor(1e-5).log())


def test_features_are_float32_whatever_precision_sound_comes_in() -> None:
    pcm = noise(CODE, 0.3)

    assert whisper_log_mel(pcm.double()).dtype == torch.float32
    torch.testing.assert_close(whisper_log_mel(pcm.double()), whisper_log_mel(pcm))
    assert FLOW_MEL.hop * 50 == FLOW_MEL.rate
