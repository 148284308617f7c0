"""A layer's weights as a step reads them: q, k and v in one matrix, gate and up in one.

Letters: C hidden_size, H query heads, G key/value heads, D head_dim, I intermediate_size.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mosstalk.engine.sequence import Part
from mosstalk.model.network import Backbone, Block, DecoderLayer, RMSNorm


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: ``qkv`` ((H+2G)D, C), ``mixed`` (C, HD), ``gate_up`` (2I, C), gate first,
    ``down`` (C, I); the gains of its norms before attention and before the MLP (C,), and of a
    head's query and key (D,).
    """

    qkv: Tensor
    mixed: Tensor
    gate_up: Tensor
    down: Tensor
    attention_gain: Tensor
    mlp_gain: Tensor
    query_gain: Tensor
    key_gain: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer) -> Self:
        """Pack a layer; its own parameters become rows of the packed matrices.

        At most one layer's weights exist twice at any time. A layer that is packed already
        is left as it is.
        """
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            _joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj.weight.detach(),
            _joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight.detach(),
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            attention.q_norm.weight.detach(),
            attention.k_norm.weight.detach(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        return sum(weight.nbytes for weight in vars(self).values())


@dataclass(frozen=True)
class StackWeights:
    """A stack of layers, the first at ``first`` of the store, and its final norm (C,) if any."""

    layers: list[LayerWeights]
    first: int
    gain: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        gain = 0 if self.gain is None else self.gain.nbytes
        return gain + sum(layer.nbytes for layer in self.layers)


def packable(backbone: Backbone, dtype: torch.dtype) -> bool:
    """Whether all weights are plain numbers of ``dtype``, not quantised ones."""
    held = (*backbone.parameters(), *backbone.buffers())
    return all(weight.dtype == dtype for weight in held)


@torch.no_grad()
def packed_stacks(backbone: Backbone) -> dict[Part, StackWeights]:
    """The three stacks of a network, packed in place, one layer after the other."""
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
        assert isinstance(layer, DecoderLayer)
        layers.append(LayerWeights.of(layer))
        if layers[-1].qkv.is_cuda:
            torch.cuda.empty_cache()  # what held the parts is too small for the next whole
    return StackWeights(layers, block.first, None if norm is None else norm.weight.detach())


def _joined(*products: nn.Linear) -> Tensor:
    """The weights of products of one input as rows of one matrix, of which they become views."""
    weights = [product.weight for product in products]
    whole = _already_joined([weight.detach() for weight in weights])
    if whole is not None:
        return whole
    whole = torch.cat([weight.detach() for weight in weights])
    parts = whole.split([weight.shape[0] for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part
    return whole


def _already_joined(weights: list[Tensor]) -> Tensor | None:
    """The matrix whose rows ``weights`` are, one after the other, if they lie so in memory."""
    first = weights[0]
    expected = first.data_ptr()
    for weight in weights:
        shared = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (shared and weight.is_contiguous() and weight.data_ptr() == expected):
            return None
        expected += weight.nbytes
    rows, columns = sum(weight.shape[0] for weight in weights), first.shape[1]
    return first.as_strided((rows, columns), (columns, 1))
