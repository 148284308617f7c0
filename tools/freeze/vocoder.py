"""A small BigVGAN with random weights, as NVIDIA publishes them: names, weight norm, config."""

import json
from pathlib import Path

import torch

_CONFIG = {
    "resblock": "1", "num_mels": 80, "upsample_initial_channel": 16,
    "upsample_rates": [16, 16], "upsample_kernel_sizes": [32, 32],
    "resblock_kernel_sizes": [3, 5], "resblock_dilation_sizes": [[1, 2], [1, 2]],
    "activation": "snakebeta", "snake_logscale": True, "use_bias_at_final": False,
    "use_tanh_at_final": False, "sampling_rate": 22_050, "n_fft": 1024, "hop_size": 256,
    "win_size": 1024, "fmin": 0, "fmax": None,
}  # fmt: skip
"""The published 22 kHz/80 config, narrower and in two stages."""


def write_vocoder(folder: Path) -> None:
    """Write ``config.json`` and ``bigvgan_generator.pt``, the same each time."""
    weights: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def conv(name: str, *shape: int, gain: float = 0.7, bias: int = 0) -> None:
        drawn = torch.randn(shape, generator=generator)
        weights[f"{name}.weight_v"] = drawn
        weights[f"{name}.weight_g"] = torch.full((shape[0], 1, 1), gain)
        if bias:
            weights[f"{name}.bias"] = 0.1 * torch.randn(bias, generator=generator)

    def activation(name: str, channels: int) -> None:
        for part in ("alpha", "beta"):
            weights[f"{name}.act.{part}"] = 0.1 * torch.randn(channels, generator=generator)

    channels = 16
    conv("conv_pre", channels, 80, 7, bias=channels)
    for stage in range(2):
        conv(f"ups.{stage}.0", channels, channels // 2, 32, gain=1.2, bias=channels // 2)
        channels //= 2
        for branch, kernel in enumerate((3, 5)):
            block = f"resblocks.{2 * stage + branch}"
            for dilation in range(2):
                for convs in ("convs1", "convs2"):
                    conv(f"{block}.{convs}.{dilation}", channels, channels, kernel, bias=channels)
            for each in range(4):
                activation(f"{block}.activations.{each}", channels)
    activation("activation_post", channels)
    conv("conv_post", 1, channels, 7)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    torch.save({"generator": weights}, folder / "bigvgan_generator.pt")
