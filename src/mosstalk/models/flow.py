"""Codes to mel frames: encoder, then ten Euler steps of a guided flow.

``FlowDecoder`` computes a whole prefix at once; ``RecomputingFlowStream`` hands out a reply
hop by hop by computing the prefix again for each hop, as public implementations do.
``codec.flow`` gives the same frames from kept state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.config import FlowConfig
from mosstalk.models.flow_networks import Estimator, FlowEncoder
from mosstalk.models.voices import Voice
from mosstalk.models.weights import embedding

NOISE_FRAMES = 15_000
"""Frames in one block of the fixed noise: 300 s."""


@lru_cache(maxsize=4)
def _noise_block(index: int, bins: int) -> Tensor:
    return torch.randn((1, bins, NOISE_FRAMES), generator=torch.Generator().manual_seed(index))


def fixed_noise(frames: int, bins: int = 80, *, start: int = 0) -> Tensor:
    """``frames`` frames of the flow's starting noise from ``start`` on, (1, bins, frames) float32.

    The published noise is one block of 15,000 frames drawn with seed 0. Past its end this
    project continues with blocks drawn with seeds 1, 2, ...: voice and reply may be longer
    than 300 s, and what was played never changes.
    """
    first, stop = start // NOISE_FRAMES, math.ceil((start + frames) / NOISE_FRAMES)
    blocks = [_noise_block(index, bins) for index in range(first, stop)]
    # One block as it is: a copy of it would cost as much as a hop's encoder.
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
    return whole[:, :, start - first * NOISE_FRAMES :][:, :, :frames]


class ConditionalFlow(nn.Module):
    """Flow matching with classifier-free guidance (Lipman et al. 2022; Ho & Salimans 2021)."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.estimator = Estimator(config)

    def times(self, device: torch.device) -> Tensor:
        """Where the Euler steps begin and end, (steps + 1,) float32: 1 - cos(pi u / 2)."""
        u = torch.linspace(0, 1, self.config.n_timesteps + 1, device=device)
        return 1 - torch.cos(u * 0.5 * torch.pi)

    def forward(
        self,
        noise: Tensor,
        mu: Tensor,
        speaker: Tensor,
        condition: Tensor,
        block: int | None,
        first: int = 0,
    ) -> Tensor:
        """Integrate from ``noise`` (B, 80, T) to mels (B, 80, T) over ``times``.

        ``first``: the Euler step to begin with; ``noise`` is then what has come of it by that time.

        Each step's velocity is (1 + g) conditioned - g unconditioned, where unconditioned
        has mu, speaker and condition at zero.
        """
        guidance, rows = self.config.cfg_rate, noise.shape[0]
        mu, speaker, condition = (
            torch.cat([value, torch.zeros_like(value)]) for value in (mu, speaker, condition)
        )
        x = noise
        for now, then in pairwise(self.times(noise.device)[first:]):
            both = torch.cat([x, x])
            velocity = self.estimator(both, mu, now.expand(2 * rows), speaker, condition, block)
            guided = (1 + guidance) * velocity[:rows] - guidance * velocity[rows:]
            x = x + ((then - now) * guided).to(x.dtype)
        return x


class FlowDecoder(nn.Module):
    """CosyVoice2's causal masked flow with an x-vector, in the published tensor names."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = embedding(config.vocab_size, config.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.mel_bins)
        self.encoder = FlowEncoder(config)
        self.encoder_proj = nn.Linear(config.input_size, config.mel_bins)
        self.decoder = ConditionalFlow(config)

    @torch.inference_mode()
    def mean(self, codes: Tensor, *, final: bool, masked: bool) -> Tensor:
        """mu (1, frames, 80) of all ``codes`` (T,), or of all but the last 3 unless ``final``."""
        embedded = self.input_embedding(codes[None])
        ahead = None
        if not final:
            split = codes.shape[0] - self.config.pre_lookahead_len
            embedded, ahead = embedded[:, :split], embedded[:, split:]
        block = self.config.chunk_size if masked else None
        return self.encoder_proj(self.encoder(embedded, ahead, block))

    @torch.inference_mode()
    def decode(self, voice: Voice, codes: Tensor, *, final: bool, masked: bool) -> Tensor:
        """Mel (80, frames) of the reply ``codes`` (n,), four frames for each.

        ``final``: the reply ends here; otherwise the last 3 codes serve as look-ahead alone.
        ``masked``: attend by blocks, as streaming does; otherwise to everything.
        """
        weight = self.encoder_proj.weight
        whole = torch.cat([voice.codes.to(codes.device), codes])
        mu = self.mean(whole, final=final, masked=masked).transpose(1, 2)
        condition = torch.zeros_like(mu)
        prompt_frames = voice.mel.shape[0]
        condition[0, :, :prompt_frames] = voice.mel.T.to(condition)
        speaker = F.normalize(voice.embedding.to(weight)[None], dim=1)
        block = self.config.chunk_size * self.config.token_mel_ratio if masked else None
        noise = fixed_noise(mu.shape[2], self.config.mel_bins).to(weight)
        mel = self.decoder(noise, mu, self.spk_embed_affine_layer(speaker), condition, block)
        return mel[0, :, prompt_frames:]


class FlowStream(ABC):
    """Mel of one reply, hop by hop; subclasses say how a hop is computed.

    Blocks are counted from the start of the voice prompt, so the first hop is
    ``chunk + (-prompt mod chunk)`` codes long and later ones ``chunk``; a hop needs three
    codes more as look-ahead. Frames once given never change.
    """

    def __init__(self, flow: FlowDecoder, voice: Voice) -> None:
        self.config = flow.config
        self.prompt_codes = voice.codes.shape[0]
        self.codes: list[int] = []
        self.done_codes = 0

    @property
    def hop_codes(self) -> int:
        """Length of the next hop in codes."""
        chunk = self.config.chunk_size
        alignment = -self.prompt_codes % chunk if self.done_codes == 0 else 0
        return chunk + alignment

    @property
    def codes_needed(self) -> int:
        """How many reply codes there must be for the next hop."""
        return self.done_codes + self.hop_codes + self.config.pre_lookahead_len

    def push(self, codes: Iterable[int]) -> list[Tensor]:
        """Take more codes; return the mel (80, frames) of every hop that became possible."""
        self.codes += codes
        hops = []
        while len(self.codes) >= self.codes_needed:
            hops.append(self._advance(self.hop_codes, final=False))
        return hops

    def finish(self) -> Tensor | None:
        """Return the mel of all codes not yet decoded; None when the reply has no codes.

        The last hop keeps the block mask and has zeros as look-ahead, so it agrees with what
        was already played.
        """
        rest = len(self.codes) - self.done_codes
        return self._advance(rest, final=True) if rest else None

    def _advance(self, hop: int, *, final: bool) -> Tensor:
        mel = self._hop(hop, final=final)
        self.done_codes += hop
        return mel

    @abstractmethod
    def _hop(self, hop: int, *, final: bool) -> Tensor:
        """Mel (80, frames) of the next ``hop`` codes; ``final``: no code follows them."""


class RecomputingFlowStream(FlowStream):
    """Computes voice and reply again at every hop: the truth that kept state is tested against."""

    def __init__(self, flow: FlowDecoder, voice: Voice) -> None:
        super().__init__(flow, voice)
        self.flow = flow
        self.voice = voice

    def _hop(self, hop: int, *, final: bool) -> Tensor:
        end = self.done_codes + hop
        available = end if final else end + self.config.pre_lookahead_len
        device = self.flow.encoder_proj.weight.device
        codes = torch.tensor(self.codes[:available], device=device)
        mel = self.flow.decode(self.voice, codes, final=final, masked=True)
        ratio = self.config.token_mel_ratio
        return mel[:, self.done_codes * ratio : end * ratio]
