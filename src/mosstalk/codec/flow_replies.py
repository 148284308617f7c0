"""Mel of many replies at once: who holds which pages, and each hop from what earlier ones left.

Replies in any voices, at any hops, joining and leaving, over one pool. ``flow_paged`` computes them
on a device, where pages are memory; ``flow`` on a CPU, where they are counted alone.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock

import torch
from torch import Tensor

from mosstalk.codec.flow_pages import (
    FEWEST_HELD,
    NOTHING,
    FlowFigures,
    FlowOptions,
    FlowPages,
    Item,
    PageLayout,
    VoiceCache,
    alone_codes,
    in_blocks,
)
from mosstalk.codec.flow_row_state import RowState
from mosstalk.constants import CODES_PER_SECOND
from mosstalk.errors import CodecFullError
from mosstalk.models.flow import FlowDecoder, FlowStream
from mosstalk.models.voices import Voice

_LONGEST_USUAL_VOICE_S = 27.0
_USUAL_REPLY_S = 20.0
"""For what length of voice and of reply passes are made ready; longer ones come as they may."""


@dataclass(frozen=True)
class ComputedVoice:
    """A voice after its first blocks: their ``pages``, its codes after them, its mel (frames, 80).

    ``speaker`` is its row in the flow's table of speakers. ``kept`` is what it keeps without pages.
    """

    pages: list[int]
    rest: list[int]
    mel: Tensor
    speaker: int
    kept: RowState | None = None

    def condition(self, start: int, frames: int) -> Tensor | None:
        """The mel in ``frames`` frames from ``start`` on; None where there is none."""
        return self.mel[start : start + frames] if start < self.mel.shape[0] else None


@dataclass(frozen=True)
class Hop:
    """New codes of a reply; ``ahead`` are the three that follow, empty at the reply's end."""

    reply: "FlowReply"
    codes: list[int]
    ahead: list[int]


class FlowReply(FlowStream):
    """One reply of a ``BatchedFlow``; its own ``push`` and ``finish`` are batches of one.

    Only its flow writes here: its voice ``computed`` once it has begun, the pages ``own`` of its
    latest blocks, and the number of ``blocks`` decoded.
    """

    def __init__(self, owner: "BatchedFlow", flow: FlowDecoder, voice: Voice) -> None:
        super().__init__(flow, voice)
        self.voice, self.digest = voice, voice.digest
        self.computed: ComputedVoice | None = None
        self.own = deque[int]()
        self.blocks = 0
        self.kept: RowState | None = None
        self.closed = False
        self._owner = owner

    def take(self, codes: Iterable[int], *, final: bool) -> Hop | None:
        """Add ``codes``; the hop that is possible now, at the end all that is left."""
        assert not self.closed, "a closed reply has no more hops"
        self.codes += codes
        done, ready = self.done_codes, len(self.codes)
        if final:
            return self._next(ready - done, final=True) if ready > done else None
        return self._next(self.hop_codes, final=False) if ready >= self.codes_needed else None

    def close(self) -> None:
        """Give the reply's pages back."""
        self._owner.close(self)

    def _next(self, hop: int, *, final: bool) -> Hop:
        assert not self.closed, "a closed reply has no more hops"
        end = self.done_codes + hop
        ahead = [] if final else self.codes[end : end + self.config.pre_lookahead_len]
        return Hop(self, self.codes[self.done_codes : end], ahead)

    def _hop(self, hop: int, *, final: bool) -> Tensor:
        return self._owner.decode([self._next(hop, final=final)])[0]


class BatchedFlow(ABC):
    """A flow decoder for many replies at once, with the weights that ``flow`` has now.

    Calls from several threads take turns; on a GPU all work is queued on the caller's stream.
    """

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        self.options, self.config = options, flow.config
        self.layout = PageLayout(flow.config, flow.config.n_timesteps, options.dtype)
        self.device = flow.encoder_proj.weight.device
        self.limit = options.context_blocks(flow.config)
        self.pool = FlowPages(options.page_count(self.layout))
        self.voices: VoiceCache[ComputedVoice] = VoiceCache(options.voices, self._drop)
        self._flow = flow
        self._lock = RLock()

    @property
    @abstractmethod
    def hops_at_once(self) -> int:
        """How many replies' hops one call computes at the same time; more wait for one another."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory of the weights as they are read."""

    @property
    def fixed_bytes(self) -> int:
        """Memory of tables and buffers besides weights and pages."""
        return 0

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return 0

    @abstractmethod
    def _compute(self, voice: Voice) -> ComputedVoice:
        """Compute the blocks that depend on the voice alone."""

    @abstractmethod
    def _run(self, hops: Sequence[Hop], fresh: list[int]) -> list[Tensor]:
        """Mel (frames, 80) of each hop's blocks, the rest of the voice's codes included."""

    def _grow(self, pages: int) -> None:
        """Have so many pages instead of fewer."""
        self.pool.grow(range(self.pool.size + 1, pages + 1))

    def _drop(self, computed: ComputedVoice) -> None:
        """Give a voice's memory back."""
        self.pool.give(computed.pages)

    @abstractmethod
    def _warm(self, pages: int) -> None:
        """Have passes over so many pages ready."""

    def open(self, voice: Voice) -> FlowReply:
        """A new reply in ``voice``; it holds no memory before its first hop."""
        return FlowReply(self, self._flow, voice)

    @torch.inference_mode()
    def prepare(self, voice: Voice) -> None:
        """Compute what depends on the voice alone, so that no reply has to wait for it.

        Raises:
            CodecFullError: there is no room for it.
        """
        with self._lock:
            digest = voice.digest
            self.voices.take(digest, partial(self._compute, voice))
            self.voices.give(digest)

    def close(self, reply: FlowReply) -> None:
        """Give a reply's pages back at once; its voice stays for others."""
        with self._lock:
            if reply.closed:
                return
            reply.closed = True
            self.pool.give(list(reply.own))
            reply.own.clear()
            reply.kept = None
            if reply.computed is not None:
                self.voices.give(reply.digest)
                reply.computed = None

    def advance(self, hops: Sequence[tuple[FlowReply, Sequence[int], bool]]) -> list[Tensor]:
        """Give each reply (each at most once) more codes; return each one's next hop.

        Mels (80, frames) float32 on the device, without frames where a reply has not enough
        codes yet. A hop has ``hop_codes`` codes; with True, no code follows and the hop is all
        that is left.

        Raises:
            CodecFullError: there is no room; then no reply has moved nor taken its codes.
        """
        assert len({id(reply) for reply, _, _ in hops}) == len(hops), "a reply twice in a batch"
        before = [len(reply.codes) for reply, _, _ in hops]
        found = [torch.empty(self.config.mel_bins, 0, device=self.device) for _ in hops]
        with self._lock:
            taken = [reply.take(codes, final=final) for reply, codes, final in hops]
            due = [(place, hop) for place, hop in enumerate(taken) if hop]
            try:
                mels = self.decode([hop for _, hop in due])
            except CodecFullError:
                for (reply, _, _), count in zip(hops, before, strict=True):
                    del reply.codes[count:]
                raise
            for (place, hop), mel in zip(due, mels, strict=True):
                found[place] = mel
                hop.reply.done_codes += len(hop.codes)
        return found

    @torch.inference_mode()
    def decode(self, hops: Sequence[Hop]) -> list[Tensor]:
        """Mel (80, frames) of each hop's own codes; replies count their codes themselves.

        Raises:
            CodecFullError: too few pages; no reply has moved then.
        """
        with self._lock:
            if not hops:
                return []
            fresh = self._begin(hops)
            skips = [self._rest(hop) * self.config.token_mel_ratio for hop in hops]
            found = self._run(hops, fresh)
            assert not fresh
            for hop in hops:
                own = hop.reply.own
                # Pages of blocks that no later one sees.
                while self.limit is not None and len(own) > max(self.limit, FEWEST_HELD):
                    self.pool.give([own.popleft()])
            return [mel[skip:].T for mel, skip in zip(found, skips, strict=True)]

    @torch.inference_mode()
    def warm(self, *, most_s: float | None = None) -> None:
        """Have passes of every size ready, captured with graphs on.

        For voice and reply of up to ``most_s`` seconds together; unless given, a voice of 27 s
        and the context, or 20 s where all is kept.
        """
        own_s = self.options.context_s or _USUAL_REPLY_S
        codes = (most_s or _LONGEST_USUAL_VOICE_S + own_s) * CODES_PER_SECOND
        with self._lock:
            self._warm(1 + int(codes // self.config.chunk_size))

    def figures(self) -> FlowFigures:
        """What is held now."""
        page_s = self.config.chunk_size / CODES_PER_SECOND
        with self._lock:
            return FlowFigures(
                pages=self.pool.size,
                pages_in_use=self.pool.in_use,
                page_bytes=self.layout.bytes,
                mb_per_s=self.layout.bytes / 1e6 / page_s,
                voices=len(self.voices),
                weight_bytes=self.weight_bytes,
                fixed_bytes=self.fixed_bytes,
                graphs=self.graph_count,
            )

    def _begin(self, hops: Sequence[Hop]) -> list[int]:
        """Have the hops' voices, and take all pages that they need, or change nothing."""
        begun: list[FlowReply] = []
        try:
            for reply in (hop.reply for hop in hops if hop.reply.computed is None):
                compute = partial(self._compute, reply.voice)
                reply.computed = self.voices.take(reply.digest, compute)
                begun.append(reply)
            fresh = sum(self._fresh(hop) for hop in hops)
            self._make_room(fresh)
            return self.pool.take(fresh)
        except CodecFullError:
            for reply in begun:
                self.voices.give(reply.digest)
                reply.computed = None
            raise

    def _voice_pages(self, voice: Voice) -> tuple[int, list[int]]:
        """How many of a voice's codes depend on it alone, and pages for them."""
        alone = alone_codes(voice, self.config)
        blocks = alone // self.config.chunk_size
        self._make_room(blocks)
        return alone, self.pool.take(blocks)

    def _voice_items(self, voice: Voice, alone: int, computed: ComputedVoice) -> list[Item]:
        """The blocks of ``voice`` that depend on it ``alone``, in the pages of ``computed``."""
        codes, frames, pages = voice.codes.tolist(), self.layout.frames, computed.pages
        ahead = codes[alone : alone + self.config.pre_lookahead_len]
        return [
            Item(
                block,
                after,
                index * frames,
                pages[: index + 1],
                pages[index - 1] if index else NOTHING,
                computed.speaker,
                computed.condition(index * frames, frames),
            )
            for index, (block, after) in enumerate(in_blocks(codes[:alone], ahead, self.config))
        ]

    def _make_room(self, pages: int) -> None:
        """Drop voices that nobody uses until so many pages are free, or none is left; then grow."""
        while self.pool.free < pages and self.voices.evict():
            pass
        if self.options.grows and self.pool.free < pages:
            self._grow(max(2 * self.pool.size, self.pool.in_use + pages))

    def _rest(self, hop: Hop) -> int:
        """Codes of the voice that a hop decodes too."""
        assert hop.reply.computed is not None
        return 0 if hop.reply.blocks else len(hop.reply.computed.rest)

    def _fresh(self, hop: Hop) -> int:
        """Pages that a hop needs besides one of its own that it writes over."""
        blocks = -(-(len(hop.codes) + self._rest(hop)) // self.config.chunk_size)
        return blocks - self._writes_over(hop.reply)

    def _writes_over(self, reply: FlowReply) -> bool:
        return self.limit is not None and len(reply.own) >= max(self.limit, FEWEST_HELD)

    def _items(self, hop: Hop, fresh: list[int]) -> Iterator[Item]:
        """A hop's blocks, their pages taken from ``fresh`` and from the reply's oldest."""
        reply, computed, frames = hop.reply, hop.reply.computed, self.layout.frames
        assert computed is not None
        codes = hop.codes if reply.blocks else computed.rest + hop.codes
        oldest = [reply.own.popleft()] if self._writes_over(reply) else []
        for block, ahead in in_blocks(codes, hop.ahead, self.config):
            before = reply.own[-1] if reply.own else (computed.pages or [NOTHING])[-1]
            reply.own.append(oldest.pop() if oldest else fresh.pop())
            own = list(reply.own)[0 if self.limit is None else -self.limit :]
            first = (len(computed.pages) + reply.blocks) * frames
            pages, condition = computed.pages + own, computed.condition(first, frames)
            yield Item(block, ahead, first, pages, before, computed.speaker, condition)
            reply.blocks += 1
