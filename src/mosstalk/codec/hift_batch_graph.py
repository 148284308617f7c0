"""CUDA graphs of HiFT calls: one for each number of replies and frames that is to be fast."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosstalk.codec.hift_batch_step import HiftStep
from mosstalk.runtime.graphs import DECODING, captured

_WARM_UPS = 3


@contextmanager
def steady_convolutions(*, tune: bool) -> Iterator[None]:
    """Have cuDNN choose among kernels that give the same sum each time; ``tune``: by trying."""
    settings = torch.backends.cudnn
    before = settings.deterministic, settings.benchmark
    settings.deterministic, settings.benchmark = True, tune
    try:
        yield
    finally:
        settings.deterministic, settings.benchmark = before


@dataclass(frozen=True)
class _Captured:
    """A graph with the tensors that it reads, and the sound that it writes."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor
    mel: Tensor
    wave: Tensor


class HiftGraphs:
    """Captured calls by (replies, frames), in one memory pool: one runs at a time."""

    def __init__(self, step: HiftStep, device: torch.device, *, tune: bool) -> None:
        self._step, self._device, self._tune = step, device, tune
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None
        self.graph_bytes = 0

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, shape: tuple[int, int]) -> bool:
        return shape in self._captured

    def capture(self, replies: int, frames: int) -> None:
        """Capture the call of ``replies`` with ``frames`` each, unless it is there already.

        The calls that warm it up touch slot 0 alone.
        """
        if (replies, frames) in self._captured:
            return
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        slots = torch.zeros(replies, dtype=torch.int64, device=self._device)
        bins = self._step.config.in_channels
        mel = torch.zeros(replies, bins, frames, device=self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        waves = list[Tensor]()

        def compute() -> None:
            waves[:] = [self._step(slots, mel)]

        with steady_convolutions(tune=self._tune), torch.inference_mode():
            graph = captured(compute, self._device, DECODING, self._pool, _WARM_UPS)
        self._captured[replies, frames] = _Captured(graph, slots, mel, waves[0])
        torch.cuda.empty_cache()
        self.graph_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

    @torch.inference_mode()
    def run(self, replies: int, slots: list[int], mels: list[Tensor], frames: int) -> Tensor:
        """Replay: new frames (80, <= T) of each slot to sound (len(slots), N), a copy.

        What is left of the batch runs on slot 0, which is nobody's.
        """
        found = self._captured[replies, frames]
        padded = slots + [0] * (replies - len(slots))
        found.slots.copy_(torch.tensor(padded, pin_memory=True), non_blocking=True)
        place_frames(found.mel, mels)
        found.graph.replay()
        return found.wave[: len(slots)].clone()


def place_frames(whole: Tensor, mels: list[Tensor]) -> None:
    """Put each of ``mels`` (80, T') at the end of its row of ``whole`` (B, 80, T)."""
    frames = whole.shape[2]
    places = [whole[row, :, frames - mel.shape[1] :] for row, mel in enumerate(mels)]
    torch._foreach_copy_(places, mels)
