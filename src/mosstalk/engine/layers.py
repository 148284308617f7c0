"""The network over packed rows of many sequences: what a step runs, in plain torch.

Letters: N packed rows, W of them wanted, C hidden_size, V ids of a channel.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.inputs import Inputs, Spec
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.packed import Packed, QuerySpan, run_block
from mosstalk.engine.sequence import Part
from mosstalk.engine.staging import Staging
from mosstalk.models.language_model import LanguageModel
from mosstalk.ops.sampling_parts import AUDIO

NOT_SEEN = -1
"""Text id of a row that the host has not seen yet: its audio id is the slot that drew it."""
_PLACE_SPECS = {"positions": Spec(("N",)), "places": Spec(("N",))}
_ROW_SPECS = {"rows": Spec(("N", 2))} | _PLACE_SPECS


class Layers(ABC):
    """The three stacks of layers and the two heads, over a pool's store.

    ``latest`` (slots, 2) int64 are the rows that slots drew last, for those that the host has
    not seen. Sequences are read, never changed: who calls notes how far a part has read.
    """

    def __init__(self, model: LanguageModel, store: KVStore, latest: Tensor) -> None:
        self.model, self.store, self.latest = model, store, latest

    @property
    def fixed_bytes(self) -> int:
        """Memory of the device that they hold for good, besides weights and store."""
        return 0

    @abstractmethod
    def trunk(self, step: int, rows: list[Row], stretches: list[QuerySpan]) -> None:
        """Read the ``rows`` of ``stretches``; what the trunk gives for them goes into the store.

        Raises:
            EngineInputError: an input is not what it must be; nothing was written.
        """

    @abstractmethod
    def block(self, step: int, part: Part, stretches: list[QuerySpan], wanted: list[int]) -> Tensor:
        """Outputs (W, C), normed, of a modality block at packed rows ``wanted`` of ``stretches``.

        It reads what the trunk left in the store.

        Raises:
            EngineInputError: an input is not what it must be; nothing was written.
        """

    def logits(self, channel: int, hidden: Tensor) -> Tensor:
        """Raw logits (W, V) of a head for ``block``'s outputs, in the model's dtype."""
        head = self.model.audio_lm_head if channel == AUDIO else self.model.text_lm_head
        logits: Tensor = head(hidden)
        return logits


class PlainLayers(Layers):
    """Torch operations, one after another, on any device."""

    def __init__(self, model: LanguageModel, store: KVStore, latest: Tensor) -> None:
        super().__init__(model, store, latest)
        self._staging = Staging(model.device)

    def trunk(self, step: int, rows: list[Row], stretches: list[QuerySpan]) -> None:
        """See ``Layers``."""
        packed = Packed.of(stretches, self._staging)
        inputs = Inputs(step, self._staging.put({"rows": np.array(rows)}))
        self._check(step, inputs, packed, _ROW_SPECS)
        text, audio = inputs["rows"].unbind(1)
        late = (text == NOT_SEEN)[:, None]
        known = torch.where(late, self.latest[torch.where(late[:, 0], audio, 0)], inputs["rows"])
        hidden = self.model.embed(known)
        theta = self.model.config.rope_theta
        hidden = run_block(self.model.model.shared_block, hidden, packed, self.store, theta)
        self.store.hidden[packed.places] = hidden

    def block(self, step: int, part: Part, stretches: list[QuerySpan], wanted: list[int]) -> Tensor:
        """See ``Layers``."""
        packed = Packed.of(stretches, self._staging)
        self._check(step, Inputs(step), packed, _PLACE_SPECS)
        backbone, theta = self.model.model, self.model.config.rope_theta
        text = part is Part.TEXT
        layers = backbone.text_block if text else backbone.audio_block
        hidden = run_block(layers, self.store.hidden[packed.places], packed, self.store, theta)
        norm = backbone.text_norm if text else backbone.audio_norm
        chosen = self._staging.put({"wanted": np.array(wanted, np.int64)})["wanted"]
        normed: Tensor = norm(hidden[chosen])
        return normed

    def _check(self, step: int, inputs: Inputs, packed: Packed, specs: Mapping[str, Spec]) -> None:
        inputs.tensors |= {"positions": packed.positions, "places": packed.places}
        inputs.check(specs, step, self.model.device)
