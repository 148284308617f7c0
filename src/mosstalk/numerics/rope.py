"""Rotary positions (RoPE): tables of angles, and what they do to queries and keys."""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return float32 cos and sin tables, each (T, head_dim), for absolute ``positions`` (T,).

    Su et al. 2021, in the rotate-half layout: frequency i serves dimensions i and i + D/2.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] * (theta**-exponents)[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to ``x`` (B, H, T, D) in float32; same shape and dtype."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
