"""What a flow for many replies may keep: its options, pages of blocks, and computed voices.

A page is what one block leaves for those that follow it: the keys and values of every layer, Euler
step and guidance branch, and the last rows that each convolution reads. Page 0 is never given out:
places of a batch that are not in use write there. I items of a pass, T codes and F frames of a
block, S pages that the longest item may see.

What a voice's first blocks leave depends on the voice alone; it is computed once, shared, and
never dropped while a reply uses it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.config import FlowConfig
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.errors import CodecFullError, ConfigError, OptionError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice
from mosstalk.ops.attention_flow import MEMBERS
from mosstalk.runtime.device_inputs import DeviceInputs, Field
from mosstalk.runtime.sharing import PagePool

BRANCHES = 2
TAIL = 2
RETRY_AFTER_S = 1.0
"""When to ask again after a refusal: a reply's end gives its pages back."""
_SMALLEST_CHUNK = 2


@dataclass(frozen=True)
class PageLayout:
    """Sizes of a page of a flow with ``steps`` Euler steps.

    ``dtype`` is that of the estimator's matmuls, so of the keys, the values and the
    convolutions' inputs that it keeps; the encoder's are float32.
    """

    config: FlowConfig
    steps: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.config.chunk_size < _SMALLEST_CHUNK:
            raise ConfigError("flow/config.json: blocks of one code are not kept in pages")

    @property
    def frames(self) -> int:
        """Frames of a block."""
        return self.config.chunk_size * self.config.token_mel_ratio

    @property
    def layers(self) -> int:
        """Transformer blocks of the estimator."""
        return (2 + self.config.estimator_mid_blocks) * self.config.estimator_transformer_blocks

    @property
    def conv_inputs(self) -> list[int]:
        """Channels that each convolution of the estimator reads, in the order they run."""
        width = self.config.estimator_channels
        mids = [width, width] * self.config.estimator_mid_blocks
        down, up = [4 * self.config.mel_bins, width, width], [2 * width, width, width]
        return [*down, *mids, *up, width]

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """(steps, layers, branch, k and v, H, F, d) of the estimator."""
        heads, size = self.config.estimator_heads, self.config.estimator_head_dim
        return (self.steps, self.layers, BRANCHES, 2, heads, self.frames, size)

    def encoder_shape(self, layers: int, rows: int) -> tuple[int, ...]:
        """(layers, 1, k and v, H, rows, d) of a stack of the encoder."""
        heads = self.config.attention_heads
        return (layers, 1, 2, heads, rows, self.config.input_size // heads)

    @property
    def bytes(self) -> int:
        """Device memory of a page."""
        parts: list[Tensor] = list(vars(PageStore(self, 1, "meta")).values())
        return sum(part.numel() * part.element_size() for part in parts)


class PageStore:
    """``pages`` pages, allocated at once, zeros.

    ``kv`` (pages, steps, layers, 2, 2, H, F, d) and ``tails`` (pages, steps, all convolutions'
    rows side by side) are the estimator's; ``code_kv`` and ``frame_kv`` (pages, layers, 1, 2, H,
    rows, d) the encoder's, ``ahead_tails`` and ``up_tails`` (pages, 1, 2, C) its convolutions'.
    """

    def __init__(self, layout: PageLayout, pages: int, device: torch.device | str) -> None:
        config = layout.config
        wide = sum(BRANCHES * TAIL * inputs for inputs in layout.conv_inputs)
        codes = layout.encoder_shape(config.encoder_blocks, config.chunk_size)
        frames = layout.encoder_shape(config.up_encoder_blocks, layout.frames)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((pages, *shape), dtype=dtype, device=device)

        self.kv = zeros(*layout.kv_shape, dtype=layout.dtype)
        self.tails = zeros(layout.steps, wide, dtype=layout.dtype)
        self.code_kv, self.frame_kv = zeros(*codes), zeros(*frames)
        self.ahead_tails, self.up_tails = (zeros(1, TAIL, config.input_size) for _ in range(2))

    def copy_from(self, other: "PageStore") -> None:
        """Take over all pages of another store, which has no more."""
        for name, part in vars(other).items():
            getattr(self, name)[: part.shape[0]] = part

    def conv_tails(self, layout: PageLayout) -> list[list[Tensor]]:
        """Views (pages, 2, 2, C) of each step's convolutions in the order they run."""
        ends = accumulate((BRANCHES * TAIL * n for n in layout.conv_inputs), initial=0)
        places = list(zip(pairwise(ends), layout.conv_inputs, strict=True))
        return [
            [step[:, start:end].unflatten(1, (BRANCHES, TAIL, n)) for (start, end), n in places]
            for step in self.tails.unbind(1)
        ]


class FlowPages(PagePool):
    """Pages 1 .. ``size`` of a flow."""

    def __init__(self, size: int) -> None:
        super().__init__(range(1, size + 1))

    def take(self, count: int) -> list[int]:
        """``count`` pages of one's own.

        Raises:
            CodecFullError: there are fewer; none is taken then.
        """
        pages = super().take(count)
        if pages is None:
            raise CodecFullError(
                f"the flow has {self.free} of {self.size} pages left and {count} are needed: "
                "close replies, raise FlowOptions.memory_mib or lower --flow-context",
                retry_after_s=RETRY_AFTER_S,
            )
        return pages


# What one pass reads.


NOTHING = -1
Rows = npt.NDArray[np.int32]
_NOT_ONE_EACH = ("codes", "table", "packs")


@dataclass(frozen=True)
class Item:
    """One block: its ``codes`` (1 .. T) and those known of the three that follow them.

    ``start`` is its first frame, counted from the start of the voice. ``pages`` are all that
    it sees, in order, its own last; ``before`` is the one that precedes it, or -1.
    ``condition`` (at most F, 80) are the voice's mel frames in it, on the device.
    """

    codes: list[int]
    ahead: list[int]
    start: int
    pages: list[int]
    before: int
    speaker: int
    condition: Tensor | None


def in_blocks(
    codes: list[int], ahead: list[int], config: FlowConfig
) -> list[tuple[list[int], list[int]]]:
    """Codes that begin a block, cut into blocks, each with the codes that follow it."""
    known, chunk = codes + ahead, config.chunk_size
    blocks = []
    for start in range(0, len(codes), chunk):
        end = min(start + chunk, len(codes))
        blocks.append((codes[start:end], known[end : end + config.pre_lookahead_len]))
    return blocks


class PassInputs:
    """The descriptors of a pass, int32, one buffer on the device and one copy to fill it.

    Each is a tensor (I,) but ``codes`` (I, T + 3), ``table`` (I, S) and ``packs`` (I, 2), which
    says what ``attention_flow`` takes at once. ``valid_*`` count an
    item's own rows, ``visible_*`` all that it sees; -1 is no item, no page, no code.
    ``noise``, ``condition`` and ``speaker`` are rows of the flow's tables.
    """

    page: Tensor
    before_item: Tensor
    before_page: Tensor
    valid_codes: Tensor
    valid_frames: Tensor
    visible_codes: Tensor
    visible_frames: Tensor
    noise: Tensor
    condition: Tensor
    speaker: Tensor
    codes: Tensor
    table: Tensor
    packs: Tensor

    def __init__(self, items: int, span: int, config: FlowConfig, device: torch.device) -> None:
        self.items, self.span = items, span
        names = [name for name in PassInputs.__annotations__ if name not in _NOT_ONE_EACH]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (items,))
        shapes["codes"] = (items, config.chunk_size + config.pre_lookahead_len)
        shapes["table"], shapes["packs"] = (items, span), (items, 2)
        fields = {name: Field(shape) for name, shape in shapes.items()}
        self._inputs = DeviceInputs(fields, device)
        for name, tensor in self._inputs.tensors.items():
            setattr(self, name, tensor)

    def fill(self, values: dict[str, Rows]) -> None:
        """Copy one pass's descriptors to the device, in stream order and without waiting.

        Raises:
            EngineInputError: one is missing, unknown, misshapen or not int32.
        """
        self._inputs.fill(values)


def descriptors(items: Sequence[Item], inputs: PassInputs, config: FlowConfig) -> dict[str, Rows]:
    """The values of ``inputs`` for ``items``; places beyond them see and change nothing.

    Rows of noise and condition are what ``stage`` of the flow puts in; here all are 0.
    """
    width = config.chunk_size + config.pre_lookahead_len
    values = {
        name: np.zeros(inputs.items, np.int32)
        for name in PassInputs.__annotations__
        if name not in _NOT_ONE_EACH
    }
    codes = values["codes"] = np.full((inputs.items, width), NOTHING, np.int32)
    table = values["table"] = np.zeros((inputs.items, inputs.span), np.int32)
    for name in ("before_item", "before_page"):
        values[name].fill(NOTHING)
    written: dict[int, int] = {}
    for place, item in enumerate(items):
        own, count, seen = item.pages[-1], len(item.codes), len(item.pages)
        known = item.codes + item.ahead
        codes[place, : len(known)] = known
        table[place, :seen] = item.pages
        values["page"][place] = own
        values["before_item"][place] = written.get(item.before, NOTHING)
        if item.before not in written:
            values["before_page"][place] = item.before
        values["valid_codes"][place] = count
        values["visible_codes"][place] = (seen - 1) * config.chunk_size + count
        values["speaker"][place] = item.speaker
        values["noise"][place] = item.start
        written[own] = place
    values["packs"] = packs_of(table, [len(item.pages) for item in items])
    for kind in ("valid", "visible"):
        values[f"{kind}_frames"] = values[f"{kind}_codes"] * np.int32(config.token_mel_ratio)
    return values


def packs_of(table: Rows, seen: Sequence[int]) -> Rows:
    """``packs`` (I, 2) of ``attention_flow`` for items of ``seen`` pages each.

    ``table`` (I, S) are their pages, and those of places beyond them. Neighbours are put together
    that begin with the same pages, an item's last, which may be short, not among them.
    """
    packs = np.tile(np.array([1, 0], np.int32), (len(table), 1))
    alike = np.logical_and.accumulate(table[1:] == table[:-1], axis=1).sum(axis=1)
    leader = 0
    for item in range(1, len(seen)):
        common = min(int(alike[item - 1]), seen[item - 1] - 1, seen[item] - 1)
        if common <= 0 or item - leader == MEMBERS:
            leader = item
            continue
        packs[leader] = item - leader + 1, min(common, packs[leader, 1] or common)
        packs[item, 0] = 0
    return packs


MEMORY_MIB = 8192
"""Of a GPU, for voices and replies, unless something else is asked for."""
FEWEST_HELD = 2
"""Own pages of a reply: a block's convolutions read the page before its own."""
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

    def reply_pages(self, config: FlowConfig) -> int | None:
        """Pages that a reply takes besides its voice's; None where it keeps all."""
        own = self.context_blocks(config)
        # One more: a hop writes before the oldest is given back.
        return None if own is None else max(own, FEWEST_HELD) + 1

    def page_count(self, layout: PageLayout) -> int:
        """How many pages there are.

        Raises:
            OptionError: ``memory_mib`` does not hold one.
        """
        if self.pages:
            return self.pages
        each = self.reply_pages(layout.config)
        if self.replies and each and self.memory_mib is None:
            # Nobody who has begun, and has a place in the vocoder, finds no page while voices take
            # no more than theirs.
            voices = math.ceil(_VOICES_S * CODES_PER_SECOND / layout.config.chunk_size)
            return self.replies * each + voices
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


def alone_codes(voice: Voice, config: FlowConfig) -> int:
    """How many of a voice's codes depend on the voice alone: whole blocks with their look-ahead."""
    spare = max(0, voice.codes.shape[0] - config.pre_lookahead_len)
    return spare // config.chunk_size * config.chunk_size


_Computed = TypeVar("_Computed")


class VoiceCache(Generic[_Computed]):
    """Computed voices by digest, at most ``limit`` of them unused; ``drop`` frees one."""

    def __init__(self, limit: int, drop: Callable[[_Computed], None]) -> None:
        self._limit, self._drop = limit, drop
        self._used: dict[bytes, tuple[_Computed, int]] = {}
        self._unused: OrderedDict[bytes, _Computed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used) + len(self._unused)

    def take(self, key: bytes, compute: Callable[[], _Computed]) -> _Computed:
        """The voice, used once more from now on; computed where it is not here."""
        if key in self._used:
            computed, users = self._used[key]
        elif key in self._unused:
            computed, users = self._unused.pop(key), 0
        else:
            computed, users = compute(), 0
        self._used[key] = computed, users + 1
        return computed

    def give(self, key: bytes) -> None:
        """One user less; a voice without any stays until its place is needed."""
        computed, users = self._used.pop(key)
        if users > 1:
            self._used[key] = computed, users - 1
            return
        self._unused[key] = computed
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
