"""A layer's weights as a step reads them: q, k and v in one matrix, gate and up in one.

Letters: C hidden_size, H query heads, G key/value heads, D head_dim, I intermediate_size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mosstalk.engine.sequence import Part
from mosstalk.errors import CheckpointError
from mosstalk.models.language_model import Backbone, Block, DecoderLayer, RMSNorm
from mosstalk.numerics.fp8 import Fp8Linear, Fp8Weight


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
    """One decoder layer: ``qkv`` ((H+2G)D, C), ``mixed`` (C, HD), ``gate_up`` (2I, C), gate first,
    ``down`` (C, I); the gains of its norms before attention and before the MLP (C,), and of a
    head's query and key (D,).
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
            CheckpointError: products of one input are quantised differently.
        """
        qkv, mixed, gate_up, down = (_matrix(products) for products in _products(layer))
        attention = layer.self_attn
        return cls(
            qkv,
            mixed,
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
        CheckpointError: products of one input are quantised differently.
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


Products = tuple[nn.Module, ...]


def _products(layer: DecoderLayer) -> tuple[Products, Products, Products, Products]:
    """A layer's products, those of one input together."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def _alike(products: Products) -> bool:
    """Whether none are quantised, or all are and round their input by one scale, or by rows."""
    quantised = [product for product in products if isinstance(product, Fp8Linear)]
    if len(quantised) < len(products):
        return not quantised
    first, *others = (product.input_scale for product in quantised)
    if first is None:
        return all(scale is None for scale in others)
    return all(scale is not None and torch.equal(first, scale) for scale in others)


def _matrix(products: Products) -> Matrix:
    """Products of one input as one matrix, of whose rows their weights become views."""
    if not _alike(products):
        raise CheckpointError(
            "products of one input (q, k, v; gate, up) are quantised with different input "
            "scales; quantise the checkpoint again with: mosstalk checkpoint quantize"
        )
    if not isinstance(products[0], Fp8Linear):
        return _joined(products, "weight")
    scale = products[0].input_scale
    return Fp8Matrix(
        Fp8Weight(_joined(products, "weight"), _joined(products, "weight_scale")),
        None if scale is None else scale.detach(),
    )


def _joined(products: Products, name: str) -> Tensor:
    """Parameters of that name one after another in one tensor, of which they become views."""
    parameters = [product.get_parameter(name) for product in products]
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
