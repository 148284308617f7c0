"""The HiFT vocoder: its source, weight norm, and streams that run on over their seams."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mosstalk.config import HiftConfig
from mosstalk.errors import ConfigError
from mosstalk.models.hift import KEPT_FRAMES, NOISE_STREAM, HiftStream, HiftVocoder, crossfade
from mosstalk.models.weights import fill, fold_weight_norm, open_pickled
from mosstalk.numerics.rng import normal

FRAME = 480
HALF = FRAME // 2
HELD = KEPT_FRAMES * FRAME
SMALL = HiftConfig(base_channels=32, f0_channels=16)
QUIET = -6.0


class Recorder(HiftVocoder):
    """A vocoder that notes the source of every call."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__(config)
        self.sources: list[Tensor] = []

    def synthesise(self, mel: Tensor, source: Tensor) -> Tensor:
        """As the vocoder's."""
        self.sources.append(source)
        return super().synthesise(mel, source)


class SourceOnly(Recorder):
    """Notes sources and says nothing: what is heard would take minutes to compute."""

    def synthesise(self, mel: Tensor, source: Tensor) -> Tensor:
        """Silence of the right length."""
        self.sources.append(source)
        return torch.zeros(mel.shape[1] * FRAME)


def prepare(vocoder: HiftVocoder, hz: float | None, log_magnitude: float = QUIET) -> None:
    """Seeded random weights; with ``hz`` every frame has that fundamental."""
    generator = torch.Generator().manual_seed(0)
    for name, value in vocoder.named_parameters():
        fan_in = value[0].numel() if value.ndim > 1 else 100
        drawn = torch.randn(value.shape, generator=generator) * fan_in**-0.5
        value.data = drawn + 1 if name.endswith("alpha") else drawn
    assert vocoder.conv_post.bias is not None
    vocoder.conv_post.bias.data[: vocoder.config.istft_n_fft // 2 + 1] = log_magnitude
    if hz is not None:
        vocoder.f0_predictor.classifier.weight.data.zero_()
        vocoder.f0_predictor.classifier.bias.data.fill_(hz)
    vocoder.requires_grad_(False).eval()


@lru_cache
def make_vocoder(hz: float | None = None, log_magnitude: float = QUIET) -> HiftVocoder:
    vocoder = HiftVocoder(SMALL)
    prepare(vocoder, hz, log_magnitude)
    return vocoder


def make_recorder(hz: float | None, config: HiftConfig = SMALL) -> Recorder:
    vocoder = Recorder(config)
    prepare(vocoder, hz)
    return vocoder


def make_mel(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((80, frames), generator=generator) - 4


def make_noise(frames: int, columns: int = 9, seed: int = 0) -> Tensor:
    return normal(seed, NOISE_STREAM, torch.arange(frames * FRAME), columns)


def stream(vocoder: HiftVocoder, mel: Tensor, sizes: list[int], seed: int = 0) -> list[Tensor]:
    hift, last = HiftStream(vocoder, seed), len(sizes) - 1
    parts = mel.split(sizes, dim=1)
    return [hift.push(part, final=index == last) for index, part in enumerate(parts)]


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Frames of each call: at least eight in the first unless it is the only one."""
    later = draw(st.lists(st.integers(1, 24), max_size=4))
    return [draw(st.integers(KEPT_FRAMES if later else 1, 30)), *later]


# Streams.


@examples(30)
@given(sizes=splits())
def test_samples_are_480_a_frame_however_a_mel_is_cut(sizes: list[int]) -> None:
    waves = stream(make_vocoder(), make_mel(sum(sizes)), sizes)

    assert sum(wave.shape[0] for wave in waves) == FRAME * sum(sizes)
    middle = [wave.shape[0] for wave in waves[1:-1]]
    assert middle == [FRAME * size for size in sizes[1:-1]]
    if len(sizes) > 1:
        assert waves[0].shape[0] == FRAME * sizes[0] - HELD


@pytest.mark.parametrize("frames", [1, 7])
def test_a_first_call_of_fewer_than_eight_frames_must_be_the_last(frames: int) -> None:
    with pytest.raises(AssertionError, match="at least 8 frames"):
        HiftStream(make_vocoder()).push(make_mel(frames))


@examples(30)
@given(ends=st.lists(st.integers(0, 3000), min_size=2, max_size=2, unique=True), seed=st.integers())
def test_noise_depends_on_the_sample_alone(ends: list[int], seed: int) -> None:
    start, end = sorted(ends)
    far = 2**32 - 1500  # sample indices past 32 bits are no other case
    whole = normal(seed, NOISE_STREAM, torch.arange(3000) + far, 9)

    found = normal(seed, NOISE_STREAM, torch.arange(start, end) + far, 9)

    # One rounding of float32: vector code may take a logarithm in another way at a slice's end.
    torch.testing.assert_close(found, whole[start:end], rtol=2e-7, atol=1e-9)


def check_sources(hz: float, sizes: list[int]) -> None:
    """Every call's source is the whole's, but for the half frame that awaits a next frame."""
    frames, vocoder = sum(sizes), make_recorder(hz)
    f0 = vocoder.f0(make_mel(frames))
    whole = vocoder.source(f0, vocoder.phase_steps(f0).cumsum(0), make_noise(frames))

    stream(vocoder, make_mel(frames), sizes)

    end = 0
    for index, source in enumerate(vocoder.sources):
        end += sizes[index] * FRAME
        settled = source if index == len(sizes) - 1 else source[:-HALF]
        start = end - source.shape[0]
        expected = whole[start : start + settled.shape[0]]
        torch.testing.assert_close(settled, expected, rtol=0, atol=1e-6)


@examples(20)
@given(sizes=splits(), hz=st.sampled_from([200.0, 187.3, 61.0]))
def test_a_streams_source_is_that_of_the_whole(sizes: list[int], hz: float) -> None:
    check_sources(hz, sizes)


@examples(20)
@given(sizes=splits())
def test_an_unvoiced_streams_source_is_the_same_noise_however_it_is_cut(sizes: list[int]) -> None:
    check_sources(0.0, sizes)


@examples(20)
@given(sizes=splits(), seed=st.integers(0, 9))
def test_the_sources_phase_runs_on_over_every_seam(sizes: list[int], seed: int) -> None:
    # A lone sine of moving pitch, without noise: a jump is a step larger than its slope.
    config = replace(SMALL, nb_harmonics=0, nsf_sigma=0.0)
    vocoder = make_recorder(None, config)
    vocoder.f0_predictor.classifier.weight.data *= 100
    vocoder.f0_predictor.classifier.bias.data.fill_(400.0)
    vocoder.m_source.l_linear.weight.data.fill_(1.0)

    stream(vocoder, make_mel(sum(sizes), seed), sizes, seed)

    highest = 4000.0
    steepest = config.nsf_alpha * 2 * math.pi * highest / config.sampling_rate
    previous = None
    for source in vocoder.sources:
        assert float(source.diff().abs().max()) < steepest
        if previous is not None:
            # What was settled is not touched again, so the pieces are one curve.
            assert torch.equal(source[: HELD - HALF], previous[-HELD:-HALF])
        previous = source


def test_streamed_sound_is_the_offline_sound_away_from_its_seams() -> None:
    # One pitch throughout: f0 near a call's end is found without the frames after it, so with
    # a moving pitch the stream's sines would be the offline ones at another phase.
    vocoder, sizes = make_vocoder(200.0), [60, 40, 40, 20]
    mel = make_mel(sum(sizes))

    streamed = torch.cat(stream(vocoder, mel, sizes))
    whole = vocoder.vocode(mel, make_noise(sum(sizes)))

    # The convolutions reach 14 frames. A call ends at a seam and the next begins 8 before it.
    far, near = (torch.ones(sum(sizes), dtype=torch.bool) for _ in range(2))
    for seam in np.cumsum(sizes)[:-1]:
        far[seam - 14 : seam + 6] = False
        near[seam - KEPT_FRAMES : seam] = False
    difference, size = ((x.view(-1, FRAME)) for x in (streamed - whole, whole))
    assert int(far.sum()) == 100
    assert float(difference[far].abs().max()) < 1e-4
    # Up to the cross-fade the missing context is heard, but little: measured 0.03 to 0.05.
    share = difference[near].square().mean().sqrt() / size[near].square().mean().sqrt()
    assert 0 < float(share) < 0.15


def test_a_mel_in_one_call_is_the_offline_sound() -> None:
    vocoder, mel = make_vocoder(), make_mel(30)

    streamed = stream(vocoder, mel, [30], seed=5)

    assert torch.equal(streamed[0], vocoder.vocode(mel, make_noise(30, seed=5)))


def test_another_seed_is_another_noise() -> None:
    vocoder, mel = make_vocoder(0.0), make_mel(30)
    one, same, other = (torch.cat(stream(vocoder, mel, [20, 10], seed)) for seed in (1, 1, 2))

    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_cross_fade_is_a_hamming_window_of_both_halves() -> None:
    generator = torch.Generator().manual_seed(0)
    kept, new = torch.randn(HELD, generator=generator), torch.randn(5000, generator=generator)

    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(2 * HELD) / (2 * HELD - 1))
    faded = new[:HELD].numpy() * window[:HELD] + kept.numpy() * window[HELD:]

    found = crossfade(kept, new)
    np.testing.assert_allclose(found[:HELD].numpy(), faded, atol=1e-6)
    assert torch.equal(found[HELD:], new[HELD:])
    assert float(crossfade(torch.ones(HELD), torch.ones(HELD))[HELD // 2]) == pytest.approx(
        1.08, abs=3e-4
    )


def test_sound_never_exceeds_0_99() -> None:
    # So loud that most samples are at the limit; the cross-fade alone would add to 1.08 of it.
    vocoder, mel = make_vocoder(200.0, 4.0), make_mel(60)
    source = make_noise(60)[:, 0]

    whole = vocoder.vocode(mel, make_noise(60))
    streamed = torch.cat(stream(vocoder, mel, [20, 20, 20]))
    unclamped = HiftStream(vocoder)
    unclamped.push_with_source(mel[:, :20], source[: 20 * FRAME])
    seam = unclamped.push_with_source(mel[:, 20:40], source[12 * FRAME : 40 * FRAME])

    assert float(whole.abs().max()) == pytest.approx(0.99)
    assert float(streamed.abs().max()) == pytest.approx(0.99)
    assert float(seam.abs().max()) > 1.0


# The source.


def test_the_source_equals_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    vocoder, frames = make_vocoder(), 12
    f0 = torch.rand(frames, generator=generator) * 300 * (torch.arange(frames) % 4 != 2)
    noise = make_noise(frames)

    turns = [
        np.cumsum((f0.numpy() * h / np.float32(24_000) % 1).astype(np.float64)) * FRAME
        for h in range(1, 10)
    ]
    centres = np.arange(frames) * FRAME + (FRAME - 1) / 2
    # numpy's interp holds the first and last value, as the source does.
    phases = [2 * np.pi * np.interp(np.arange(frames * FRAME), centres, turn) for turn in turns]
    voiced = np.repeat(f0.numpy() > 10, FRAME)[:, None]
    waves = 0.1 * np.sin(np.stack(phases, axis=1)) * voiced
    waves += np.where(voiced, 0.003, 0.1 / 3) * noise.numpy()
    mixer = vocoder.m_source.l_linear
    expected = np.tanh(waves @ mixer.weight[0].double().numpy() + float(mixer.bias))

    found = vocoder.source(f0, vocoder.phase_steps(f0).cumsum(0), noise)
    assert 0 < int(voiced.sum()) < voiced.size
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize(("hz", "voiced"), [(0.0, False), (10.0, False), (10.01, True)])
def test_unvoiced_frames_are_noise_alone(hz: float, voiced: bool) -> None:
    vocoder, f0, noise = make_vocoder(), torch.full((6,), hz), make_noise(6)
    some = torch.rand((6, 9), generator=torch.Generator().manual_seed(1)).double()

    one, other = (vocoder.source(f0, phases, noise) for phases in (some, some * 3))

    from_noise = float((one - vocoder.m_source(0.1 / 3 * noise)).abs().max())
    assert (from_noise > 1e-2) if voiced else (from_noise < 1e-6)
    assert torch.equal(one, other) is not voiced


def test_phases_are_exact_after_ten_minutes() -> None:
    # Float32 resolves a hundredth of a turn after the 112,000 turns of these ten minutes.
    hz, hop, frames = 187.3, 1000, 30_000
    config = replace(SMALL, nb_harmonics=2, nsf_sigma=0.0)
    vocoder = SourceOnly(config)
    prepare(vocoder, hz)
    hift = HiftStream(vocoder)
    for _ in range(frames // hop):
        vocoder.sources.clear()
        hift.push(torch.zeros(80, hop))
    found = vocoder.sources[-1][-6 * FRAME : -FRAME]

    first = (frames - 6) * FRAME
    waves = np.zeros((5 * FRAME, 3))
    for h in range(1, 4):
        turns = Fraction(float((torch.tensor(hz) * h / 24_000) % 1))
        # At a frame's centre as many frames have passed as there are up to and with it.
        offsets = (first + sample + Fraction(HALF) + Fraction(1, 2) for sample in range(5 * FRAME))
        waves[:, h - 1] = [math.sin(2 * math.pi * float(turns * at % 1)) for at in offsets]
    mixer = vocoder.m_source.l_linear
    expected = np.tanh(0.1 * waves @ mixer.weight[0].double().numpy() + float(mixer.bias))

    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


# Weights and sizes.


def state_with_weight_norm(vocoder: HiftVocoder) -> dict[str, Tensor]:
    """The published form: g and v for every convolution but the source's."""
    for name, layer in vocoder.named_modules():
        if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d) and "source_downs" not in name:
            weight_norm(layer)
    for name, value in vocoder.named_parameters():
        if name.endswith("original0"):
            value.data *= 0.8  # a g that is not the norm of v: dropping either would show
    return {name: value.clone() for name, value in vocoder.state_dict().items()}


@pytest.mark.parametrize("older", [False, True], ids=["parametrizations", "weight_g"])
def test_folded_weights_are_torchs_weight_norm_in_both_spellings(
    older: bool, tmp_path: Path
) -> None:
    normed = HiftVocoder(SMALL)
    prepare(normed, None)
    state = state_with_weight_norm(normed)
    assert sum(name.endswith("original0") for name in state) > 40
    if older:
        for place, letter in enumerate("gv"):
            old = f"parametrizations.weight.original{place}"
            state = {n.replace(old, f"weight_{letter}"): value for n, value in state.items()}
    torch.save(state, tmp_path / "hift.pt")

    with torch.device("meta"):
        folded = HiftVocoder(SMALL)
    store = fold_weight_norm(open_pickled(tmp_path / "hift.pt"))
    fill(folded, store, where="here", device=torch.device("cpu"), dtype=torch.float32)

    for name in ("conv_pre", "ups.1", "resblocks.4.convs2.1", "f0_predictor.condnet.2"):
        weight = normed.get_submodule(name).weight
        torch.testing.assert_close(folded.get_submodule(name).weight, weight, rtol=1e-6, atol=1e-7)
    mel, noise = make_mel(10), make_noise(10)
    torch.testing.assert_close(
        folded.vocode(mel, noise), normed.vocode(mel, noise), rtol=0, atol=1e-5
    )


def test_sizes_survive_being_written_and_read() -> None:
    for config in (HiftConfig(), SMALL, replace(SMALL, istft_n_fft=32, istft_hop=8)):
        assert HiftConfig.from_dict(config.to_dict()) == config
    assert HiftConfig.from_dict({}) == HiftConfig()
    assert HiftConfig().samples_per_frame == FRAME


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"base_channel": 64}, "unknown key 'base_channel'"),
        ({"istft": {"n_fft": 16}}, "istft must hold n_fft and hop_len"),
        ({"istft": {"n_fft": 16, "hop_len": 4, "window": "hann"}}, "istft must hold"),
        ({"upsample_rates": [8, 5]}, "one kernel and one source block per upsampling rate"),
        ({"upsample_rates": 480}, "upsample_rates must be tuple"),
        ({"base_channels": 0}, "base_channels must be at least 1"),
    ],
)
def test_sizes_that_are_not_understood_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        HiftConfig.from_dict(values)
