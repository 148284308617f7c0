"""Replies and voices in pages on a device, computed by the kernels, several passes at a time.

A pass runs over at most I items: its tables and buffers, and its CUDA graph for each bucket. What
fills a GPU is several passes of small kernels, not larger ones. F frames of an item, S pages that
the longest item may see.
"""

import copy
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mosstalk.codec.flow_networks import EstimatorBuffers
from mosstalk.codec.flow_paged_state import PagedEncoder, PagedEstimator, spans
from mosstalk.codec.flow_pages import (
    RETRY_AFTER_S,
    FlowOptions,
    Item,
    PageLayout,
    PageStore,
    PassInputs,
    Rows,
    descriptors,
    speaker_of,
)
from mosstalk.codec.flow_replies import BatchedFlow, ComputedVoice, Hop
from mosstalk.codec.flow_weights import held_bytes
from mosstalk.errors import CodecFullError
from mosstalk.models.flow import NOISE_FRAMES, FlowDecoder, fixed_noise
from mosstalk.models.voices import Voice
from mosstalk.ops.launch import compiled_together, runs
from mosstalk.runtime.device import synchronize
from mosstalk.runtime.graphs import DECODING, Graphs

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
SMALLEST_SPANS = {"cuda": 128, "cpu": 4}
"""Pages that a pass is made for at least, so that few graphs serve all: 51 s of the published."""
SPEAKERS = 1024
"""Voices whose speaker vectors there is room for."""


def buckets_for(most: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of items that a pass may have.

    In float32 a reply's frames must not depend on its company, and matmuls of other sizes
    round otherwise: there is one size.
    """
    if dtype == torch.float32:
        return (most,)
    return (*(size for size in BUCKETS if size < most), most)


class FlowTables:
    """What passes take rows of: fixed noise, the voices' frames and their speakers.

    Noise and frames end with room for what ``places`` items bring of their own.
    """

    def __init__(self, layout: PageLayout, places: int, device: torch.device) -> None:
        bins, frames = layout.config.mel_bins, layout.frames
        self.noise = torch.zeros(NOISE_FRAMES + places * frames, bins, device=device)
        self.noise[:NOISE_FRAMES] = fixed_noise(NOISE_FRAMES, bins)[0].T.to(device)
        # After a block of zeros, which most items read.
        self.condition = torch.zeros((1 + places) * frames, bins, device=device)
        self.speakers = torch.zeros(SPEAKERS, bins, device=device)
        self._frames, self._device = frames, device

    def stage(self, items: Sequence[Item], first: int, noise: Rows, condition: Rows) -> None:
        """Put in places from ``first`` on noise past the first 300 s, and the voices' frames.

        Notes in ``noise`` and ``condition`` (I,) which rows are the items' own.
        """
        for number, item in enumerate(items):
            place = (first + number) * self._frames
            if item.start + self._frames > NOISE_FRAMES:
                noise[number] = NOISE_FRAMES + place
                further = fixed_noise(self._frames, self.noise.shape[1], start=item.start)[0].T
                self.noise[noise[number] :][: self._frames] = further.to(self._device)
            if item.condition is not None:
                condition[number] = self._frames + place
                given = self.condition[condition[number] :][: self._frames]
                given[: item.condition.shape[0]] = item.condition
                given[item.condition.shape[0] :] = 0


class FlowPass:
    """Runs items through encoder and estimator; captured once a bucket and span with graphs.

    Passes of one ``FlowPass`` follow one another; those of another ``lane`` may run meanwhile.
    """

    def __init__(
        self,
        flow: FlowDecoder,
        layout: PageLayout,
        store: PageStore,
        most: int,
        *,
        graphs: bool,
        lanes: int = 1,
    ) -> None:
        """Lane 0 of so many ``lanes``."""
        self._layout, self._config = layout, layout.config
        self._device = store.kv.device
        self._span = SMALLEST_SPANS[self._device.type]
        self._encoder = PagedEncoder(flow, store)
        self._estimator = PagedEstimator(flow.decoder, layout, store)
        self._tables = FlowTables(layout, lanes * most, self._device)
        self.speakers = self._tables.speakers
        self.buckets = buckets_for(most, layout.dtype)
        self._captures = graphs
        self._frame = torch.arange(layout.frames, device=self._device)
        self._clear(0)

    def _clear(self, lane: int) -> None:
        """Have buffers and graphs of its own."""
        most = self.buckets[-1]
        self._first = lane * most
        self._buffers = EstimatorBuffers.allocate(self._layout, most, self._device)
        self._inputs: dict[tuple[int, int], PassInputs] = {}
        # Lanes run at the same time, so their graphs must not share a stream.
        use = f"{DECODING} {lane}" if lane else DECODING
        self._graphs = Graphs[tuple[int, int], None](self._device, use, enabled=self._captures)

    def beside(self, lane: int) -> "FlowPass":
        """Lane number ``lane``: the same weights, pages and tables, all else its own.

        It takes as many items as the largest bucket has at the cost of that.
        """
        other = copy.copy(self)
        other.buckets = self.buckets[-1:]
        other._encoder, other._estimator = self._encoder.beside(), self._estimator.beside()
        other._clear(lane)
        return other

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as the kernels read them."""
        return self._estimator.weight_bytes + self._encoder.weight_bytes

    @property
    def table_bytes(self) -> int:
        """Memory of tables that all lanes read."""
        tables = self._tables
        own = [tables.noise, tables.condition, tables.speakers]
        return held_bytes(own) + self._encoder.table_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of its buffers; what graphs hold besides is torch's to tell."""
        return held_bytes(list(vars(self._buffers).values()))

    def warm(self, items: int, span: int) -> None:
        """Capture, or run once, a pass of up to ``items`` items that see up to ``span`` pages."""
        key = self._bucket(items), spans([span], self._span)
        self._prepare(key)
        self._launch(key, [])

    def compile(self, buckets: Sequence[tuple[int, int]]) -> None:
        """Compile what passes of so many items and pages run, all kernels at the same time."""
        if self._device.type != "cuda" or not runs(self._frame):
            return
        keys = [(self._bucket(items), spans([span], self._span)) for items, span in buckets]
        for key in keys:
            self._reserve(*key)  # kernels fill its tables, and none runs below
        with compiled_together():
            for key in keys:
                self._compute(self._inputs_of(key))

    def prepare(self, items: Sequence[Item]) -> None:
        """Make what ``run`` of these needs, on the stream on which all memory is taken."""
        self._prepare(self._key(items))

    def run(self, items: Sequence[Item], mel: Tensor) -> None:
        """Write ``mel`` (items, F, 80) of at most as many items as the largest bucket has."""
        key = self._key(items)
        self._prepare(key)
        self._launch(key, items)
        found = self._buffers.given[: len(items) * self._layout.frames, : self._config.mel_bins]
        mel.copy_(found.unflatten(0, (len(items), -1)))

    def _key(self, items: Sequence[Item]) -> tuple[int, int]:
        return self._bucket(len(items)), spans([len(item.pages) for item in items], self._span)

    def _bucket(self, items: int) -> int:
        return next(size for size in self.buckets if size >= min(items, self.buckets[-1]))

    def _inputs_of(self, key: tuple[int, int]) -> PassInputs:
        if key not in self._inputs:
            self._inputs[key] = PassInputs(*key, self._config, self._device)
        return self._inputs[key]

    def _reserve(self, bucket: int, span: int) -> None:
        self._encoder.reserve(bucket, span)
        self._estimator.reserve(bucket)

    def _prepare(self, key: tuple[int, int]) -> None:
        inputs = self._inputs_of(key)
        self._reserve(*key)
        if self._graphs.enabled and key not in self._graphs:
            inputs.fill(descriptors([], inputs, self._config))
            self._graphs.ready(key, lambda: self._compute(inputs))

    def _launch(self, key: tuple[int, int], items: Sequence[Item]) -> None:
        inputs = self._inputs[key]
        values = descriptors(items, inputs, self._config)
        self._tables.stage(items, self._first, values["noise"], values["condition"])
        inputs.fill(values)
        if key in self._graphs:
            self._graphs.replay(key)
        else:
            self._compute(inputs)

    def _compute(self, inputs: PassInputs) -> None:
        """The whole pass; its mel lies in the first columns of the buffers' ``given``."""
        bins, rows = self._config.mel_bins, inputs.items * self._layout.frames
        buffers, tables = self._buffers.first(2 * rows), self._tables
        conditioned, free = buffers.given[:rows], buffers.given[rows:]

        def read(table: Tensor, first: Tensor) -> Tensor:
            return table[(first[:, None] + self._frame).flatten()]

        noise = read(tables.noise, inputs.noise)
        speaker = tables.speakers[inputs.speaker.long()].repeat_interleave(len(self._frame), 0)
        mu, condition = self._encoder(inputs), read(tables.condition, inputs.condition)
        torch.cat([noise, mu, speaker, condition], dim=1, out=conditioned)
        free[:, :bins] = noise
        free[:, bins:] = 0
        self._estimator.integrate(buffers, inputs)


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

    def _compute(self, voice: Voice) -> ComputedVoice:
        if not self._speakers:
            message = f"the flow has room for {SPEAKERS - 1} voices at once: close replies"
            raise CodecFullError(message, retry_after_s=RETRY_AFTER_S)
        alone, pages = self._voice_pages(voice)
        speaker = self._speakers.popleft()
        self._pass.speakers[speaker] = speaker_of(self._flow, voice)
        mel = voice.mel.to(self.device, torch.float32)
        computed = ComputedVoice(pages, voice.codes[alone:].tolist(), mel, speaker)
        self._decode([self._voice_items(voice, alone, computed)])
        return computed

    def _drop(self, computed: ComputedVoice) -> None:
        super()._drop(computed)
        self._speakers.append(computed.speaker)

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
