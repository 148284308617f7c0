"""Replies and voices in pages on a device, computed by the kernels, several passes at a time.

What fills a GPU is several passes of small kernels, not larger ones.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mosstalk.codec.flow_options import FlowOptions, speaker_of
from mosstalk.codec.flow_pages import RETRY_AFTER_S, Item, PageStore
from mosstalk.codec.flow_pass import SPEAKERS, FlowPass
from mosstalk.codec.flow_replies import BatchedFlow, Hop, Start
from mosstalk.errors import CodecFullError
from mosstalk.models.flow import FlowDecoder
from mosstalk.models.voices import Voice
from mosstalk.runtime.device import synchronize


class PagedFlow(BatchedFlow):
    """A flow whose pages are preallocated on the device."""

    def __init__(self, flow: FlowDecoder, options: FlowOptions) -> None:
        super().__init__(flow, options)
        self._speakers = deque(range(1, SPEAKERS))
        self._allocate()

    def _allocate(self) -> None:
        """Pages as many as the pool has, and passes over them."""
        options, lanes = self.options, self.options.lane_count(self.device)
        self._store = PageStore(self.layout, self.pool.size + 1, self.device)
        self._pass = FlowPass(
            self._flow, self.layout, self._store, options.max_items,
            graphs=options.graphs, lanes=lanes,
        )  # fmt: skip
        self._lanes = Lanes(self._pass, lanes, self.device)

    def _grow(self, pages: int) -> None:
        """Have so many pages; passes begin anew, for graphs know where the old ones lay."""
        super()._grow(pages)
        store, speakers = self._store, self._pass.speakers
        synchronize(self.device)
        self._allocate()
        self._store.copy_from(store)
        self._pass.speakers.copy_(speakers)

    def _warm(self, pages: int) -> None:
        """Run, and capture where graphs are on, passes of every size over so many pages.

        The largest first: what its graph works in, the others' graphs can work in too.
        """
        counts = sorted(self._pass.buckets, reverse=True)
        self._pass.compile([(count, pages) for count in counts])
        for count in counts:
            self._pass.warm(count, pages)
        self._lanes.warm(pages)

    @property
    def hops_at_once(self) -> int:
        """Blocks of so many replies are computed at the same time."""
        return self._lanes.count * self.options.max_items

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as the kernels read them."""
        return self._pass.weight_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory of tables and of all lanes' buffers."""
        return self._pass.table_bytes + self._lanes.buffer_bytes

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return self._lanes.graph_count

    def _compute(self, voice: Voice) -> Start:
        if not self._speakers:
            message = f"the flow has room for {SPEAKERS - 1} voices at once: close replies"
            raise CodecFullError(message, retry_after_s=RETRY_AFTER_S)
        alone, pages = self._voice_pages(voice)
        speaker = self._speakers.popleft()
        self._pass.speakers[speaker] = speaker_of(self._flow, voice)
        mel = voice.mel.to(self.device, torch.float32)
        start = Start(pages, voice.codes[alone:].tolist(), mel, speaker)
        self._decode([self._voice_items(voice, alone, start)])
        return start

    def _drop(self, start: Start) -> None:
        super()._drop(start)
        self._speakers.append(start.speaker)

    def _run(self, hops: Sequence[Hop], fresh: list[int]) -> list[Tensor]:
        # Replies in one voice stand together: attention reads its keys once for several.
        order = sorted(range(len(hops)), key=lambda place: hops[place].reply.digest)
        made = [list(self._items(hops[place], fresh)) for place in order]
        blocks, found = iter(self._decode(made)), dict[int, Tensor]()
        for place, items in zip(order, made, strict=True):
            mels = [next(blocks) for _ in items]
            found[place] = mels[0] if len(mels) == 1 else torch.cat(mels)
        return [found[place] for place in range(len(hops))]

    def _decode(self, hops: list[list[Item]]) -> list[Tensor]:
        """Each item's mel (its frames, 80), in passes of at most ``max_items``.

        Hops know nothing of one another, so passes of whole hops may run at the same time.
        """
        items = [item for hop in hops for item in hop]
        if not items:
            return []
        size = (len(items), self.layout.frames, self.config.mel_bins)
        mels = torch.empty(size, device=self.device)
        most = self.options.max_items
        apart = self._lanes.count > 1 and max(map(len, hops)) <= most
        # Else one after another, each of which may read what the one before it left.
        cut = [items[first : first + most] for first in range(0, len(items), most)]
        lots = _whole_hops(hops, most) if apart else cut
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


def _whole_hops(hops: list[list[Item]], most: int) -> list[list[Item]]:
    """Passes of at most ``most`` items, no hop of which is in two of them."""
    lots: list[list[Item]] = [[]]
    for hop in hops:
        if len(lots[-1]) + len(hop) > most:
            lots.append([])
        lots[-1] += hop
    return lots


class Lanes:
    """One ``FlowPass`` a lane, made when it is first needed, each on a stream of its own.

    Lane 0 works on the caller's stream. To the caller all of it is queued on that one: lanes
    begin after what was queued before, and what is queued later waits for them. On a CPU passes
    follow one another.
    """

    def __init__(self, first: FlowPass, count: int, device: torch.device) -> None:
        self.count = count
        self._passes, self._device = [first], device
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def buffer_bytes(self) -> int:
        """Memory of all lanes' buffers."""
        return sum(each.buffer_bytes for each in self._passes)

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return sum(each.graph_count for each in self._passes)

    def warm(self, span: int) -> None:
        """Have passes of the largest bucket ready on all lanes but the first."""
        for lane in range(1, self.count):
            self._pass(lane).warm(self._passes[0].buckets[-1], span)

    def run(self, work: Sequence[tuple[Sequence[Item], Tensor]]) -> None:
        """``FlowPass.run`` of all; none may read what another one writes.

        The last of ``work``, which may have the fewest items, goes to the first lane: there alone
        a small pass is a quick one.
        """
        turns = [(number % self.count, *each) for number, each in enumerate(reversed(work))]
        for lane, items, _ in turns:
            # On the caller's stream: what a lane needs may be what others read too.
            self._pass(lane).prepare(items)
        others = [stream for lane, stream in self._streams.items() if lane < len(turns)]
        for stream in others:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            for lane, items, mel in turns:
                with self._on(lane):
                    self._pass(lane).run(items, mel)
        finally:
            for stream in others:
                torch.cuda.current_stream(self._device).wait_stream(stream)

    def _pass(self, lane: int) -> FlowPass:
        while len(self._passes) <= lane:
            another = len(self._passes)
            self._passes.append(self._passes[0].beside(another))
            if self._device.type == "cuda":
                self._streams[another] = torch.cuda.Stream(self._device)
        return self._passes[lane]

    def _on(self, lane: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[lane]) if lane in self._streams else nullcontext()
