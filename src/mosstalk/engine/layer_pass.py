"""A stack of layers over the packed rows of one pass, by kernels; where each leaves what it makes.

Letters: N packed rows, C hidden_size, H query heads, G key/value heads, D head_dim,
I intermediate_size.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mosstalk.config import LanguageModelConfig
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layer_weights import LayerWeights, packed_stacks
from mosstalk.engine.linears import Linears, ScratchBuffers
from mosstalk.engine.sequence import Part
from mosstalk.engine.step_inputs import StepInputs
from mosstalk.engine.step_plan import PassLimits
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.attention_decode import attention_decode, rows_work
from mosstalk.ops.attention_prefill import attention_prefill, tiles_work
from mosstalk.ops.move_rows import Latest, embed_rows, gather_rows, scatter_rows
from mosstalk.ops.norm import rms_norm
from mosstalk.ops.rope_kv import rope_kv, rotary_table


@dataclass(frozen=True)
class LayerBuffers:
    """What a pass makes of its rows: the stream ``hidden`` (N, C), ``normed`` (N, C), products
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
        """Rooms for ``rows`` rows; finite from the start."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        widths = (hidden, hidden, queries + 2 * keys, queries, queries, 2 * inner, inner, hidden)
        return cls(*(torch.zeros((rows, n), device=device, dtype=dtype) for n in widths))

    def first(self, rows: int) -> Self:
        """The same for ``rows`` rows."""
        return type(self)(*(room[:rows] for room in vars(self).values()))

    @property
    def between(self) -> ScratchBuffers:
        """Those that products need for themselves."""
        return ScratchBuffers(self.normed, self.gates)

    @property
    def nbytes(self) -> int:
        """Their memory."""
        return sum(room.nbytes for room in vars(self).values())


class LayerPass:
    """Runs the trunk or a modality block over what ``StepInputs`` describe.

    ``invariant``: no row's bits depend on the rows beside it. Rooms are shared by all passes,
    which therefore follow one another on the device.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KVStore,
        latest: Tensor,
        limits: PassLimits,
        *,
        invariant: bool,
    ) -> None:
        config = model.config
        self._store, self._latest, self._limits = store, latest, limits
        self._invariant, self._eps = invariant, config.rms_norm_eps
        self._pad = config.modality_pad_token_id
        self._stacks = packed_stacks(model.model)
        self._tables = (
            model.model.embed_tokens.weight.detach(), model.model.audio_embed.weight.detach()
        )  # fmt: skip
        device, dtype = store.keys.device, store.keys.dtype
        self.rooms = LayerBuffers.allocate(config, limits.rows, device, dtype)
        self._angles = rotary_table(limits.keys, config.head_dim, config.rope_theta, device)
        self._work = _work(config, limits, store, invariant=invariant)
        layers = [layer for stack in self._stacks.values() for layer in stack.layers]
        self._products = Linears(layers, self._eps, limits.rows, invariant=invariant)

    @property
    def weight_bytes(self) -> int:
        """Memory of the layers' weights, which are the model's own."""
        return sum(stack.nbytes for stack in self._stacks.values())

    @property
    def fixed_bytes(self) -> int:
        """Memory of rooms and tables."""
        own = self.rooms.nbytes + self._angles.nbytes + self._work.nbytes
        return own + self._products.fixed_bytes

    def run(self, part: Part, inputs: StepInputs) -> None:
        """Read the pass's rows with a part.

        The trunk leaves its output in the store; a modality block leaves the rows that are
        wanted, normed, in the first of ``rooms.asked``.
        """
        stack, rooms = self._stacks[part], self.rooms.first(inputs.size.rows)
        if part is Part.TRUNK:
            latest = Latest(self._latest, inputs.slots)
            embed_rows(inputs.rows, *self._tables, self._pad, rooms.hidden, latest)
        else:
            gather_rows(self._store.hidden, inputs.slot_mapping, rooms.hidden)
        for number, layer in enumerate(stack.layers, stack.first):
            self._attention(layer, number, rooms, inputs)
            self._mlp(layer, rooms)
        if stack.norm_weight is None:
            scatter_rows(rooms.hidden, inputs.slot_mapping, self._store.hidden)
        else:
            gather_rows(rooms.hidden, inputs.wanted, rooms.normed)
            rms_norm(rooms.normed, stack.norm_weight, self._eps, rooms.asked)

    def _attention(
        self, layer: LayerWeights, number: int, rooms: LayerBuffers, inputs: StepInputs
    ) -> None:
        room = rooms.between
        self._products.normed(rooms.hidden, layer.attention_norm_weight, layer.qkv, rooms.qkv, room)
        size = inputs.size
        keys, values = self._store.keys[number], self._store.values[number]
        turn = (layer.query_norm_weight, layer.key_norm_weight), self._eps, self._angles
        block_rows = self._store.rows_per_block
        span = size.blocks * block_rows
        if size.tiles:
            rope_kv(rooms.qkv, *turn, inputs.positions, inputs.written, keys, values, rooms.query)
        if size.singles:
            single = slice(0, size.singles)
            attention_decode(
                rooms.qkv[single], *turn, keys, values, inputs.block_tables[single],
                inputs.context_lens, rooms.mixed[single],
                block_rows=block_rows, span=span, work=self._work,
            )  # fmt: skip
        if size.tiles:
            # After single rows, where their zeros may stand for want of so many.
            attention_prefill(
                rooms.query, keys, values, inputs.block_tables, inputs.tiles, rooms.mixed,
                block_rows=block_rows, span=span, work=self._work, invariant=self._invariant,
            )  # fmt: skip
        self._products.added(rooms.mixed, layer.o_proj, rooms.hidden, room)

    def _mlp(self, layer: LayerWeights, rooms: LayerBuffers) -> None:
        room = rooms.between
        self._products.gated(rooms.hidden, layer.mlp_norm_weight, layer.gate_up, rooms.inner, room)
        self._products.added(rooms.inner, layer.down, rooms.hidden, room)


def _work(
    config: LanguageModelConfig, limits: PassLimits, store: KVStore, *, invariant: bool
) -> Tensor:
    """What programs of the attention of any pass leave one another."""
    keys = store.keys
    shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    span = limits.size(1, 1, 0, limits.keys).blocks * limits.block_rows
    numbers = tiles_work(limits.tiles, *shape, span, keys.dtype, invariant=invariant)
    if not limits.tiled:
        numbers = max(numbers, rows_work(limits.singles, *shape, span, keys.dtype))
    return torch.zeros(numbers, device=keys.device)
