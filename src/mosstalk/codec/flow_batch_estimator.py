"""The flow's estimator on blocks of many replies at once, through the kernels.

Shapes: I items (blocks), F frames of each, R = 2 I F rows in the order (guidance branch, item,
frame), C channels. Nothing here is allocated in a pass but what ``EstimatorBuffers`` holds.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.codec.flow_batch_weights import EstimatorWeights, Stage, Transformer, held_bytes
from mosstalk.codec.flow_items import PassInputs
from mosstalk.codec.flow_pages import BRANCHES, PageLayout, PageStore
from mosstalk.codec.flow_parts import Linear, Norm
from mosstalk.models.flow import ConditionalFlow
from mosstalk.ops.attend_groups import attend_groups
from mosstalk.ops.attention_flow import attend_workspace, attention_flow
from mosstalk.ops.conv1d import conv1d
from mosstalk.ops.euler import euler
from mosstalk.ops.flow_linear import close_residual, linear_add, norm_linear, norm_qkv
from mosstalk.ops.norm import norm_act
from mosstalk.ops.tiles import norms_apart

_GROUPED_FROM = 12
"""Items that see the same keys first are taken together where there are so many items.

Not in float32, where nothing may depend on company.
"""
_MOST_SPLITS, _SPLIT_PROGRAMS = 8, 16
_LEAST_KEYS = 512
"""What a program that shares an item's keys takes at least: joining costs as much as some 400."""


def splits_for(items: int) -> int:
    """Programs that may share the keys of one item and head when there are ``items``."""
    return min(_MOST_SPLITS, max(1, _SPLIT_PROGRAMS // items))


@dataclass(frozen=True)
class EstimatorBuffers:
    """Where a pass of I items works, (R, ...) each; passes of fewer use the first rows.

    ``given`` is the estimator's input: x, mu, speaker, condition. ``entry``, ``both``,
    ``active``, ``query``, ``mixed`` and ``wide`` are what products read, in their dtype:
    ``entry`` is ``given`` again, ``both`` the up stage's input, the stream in its first half and
    the down stage's output in its second. ``raw``, ``stream`` and ``velocity`` are float32.
    """

    given: Tensor
    entry: Tensor
    raw: Tensor
    stream: Tensor
    active: Tensor
    both: Tensor
    query: Tensor
    mixed: Tensor
    wide: Tensor
    velocity: Tensor

    @classmethod
    def allocate(cls, layout: PageLayout, items: int, device: torch.device) -> "EstimatorBuffers":
        """Room for ``items`` items."""
        config, rows = layout.config, BRANCHES * items * layout.frames
        width, bins, dtype = config.estimator_channels, config.mel_bins, layout.dtype
        inner = config.estimator_heads * config.estimator_head_dim

        def room(channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((rows, channels), dtype=dtype, device=device)

        given = room(4 * bins)
        return cls(
            given=given,
            entry=given if dtype == torch.float32 else room(4 * bins, dtype),
            raw=room(width),
            stream=room(width),
            active=room(width, dtype),
            both=room(2 * width, dtype),
            query=room(inner, dtype),
            mixed=room(inner, dtype),
            wide=room(4 * width, dtype),
            velocity=room(bins),
        )

    def first(self, rows: int) -> "EstimatorBuffers":
        """The same memory's first ``rows`` rows."""
        return EstimatorBuffers(**{name: value[:rows] for name, value in vars(self).items()})

    @property
    def rounded(self) -> Tensor | None:
        """``entry``, where it is not the same memory as ``given``."""
        return None if self.entry.dtype == torch.float32 else self.entry


class PagedEstimator:
    """Euler steps over new blocks; what they leave lies in the pages."""

    def __init__(self, flow: ConditionalFlow, layout: PageLayout, store: PageStore) -> None:
        times = flow.times(store.kv.device)
        durations = times.diff().tolist()
        assert len(durations) == layout.steps
        self._weights = EstimatorWeights.of(flow.estimator, times[:-1], layout.dtype)
        self._durations: list[float] = durations
        self._guidance = flow.config.cfg_rate
        self._layout = layout
        # (pages, branch, 2, H, F, d) of each step and layer.
        self._kv = [list(step.unbind(1)) for step in store.kv.unbind(1)]
        self._tails = store.conv_tails(layout)
        self._work: dict[int, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return held_bytes(self._weights)

    def beside(self) -> "PagedEstimator":
        """The same weights and pages with a workspace of its own, for passes at the same time."""
        other = copy.copy(self)
        other._work = {}
        return other

    def reserve(self, items: int) -> None:
        """Allocate what a pass of ``items`` needs besides its rooms."""
        if items not in self._work:
            kv, frames = self._kv[0][0], self._layout.frames
            self._work[items] = attend_workspace(items, kv, frames, splits_for(items))

    def integrate(self, rooms: EstimatorBuffers, inputs: PassInputs) -> None:
        """From noise to mel, in the first columns of ``rooms.given``."""
        self.reserve(inputs.items)
        rounded = rooms.rounded
        if rounded is not None:
            rounded.copy_(rooms.given)
        for step, duration in enumerate(self._durations):
            _Step(self, rooms, inputs, step).run()
            euler(rooms.given, rooms.velocity, self._guidance, duration, rounded)


class _Step:
    """One Euler step's velocity; layers and convolutions are counted as they run."""

    def __init__(
        self, owner: PagedEstimator, rooms: EstimatorBuffers, inputs: PassInputs, step: int
    ) -> None:
        self.weights = owner._weights
        self.frames = owner._layout.frames
        self.work = owner._work[inputs.items]
        self.rooms, self.inputs, self.step = rooms, inputs, step
        self.apart = norms_apart(rooms.given.shape[0], rooms.both.dtype)
        self.kv: Iterator[Tensor] = iter(owner._kv[step])
        self.tails: Iterator[Tensor] = iter(owner._tails[step])

    def run(self) -> None:
        """From ``rooms.given`` to ``rooms.velocity``."""
        rooms, width = self.rooms, self.rooms.stream.shape[1]
        half, skip = rooms.both[:, :width], rooms.both[:, width:]
        down, *mids, up = self.weights.stages
        self._stage(down, rooms.entry, skip)
        self._close(down, skip, half)
        for mid in mids:
            self._stage(mid, half, half)
        self._stage(up, rooms.both, rooms.active)
        self._close(up, rooms.active, half)
        self._conv(half, self.weights.final, rooms.raw)
        norm, proj = self.weights.final_norm, self.weights.proj
        if self.apart:
            norm_act(rooms.raw, norm, rooms.active, activation="mish")
            norm_linear(rooms.active, None, *proj, rooms.velocity)
        else:
            norm_linear(rooms.raw, norm, *proj, rooms.velocity, mish=True)

    def _stage(self, stage: Stage, x: Tensor, out: Tensor) -> None:
        """All of a stage but its closing convolution, from ``x`` into ``out``."""
        rooms = self.rooms
        self._conv(x, stage.conv1, rooms.raw)
        time = stage.times[self.step]
        norm_act(rooms.raw, stage.norm1, rooms.active, activation="mish", add=time)
        self._conv(rooms.active, stage.conv2, rooms.raw)
        close_residual(rooms.raw, stage.norm2, x, *stage.beside, rooms.stream)
        *blocks, last = stage.transformers
        for block in blocks:
            self._transform(block, rooms.stream)
        self._transform(last, out)

    def _close(self, stage: Stage, x: Tensor, out: Tensor) -> None:
        assert stage.closing is not None
        self._conv(x, stage.closing, out)

    def _conv(self, x: Tensor, conv: Linear, out: Tensor) -> None:
        given = self.inputs
        conv1d(
            x,
            *conv,
            out,
            before_item=given.before_item,
            before_page=given.before_page,
            tails=next(self.tails),
            page=given.page,
            frames=self.frames,
            valid=given.valid_frames,
        )

    def _transform(self, block: Transformer, out: Tensor) -> None:
        """A transformer block of the stream, into ``out``."""
        rooms, given, kv = self.rooms, self.inputs, next(self.kv)
        x = rooms.stream
        read = self._normed(block.norm)
        norm_qkv(*read, block.qkv.weight, rooms.query, kv, given.page, frames=self.frames)
        self._attend(kv)
        linear_add(x, rooms.mixed, *block.out, out=x)
        read = self._normed(block.wide_norm)
        norm_linear(*read, *block.widen, rooms.wide, activation="gelu")
        linear_add(x, rooms.wide, *block.narrow, out=out)

    def _attend(self, kv: Tensor) -> None:
        rooms, given = self.rooms, self.inputs
        seen = rooms.query, kv, given.table, given.visible_frames
        if given.items >= _GROUPED_FROM and kv.dtype != torch.float32:
            attend_groups(*seen, given.groups, rooms.mixed, frames=self.frames)
            return
        attention_flow(
            *seen,
            rooms.mixed,
            frames=self.frames,
            splits=splits_for(given.items),
            least=_LEAST_KEYS,
            workspace=self.work,
        )

    def _normed(self, norm: Norm) -> tuple[Tensor, Norm | None]:
        """What a product reads of the stream, and the norm that it still has to take of it."""
        if not self.apart:
            return self.rooms.stream, norm
        return norm_act(self.rooms.stream, norm, self.rooms.active), None
