"""K and V of every layer, and the trunk's outputs, for every row of the pool."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mosstalk.config import LanguageModelConfig
from mosstalk.engine.block_pool import BlockPool
from mosstalk.errors import DeviceError


@dataclass(frozen=True)
class KVStore:
    """``keys`` and ``values`` (layers, places, G, D), ``hidden`` (places, C).

    A place is block x rows of a block + row inside it. ``hidden`` is what the trunk gave for
    a row, for modality blocks that read it later.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor
    rows_per_block: int

    @classmethod
    def allocate(
        cls, config: LanguageModelConfig, pool: BlockPool, device: torch.device, dtype: torch.dtype
    ) -> "KVStore":
        """Room for every block of ``pool``."""
        places = pool.size * pool.rows
        shape = (config.num_kv_layers, places, config.num_key_value_heads, config.head_dim)
        return cls(
            _zeros(shape, device, dtype),
            _zeros(shape, device, dtype),
            _zeros((places, config.hidden_size), device, dtype),
            pool.rows,
        )

    def grown(self, config: LanguageModelConfig, pool: BlockPool) -> "KVStore":
        """Room for every block of a pool that has grown, with what was there."""
        store = self.allocate(config, pool, self.keys.device, self.keys.dtype)
        places = len(self.hidden)
        store.keys[:, :places] = self.keys
        store.values[:, :places] = self.values
        store.hidden[:places] = self.hidden
        return store

    def poison(self, blocks: list[int]) -> None:
        """Make every number of these blocks NaN, so that reading one unwritten is seen."""
        for block in blocks:
            rows = slice(block * self.rows_per_block, (block + 1) * self.rows_per_block)
            self.keys[:, rows] = float("nan")
            self.values[:, rows] = float("nan")
            self.hidden[rows] = float("nan")


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros; on a CPU memory that is taken page by page, as rows are first written.

    torch would write them all at once: 256 MiB that are never used, and 0.15 s of each start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def bytes_per_row(config: LanguageModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one row in the store: K and V of all layers, and the trunk's output."""
    kv = 2 * config.num_kv_layers * config.num_key_value_heads * config.head_dim
    return (kv + config.hidden_size) * dtype.itemsize


def blocks_that_fit(
    config: LanguageModelConfig,
    dtype: torch.dtype,
    block_rows: int,
    memory_bytes: float,
    context_rows: int | None = None,
) -> int:
    """Blocks of ``block_rows`` rows that ``memory_bytes`` hold.

    Raises:
        DeviceError: not one conversation of ``context_rows`` (the model's context unless
            given) fits; says what to change.
    """
    row = bytes_per_row(config, dtype)
    blocks = max(0, int(memory_bytes // (row * block_rows)))
    context = context_rows or config.max_position_embeddings
    if blocks * block_rows < context:
        raise DeviceError(
            f"{max(0.0, memory_bytes) / 2**20:,.1f} MiB left for K and V hold "
            f"{blocks * block_rows} rows of {row / 1024:,.1f} KiB, and one conversation may have "
            f"{context}: give more memory, a shorter context, fewer slots and rows a step, or a "
            "dtype of fewer bytes"
        )
    return blocks
