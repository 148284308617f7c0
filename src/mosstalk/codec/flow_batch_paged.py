"""Replies and voices in pages on a device, computed by the kernels."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mosstalk.codec.flow_batch_base import BlockFlow, Hop, Start
from mosstalk.codec.flow_batch_voices import (
    FlowFigures,
    FlowOptions,
    alone_codes,
    seconds_per_page,
    speaker_of,
)
from mosstalk.codec.flow_graph import SPEAKERS, FlowPass
from mosstalk.codec.flow_items import Item
from mosstalk.codec.flow_lanes import Lanes
from mosstalk.codec.flow_pages import RETRY_AFTER_S, PageStore
from mosstalk.errors import CodecFullError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice
from mosstalk.runtime.device import synchronize


class PagedFlow(BlockFlow[None]):
    """A flow whose pages are preallocated on the device."""

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        super().__init__(flow, options)
        self._flow, self._most, self._options = flow, options.max_items, options
        self._speakers = deque(range(1, SPEAKERS))
        self._allocate()

    def _allocate(self) -> None:
        """Pages as many as the pool has, and passes over them."""
        lanes, most = self._options.lane_count(self.device), self._most
        self._store = PageStore(self.layout, self.pool.size + 1, self.device)
        self._pass = FlowPass(
            self._flow, self.layout, self._store, most, graphs=self._options.graphs, lanes=lanes
        )
        self._lanes = Lanes(self._pass, lanes, self.device)

    def _grow(self, pages: int) -> None:
        """Have so many pages; passes begin anew, for graphs know where the old ones lay."""
        super()._grow(pages)
        store, speakers = self._store, self._pass.speakers
        synchronize(self.device)
        self._allocate()
        self._store.copy_from(store)
        self._pass.speakers.copy_(speakers)

    def warm(self, items: Sequence[int] | None, pages: Sequence[int]) -> None:
        """Run, and capture where graphs are on, passes of so many items over so many pages.

        The largest first: what its graph works in, the others' graphs can work in too.
        """
        counts = sorted(items or self._pass.buckets, reverse=True)
        passes = [(count, span) for span in sorted(pages, reverse=True) for count in counts]
        self._pass.compile(passes)
        for count, span in passes:
            self._pass.warm(count, span)
        if items is None:
            for span in sorted(pages, reverse=True):
                self._lanes.warm(span)

    @property
    def hops_at_once(self) -> int:
        """Blocks of so many replies are computed at the same time."""
        return self._lanes.count * self._most

    def figures(self) -> FlowFigures:
        """What is held now."""
        return FlowFigures(
            pages=self.pool.size,
            pages_in_use=self.pool.in_use,
            page_bytes=self.layout.bytes,
            mb_per_s=self.layout.bytes / 1e6 / seconds_per_page(self.config),
            voices=len(self.shelf),
            weight_bytes=self._pass.weight_bytes,
            fixed_bytes=self._pass.table_bytes + self._lanes.buffer_bytes,
            graphs=self._lanes.graph_count,
        )

    def _compute(self, voice: Voice) -> Start[None]:
        if not self._speakers:
            message = f"the flow has room for {SPEAKERS - 1} voices at once: close replies"
            raise CodecFullError(message, retry_after_s=RETRY_AFTER_S)
        alone = alone_codes(voice, self.config)
        blocks = alone // self.config.chunk_size
        self._make_room(blocks)
        pages, speaker = self.pool.take(blocks), self._speakers.popleft()
        self._pass.speakers[speaker] = speaker_of(self._flow, voice)
        self._decode([self._voice_items(voice, pages, speaker)])
        mel = voice.mel.to(self.device, torch.float32)
        return Start(pages, voice.codes[alone:].tolist(), mel, speaker, None)

    def _drop(self, start: Start[None]) -> None:
        self.pool.give(start.pages)
        self._speakers.append(start.speaker)

    def _run(self, hops: Sequence[Hop[None]], fresh: list[int]) -> list[Tensor]:
        made = [list(self._items(hop, fresh)) for hop in hops]
        blocks = iter(self._decode(made))
        each = ([next(blocks) for _ in items] for items in made)
        return [mels[0] if len(mels) == 1 else torch.cat(mels) for mels in each]

    def _decode(self, hops: list[list[Item]]) -> list[Tensor]:
        """Each item's mel (its frames, 80), in passes of at most ``max_items``.

        Hops know nothing of one another, so passes of whole hops may run at the same time.
        """
        items = [item for hop in hops for item in hop]
        if not items:
            return []
        size = (len(items), self.layout.frames, self.config.mel_bins)
        mels = torch.empty(size, device=self.device)
        apart = self._lanes.count > 1 and max(map(len, hops)) <= self._most
        lots = _whole_hops(hops, self._most) if apart else _one_after_another(items, self._most)
        work, first = [], 0
        for lot in lots:
            work.append((lot, mels[first : first + len(lot)]))
            first += len(lot)
        if apart:
            self._lanes.run(work)
        else:
            for lot, mel in work:
                self._pass.run(lot, mel)
        ratio = self.config.token_mel_ratio
        return [mel[: len(item.codes) * ratio] for item, mel in zip(items, mels, strict=True)]


def _one_after_another(items: list[Item], most: int) -> list[list[Item]]:
    """Passes of at most ``most``, each of which may read what the one before it left."""
    return [items[first : first + most] for first in range(0, len(items), most)]


def _whole_hops(hops: list[list[Item]], most: int) -> list[list[Item]]:
    """The same without a hop that is in two of them."""
    lots: list[list[Item]] = [[]]
    for hop in hops:
        if len(lots[-1]) + len(hop) > most:
            lots.append([])
        lots[-1] += hop
    return lots
