"""A layer's matrices as a step reads them, and what multiplies rows with them.

q, k and v are in one matrix, gate and up in one; precision and number of rows say what multiplies.

Letters: N packed rows, C hidden_size, H query heads, G key/value heads, D head_dim,
I intermediate_size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mosstalk.config import LanguageModelConfig
from mosstalk.engine.sequence import Part
from mosstalk.errors import CheckpointError
from mosstalk.models.language_model import Backbone, Block, DecoderLayer, RMSNorm
from mosstalk.numerics.fp8 import E4M3, Fp8Linear, Fp8Weight, require_fp8
from mosstalk.ops.launch import Workspace, keep_fp16, linear_fp16
from mosstalk.ops.linear import gate_up, rms_linear
from mosstalk.ops.linear_fp8 import fp8_library, fp8_linear, fp8_rows, library_takes
from mosstalk.ops.linear_tiles import FEW_ROWS, Kind, division, kind_of
from mosstalk.ops.norm import rms_norm


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight (N, K) in E4M3 with its channels' scales, and its input's, () float32, if fixed."""

    weight: Fp8Weight
    input_scale: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        return self.weight.nbytes + (0 if self.input_scale is None else self.input_scale.nbytes)


Matrix = Tensor | Fp8Matrix
"""A weight (N, K) in the model's own dtype or in E4M3."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: ``qkv`` ((H+2G)D, C), ``o_proj`` (C, HD), ``gate_up`` (2I, C), gate first,
    ``down`` (C, I); the weights of its norms before attention and before the MLP (C,), and of
    those of a head's query and key (D,).
    """

    qkv: Matrix
    o_proj: Matrix
    gate_up: Matrix
    down: Matrix
    attention_norm_weight: Tensor
    mlp_norm_weight: Tensor
    query_norm_weight: Tensor
    key_norm_weight: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer) -> Self:
        """Pack a layer; its own parameters become rows of the packed matrices.

        At most one layer's weights exist twice at any time. A layer that is packed already
        is left as it is.

        Raises:
            CheckpointError: linear layers of one input are quantised differently.
        """
        qkv, o_proj, gate_up, down = (_matrix(linears) for linears in _by_input(layer))
        attention = layer.self_attn
        return cls(
            qkv,
            o_proj,
            gate_up,
            down,
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            attention.q_norm.weight.detach(),
            attention.k_norm.weight.detach(),
        )

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Those that rows are multiplied with."""
        return self.qkv, self.o_proj, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        return sum(weight.nbytes for weight in vars(self).values())


@dataclass(frozen=True)
class StackWeights:
    """A stack of layers, the first at ``first`` of the store, and its final norm (C,) if any."""

    layers: list[LayerWeights]
    first: int
    norm_weight: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        norm_weight = 0 if self.norm_weight is None else self.norm_weight.nbytes
        return norm_weight + sum(layer.nbytes for layer in self.layers)


@torch.no_grad()
def packed_stacks(backbone: Backbone) -> dict[Part, StackWeights]:
    """The three stacks of a network, packed in place, one layer after the other.

    Raises:
        CheckpointError: linear layers of one input are quantised differently.
    """
    stacks: tuple[tuple[Part, Block, RMSNorm | None], ...] = (
        (Part.TRUNK, backbone.shared_block, None),
        (Part.TEXT, backbone.text_block, backbone.text_norm),
        (Part.AUDIO, backbone.audio_block, backbone.audio_norm),
    )
    with torch.inference_mode(mode=False):  # parameters stay of use to whoever owns the model
        return {part: _stack(block, norm) for part, block, norm in stacks}


def _stack(block: Block, norm: RMSNorm | None) -> StackWeights:
    layers = []
    for layer in block.layers:
        layers.append(LayerWeights.of(_decoder(layer)))
        if layers[-1].attention_norm_weight.is_cuda:
            torch.cuda.empty_cache()  # what held the parts is too small for the next whole
    return StackWeights(layers, block.first, None if norm is None else norm.weight.detach())


def _decoder(layer: nn.Module) -> DecoderLayer:
    assert isinstance(layer, DecoderLayer)
    return layer


SameInput = tuple[nn.Module, ...]


def _by_input(layer: DecoderLayer) -> tuple[SameInput, SameInput, SameInput, SameInput]:
    """A layer's linear layers, those of one input together."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def _alike(linears: SameInput) -> bool:
    """Whether none are quantised, or all are and round their input by one scale, or by rows."""
    quantised = [linear for linear in linears if isinstance(linear, Fp8Linear)]
    if len(quantised) < len(linears):
        return not quantised
    first, *others = (linear.input_scale for linear in quantised)
    if first is None:
        return all(scale is None for scale in others)
    return all(scale is not None and torch.equal(first, scale) for scale in others)


def _matrix(linears: SameInput) -> Matrix:
    """Linear layers of one input as one matrix, of whose rows their weights become views."""
    if not _alike(linears):
        raise CheckpointError(
            "linear layers of one input (q, k, v; gate, up) are quantised with different input "
            "scales; quantise the checkpoint again with: mosstalk checkpoint quantize"
        )
    if not isinstance(linears[0], Fp8Linear):
        whole = _joined(linears, "weight")
        keep_fp16(whole)
        return whole
    scale = linears[0].input_scale
    return Fp8Matrix(
        Fp8Weight(_joined(linears, "weight"), _joined(linears, "weight_scale")),
        None if scale is None else scale.detach(),
    )


def _joined(linears: SameInput, name: str) -> Tensor:
    """Parameters of that name one after another in one tensor, of which they become views."""
    parameters = [linear.get_parameter(name) for linear in linears]
    whole = _already_joined([parameter.detach() for parameter in parameters])
    if whole is not None:
        return whole
    whole = _bitwise(torch.cat, [parameter.detach() for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


def _bitwise(join: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """``join`` of the numbers' bits where they are of 8, of which torch knows little else."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return join(list(tensors))
    return join([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)


def _already_joined(tensors: list[Tensor]) -> Tensor | None:
    """The tensor whose rows ``tensors`` are, one after the other, if they lie so in memory."""
    first = tensors[0]
    expected = first.data_ptr()
    for tensor in tensors:
        shared = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (shared and tensor.is_contiguous() and tensor.data_ptr() == expected):
            return None
        expected += tensor.nbytes
    shape = (sum(map(len, tensors)), *first.shape[1:])
    return first.as_strided(shape, first.stride())


# What multiplies rows with them.


Shape = tuple[Kind, int, torch.dtype, int]
"""What a matmul is, how many columns it writes, in what its weights are, and its most rows."""


@dataclass(frozen=True)
class LayerBuffers:
    """What a pass makes of its rows: the stream ``hidden`` (N, C), ``normed`` (N, C), matmuls'
    ``qkv`` (N, (H+2G)D), ``query`` and what it ``mixed`` (N, HD), ``gates`` (N, 2I), their
    product ``inner`` (N, I), and what was ``asked`` for (N, C).
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    query: Tensor
    mixed: Tensor
    gates: Tensor
    inner: Tensor
    asked: Tensor

    @classmethod
    def allocate(
        cls, config: LanguageModelConfig, rows: int, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """Buffers for ``rows`` rows; finite from the start."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        widths = (hidden, hidden, queries + 2 * keys, queries, queries, 2 * inner, inner, hidden)
        return cls(*(torch.zeros((rows, n), device=device, dtype=dtype) for n in widths))

    def first(self, rows: int) -> Self:
        """The same for ``rows`` rows."""
        return type(self)(*(buffer[:rows] for buffer in vars(self).values()))

    @property
    def nbytes(self) -> int:
        """Their memory."""
        return sum(buffer.nbytes for buffer in vars(self).values())


@dataclass(frozen=True)
class Fp8Scratch:
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
    ``invariant``, all by kernels whose sums do not depend on the number of rows. Without
    ``kernels`` the library multiplies all, but for weights in FP8, which the reference does.

    Raises:
        DeviceError: weights are in FP8, which the card does not have.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        eps: float,
        rows: int,
        *,
        invariant: bool,
        kernels: bool = True,
    ) -> None:
        norm_weight = layers[0].attention_norm_weight
        self._eps, self._dtype = eps, norm_weight.dtype
        self._invariant, self._kernels = invariant, kernels
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        widths = {len(m.weight.q[0]) for m in matrices if isinstance(m, Fp8Matrix)}
        self._fp8_scratch: Fp8Scratch | None = None
        if widths:
            require_fp8(norm_weight.device)
            self._fp8_scratch = Fp8Scratch.allocate(rows, max(widths), norm_weight.device)
        most = 0
        if kernels:
            shapes = {shape for layer in layers for shape in self._shapes(layer, rows)}
            most = max(_most_sums(*shape, invariant=invariant) for shape in shapes)
        self._workspace = Workspace(most, norm_weight.device)

    @property
    def fixed_bytes(self) -> int:
        """Memory of buffers."""
        scratch = 0 if self._fp8_scratch is None else self._fp8_scratch.nbytes
        return self._workspace.counters.nbytes + self._workspace.sums.nbytes + scratch

    def normed(
        self, x: Tensor, norm_weight: Tensor, matrix: Matrix, out: Tensor, buffers: LayerBuffers
    ) -> None:
        """out = RMSNorm(x) W^T."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, norm_weight, matrix, out)
        elif isinstance(matrix, Fp8Matrix):
            fp8_library(*self._rounded(x, norm_weight, matrix), matrix.weight, out)
        else:
            rms_norm(x, norm_weight, self._eps, buffers.normed)
            y = linear_fp16(buffers.normed, matrix)
            torch.mm(buffers.normed, matrix.t(), out=out) if y is None else out.copy_(y)

    def gated(
        self, x: Tensor, norm_weight: Tensor, matrix: Matrix, out: Tensor, buffers: LayerBuffers
    ) -> None:
        """out = silu(RMSNorm(x) G^T) x RMSNorm(x) U^T, where G and U are ``matrix`` (2I, C)."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, norm_weight, matrix, out, gated=True)
        else:
            self.normed(x, norm_weight, matrix, buffers.gates, buffers)
            gate_up(buffers.gates, out)

    def added(self, x: Tensor, matrix: Matrix, hidden: Tensor, buffers: LayerBuffers) -> None:
        """hidden += x W^T."""
        if not self._general(len(x), matrix):
            self._by_kernel(x, None, matrix, hidden, residual=hidden)
        elif isinstance(matrix, Fp8Matrix):
            rounded = self._rounded(x, None, matrix)
            hidden.add_(fp8_library(*rounded, matrix.weight, buffers.normed))
        else:
            y = linear_fp16(x, matrix)
            hidden.addmm_(x, matrix.t()) if y is None else hidden.add_(y)

    def _general(self, rows: int, matrix: Matrix) -> bool:
        """Whether a general library multiplies so many rows."""
        if not self._kernels:
            return not isinstance(matrix, Fp8Matrix)
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
        assert self._fp8_scratch is not None
        q, scale = self._fp8_scratch.of(x)
        fixed, invariant = matrix.input_scale, self._invariant
        fp8_rows(x, norm_weight, self._eps, q, scale, fixed=fixed, invariant=invariant)
        return q, scale

    def _shapes(self, layer: LayerWeights, rows: int) -> Iterator[Shape]:
        """Of a layer's linear layers, with how many rows its kernels are given at most."""
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
    """How many sums programs of a matmul leave one another at most."""
    counts = range(1, most_rows + 1)
    most = 0
    for divided, rows in {division(kind, n, dtype, invariant=invariant): n for n in counts}.items():
        most = max(most, divided.sums(rows, columns, 2 if kind == "gated" else 1))
    return most
