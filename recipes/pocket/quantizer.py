"""A codebook learned by moving averages, with unused entries moved to where data is."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DECAY = 0.99
_DEAD_SHARE = 0.05
"""An entry used less than this share of the mean use is moved."""
_LLOYD_ROUNDS = 20


class Quantized(NamedTuple):
    """``values`` (B, T, C) with the straight-through gradient, ``codes`` (B, T), losses."""

    values: Tensor
    codes: Tensor
    commitment: Tensor


def nearest(points: Tensor, entries: Tensor) -> Tensor:
    """Indices (...) of the ``entries`` (n, C) nearest to ``points`` (..., C) by squared L2."""
    return (entries.square().sum(1) - 2 * points @ entries.T).argmin(dim=-1)


class Quantizer(nn.Module):
    """Nearest entry by squared L2 (van den Oord et al. 2017), entries by moving averages.

    Where it is not ``moving`` the entries stay as they are, in training too.
    """

    codebook: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.moving = True
        self.register_buffer("codebook", torch.randn(entries, width))
        self.register_buffer("counts", torch.ones(entries))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, pooled: Tensor, counted: Tensor | None = None) -> Quantized:
        """Quantise (B, T, C); in training also move the codebook.

        Points outside ``counted`` (B * T,) bool, all by default, neither move it nor cost anything.
        """
        points = pooled.float().flatten(0, 1)
        codes = nearest(points.detach(), self.codebook)
        values = self.codebook[codes]
        kept = slice(None) if counted is None else counted
        if self.training and self.moving:
            self._move(points.detach()[kept], codes[kept])
        commitment = F.mse_loss(points[kept], values.detach()[kept])
        through = points + (values - points).detach()
        return Quantized(
            through.view_as(pooled).to(pooled.dtype), codes.view(pooled.shape[:2]), commitment
        )

    @torch.no_grad()
    def begin(self, points: Tensor, generator: torch.Generator) -> None:
        """Place the entries by Lloyd's algorithm on ``points`` (n, C)."""
        entries, device = self.codebook.shape[0], points.device
        chosen = torch.randint(points.shape[0], (entries,), generator=generator, device=device)
        self.codebook.copy_(points[chosen])
        for _ in range(_LLOYD_ROUNDS):
            counts, sums = self._statistics(points, nearest(points, self.codebook))
            alive = counts > 0
            self.codebook[alive] = sums[alive] / counts[alive, None]
        counts, sums = self._statistics(points, nearest(points, self.codebook))
        scale = self.codebook.shape[0] / points.shape[0]
        self.counts.copy_((counts * scale).clamp_min(1e-3))
        self.sums.copy_(self.codebook * self.counts[:, None])

    def _statistics(self, points: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.zeros_like(self.counts).index_add_(
            0, codes, torch.ones_like(codes, dtype=torch.float32)
        )
        return counts, torch.zeros_like(self.sums).index_add_(0, codes, points)

    @torch.no_grad()
    def _move(self, points: Tensor, codes: Tensor) -> None:
        counts, sums = self._statistics(points, codes)
        scale = self.codebook.shape[0] / points.shape[0]
        self.counts.lerp_(counts * scale, 1 - _DECAY)
        self.sums.lerp_(sums * scale, 1 - _DECAY)
        self.codebook.copy_(self.sums / self.counts.clamp_min(1e-3)[:, None])
        # No test on the host, so that the device is never waited for.
        dead = self.counts < _DEAD_SHARE
        chosen = torch.randint(points.shape[0], dead.shape, device=points.device)
        self.codebook.copy_(torch.where(dead[:, None], points[chosen], self.codebook))
        self.sums.copy_(torch.where(dead[:, None], self.codebook, self.sums))
        self.counts.copy_(torch.where(dead, torch.ones_like(self.counts), self.counts))


def perplexity(codes: Tensor, entries: int) -> float:
    """exp of the entropy of how often each entry is used: at most ``entries``."""
    share = torch.bincount(codes.flatten(), minlength=entries).double()
    share = share / share.sum()
    return float(torch.exp(-(share * share.clamp_min(1e-12).log()).sum()))
