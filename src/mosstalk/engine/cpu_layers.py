"""The layers on a CPU in float32: NumPy between the matmuls.

A step has few rows, and then an operation takes the time that it takes to begin: some 3 us in
torch, 1 us in NumPy, 50 of them a layer. Matmuls are torch's, in float16 where the weights are
(``ops.launch.linear_fp16``).

Letters are those of ``engine.layers``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.linears import LayerWeights, Matrix, StackWeights
from mosstalk.engine.step_plan import PassInputs
from mosstalk.ops.attention_decode import adjacent
from mosstalk.ops.launch import linear

Array: TypeAlias = npt.NDArray[np.float32]


class _Tile(NamedTuple):
    """Packed rows ``rows`` of one sequence, and where the rows that they see are kept.

    ``later`` (R, S) marks keys that come after a row, which must not see them; None: none do.
    """

    rows: slice
    kept: slice | npt.NDArray[np.int64]
    later: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Layer:
    """A layer's matrices as torch has them, and what NumPy reads: see ``LayerWeights``.

    ``head_norm_weight`` (H + G, D): of each query's head, then of each key's. ``keys`` and
    ``values`` (places, G, D) are the store's own.
    """

    qkv: Tensor
    o_proj: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm_weight: Array
    mlp_norm_weight: Array
    head_norm_weight: Array
    keys: Array
    values: Array

    @classmethod
    def of(cls, weights: LayerWeights, keys: Tensor, values: Tensor) -> "_Layer":
        qkv, o_proj, gate_up, down = map(_plain, weights.matrices)
        heads = o_proj.shape[1] // keys.shape[2]
        norms = [weights.query_norm_weight] * heads + [weights.key_norm_weight] * keys.shape[1]
        return cls(
            qkv,
            o_proj,
            gate_up,
            down,
            weights.attention_norm_weight.numpy(),
            weights.mlp_norm_weight.numpy(),
            torch.stack(norms).numpy(),
            keys.numpy(),
            values.numpy(),
        )


def takes_cpu_layers(stack: StackWeights, store: KVStore) -> bool:
    """Whether ``CpuLayers`` can compute a stack's layers over a store."""
    matrices = (matrix for layer in stack.layers for matrix in layer.matrices)
    on_cpu = store.keys.device.type == "cpu" and store.keys.dtype == torch.float32
    return on_cpu and all(isinstance(matrix, Tensor) for matrix in matrices)


class CpuLayers:
    """A stack's layers over a store in float32, upon packed rows of any number of sequences.

    ``angles`` is a ``rotary_table``, ``eps`` that of all norms. A row's bits do not depend on
    other sequences' rows, but for what ``engine.layers`` says of matmuls.
    """

    def __init__(self, stack: StackWeights, store: KVStore, angles: Tensor, eps: float) -> None:
        self._eps, self._angles, self._block_rows = eps, angles.numpy(), store.rows_per_block
        kv_heads, self._channels = store.keys.shape[2:]
        self._layers = [
            _Layer.of(weights, store.keys[number], store.values[number])
            for number, weights in enumerate(stack.layers, stack.first)
        ]
        self._heads = len(self._layers[0].head_norm_weight) - kv_heads

    def run(self, hidden: Tensor, inputs: PassInputs) -> None:
        """Add to rows ``hidden`` (N, C) what all layers make of them; keep their K and V.

        ``inputs`` are those of a pass whose rows all lie in tiles.
        """
        x, places = hidden.numpy(), inputs.slot_mapping.numpy()
        half = self._channels // 2
        lines = self._angles[inputs.positions.numpy()][:, None]
        cos, sin = lines[..., :half], lines[..., half:]
        tiles = self._tiles(inputs)
        # A number too large for exp is one whose silu is 0.
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self._layers:
                normed = self._normed(x, layer.attention_norm_weight)
                qkv = _multiply(normed, layer.qkv)
                heads = qkv.reshape(len(x), -1, self._channels)
                turned, values = self._turned(heads, layer.head_norm_weight, cos, sin)
                layer.keys[places] = turned[:, self._heads :]
                layer.values[places] = values
                mixed = self._mixed(turned[:, : self._heads], layer, tiles)
                x += _multiply(mixed, layer.o_proj)
                normed = self._normed(x, layer.mlp_norm_weight)
                x += _multiply(_gated(_multiply(normed, layer.gate_up)), layer.down)

    def _tiles(self, inputs: PassInputs) -> list[_Tile]:
        tiles, size = list[_Tile](), self._block_rows
        for first, rows, position, item in inputs.tiles.tolist():
            seen = position + rows
            blocks = inputs.block_tables[item, : -(-seen // size)].tolist()
            kept: slice | npt.NDArray[np.int64]
            if adjacent(blocks):
                kept = slice(blocks[0] * size, blocks[0] * size + seen)
            else:
                places = np.array(blocks)[:, None] * size + np.arange(size)
                kept = places.reshape(-1)[:seen]
            later = None
            if rows > 1:
                later = np.arange(seen) > np.arange(position, seen)[:, None]
            tiles.append(_Tile(slice(first, first + rows), kept, later))
        return tiles

    def _normed(self, x: Array, norm_weight: Array) -> Array:
        """RMSNorm of (..., C)."""
        return _scaled(x, self._eps) * norm_weight

    def _turned(
        self, heads: Array, norm_weight: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array]:
        """Queries, then keys (N, H + G, D), normed and rotated, and values (N, G, D)."""
        queries = len(norm_weight)
        both = self._normed(heads[:, :queries], norm_weight)
        half = both.shape[2] // 2
        first, second = both[..., :half], both[..., half:]
        turned = np.empty_like(both)
        np.multiply(first, cos, out=turned[..., :half])
        np.multiply(second, cos, out=turned[..., half:])
        turned[..., :half] -= second * sin
        turned[..., half:] += first * sin
        return turned, heads[:, queries:]

    def _mixed(self, query: Array, layer: _Layer, tiles: Sequence[_Tile]) -> Array:
        """What rows (N, H, D) see of the rows kept, mixed: (N, H D)."""
        rows, heads, channels = query.shape
        kv_heads = layer.keys.shape[1]
        query = query / np.float32(channels**0.5)
        mixed = np.empty((rows, heads * channels), np.float32)
        for tile in tiles:
            keys, values = layer.keys[tile.kept], layer.values[tile.kept]
            own = query[tile.rows].reshape(-1, kv_heads, heads // kv_heads, channels)
            count = len(own)
            # A key head's queries, row after row, are the rows of one matmul.
            asking = own.transpose(1, 0, 2, 3).reshape(kv_heads, -1, channels)
            weight = np.matmul(asking, keys.transpose(1, 2, 0))
            if tile.later is not None:
                each = weight.reshape(kv_heads, count, -1, len(keys))
                np.copyto(each, -np.inf, where=tile.later[:, None])
            weight -= np.maximum.reduce(weight, -1, keepdims=True)
            np.exp(weight, out=weight)
            weight /= np.add.reduce(weight, -1, keepdims=True)
            found = np.matmul(weight, values.transpose(1, 0, 2))
            found = found.reshape(kv_heads, count, -1, channels).transpose(1, 0, 2, 3)
            mixed[tile.rows] = found.reshape(count, -1)
        return mixed


def _plain(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix


def _scaled(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) of (..., C)."""
    size = np.add.reduce(x * x, -1, keepdims=True)
    size /= x.shape[-1]
    size += eps
    return np.divide(x, np.sqrt(size, out=size))


def _gated(both: Array) -> Array:
    """silu(gate) up of (N, 2I), gate then up: (N, I)."""
    inner = both.shape[1] // 2
    gate = both[:, :inner]
    made = np.negative(gate)
    np.exp(made, out=made)
    made += 1
    np.divide(gate, made, out=made)
    made *= both[:, inner:]
    return made


def _multiply(x: Array, matrix: Tensor) -> Array:
    """x W^T of rows (N, K) with a matrix (M, K) of torch's."""
    found: Array = linear(torch.from_numpy(x), matrix, None).numpy()
    return found
