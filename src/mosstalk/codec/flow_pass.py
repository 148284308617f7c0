"""One pass over at most I items: its tables and buffers, and its CUDA graph for each bucket.

F frames of an item, S pages that the longest item may see.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from mosstalk.codec.flow_estimator import EstimatorBuffers
from mosstalk.codec.flow_paged_state import PagedEncoder, PagedEstimator, spans
from mosstalk.codec.flow_pages import Item, PageLayout, PageStore, PassInputs, Rows, descriptors
from mosstalk.codec.flow_weights import held_bytes
from mosstalk.models.flow import NOISE_FRAMES, FlowDecoder, fixed_noise
from mosstalk.ops.launch import compiled_together, runs
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
        self._lane, most = lane, self.buckets[-1]
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
