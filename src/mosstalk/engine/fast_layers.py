"""The network over packed rows: on a GPU one captured graph a pass, elsewhere the references.

Letters: W wanted rows, C hidden_size, V ids of a channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layer_pass import LayerPass
from mosstalk.engine.layer_weights import packable
from mosstalk.engine.layers import Layers, PlainLayers
from mosstalk.engine.packed import QuerySpan
from mosstalk.engine.sequence import Part
from mosstalk.engine.step_inputs import PassSize, Planned, StepInputs
from mosstalk.engine.step_plan import PassLimits, Planner
from mosstalk.errors import EngineInputError
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.launch import compiled_together, runs
from mosstalk.ops.linear import rms_linear
from mosstalk.ops.linear_tiles import FEW_ROWS
from mosstalk.ops.sampling_parts import AUDIO
from mosstalk.runtime.graphs import STEPPING, Graphs

_CAPABLE_SINCE = (8, 0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FastOptions:
    """``rows`` of a pass at most, of them ``singles`` that are the only ones of their sequence;
    more are read in several passes. ``graphs``: passes are captured once and replayed, on a GPU.
    ``invariant``: a row's bits do not depend on the rows beside it; None: in float32 alone.
    """

    rows: int = 576
    singles: int = 64
    graphs: bool = True
    invariant: bool | None = None


def suited(model: LanguageModel, store: KVStore) -> bool:
    """Whether kernels run where the store is, in its dtype, upon these weights."""
    return suited_to(model, store.keys)


def suited_to(model: LanguageModel, keys: Tensor) -> bool:
    """``suited`` to a store whose keys are on this one's device and in its dtype."""
    if not keys.is_cuda or not runs(keys) or keys.dtype not in _DTYPES:
        return False
    if not packable(model.model, keys.dtype):
        return False
    return torch.cuda.get_device_capability(keys.device) >= _CAPABLE_SINCE


def best_layers(
    model: LanguageModel, store: KVStore, latest: Tensor, options: FastOptions
) -> Layers:
    """``FastLayers`` where kernels run, plain torch elsewhere."""
    if suited(model, store):
        return FastLayers(model, store, latest, options)
    return PlainLayers(model, store, latest)


class FastLayers(Layers):
    """Kernels, in CUDA graphs on a GPU; the model's weights are packed in place.

    A graph serves one size of pass (``PassSize``) of one part, is captured at its first use or
    by ``warm``, and holds what kernels' switches said then. All share one pool of memory and
    one set of rooms: passes follow one another on one stream.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KVStore,
        latest: Tensor,
        options: FastOptions | None = None,
    ) -> None:
        super().__init__(model, store, latest)
        options = options or FastOptions()
        exact = store.keys.dtype == torch.float32
        self.invariant = exact if options.invariant is None else options.invariant
        self.limits = PassLimits(
            options.rows,
            min(options.singles, options.rows),
            min(len(store.hidden), model.config.max_position_embeddings),
            store.rows_per_block,
            self.invariant,
        )
        device = store.keys.device
        self._graphs = Graphs[tuple[Part, PassSize]](device, STEPPING, enabled=options.graphs)
        self.planner = Planner(self.limits)
        self.layer_pass = LayerPass(model, store, latest, self.limits, invariant=self.invariant)
        self._inputs: dict[tuple[bool, PassSize], StepInputs] = {}

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def weight_bytes(self) -> int:
        """Memory of the layers' weights, which are the model's own."""
        return self.layer_pass.weight_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory of rooms, tables and descriptors; what graphs hold besides is torch's to tell."""
        return self.layer_pass.fixed_bytes + sum(inputs.nbytes for inputs in self._inputs.values())

    def trunk(self, step: int, rows: list[Row], stretches: list[QuerySpan]) -> None:
        """See ``Layers``."""
        first, planned = 0, list[Planned]()
        for lot in self.limits.lots(stretches):
            end = first + _count(lot)
            planned.append(self.planner.embedding(step, rows[first:end], lot))
            first = end
        if first != len(rows):
            raise EngineInputError(f"input 'rows' has {len(rows)} rows, must have {first}")
        self._require(Part.TRUNK, step, planned)
        for one in planned:
            self._run(Part.TRUNK, step, one)

    def block(self, step: int, part: Part, stretches: list[QuerySpan], wanted: list[int]) -> Tensor:
        """See ``Layers``; ``wanted`` ascends. What it returns stays as it is whatever runs next."""
        first, planned, counts = 0, list[Planned](), list[int]()
        for lot in self.limits.lots(stretches):
            end = first + _count(lot)
            inside = [row - first for row in wanted if first <= row < end]
            planned.append(self.planner.wanting(step, lot, inside))
            counts.append(len(inside))
            first = end
        self._require(part, step, planned)
        found = list[Tensor]()
        for one, count in zip(planned, counts, strict=True):
            self._run(part, step, one)
            found.append(self.layer_pass.rooms.asked[:count].clone())
        return found[0] if len(found) == 1 else torch.cat(found)

    def logits(self, channel: int, hidden: Tensor) -> Tensor:
        """See ``Layers``."""
        head = self.model.audio_lm_head if channel == AUDIO else self.model.text_lm_head
        weight = head.weight.detach()
        if len(hidden) > FEW_ROWS and not self.invariant:
            return F.linear(hidden, weight)
        out = hidden.new_empty((len(hidden), len(weight)))
        return rms_linear(hidden, None, 0.0, weight, out, invariant=self.invariant)

    @torch.inference_mode()
    def warm(self, sizes: Sequence[PassSize]) -> None:
        """Compile what passes of these sizes run, all kernels at the same time; capture them."""
        if not (self.store.keys.is_cuda and runs(self.store.keys)):
            return
        passes = [(part, size) for size in sizes for part in Part]
        with compiled_together():
            for part, size in passes:
                self.layer_pass.run(part, self._inputs_of(part, size))
        for part, size in passes:
            self._ready(part, size)

    def _inputs_of(self, part: Part, size: PassSize) -> StepInputs:
        key = part is Part.TRUNK, size
        if key not in self._inputs:
            self._inputs[key] = StepInputs(size, self.store.keys.device, embeds=key[0])
        return self._inputs[key]

    def _require(self, part: Part, step: int, planned: list[Planned]) -> None:
        """Raise EngineInputError before the first of several passes, not among them."""
        if len(planned) > 1:
            for one in planned:
                self._inputs_of(part, one.size).check(one, step)

    def _run(self, part: Part, step: int, planned: Planned) -> None:
        captured = self._ready(part, planned.size)
        inputs = self._inputs_of(part, planned.size)
        inputs.fill(planned, step)
        if captured:
            self._graphs.replay((part, planned.size))
        else:
            self.layer_pass.run(part, inputs)

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
            self._graphs.ready(key, lambda: self.layer_pass.run(part, inputs))
        return True


def _count(stretches: list[QuerySpan]) -> int:
    return sum(map(len, stretches))
