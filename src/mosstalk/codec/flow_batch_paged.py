"""Replies and voices in pages on a device, computed by the kernels."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mosstalk.codec.flow import FlowDecoder
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
from mosstalk.codec.flow_pages import RETRY_AFTER_S, PageStore
from mosstalk.codec.voices import Voice
from mosstalk.errors import CodecFullError


class PagedFlow(BlockFlow[None]):
    """A flow whose pages are preallocated on the device."""

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        super().__init__(flow, options)
        self._flow, self._most = flow, options.max_items
        store = PageStore(self.layout, self.pool.size + 1, self.device)
        self._pass = FlowPass(flow, self.layout, store, self._most, graphs=options.graphs)
        self._speakers = deque(range(1, SPEAKERS))

    def warm(self, items: Sequence[int] | None, pages: Sequence[int]) -> None:
        """Run, and capture where graphs are on, passes of so many items over so many pages.

        The largest first: what its graph works in, the others' graphs can work in too.
        """
        counts = sorted(items or self._pass.buckets, reverse=True)
        passes = [(count, span) for span in sorted(pages, reverse=True) for count in counts]
        self._pass.compile(passes)
        for count, span in passes:
            self._pass.warm(count, span)

    def figures(self) -> FlowFigures:
        """What is held now."""
        return FlowFigures(
            pages=self.pool.size,
            pages_in_use=self.pool.in_use,
            page_bytes=self.layout.bytes,
            mb_per_s=self.layout.bytes / 1e6 / seconds_per_page(self.config),
            voices=len(self.shelf),
            weight_bytes=self._pass.weight_bytes,
            fixed_bytes=self._pass.fixed_bytes,
            graphs=self._pass.graph_count,
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
        self._decode(self._voice_items(voice, pages, speaker))
        mel = voice.mel.to(self.device, torch.float32)
        return Start(pages, voice.codes[alone:].tolist(), mel, speaker, None)

    def _drop(self, start: Start[None]) -> None:
        self.pool.give(start.pages)
        self._speakers.append(start.speaker)

    def _run(self, hops: Sequence[Hop[None]], fresh: list[int]) -> list[Tensor]:
        made = [list(self._items(hop, fresh)) for hop in hops]
        blocks = iter(self._decode([item for items in made for item in items]))
        each = ([next(blocks) for _ in items] for items in made)
        return [mels[0] if len(mels) == 1 else torch.cat(mels) for mels in each]

    def _decode(self, items: list[Item]) -> list[Tensor]:
        """Each item's mel (its frames, 80), in passes of at most ``max_items``."""
        ratio, found = self.config.token_mel_ratio, list[Tensor]()
        for first in range(0, len(items), self._most):
            lot = items[first : first + self._most]
            for item, mel in zip(lot, self._pass.run(lot).unbind(), strict=False):
                found.append(mel[: len(item.codes) * ratio])
        return found
