"""Random flows and voices of any size, made where they are used."""

import torch

from mosstalk.config import FlowConfig
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice


def random_flow(config: FlowConfig, device: torch.device, seed: int = 0) -> FlowDecoder:
    """A flow on ``device`` whose weights keep activations the size they are."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        flow = FlowDecoder(config)
    for name, value in flow.named_parameters():
        fan_in = value[0].numel() if value.ndim > 1 else 100
        drawn = torch.randn(value.shape, generator=generator, device=device) * fan_in**-0.5
        value.data = drawn + 1 if "norm" in name and name.endswith("weight") else drawn
    return flow.requires_grad_(False).eval()


def random_codes(config: FlowConfig, count: int, seed: int = 0) -> list[int]:
    """``count`` codes that the flow knows."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def random_voice(config: FlowConfig, codes: int, seed: int = 0) -> Voice:
    """A voice of ``codes`` codes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    frames = codes * config.token_mel_ratio
    return Voice(
        torch.tensor(random_codes(config, codes, seed)),
        torch.randn((frames, config.mel_bins), generator=generator),
        torch.randn(config.spk_embed_dim, generator=generator),
    )
