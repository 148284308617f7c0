"""Blocks of replies, the pages that they leave, and what one pass over both reads.

A page is what one block leaves for those that follow it: the keys and values of every layer, Euler
step and guidance branch, and the last rows that each convolution reads. Page 0 belongs to nobody:
places of a batch that are not in use write there. I items of a pass, T codes and F frames of a
block, S pages that the longest item may see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.config import FlowConfig
from mosstalk.errors import CodecFullError, ConfigError
from mosstalk.ops.attention_flow import MEMBERS
from mosstalk.runtime.device_inputs import DeviceInputs, Field
from mosstalk.runtime.page_pool import PagePool

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
