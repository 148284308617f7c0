"""Who holds which pages: replies in many voices, at different hops, over one pool.

``flow_batch_paged`` computes them on a device, where pages are memory; ``flow_batch_rows`` on a
CPU, where they are counted alone.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mosstalk.codec.flow_batch_voices import (
    FlowFigures,
    FlowOptions,
    VoiceShelf,
    alone_codes,
)
from mosstalk.codec.flow_items import NOTHING, Item, in_blocks
from mosstalk.codec.flow_pages import FlowPages, PageLayout
from mosstalk.errors import CodecFullError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice

_FEWEST_HELD = 2
"""Own pages of a reply: a block's convolutions read the page before its own."""

Kept = TypeVar("Kept")
"""What a reply or voice keeps besides its pages."""


@dataclass(frozen=True)
class Start(Generic[Kept]):
    """A voice: the pages of its first blocks, its other codes, its mel (frames, 80).

    ``speaker`` is its row in the flow's table of speakers.
    """

    pages: list[int]
    rest: list[int]
    mel: Tensor
    speaker: int
    kept: Kept

    def condition(self, start: int, frames: int) -> Tensor | None:
        """The mel in ``frames`` frames from ``start`` on; None where there is none."""
        return self.mel[start : start + frames] if start < self.mel.shape[0] else None


@dataclass(eq=False)
class ReplyState(Generic[Kept]):
    """A reply: its voice once it has begun, the pages of its latest blocks, blocks decoded."""

    voice: Voice
    digest: bytes
    start: Start[Kept] | None = None
    own: deque[int] = field(default_factory=deque)
    blocks: int = 0
    kept: Kept | None = None


@dataclass(frozen=True)
class Hop(Generic[Kept]):
    """New codes of a reply; ``ahead`` are the three that follow, empty at the reply's end."""

    state: ReplyState[Kept]
    codes: list[int]
    ahead: list[int]


class BlockFlow(ABC, Generic[Kept]):
    """A flow whose replies keep their blocks in pages of one pool."""

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        self.config = flow.config
        self.layout = PageLayout(flow.config, flow.config.n_timesteps, options.dtype)
        self.device = flow.encoder_proj.weight.device
        self.limit = options.context_blocks(flow.config)
        self.pool = FlowPages(options.page_count(self.layout))
        self._grows = options.grows
        self.shelf: VoiceShelf[Start[Kept]] = VoiceShelf(options.voices, self._drop)

    @property
    @abstractmethod
    def hops_at_once(self) -> int:
        """How many replies' hops one call computes at the same time; more wait for one another."""

    @abstractmethod
    def figures(self) -> FlowFigures:
        """What is held now."""

    @abstractmethod
    def warm(self, items: Sequence[int] | None, pages: Sequence[int]) -> None:
        """Have passes of so many items over so many pages ready."""

    @abstractmethod
    def _compute(self, voice: Voice) -> Start[Kept]:
        """Compute the blocks that depend on the voice alone; see ``_voice``."""

    @abstractmethod
    def _run(self, hops: Sequence[Hop[Kept]], fresh: list[int]) -> list[Tensor]:
        """Mel (frames, 80) of each hop's blocks, the rest of the voice's codes included."""

    def _grow(self, pages: int) -> None:
        """Have so many pages instead of fewer."""
        self.pool.grow(range(self.pool.size + 1, pages + 1))

    @abstractmethod
    def _drop(self, start: Start[Kept]) -> None:
        """Give a voice's memory back."""

    def open(self, voice: Voice) -> ReplyState[Kept]:
        """A reply's state; nothing is computed or held before its first hop."""
        return ReplyState(voice, voice.digest)

    def prepare(self, voice: Voice) -> None:
        """Compute a voice's first blocks where they are not kept.

        Raises:
            CodecFullError: there is no room for them.
        """
        digest = voice.digest
        self.shelf.take(digest, lambda: self._compute(voice))
        self.shelf.give(digest)

    def close(self, state: ReplyState[Kept]) -> None:
        """Give back what a reply holds."""
        self.pool.give(list(state.own))
        state.own.clear()
        state.kept = None
        if state.start is not None:
            self.shelf.give(state.digest)
            state.start = None

    def advance(self, hops: Sequence[Hop[Kept]]) -> list[Tensor]:
        """Mel (80, frames) of each hop's own codes.

        Raises:
            CodecFullError: too few pages; no reply has moved then.
        """
        fresh = self._begin(hops)
        skips = [self._rest(hop) * self.config.token_mel_ratio for hop in hops]
        found = self._run(hops, fresh)
        assert not fresh
        for hop in hops:
            self._trim(hop.state)
        return [mel[skip:].T for mel, skip in zip(found, skips, strict=True)]

    def _begin(self, hops: Sequence[Hop[Kept]]) -> list[int]:
        """Have the hops' voices, and take all pages that they need, or change nothing."""
        begun: list[ReplyState[Kept]] = []
        try:
            for state in (hop.state for hop in hops if hop.state.start is None):
                state.start = self._take_voice(state)
                begun.append(state)
            fresh = sum(self._fresh(hop) for hop in hops)
            self._make_room(fresh)
            return self.pool.take(fresh)
        except CodecFullError:
            for state in begun:
                self.shelf.give(state.digest)
                state.start = None
            raise

    def _take_voice(self, state: ReplyState[Kept]) -> Start[Kept]:
        return self.shelf.take(state.digest, lambda: self._compute(state.voice))

    def _voice_items(self, voice: Voice, pages: list[int], speaker: int) -> list[Item]:
        """The blocks of ``voice`` that depend on it alone, in ``pages``."""
        alone, codes, config = alone_codes(voice, self.config), voice.codes.tolist(), self.config
        mel = voice.mel.to(self.device, torch.float32)
        start = Start(pages, codes[alone:], mel, speaker, None)
        ahead = codes[alone : alone + config.pre_lookahead_len]
        frames = self.layout.frames
        return [
            Item(
                block,
                after,
                index * frames,
                pages[: index + 1],
                pages[index - 1] if index else NOTHING,
                speaker,
                start.condition(index * frames, frames),
            )
            for index, (block, after) in enumerate(in_blocks(codes[:alone], ahead, config))
        ]

    def _make_room(self, pages: int) -> None:
        """Drop voices that nobody uses until so many pages are free, or none is left; then grow."""
        while self.pool.free < pages and self.shelf.evict():
            pass
        if self._grows and self.pool.free < pages:
            self._grow(max(2 * self.pool.size, self.pool.in_use + pages))

    def _rest(self, hop: Hop[Kept]) -> int:
        """Codes of the voice that a hop decodes too."""
        assert hop.state.start is not None
        return 0 if hop.state.blocks else len(hop.state.start.rest)

    def _fresh(self, hop: Hop[Kept]) -> int:
        """Pages that a hop needs besides one of its own that it writes over."""
        blocks = -(-(len(hop.codes) + self._rest(hop)) // self.config.chunk_size)
        return blocks - self._writes_over(hop.state)

    def _writes_over(self, state: ReplyState[Kept]) -> bool:
        return self.limit is not None and len(state.own) >= max(self.limit, _FEWEST_HELD)

    def _items(self, hop: Hop[Kept], fresh: list[int]) -> Iterator[Item]:
        """A hop's blocks, their pages taken from ``fresh`` and from the reply's oldest."""
        state, start, frames = hop.state, hop.state.start, self.layout.frames
        assert start is not None
        codes = hop.codes if state.blocks else start.rest + hop.codes
        oldest = [state.own.popleft()] if self._writes_over(state) else []
        for block, ahead in in_blocks(codes, hop.ahead, self.config):
            before = state.own[-1] if state.own else (start.pages or [NOTHING])[-1]
            state.own.append(oldest.pop() if oldest else fresh.pop())
            own = list(state.own)[0 if self.limit is None else -self.limit :]
            first = (len(start.pages) + state.blocks) * frames
            condition = start.condition(first, frames)
            yield Item(block, ahead, first, start.pages + own, before, start.speaker, condition)
            state.blocks += 1

    def _trim(self, state: ReplyState[Kept]) -> None:
        """Give back pages of blocks that no later one sees."""
        while self.limit is not None and len(state.own) > max(self.limit, _FEWEST_HELD):
            self.pool.give([state.own.popleft()])
