"""The pocket recipe's vocoder in training: its inverse STFT, and how a narrow one grows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mosstalk.config import HiftConfig
from mosstalk.models.hift import HiftVocoder
from recipes.pocket.training import save_weights
from recipes.pocket.vocoder_network import TrainedHift, initial_vocoder, load_vocoder

NARROW = HiftConfig(base_channels=16, f0_channels=16)
WIDE = HiftConfig(base_channels=32, f0_channels=16)


@pytest.mark.parametrize("frames", [4, 5, 1201])
def test_the_inverse_stft_is_torchs(frames: int) -> None:
    parts = torch.randn((2, 2, 9, frames), generator=torch.Generator().manual_seed(frames))
    spectrum = torch.complex(*parts)

    ours = TrainedHift(NARROW).inverse_stft(spectrum)

    assert ours.shape == (2, 4 * (frames - 1))
    torch.testing.assert_close(ours, HiftVocoder(NARROW).inverse_stft(spectrum))


def narrow_file(folder: Path) -> tuple[HiftVocoder, Path]:
    torch.manual_seed(0)
    narrow, path = initial_vocoder(NARROW), folder / "vocoder.safetensors"
    save_weights(narrow, path, {})
    return narrow, path


def sound(vocoder: HiftVocoder) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    mel, source = torch.randn((80, 20), generator=draw) - 6, torch.randn(9600, generator=draw)
    return vocoder.synthesise(mel, source)


def test_a_narrow_vocoder_grows_and_speaks_as_it_did(tmp_path: Path) -> None:
    narrow, path = narrow_file(tmp_path)
    wide = initial_vocoder(WIDE)
    assert not torch.allclose(sound(wide), sound(narrow), atol=1e-4)

    load_vocoder(wide, path)

    torch.testing.assert_close(sound(wide), sound(narrow), rtol=0, atol=1e-6)
    assert torch.equal(wide.f0(torch.zeros(80, 9)), narrow.f0(torch.zeros(80, 9)))


def test_the_two_copies_of_a_channel_part_as_it_learns(tmp_path: Path) -> None:
    wide = initial_vocoder(WIDE)
    load_vocoder(wide, narrow_file(tmp_path)[1])

    draw = torch.Generator().manual_seed(1)
    mel, source = torch.randn((1, 80, 20), generator=draw), torch.randn((1, 9600), generator=draw)
    wide(mel - 6, source).abs().mean().backward()

    for name in ("conv_pre", "ups.0", "resblocks.0.convs1.0"):
        gradient = wide.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        first, second = gradient.chunk(2, dim=int(name == "ups.0"))
        assert not torch.allclose(first, second), name


def test_weights_of_its_own_size_come_as_they_are(tmp_path: Path) -> None:
    narrow, path = narrow_file(tmp_path)
    other = initial_vocoder(NARROW)

    load_vocoder(other, path)

    assert all(map(torch.equal, other.state_dict().values(), narrow.state_dict().values()))
