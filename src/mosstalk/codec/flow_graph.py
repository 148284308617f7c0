"""One pass over at most I items: its tables and rooms, and its CUDA graph for each bucket.

F frames of an item, S pages that the longest item may see.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.codec.flow import NOISE_FRAMES, FlowDecoder, fixed_noise
from mosstalk.codec.flow_batch_encoder import PagedEncoder, spans
from mosstalk.codec.flow_batch_estimator import PagedEstimator, Rooms
from mosstalk.codec.flow_batch_weights import held_bytes
from mosstalk.codec.flow_items import Item, PassInputs, descriptors
from mosstalk.codec.flow_pages import PageLayout, PageStore
from mosstalk.kernels.launch import compiled_together, runs

Rows = npt.NDArray[np.int32]
BUCKETS = (1, 2, 4, 8, 16, 24, 32)
SMALLEST_SPANS = {"cuda": 128, "cpu": 4}
"""Pages that a pass is made for at least, so that few graphs serve all: 51 s of the published."""
SPEAKERS = 1024
"""Voices whose speaker vectors there is room for."""


def buckets_for(most: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of items that a pass may have.

    In float32 a reply's frames must not depend on its company, and products of other sizes
    round otherwise: there is one size.
    """
    if dtype == torch.float32:
        return (most,)
    return (*(size for size in BUCKETS if size < most), most)


class FlowPass:
    """Runs items through encoder and estimator; captured once a bucket and span with graphs."""

    def __init__(
        self, flow: FlowDecoder, layout: PageLayout, store: PageStore, most: int, *, graphs: bool
    ) -> None:
        self._layout, self._config = layout, layout.config
        self._device = store.kv.device
        self._span = SMALLEST_SPANS[self._device.type]
        self._encoder = PagedEncoder(flow, store)
        self._estimator = PagedEstimator(flow.decoder, layout, store)
        self._rooms = Rooms.allocate(layout, most, self._device)
        self.buckets = buckets_for(most, layout.dtype)
        self._graphs = graphs and self._device.type == "cuda"
        self._captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._inputs: dict[tuple[int, int], PassInputs] = {}
        self._pool: Any = None  # torch's handle of the graphs' memory
        self._side: torch.cuda.Stream | None = None
        bins, frames = self._config.mel_bins, layout.frames
        # After the fixed noise, and after a block of zeros, there is room for each item's own.
        self._noise = torch.zeros(NOISE_FRAMES + most * frames, bins, device=self._device)
        self._noise[:NOISE_FRAMES] = fixed_noise(NOISE_FRAMES, bins)[0].T.to(self._device)
        self._condition = torch.zeros((1 + most) * frames, bins, device=self._device)
        self.speakers = torch.zeros(SPEAKERS, bins, device=self._device)
        self._frame = torch.arange(frames, device=self._device)

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as the kernels read them."""
        return self._estimator.weight_bytes + self._encoder.weight_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory of tables and rooms; what graphs hold besides is torch's to tell."""
        parts = [self._noise, self._condition, self.speakers, *vars(self._rooms).values()]
        return held_bytes(parts) + self._encoder.table_bytes

    def warm(self, items: int, span: int) -> None:
        """Capture, or run once, a pass of up to ``items`` items that see up to ``span`` pages."""
        self._launch(self._bucket(items), spans([span], self._span), [])

    def compile(self, buckets: Sequence[tuple[int, int]]) -> None:
        """Compile what passes of so many items and pages run, all kernels at the same time."""
        if self._device.type != "cuda" or not runs(self._noise):
            return
        keys = [(self._bucket(items), spans([span], self._span)) for items, span in buckets]
        for key in keys:
            self._reserve(*key)  # kernels fill its tables, and none runs below
        with compiled_together():
            for key in keys:
                self._compute(self._inputs_of(key))

    def run(self, items: Sequence[Item]) -> Tensor:
        """Mel (items, F, 80) of at most as many items as the largest bucket has."""
        bucket = next(size for size in self.buckets if size >= len(items))
        span = spans([len(item.pages) for item in items], self._span)
        self._launch(bucket, span, items)
        mel = self._rooms.given[: len(items) * self._layout.frames, : self._config.mel_bins]
        return mel.unflatten(0, (len(items), -1)).clone()

    def _bucket(self, items: int) -> int:
        return next(size for size in self.buckets if size >= min(items, self.buckets[-1]))

    def _inputs_of(self, key: tuple[int, int]) -> PassInputs:
        if key not in self._inputs:
            self._inputs[key] = PassInputs(*key, self._config, self._device)
        return self._inputs[key]

    def _reserve(self, bucket: int, span: int) -> None:
        self._encoder.reserve(bucket, span)
        self._estimator.reserve(bucket)

    def _launch(self, bucket: int, span: int, items: Sequence[Item]) -> None:
        key = bucket, span
        inputs = self._inputs_of(key)
        if self._graphs and key not in self._captured:
            inputs.fill(descriptors([], inputs, self._config))
            self._captured[key] = self._capture(lambda: self._compute(inputs), bucket, span)
        values = descriptors(items, inputs, self._config)
        self._stage(items, values["noise"], values["condition"])
        inputs.fill(values)
        if self._graphs:
            self._captured[key].replay()
        else:
            self._compute(inputs)

    def _stage(self, items: Sequence[Item], noise: Rows, condition: Rows) -> None:
        """Put in place what lies in no table: noise past the first 300 s, the voice's frames."""
        frames, bins = self._layout.frames, self._config.mel_bins
        for place, item in enumerate(items):
            if item.start + frames > NOISE_FRAMES:
                noise[place] = NOISE_FRAMES + place * frames
                further = fixed_noise(frames, bins, start=item.start)[0].T
                self._noise[noise[place] :][:frames] = further.to(self._device)
            if item.condition is not None:
                condition[place] = (1 + place) * frames
                given = self._condition[condition[place] :][:frames]
                given[: item.condition.shape[0]] = item.condition
                given[item.condition.shape[0] :] = 0

    def _compute(self, inputs: PassInputs) -> None:
        """The whole pass; its mel lies in the first columns of the rooms' ``given``."""
        bins, rows = self._config.mel_bins, inputs.items * self._layout.frames
        rooms = self._rooms.first(2 * rows)
        conditioned, free = rooms.given[:rows], rooms.given[rows:]

        def read(table: Tensor, first: Tensor) -> Tensor:
            return table[(first[:, None] + self._frame).flatten()]

        noise = read(self._noise, inputs.noise)
        speaker = self.speakers[inputs.speaker.long()].repeat_interleave(self._frame.shape[0], 0)
        mu, condition = self._encoder(inputs), read(self._condition, inputs.condition)
        torch.cat([noise, mu, speaker, condition], dim=1, out=conditioned)
        free[:, :bins] = noise
        free[:, bins:] = 0
        self._estimator.integrate(rooms, inputs)

    def _capture(self, compute: Callable[[], None], bucket: int, span: int) -> torch.cuda.CUDAGraph:
        """A graph of ``compute``; all graphs share memory, since they run one after another."""
        self._reserve(bucket, span)
        # Once before, so that what is made at a first call is made.
        self._side = side = self._side or torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            compute()
        return graph
