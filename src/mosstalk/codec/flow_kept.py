"""Keys and values that a flow stream keeps, and what new rows see of them.

Shapes: B sequences, T new rows, S all rows, L layers, H heads, d channels of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_GROWTH = 2


def seen_mask(done: int, new: int, block: int, device: torch.device) -> Tensor | None:
    """Which of ``done + new`` rows the new ones see, (new, done + new), True to see.

    A row sees its own block and all earlier ones, as in ``block_mask``. None, everything is
    seen, where the new rows lie in one block.
    """
    if done // block == (done + new - 1) // block:
        return None
    index = torch.arange(done + new, device=device) // block
    return index[None, :] <= index[done:, None]


class LayerKeys(NamedTuple):
    """One layer's kept keys and values (B, H, S, d), and the place of the new (2, B, H, T, d)."""

    keys: Tensor
    values: Tensor
    new: Tensor

    def put(self, projected: Tensor) -> Tensor:
        """Of q, k and v side by side (B, T, 3 H d) keep k and v; return q (B, H, T, d)."""
        _, batch, heads, rows, size = self.new.shape
        parts = projected.view(batch, rows, 3, heads, size).permute(2, 0, 3, 1, 4)
        self.new.copy_(parts[1:])
        return parts[0]


@dataclass
class KeptKeys:
    """Keys and values of L attention layers; the first ``rows`` of ``buffer`` are in use.

    ``buffer`` (L, 2, B, H, capacity, d) at least doubles when it is full, so a row is moved
    a constant number of times however long a reply becomes.
    """

    buffer: Tensor
    rows: int = 0

    def fork(self) -> "KeptKeys":
        """The same rows for another stream. It has no room, so its first new row moves it."""
        return KeptKeys(self.buffer[..., : self.rows, :], self.rows)

    def extend(self, rows: int) -> list[LayerKeys]:
        """Make room for ``rows`` more; every layer must then put its own."""
        start, self.rows = self.rows, self.rows + rows
        if self.rows > self.buffer.shape[-2]:
            self._grow(start)
        kept = self.buffer[..., : self.rows, :].flatten(0, 1).unbind()
        new = self.buffer[..., start : self.rows, :].unbind()
        return list(map(LayerKeys, kept[::2], kept[1::2], new))

    def _grow(self, kept_rows: int) -> None:
        *outer, capacity, size = self.buffer.shape
        grown = self.buffer.new_empty(*outer, max(self.rows, _GROWTH * capacity), size)
        grown[..., :kept_rows, :] = self.buffer[..., :kept_rows, :]
        self.buffer = grown
