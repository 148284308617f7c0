"""Products of a pass's rows with a layer's matrices, as their precision and number ask for.

Letters: N packed rows, C hidden_size, I intermediate_size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mosstalk.engine.layer_weights import Fp8Matrix, LayerWeights, Matrix
from mosstalk.numerics.fp8 import E4M3, require_fp8
from mosstalk.ops.launch import Workspace
from mosstalk.ops.linear import gate_up, rms_linear
from mosstalk.ops.linear_fp8 import fp8_library, fp8_linear, fp8_rows, library_takes
from mosstalk.ops.linear_tiles import FEW_ROWS, Kind, division, kind_of
from mosstalk.ops.norm import rms_norm

Shape = tuple[Kind, int, torch.dtype, int]
"""What a product is, how many columns it writes, in what its weights are, and its most rows."""


@dataclass(frozen=True)
class ScratchBuffers:
    """Room for what is between a product and its input: rows normed (N, C), and gates (N, 2I)."""

    normed: Tensor
    gates: Tensor


@dataclass(frozen=True)
class Fp8Room:
    """Room for rows in E4M3, ``q`` a row after the other, and their scales (N,)."""

    q: Tensor
    scale: Tensor

    @classmethod
    def allocate(cls, rows: int, channels: int, device: torch.device) -> Self:
        """For ``rows`` rows of at most ``channels``."""
        return cls(
            torch.zeros(rows * channels, dtype=torch.uint8, device=device).view(E4M3),
            torch.zeros(rows, device=device),
        )

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For the rows ``x`` (R, C): (R, C) and (R,)."""
        return self.q[: x.numel()].view(x.shape), self.scale[: len(x)]

    @property
    def nbytes(self) -> int:
        """Their memory."""
        return self.q.nbytes + self.scale.nbytes


class Linears:
    """What multiplies rows with the matrices of ``layers``, at most ``rows`` of them.

    Few rows are multiplied by kernels that read weights once, more by a general library; with
    ``invariant``, all by kernels whose sums do not depend on the number of rows.

    Raises:
        DeviceError: weights are in FP8, which the card does not have.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], eps: float, rows: int, *, invariant: bool
    ) -> None:
        norm_weight = layers[0].attention_norm_weight
        self._eps, self._dtype, self._invariant = eps, norm_weight.dtype, invariant
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        widths = {len(m.weight.q[0]) for m in matrices if isinstance(m, Fp8Matrix)}
        self._fp8_room: Fp8Room | None = None
        if widths:
            require_fp8(norm_weight.device)
            self._fp8_room = Fp8Room.allocate(rows, max(widths), norm_weight.device)
        shapes = {shape for layer in layers for shape in self._shapes(layer, rows)}
        most = max(_most_sums(*shape, invariant=invariant) for shape in shapes)
        self._workspace = Workspace(most, norm_weight.device)

    @property
    def fixed_bytes(self) -> int:
        """Memory of rooms."""
        room = 0 if self._fp8_room is None else self._fp8_room.nbytes
        return self._workspace.counters.nbytes + self._workspace.sums.nbytes + room

    def normed(
        self, x: Tensor, norm_weight: Tensor, matrix: Matrix, out: Tensor, room: ScratchBuffers
    ) -> None:
        """out = RMSNorm(x) W^T."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, norm_weight, matrix, out)
        elif isinstance(matrix, Fp8Matrix):
            fp8_library(*self._rounded(x, norm_weight, matrix), matrix.weight, out)
        else:
            rms_norm(x, norm_weight, self._eps, room.normed)
            torch.mm(room.normed, matrix.t(), out=out)

    def gated(
        self, x: Tensor, norm_weight: Tensor, matrix: Matrix, out: Tensor, room: ScratchBuffers
    ) -> None:
        """out = silu(RMSNorm(x) G^T) x RMSNorm(x) U^T, where G and U are ``matrix`` (2I, C)."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, norm_weight, matrix, out, gated=True)
        else:
            self.normed(x, norm_weight, matrix, room.gates, room)
            gate_up(room.gates, out)

    def added(self, x: Tensor, matrix: Matrix, hidden: Tensor, room: ScratchBuffers) -> None:
        """hidden += x W^T."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, None, matrix, hidden, residual=hidden)
        elif isinstance(matrix, Fp8Matrix):
            rounded = self._rounded(x, None, matrix)
            hidden.add_(fp8_library(*rounded, matrix.weight, room.normed))
        else:
            hidden.addmm_(x, matrix.t())

    def _general(self, rows: int, matrix: Matrix) -> bool:
        """Whether a general library multiplies so many rows."""
        if self._invariant or rows <= FEW_ROWS:
            return False
        return not isinstance(matrix, Fp8Matrix) or library_takes(matrix.weight, self._dtype)

    def _by_kernel(
        self, x: Tensor, norm_weight: Tensor | None, matrix: Matrix, out: Tensor, **how: Any
    ) -> None:
        how |= {"invariant": self._invariant, "workspace": self._workspace}
        if isinstance(matrix, Fp8Matrix):
            fp8_linear(*self._rounded(x, norm_weight, matrix), matrix.weight, out, **how)
        else:
            rms_linear(x, norm_weight, self._eps, matrix, out, **how)

    def _rounded(
        self, x: Tensor, norm_weight: Tensor | None, matrix: Fp8Matrix
    ) -> tuple[Tensor, Tensor]:
        """Rows, normed if there is a norm_weight, as ``matrix`` takes them."""
        assert self._fp8_room is not None
        q, scale = self._fp8_room.of(x)
        fixed, invariant = matrix.input_scale, self._invariant
        fp8_rows(x, norm_weight, self._eps, q, scale, fixed=fixed, invariant=invariant)
        return q, scale

    def _shapes(self, layer: LayerWeights, rows: int) -> Iterator[Shape]:
        """Of a layer's products, with how many rows its kernels are given at most."""
        normed = (layer.qkv, layer.gate_up)
        for matrix in layer.matrices:
            weight = matrix.weight.q if isinstance(matrix, Fp8Matrix) else matrix
            gated = matrix is layer.gate_up
            kind = kind_of(weight.shape[1], normed=any(matrix is m for m in normed), gated=gated)
            few = min(rows, FEW_ROWS) if self._general(rows, matrix) else rows
            yield kind, len(weight) // (1 + gated), weight.dtype, few


def _most_sums(
    kind: Kind, columns: int, dtype: torch.dtype, most_rows: int, *, invariant: bool
) -> int:
    """How many sums programs of a product leave one another at most."""
    counts = range(1, most_rows + 1)
    most = 0
    for divided, rows in {division(kind, n, dtype, invariant=invariant): n for n in counts}.items():
        most = max(most, divided.sums(rows, columns, 2 if kind == "gated" else 1))
    return most
