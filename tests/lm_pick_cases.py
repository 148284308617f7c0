"""Draws for what compiles, checks and times the kernels that pick tokens."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mosstalk.engine.sampler import draw
from mosstalk.ops.sampling import sample
from mosstalk.ops.sampling_parts import AUDIO, FREE, DrawSettings, DrawState

TEXT_IDS, AUDIO_IDS, EOSP = 151_680, 16_512, 16_384
NEVERS = 3


@dataclass(frozen=True)
class Draws:
    """Rows (R, V) to draw from, and what is written."""

    logits: Tensor
    state: DrawState
    settings: DrawSettings
    tokens: Tensor
    bad: Tensor
    channel: int
    last_token: int | None

    def pick(self, *, masked: bool = False) -> None:
        """Call the public function."""
        sample(
            self.logits, self.state, self.settings, self.tokens, self.bad, channel=self.channel,
            last_token=self.last_token, masked=masked,
        )  # fmt: skip

    def rows(self, chosen: Tensor) -> "Draws":
        """Some of the rows, which write elsewhere."""
        settings = {name: value[chosen] for name, value in vars(self.settings).items()}
        return replace(
            self,
            logits=self.logits[chosen],
            state=copied(self.state),
            settings=DrawSettings(**settings),
            tokens=self.tokens[chosen],
            bad=self.bad[chosen],
        )

    def expected(self) -> Tensor:
        """The tokens of the engine's own draws on the general path."""
        seen = self.state.seen
        return draw(
            self.logits, seen, self.settings, self.channel, last_token=self.last_token
        ).tokens


def copied(state: DrawState) -> DrawState:
    """The same state, to be changed apart."""
    return DrawState(state.seen.clone(), *map(_copied, (state.latest, state.mode)))


def _copied(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.clone()


def draws(
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    channel: int = AUDIO,
    last_token: int | None = None,
    seed: int = 0,
    spread: float = 2.0,
) -> Draws:
    """Random logits and settings of every kind that the kernels take."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (rows,), generator=generator)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[whole(0, len(values))]

    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    never = torch.where(whole(0, 2, rows, NEVERS) == 0, FREE, whole(0, vocabulary, rows, NEVERS))
    latest = torch.full((rows + 2, 2), -7)
    state = DrawState(whole(0, 3, rows + 2, vocabulary) == 0, latest)
    settings = DrawSettings(
        slots=torch.randperm(rows + 2, generator=generator)[:rows],
        steps=whole(1, 5000),
        seeds=whole(-(1 << 62), 1 << 62),
        forced=torch.where(whole(0, 8) == 0, whole(0, vocabulary), FREE),
        never=never,
        top_k=one_of(1, 2, 5, 20, 40, 63, 64).long(),
        temperature=one_of(0, 0.3, 0.6, 1.0, 1.7).float(),
        tail=(1 - one_of(0.05, 0.5, 0.8, 0.95, 0.999, 1)).float(),
        penalty=one_of(0.8, 1.0, 1.1, 1.5).float(),
    )
    moved = {name: value.to(device) for name, value in vars(settings).items()}
    return Draws(
        logits.to(device, dtype),
        DrawState(state.seen.to(device), latest.to(device)),
        DrawSettings(**moved),
        torch.full((rows,), -9, device=device),
        torch.ones(rows, dtype=torch.bool, device=device),
        channel,
        last_token,
    )
