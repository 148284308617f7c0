"""Keys and values of every layer for the reference network, growing row by row."""

import torch
from torch import Tensor

_FIRST_CAPACITY_ROWS = 256


class KVCache:
    """K and V of ``layers`` layers for B sequences of equal length.

    ``rows`` counts the rows all layers have; ``truncate`` forgets the latest of them, after
    which the next rows are written in their place.
    """

    def __init__(self, layers: int) -> None:
        self.rows = 0
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put new ``key`` and ``value`` (B, G, T, D) after the kept rows; return all (B, G, S, D).

        The rows count only once ``advance`` was called, so every layer writes at one place.
        """
        end = self.rows + key.shape[2]
        keys = self._keys[layer] = _with_room(self._keys[layer], key, self.rows, end)
        values = self._values[layer] = _with_room(self._values[layer], value, self.rows, end)
        keys[:, :, self.rows : end] = key
        values[:, :, self.rows : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, rows: int) -> None:
        """Count ``rows`` newly written rows as kept."""
        self.rows += rows

    def truncate(self, rows: int) -> None:
        """Keep only the first ``rows`` rows."""
        assert 0 <= rows <= self.rows, f"cannot keep {rows} of {self.rows} rows"
        self.rows = rows


def _with_room(kept: Tensor | None, like: Tensor, rows: int, needed: int) -> Tensor:
    """Return ``kept`` itself, or a copy at least twice as long when ``needed`` rows do not fit."""
    if kept is not None and kept.shape[2] >= needed:
        return kept
    capacity = max(_FIRST_CAPACITY_ROWS, 1 << (needed - 1).bit_length())
    batch, heads, _, head_dim = like.shape
    grown = torch.empty((batch, heads, capacity, head_dim), dtype=like.dtype, device=like.device)
    if kept is not None:
        grown[:, :, :rows] = kept[:, :, :rows]
    return grown
