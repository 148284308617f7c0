"""The network over packed rows of many sequences: what a step runs, by the fused operations.

On a GPU that runs kernels a pass is padded to one of a few sizes, and captured once as a graph;
elsewhere it has exactly the rows that there are. There ``cpu_layers`` computes the layers on a CPU
in float32, and the operations' references all else.

Letters: N packed rows, W of them wanted, C hidden_size, V tokens of a channel, H query heads,
G key/value heads, D head_dim, I intermediate_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Row
from mosstalk.engine.cpu_layers import CpuLayers, takes_cpu_layers
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.linears import LayerBuffers, LayerWeights, Linears, packed_stacks
from mosstalk.engine.sequence import Part
from mosstalk.engine.step_plan import (
    ExactInputs,
    PassInputs,
    PassLimits,
    PassSize,
    Planned,
    Planner,
    QuerySpan,
    StepInputs,
    check_planned,
)
from mosstalk.errors import EngineInputError
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.attention_decode import attention_decode, decode_numbers
from mosstalk.ops.attention_prefill import attention_prefill, prefill_numbers
from mosstalk.ops.launch import compiled_together, keep_fp16, linear_fp16, references_only, runs
from mosstalk.ops.linear import rms_linear
from mosstalk.ops.linear_tiles import FEW_ROWS
from mosstalk.ops.move_rows import Latest, embed_rows, gather_rows, scatter_rows
from mosstalk.ops.norm import rms_norm
from mosstalk.ops.rope_kv import rope_kv, rotary_table
from mosstalk.ops.sampling_parts import AUDIO
from mosstalk.runtime.graphs import STEPPING, Graphs

NOT_SEEN = -1
"""Text token of a row that the host has not seen yet: its audio token is the slot that drew it."""
_CAPABLE_SINCE = (8, 0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LayerOptions:
    """``rows`` of a pass at most, of them ``singles`` that are the only ones of their sequence;
    more are read in several passes. ``graphs``: passes are captured once and replayed, on a GPU.
    ``invariant``: a row's bits do not depend on the rows beside it; None: in float32 alone.
    ``kernels``: passes are padded to the sizes that kernels are compiled for; without, they have
    the rows that there are, and NumPy or the references compute them; None: where kernels run.
    """

    rows: int = 576
    singles: int = 64
    graphs: bool = True
    invariant: bool | None = None
    kernels: bool | None = None


def takes_kernels(keys: Tensor) -> bool:
    """Whether kernels run upon a store whose keys are on this one's device and in its dtype."""
    if not keys.is_cuda or not runs(keys) or keys.dtype not in _DTYPES:
        return False
    return torch.cuda.get_device_capability(keys.device) >= _CAPABLE_SINCE


class Layers:
    """The three stacks of layers and the two heads, over a pool's store.

    The model's weights are packed in place. ``latest`` (slots, 2) int64 are the rows that slots
    drew last, for those that the host has not seen. Sequences are read, never changed: who calls
    notes how far a part has read. With ``kernels``, a graph serves one size of pass (``PassSize``)
    of one part, is captured at its first use or by ``warm``, and holds what kernels' switches said
    then. All share one pool of memory and one set of buffers: passes follow one another on one
    stream.

    ``invariant``: a row's sums are taken in the same order whoever shares its pass. With kernels
    no bit of a row then depends on the others. Without, that is so of attention and norms; a
    float32 matmul is as its library has it, and MKL's of few rows (up to 3 on the processors
    tried) may differ from one of more in a row's last bits.

    Raises:
        CheckpointError: matmuls of one input are quantised differently.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KVStore,
        latest: Tensor,
        options: LayerOptions | None = None,
    ) -> None:
        self.model, self.store, self.latest = model, store, latest
        options = options or LayerOptions()
        kernels, invariant = options.kernels, options.invariant
        self.kernels = takes_kernels(store.keys) if kernels is None else kernels
        if invariant is None or not self.kernels:
            invariant = store.keys.dtype == torch.float32
        self.invariant = invariant
        self.limits = PassLimits(
            options.rows,
            min(options.singles, options.rows),
            min(len(store.hidden), model.config.max_position_embeddings),
            store.rows_per_block,
            tiled=self.invariant,
            exact=not self.kernels,
        )
        self._graphs = Graphs[tuple[Part, PassSize], None](
            store.keys.device, STEPPING, enabled=self.kernels and options.graphs
        )
        self.planner = Planner(self.limits)
        self._inputs: dict[tuple[bool, PassSize], StepInputs] = {}
        config, device, dtype = model.config, store.keys.device, store.keys.dtype
        self._eps, self._pad = config.rms_norm_eps, config.modality_pad_token_id
        self._stacks = packed_stacks(model.model)
        self._tables = (
            model.model.embed_tokens.weight.detach(), model.model.audio_embed.weight.detach()
        )  # fmt: skip
        for head in (model.text_lm_head, model.audio_lm_head):
            keep_fp16(head.weight)
        self.buffers = LayerBuffers.allocate(config, self.limits.rows, device, dtype)
        self._angles = rotary_table(self.limits.keys, config.head_dim, config.rope_theta, device)
        self._work = _work(config, self.limits, store, invariant=self.invariant)
        self.cpu_layers = {
            part: CpuLayers(stack, store, self._angles, self._eps)
            for part, stack in self._stacks.items()
            if not self.kernels and takes_cpu_layers(stack, store)
        }
        layers = [layer for stack in self._stacks.values() for layer in stack.layers]
        self._linears = Linears(
            layers, self._eps, self.limits.rows,
            invariant=self.invariant, kernels=not self.limits.exact,
        )  # fmt: skip

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def weight_bytes(self) -> int:
        """Memory of the layers' weights, which are the model's own."""
        return sum(stack.nbytes for stack in self._stacks.values())

    @property
    def fixed_bytes(self) -> int:
        """Memory of the device that they hold for good, besides weights and store.

        That is buffers, tables and descriptors; what graphs hold besides is torch's to tell.
        """
        own = self.buffers.nbytes + self._angles.nbytes + self._work.nbytes
        inputs = sum(inputs.nbytes for inputs in self._inputs.values())
        return own + self._linears.fixed_bytes + inputs

    def trunk(self, step: int, rows: list[Row], spans: list[QuerySpan]) -> None:
        """Read the ``rows`` of ``spans``; what the trunk gives for them goes into the store.

        Raises:
            EngineInputError: an input is not what it must be; nothing was written.
        """
        first, planned = 0, list[Planned]()
        for lot in self.limits.lots(spans):
            end = first + _count(lot)
            planned.append(self.planner.embedding(step, rows[first:end], lot))
            first = end
        if first != len(rows):
            raise EngineInputError(f"input 'rows' has {len(rows)} rows, must have {first}")
        self._require(Part.TRUNK, step, planned)
        for one in planned:
            self._run(Part.TRUNK, step, one)

    def block(self, step: int, part: Part, spans: list[QuerySpan], wanted: list[int]) -> Tensor:
        """Outputs (W, C), normed, of a modality block at packed rows ``wanted`` of ``spans``.

        It reads what the trunk left in the store. ``wanted`` ascends. What it returns stays as it
        is whatever runs next.

        Raises:
            EngineInputError: an input is not what it must be; nothing was written.
        """
        first, planned, counts = 0, list[Planned](), list[int]()
        for lot in self.limits.lots(spans):
            end = first + _count(lot)
            inside = [row - first for row in wanted if first <= row < end]
            planned.append(self.planner.wanting(step, lot, inside))
            counts.append(len(inside))
            first = end
        self._require(part, step, planned)
        found = list[Tensor]()
        for one, count in zip(planned, counts, strict=True):
            self._run(part, step, one)
            found.append(self.buffers.asked[:count].clone())
        return found[0] if len(found) == 1 else torch.cat(found)

    def logits(self, channel: int, hidden: Tensor) -> Tensor:
        """Raw logits (W, V) of a head for ``block``'s outputs, in the model's dtype."""
        head = self.model.audio_lm_head if channel == AUDIO else self.model.text_lm_head
        weight = head.weight.detach()
        if not self.kernels or (len(hidden) > FEW_ROWS and not self.invariant):
            y = linear_fp16(hidden, head.weight)
            return F.linear(hidden, weight) if y is None else y
        out = hidden.new_empty((len(hidden), len(weight)))
        return rms_linear(hidden, None, 0.0, weight, out, invariant=self.invariant)

    @torch.inference_mode()
    def warm(self, sizes: Sequence[PassSize]) -> None:
        """Compile what passes of these sizes run, all kernels at the same time; capture them."""
        if not (self.kernels and self.store.keys.is_cuda and runs(self.store.keys)):
            return
        passes = [(part, size) for size in sizes for part in Part]
        with compiled_together():
            for part, size in passes:
                self.run(part, self._inputs_of(part, size))
        for part, size in passes:
            self._ready(part, size)

    def run(self, part: Part, inputs: PassInputs) -> None:
        """Read the pass's rows with a part.

        The trunk leaves its output in the store; a modality block leaves the rows that are
        wanted, normed, in the first of ``buffers.asked``.
        """
        stack, buffers = self._stacks[part], self.buffers.first(inputs.size.rows)
        if part is Part.TRUNK:
            latest = Latest(self.latest, inputs.slots)
            embed_rows(inputs.rows, *self._tables, self._pad, buffers.hidden, latest)
        else:
            gather_rows(self.store.hidden, inputs.slot_mapping, buffers.hidden)
        if part in self.cpu_layers:
            self.cpu_layers[part].run(buffers.hidden, inputs)
        else:
            for number, layer in enumerate(stack.layers, stack.first):
                self._attention(layer, number, buffers, inputs)
                self._mlp(layer, buffers)
        if stack.norm_weight is None:
            scatter_rows(buffers.hidden, inputs.slot_mapping, self.store.hidden)
        else:
            wanted = len(inputs.wanted)
            asked = gather_rows(buffers.hidden, inputs.wanted, buffers.normed[:wanted])
            rms_norm(asked, stack.norm_weight, self._eps, buffers.asked[:wanted])

    def _attention(
        self, layer: LayerWeights, number: int, buffers: LayerBuffers, inputs: PassInputs
    ) -> None:
        self._linears.normed(
            buffers.hidden, layer.attention_norm_weight, layer.qkv, buffers.qkv, buffers
        )
        size = inputs.size
        keys, values = self.store.keys[number], self.store.values[number]
        turn = (layer.query_norm_weight, layer.key_norm_weight), self._eps, self._angles
        block_rows = self.store.rows_per_block
        span = size.blocks * block_rows
        if size.tiles:
            rope_kv(
                buffers.qkv, *turn, inputs.positions, inputs.written, keys, values, buffers.query
            )
        if size.singles:
            single = slice(0, size.singles)
            attention_decode(
                buffers.qkv[single], *turn, keys, values, inputs.block_tables[single],
                inputs.context_lens, buffers.mixed[single],
                block_rows=block_rows, span=span, work=self._work,
            )  # fmt: skip
        if size.tiles:
            # After single rows, where their zeros may stand for want of so many.
            attention_prefill(
                buffers.query, keys, values, inputs.block_tables, inputs.tiles, buffers.mixed,
                block_rows=block_rows, span=span, work=self._work, invariant=self.invariant,
            )  # fmt: skip
        self._linears.added(buffers.mixed, layer.o_proj, buffers.hidden, buffers)

    def _mlp(self, layer: LayerWeights, buffers: LayerBuffers) -> None:
        self._linears.gated(
            buffers.hidden, layer.mlp_norm_weight, layer.gate_up, buffers.inner, buffers
        )
        self._linears.added(buffers.inner, layer.down, buffers.hidden, buffers)

    def _inputs_of(self, part: Part, size: PassSize) -> StepInputs:
        key = part is Part.TRUNK, size
        if key not in self._inputs:
            self._inputs[key] = StepInputs(size, self.store.keys.device, embeds=key[0])
        return self._inputs[key]

    def _require(self, part: Part, step: int, planned: list[Planned]) -> None:
        """Raise EngineInputError before the first of several passes, not among them."""
        if len(planned) > 1:
            for one in planned:
                check_planned(one, step, embeds=part is Part.TRUNK)

    def _run(self, part: Part, step: int, planned: Planned) -> None:
        if not self.kernels:
            embeds = part is Part.TRUNK
            with references_only():
                device = self.store.keys.device
                self.run(part, ExactInputs(planned, step, device, embeds=embeds))
            return
        captured = self._ready(part, planned.size)
        inputs = self._inputs_of(part, planned.size)
        inputs.fill(planned, step)
        if captured:
            self._graphs.replay((part, planned.size))
        else:
            self.run(part, inputs)

    def _ready(self, part: Part, size: PassSize) -> bool:
        """Whether a pass has a graph, captured now if it was not; False where there is to be none.

        It is run once before, on padding, so that what is made once is made.
        """
        if not (self._graphs.enabled and runs(self.store.keys)):
            return False
        key = part, size
        if key not in self._graphs:
            inputs = self._inputs_of(part, size)
            inputs.clear()
            self._graphs.ready(key, lambda: self.run(part, inputs))
        return True


def _count(spans: list[QuerySpan]) -> int:
    return sum(map(len, spans))


def _work(
    config: LanguageModelConfig, limits: PassLimits, store: KVStore, *, invariant: bool
) -> Tensor:
    """What programs of the attention of any pass leave one another; references leave nothing."""
    keys = store.keys
    if limits.exact:
        return torch.zeros(0, device=keys.device)
    shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    span = limits.size(1, 1, 0, limits.keys).blocks * limits.block_rows
    numbers = prefill_numbers(limits.tiles, *shape, span, keys.dtype, invariant=invariant)
    if not limits.tiled:
        numbers = max(numbers, decode_numbers(limits.singles, *shape, span, keys.dtype))
    return torch.zeros(numbers, device=keys.device)
