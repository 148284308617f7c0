"""BigVGAN: the published network and files, streams that equal the whole, and the mel bridge."""

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soxr
import torch
from conftest import QUESTION, examples, require_package
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mosstalk import read_audio
from mosstalk.codec.bigvgan_stream import (
    BatchedBigVgan,
    BigVganOptions,
    MelBridge,
    frames_in,
    frames_ready,
    places,
    reach,
)
from mosstalk.errors import CheckpointError, CodecFullError, ConfigError, OptionError
from mosstalk.models.bigvgan import BigVgan, BigVganConfig, load_bigvgan, low_pass
from mosstalk.models.features import FLOW_MEL, MelSpec, vocoder_mel
from recipes.mel_bridge import Pair, error_db, fit, unfitted

CPU = torch.device("cpu")
FRAME = 480
V2: dict[str, Any] = {
    "resblock": "1",
    "num_mels": 80,
    "upsample_initial_channel": 64,
    "upsample_rates": [4, 4, 2, 2, 2, 2],
    "upsample_kernel_sizes": [8, 8, 4, 4, 4, 4],
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
    "activation": "snakebeta",
    "snake_logscale": True,
    "use_bias_at_final": False,
    "use_tanh_at_final": False,
    "sampling_rate": 22_050,
    "n_fft": 1024,
    "hop_size": 256,
    "win_size": 1024,
    "fmin": 0,
    "fmax": None,
    "segment_size": 65_536,
}
"""The published 22 kHz/80 config, narrower; with a key of the training."""
SMALL = V2 | {
    "upsample_initial_channel": 16,
    "upsample_rates": [16, 16],
    "upsample_kernel_sizes": [32, 32],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 2], [1, 2]],
}
FOLDERS = {
    "22 kHz/80 fmax8k": {"fmax": 8000},
    "22 kHz/80": {},
    "24 kHz/100": {"sampling_rate": 24_000, "num_mels": 100, "fmax": 12_000},
}


def config(**changes: Any) -> BigVganConfig:
    return BigVganConfig.from_dict(SMALL | changes)


def random_weights(vocoder: torch.nn.Module, seed: int = 0) -> None:
    """Weights that keep a sound's size from layer to layer, so that rounding stays rounding."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in vocoder.named_parameters():
        drawn = torch.randn(value.shape, generator=generator)
        if name.endswith("weight_g"):
            value.data.fill_(1.2 if "ups" in name else 0.7)
        elif value.ndim > 1:
            value.data = drawn * (1.2 if "ups" in name else 0.7) * value[0].numel() ** -0.5
        else:
            value.data = 0.1 * drawn


@lru_cache
def small(which: str = "24 kHz/100") -> BigVgan:
    vocoder = BigVgan(config(**FOLDERS[which])).requires_grad_(False).eval()
    random_weights(vocoder)
    return vocoder


@lru_cache
def flow_mel(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(FLOW_MEL.bins, frames, generator=generator) - 4


# The network.


def public_bigvgan(values: dict[str, Any]) -> torch.nn.Module:
    """The package's generator with random weights; what its network does not use is left out."""
    require_package("bigvgan", "quality,recipe")
    absent = {"librosa": ModuleType("librosa"), "librosa.filters": ModuleType("librosa.filters")}
    setattr(absent["librosa.filters"], "mel", None)  # noqa: B010
    for name, module in absent.items():
        sys.modules.setdefault(name, module)
    try:
        from bigvgan.bigvgan import AttrDict, BigVGAN
    finally:
        for name, module in absent.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    public: torch.nn.Module = BigVGAN(AttrDict(values)).eval()
    random_weights(public)
    return public


def publish(folder: Path, weights: dict[str, Tensor], values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"generator": weights}, folder / "bigvgan_generator.pt")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "changes",
    [
        *FOLDERS.values(),
        {"activation": "snake"},
        {"snake_logscale": False},
        {"use_bias_at_final": True, "use_tanh_at_final": True},
    ],
    ids=str,
)
def test_sound_equals_the_public_packages(changes: dict[str, Any], tmp_path: Path) -> None:
    values = V2 | changes
    public = public_bigvgan(values)
    if not values["snake_logscale"]:
        for name, value in public.named_parameters():
            value.data += name.endswith(("alpha", "beta"))
    folder = publish(tmp_path, public.state_dict(), values)
    vocoder = load_bigvgan(folder, device=CPU)
    mel = torch.randn(2, values["num_mels"], 21, generator=torch.Generator().manual_seed(1)) - 4
    with torch.no_grad():
        expected = public(mel)[:, 0]
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(vocoder(mel), expected, rtol=0, atol=1e-4)


def test_the_filter_passes_what_is_low_and_stops_what_is_high() -> None:
    taps = low_pass()
    response = torch.fft.rfft(taps, 256).abs()  # up to half of the doubled rate
    assert float(taps.sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(taps, taps.flip(0))
    assert float(response[64]) == pytest.approx(0.5, abs=0.01)
    assert float(response[:20].min()) > 0.98
    assert float(response[-15:].max()) < 0.01


def as_stored(vocoder: BigVgan) -> dict[str, Tensor]:
    """A state dict as published: weight-normalised, with its filters."""
    stored: dict[str, Tensor] = {}
    for name, value in vocoder.state_dict().items():
        if value.ndim == 3:
            norm = value.flatten(1).norm(dim=1)[:, None, None]
            stored |= {f"{name}_g": norm, f"{name}_v": 3 * value}
        else:
            stored[name] = value
        if name.endswith("act.alpha"):
            stem = name.removesuffix("act.alpha")
            taps = low_pass()[None, None]
            stored |= {f"{stem}upsample.filter": taps, f"{stem}downsample.lowpass.filter": taps}
    return stored


def test_a_published_folder_is_read_and_weight_norm_folded(tmp_path: Path) -> None:
    vocoder = small("22 kHz/80")
    folder = publish(tmp_path, as_stored(vocoder), SMALL)
    mel = flow_mel(9)[None]
    torch.testing.assert_close(load_bigvgan(folder, device=CPU)(mel), vocoder(mel))


def lose(weights: dict[str, Tensor]) -> None:
    del weights["conv_pre.bias"]


def spoil(weights: dict[str, Tensor]) -> None:
    weights["conv_pre.bias"] = weights["conv_pre.bias"] * torch.nan


def refilter(weights: dict[str, Tensor]) -> None:
    weights["activation_post.upsample.filter"] = torch.full((1, 1, 12), 1 / 12)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lose, "1 tensor missing"), (spoil, "NaN or infinity"), (refilter, "another filter")],
)
def test_damaged_weights_are_refused(
    damage: Callable[[dict[str, Tensor]], None], reason: str, tmp_path: Path
) -> None:
    weights = as_stored(small("22 kHz/80"))
    damage(weights)
    with pytest.raises(CheckpointError, match=reason):
        load_bigvgan(publish(tmp_path, weights, SMALL), device=CPU)


def test_a_file_without_a_generator_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, {}, SMALL)
    torch.save({"discriminator": {}}, tmp_path / "bigvgan_generator.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        load_bigvgan(tmp_path, device=CPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"resblock": "2"}, "resblock = '2' is not supported"),
        ({"activation": "relu"}, "activation = 'relu' is not supported"),
        ({"upsample_rates": [16, 8]}, "must multiply to hop_size"),
        ({"upsample_rates": [256]}, "one upsampling kernel for each rate"),
        ({"upsample_kernel_sizes": [33, 32]}, "by an even number"),
        ({"resblock_kernel_sizes": [3, 4]}, "residual kernels are odd"),
        ({"resblock_dilation_sizes": [[1]]}, "dilations for each residual kernel"),
        ({"resblock_dilation_sizes": [[1], 3]}, "whole numbers above 0"),
        ({"resblock_dilation_sizes": [[1], []]}, "resblock_dilation_sizes is empty"),
        (
            {"resblock_kernel_sizes": [], "resblock_dilation_sizes": []},
            "resblock_kernel_sizes is empty",
        ),
        ({"upsample_initial_channel": 18}, "must halve at each upsampling"),
        ({"win_size": 512}, "win_size must be n_fft"),
        ({"fmin": 9000, "fmax": 8000}, "fmin and fmax"),
        ({"fmax": -1}, "fmax must be finite and above 0"),
        ({"num_mels": None}, "'num_mels' is missing"),
    ],
)
def test_configs_that_are_not_understood_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(**changes)


# How far it looks.


@pytest.mark.parametrize(
    "changes",
    [{}, {"resblock_kernel_sizes": [7, 3]}, {"upsample_kernel_sizes": [16, 48]}],
    ids=str,
)
def test_a_frames_sound_depends_on_the_frames_within_reach_and_no_others(
    changes: dict[str, Any],
) -> None:
    vocoder = BigVgan(config(**changes)).double()
    random_weights(vocoder)
    vocoder.requires_grad_(False)
    left, right = reach(vocoder.config)
    middle, frames = left + 4, left + right + 9
    mel = (torch.randn(1, 80, frames, dtype=torch.float64) - 4).requires_grad_()
    forward = BigVgan.forward.__wrapped__  # type: ignore[attr-defined]
    sound = forward(vocoder, mel)[0, middle * 256 : (middle + 1) * 256]
    (sound * torch.randn(256)).sum().backward()
    assert mel.grad is not None
    read = mel.grad[0].abs().sum(0).nonzero().flatten()
    assert (int(read[0]), int(read[-1])) == (middle - left, middle + right)


# Streams.


def whole(which: str, mel: Tensor) -> Tensor:
    """A reply's sound at 24 kHz, made at once."""
    spec = small(which).config.mel
    sound = small(which)(MelBridge.load(spec, CPU).whole(mel)[None])[0]
    if spec.rate != 24_000:
        sound = torch.from_numpy(soxr.resample(sound.numpy(), spec.rate, 24_000, "HQ"))
    return sound[: mel.shape[1] * FRAME]


@pytest.mark.parametrize("which", FOLDERS)
@examples(8)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_streamed_sound_is_the_whole_sound(which: str, sizes: list[int]) -> None:
    bigvgan, mel = BatchedBigVgan(small(which), BigVganOptions(replies=2)), flow_mel(sum(sizes))
    reply, last = bigvgan.open(), len(sizes) - 1
    parts = enumerate(mel.split(sizes, dim=1))
    found = torch.cat([bigvgan.push([(reply, part, n == last)])[0] for n, part in parts])
    expected = whole(which, mel)
    assert found.shape == (sum(sizes) * FRAME,)
    assert float(expected.abs().max()) > 0.05
    torch.testing.assert_close(found[: len(expected)], expected, rtol=0, atol=1e-4)


def test_company_and_resets_leave_a_reply_bit_identical() -> None:
    def run(*, company: bool) -> list[Tensor]:
        bigvgan, heard = BatchedBigVgan(small(), BigVganOptions(replies=3)), []
        reply, other = bigvgan.open(), bigvgan.open()
        for call in range(3):
            work = [(reply, flow_mel(20, call), call == 2)]
            if company:
                work.insert(call % 2, (other, flow_mel(17, 9), call == 1))
            heard.append(bigvgan.push(work)[company and call % 2 == 0])
            if company and call == 1:
                bigvgan.close(other)
                other = bigvgan.open()
        return heard

    for alone, among in zip(run(company=False), run(company=True), strict=True):
        assert torch.equal(alone, among)


def test_less_lookahead_lets_sound_out_earlier_and_changes_it() -> None:
    exact, early = (
        BatchedBigVgan(small(), BigVganOptions(replies=1, lookahead_frames=frames))
        for frames in (None, 1)
    )
    mels = [flow_mel(20, n) for n in range(3)]
    found = []
    for bigvgan in (exact, early):
        reply = bigvgan.open()
        found.append([bigvgan.push([(reply, mel, n == 2)])[0] for n, mel in enumerate(mels)])
    assert found[1][0].shape[0] - found[0][0].shape[0] == 256 * (exact.lookahead - 1)
    one, other = map(torch.cat, found)
    assert one.shape == other.shape
    assert float((one - other).norm() / one.norm()) > 1e-6


def test_a_full_vocoder_refuses_and_options_are_checked() -> None:
    bigvgan = BatchedBigVgan(small(), BigVganOptions(replies=1))
    reply = bigvgan.open()
    with pytest.raises(CodecFullError, match="all 1 places"):
        bigvgan.open()
    bigvgan.close(reply)
    bigvgan.close(reply)
    assert bigvgan.figures().slots_used == 0
    assert bigvgan.figures().state_bytes > 0
    with pytest.raises(OptionError, match="at least one reply"):
        BigVganOptions(replies=0)
    with pytest.raises(OptionError, match="lookahead_frames"):
        BigVganOptions(lookahead_frames=-1)


# The mel bridge.


def test_frames_of_the_other_mel_lie_where_their_windows_do() -> None:
    spec = small("24 kHz/100").config.mel
    # Frame j of n_fft 1024 and hop 256, not centred, has its middle at sample 256 j + 128; the
    # flow's frame m at 480 m + 240.
    np.testing.assert_allclose(places(spec, 0, 4), (256 * np.arange(4) + 128 - 240) / 480)


@pytest.mark.parametrize("which", FOLDERS)
@given(frames=st.integers(1, 120), known=st.integers(0, 120))
def test_frames_that_are_ready_do_not_change_by_later_ones(
    which: str, frames: int, known: int
) -> None:
    known = min(known, frames)
    spec = small(which).config.mel
    bridge, mel = MelBridge.load(spec, CPU), flow_mel(120)
    ready = frames_ready(spec, known)
    assert ready <= frames_in(spec, known)
    if ready:
        early = bridge.convert(mel[:, :known], 0, 0, ready)
        torch.testing.assert_close(early, bridge.whole(mel[:, :frames])[:, :ready])


def test_a_mel_without_a_bridge_is_refused() -> None:
    with pytest.raises(ConfigError, match="no bridge leads to the mel 16000"):
        MelBridge.load(MelSpec(16_000, 1024, 256, 80, 0.0, 8000.0), CPU)


def test_a_fit_finds_a_linear_map_and_is_nearer_than_none() -> None:
    spec = small("22 kHz/80 fmax8k").config.mel
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(80, 240, generator=generator) * 0.05
    level = torch.randn(80, 1, generator=generator)
    features = torch.randn(240, 4000, generator=generator) - 4
    pairs = [Pair(features, mixing @ features + level, wide=True, voiced_by="festival")]
    fitted, none = (error_db(made(pairs, spec), pairs)[0] for made in (fit, unfitted))
    assert fitted < 0.15 * none


@pytest.mark.parametrize("which", FOLDERS)
def test_on_a_recording_the_bridge_is_near_the_true_mel(which: str) -> None:
    spec = small(which).config.mel
    sound = read_audio(QUESTION, 24_000).samples
    sound = sound[: len(sound) // FRAME * FRAME]
    other = sound if spec.rate == 24_000 else soxr.resample(sound, 24_000, spec.rate)
    true = vocoder_mel(torch.from_numpy(other), spec).mT
    found = MelBridge.load(spec, CPU).whole(vocoder_mel(torch.from_numpy(sound)).mT)
    bands = slice(0, 70)  # to 6 kHz and more: what a 16 kHz recording knows
    found, true = found[bands, : true.shape[1]], true[bands, : found.shape[1]]
    assert float((found - true).square().mean().sqrt()) * 8.686 < 5
    assert float(true.std()) * 8.686 > 12
