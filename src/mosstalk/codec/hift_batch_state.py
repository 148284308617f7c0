"""What HiFT keeps of each reply between calls, in tensors that are allocated once."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mosstalk.config import HiftConfig
from mosstalk.models.hift_stream import KEPT_FRAMES

_SEED_RANGE = 1 << 64


@dataclass(frozen=True)
class HiftState:
    """The last eight frames of every reply, and their sound; one row a slot (S rows).

    Phases are turns, less whole turns at the last frame, so that long audio costs no accuracy.
    """

    begun: Tensor
    """(S,) whether there was a call before: without, the other tensors mean nothing."""
    seed: Tensor
    """(S,) int64."""
    first_sample: Tensor
    """(S,) int64: where in the reply the next call begins, eight kept frames included."""
    mel: Tensor
    """(S, 80, 8)."""
    f0: Tensor
    """(S, 8) in Hz."""
    phases: Tensor
    """(S, 8, K) float64."""
    source: Tensor
    """(S, 3840)."""
    wave: Tensor
    """(S, 3840), not heard yet."""

    @classmethod
    def empty(cls, slots: int, config: HiftConfig, device: torch.device) -> "HiftState":
        """State of ``slots`` replies that have not begun."""
        held = KEPT_FRAMES * config.samples_per_frame
        return cls(
            torch.zeros(slots, dtype=torch.bool, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(slots, config.in_channels, KEPT_FRAMES, device=device),
            torch.zeros(slots, KEPT_FRAMES, device=device),
            torch.zeros(
                slots, KEPT_FRAMES, config.nb_harmonics + 1, dtype=torch.float64, device=device
            ),
            torch.zeros(slots, held, device=device),
            torch.zeros(slots, held, device=device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [getattr(self, spec.name) for spec in fields(self)]

    def reset(self, slot: int, seed: int) -> None:
        """Make ``slot`` a reply that has not begun; no other slot changes."""
        wrapped = seed % _SEED_RANGE
        self.begun[slot] = False
        self.first_sample[slot] = 0
        self.seed[slot] = wrapped - _SEED_RANGE if wrapped >= _SEED_RANGE // 2 else wrapped

    def at(self, slots: Tensor) -> "HiftState":
        """Copies of the rows ``slots`` (B,)."""
        return HiftState(*(tensor.index_select(0, slots) for tensor in self.tensors))

    def write(self, slots: Tensor, rows: "HiftState") -> None:
        """Write ``rows`` back to ``slots`` (B,)."""
        for tensor, new in zip(self.tensors, rows.tensors, strict=True):
            tensor.index_copy_(0, slots, new)
