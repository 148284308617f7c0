"""Options of a flow for many replies, and the voices that it has computed.

What a voice's first blocks leave depends on the voice alone; it is computed once, shared, and
never dropped while a reply uses it.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mosstalk.codec.flow_pages import PageLayout
from mosstalk.config import FlowConfig
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.errors import OptionError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice

MEMORY_MIB = 8192
"""Of a GPU, for voices and replies, unless something else is asked for."""
_VOICES_S = 40.0
_LANES = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class FlowOptions:
    """How a flow for many replies computes and what it may keep.

    ``context_s`` bounds what a reply sees of itself besides its voice, in seconds, rounded up
    to whole blocks, the newest included; None keeps all and is exact. ``steps``: Euler steps,
    None as many as the flow's config says. ``dtype``: float32, or float16 or bfloat16 for the
    estimator's matmuls, keys and values on a GPU. ``pages`` bounds the blocks kept of replies
    and voices; None as many as ``memory_mib`` holds, and where that is None too and a reply's
    history is bounded, as many as ``replies`` at once and 40 s of voices need. ``graphs`` off runs
    kernel by kernel. ``max_items`` bounds the blocks of a pass, ``lanes`` the passes at the same
    time; None: as many as ``replies`` need, up to 4, on a GPU. ``voices`` are kept computed while
    nobody uses them, the latest used ones. With ``grows`` there are twice as many pages once they
    are full, for which all replies wait, instead of a refusal. ``paged`` forces or forbids pages
    and kernels; None has them on a GPU, where alone they are fast.
    """

    context_s: float | None = None
    steps: int | None = None
    dtype: torch.dtype = torch.float32
    pages: int | None = None
    memory_mib: int | None = None
    replies: int | None = None
    graphs: bool = True
    max_items: int = 32
    lanes: int | None = None
    voices: int = 16
    grows: bool = False
    paged: bool | None = None

    def __post_init__(self) -> None:
        if self.context_s is not None and not 0 < self.context_s < math.inf:
            raise OptionError(f"flow context must be above 0 seconds, not {self.context_s}")
        counts = {"steps": self.steps, "pages": self.pages, "memory_mib": self.memory_mib}
        counts |= {"max_items": self.max_items, "voices": self.voices}
        counts |= {"replies": self.replies, "lanes": self.lanes}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise OptionError(f"{name} must be at least 1, not {count}")
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise OptionError(f"a flow computes in float32, float16 or bfloat16, not {self.dtype}")

    def context_blocks(self, config: FlowConfig) -> int | None:
        """Blocks of its own that a reply sees; None is all."""
        if self.context_s is None:
            return None
        # A hair less, so that 1.2 s are three blocks of 0.4 s in floating point too.
        return math.ceil(self.context_s * CODES_PER_SECOND / config.chunk_size - 1e-9)

    def page_count(self, layout: PageLayout) -> int:
        """How many pages there are.

        Raises:
            OptionError: ``memory_mib`` does not hold one.
        """
        if self.pages:
            return self.pages
        own = self.context_blocks(layout.config)
        if self.replies and own and self.memory_mib is None:
            voices = math.ceil(_VOICES_S * CODES_PER_SECOND / layout.config.chunk_size)
            return self.replies * (own + 1) + voices
        memory_mib = self.memory_mib or MEMORY_MIB
        count = memory_mib * _MIB // layout.bytes
        if count < 1:
            raise OptionError(f"memory_mib={memory_mib} is less than a page: {layout.bytes} B")
        return count

    def lane_count(self, device: torch.device) -> int:
        """How many passes may run at the same time."""
        if self.lanes or device.type != "cuda":
            return self.lanes or 1
        needed = math.ceil(self.replies / self.max_items) if self.replies else _LANES
        return min(_LANES, needed)


@dataclass(frozen=True)
class FlowFigures:
    """What a flow for many replies holds, in pages of ``page_bytes``.

    ``mb_per_s``: memory that a second of own history takes, and of a voice, in 10^6 bytes.
    ``fixed_bytes``: tables and buffers besides weights and pages.
    """

    pages: int
    pages_in_use: int
    page_bytes: int
    mb_per_s: float
    voices: int
    weight_bytes: int
    fixed_bytes: int
    graphs: int


def with_steps(flow: FlowDecoder, steps: int | None) -> FlowDecoder:
    """The same flow with ``steps`` Euler steps, sharing its weights; None leaves it as it is."""
    if steps is None or steps == flow.config.n_timesteps:
        return flow
    other, decoder = copy.copy(flow), copy.copy(flow.decoder)
    other.config = decoder.config = replace(flow.config, n_timesteps=steps)
    other._modules = {**flow._modules, "decoder": decoder}
    return other


def alone_codes(voice: Voice, config: FlowConfig) -> int:
    """How many of a voice's codes depend on the voice alone: whole blocks with their look-ahead."""
    spare = max(0, voice.codes.shape[0] - config.pre_lookahead_len)
    return spare // config.chunk_size * config.chunk_size


Start = TypeVar("Start")


class VoiceShelf(Generic[Start]):
    """Computed voices by digest, at most ``limit`` of them unused; ``drop`` frees one."""

    def __init__(self, limit: int, drop: Callable[[Start], None]) -> None:
        self._limit, self._drop = limit, drop
        self._used: dict[bytes, tuple[Start, int]] = {}
        self._unused: OrderedDict[bytes, Start] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used) + len(self._unused)

    def take(self, key: bytes, compute: Callable[[], Start]) -> Start:
        """The voice, used once more from now on; computed where it is not here."""
        if key in self._used:
            start, users = self._used[key]
        elif key in self._unused:
            start, users = self._unused.pop(key), 0
        else:
            start, users = compute(), 0
        self._used[key] = start, users + 1
        return start

    def give(self, key: bytes) -> None:
        """One user less; a voice without any stays until its place is needed."""
        start, users = self._used.pop(key)
        if users > 1:
            self._used[key] = start, users - 1
            return
        self._unused[key] = start
        while len(self._unused) > self._limit:
            self.evict()

    def evict(self) -> bool:
        """Drop the voice that has been unused for longest; False when all are in use."""
        if not self._unused:
            return False
        self._drop(self._unused.popitem(last=False)[1])
        return True


def speaker_of(flow: FlowDecoder, voice: Voice) -> Tensor:
    """The voice's speaker vector (80,) as the estimator reads it."""
    weight = flow.spk_embed_affine_layer.weight
    unit = torch.nn.functional.normalize(voice.embedding.to(weight)[None], dim=1)
    return flow.spk_embed_affine_layer(unit)[0]
