"""Passes at the same time: what fills a GPU is several passes of small kernels, not larger ones."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mosstalk.codec.flow_graph import FlowPass
from mosstalk.codec.flow_items import Item


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
