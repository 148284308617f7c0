"""Losses and gradients on a card as one CUDA graph: hundreds of small kernels begin as one."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Losses = dict[str, Tensor]
_WARM_UPS = 3
"""Plain calls before a recording, in which libraries choose their kernels."""


class Recorded:
    """``function`` of tensors that fills gradients and returns losses; on a CPU a plain call.

    On a card its first call is recorded and every call replays that recording. So its inputs keep
    their shapes, it waits for no value of the card's, and nothing but its inputs, the parameters
    and the card's random numbers changes from call to call.
    """

    def __init__(self, function: Callable[..., Losses], parameters: Iterable[nn.Parameter]) -> None:
        self._function, self._parameters = function, list(parameters)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._losses: Losses = {}

    def __call__(self, *inputs: Tensor) -> Losses:
        """Losses of ``inputs``, whose gradients take the place of those that the parameters had."""
        if not inputs[0].is_cuda:
            return self._plainly(*inputs)
        if self._graph is None:
            self._record(*inputs)
        assert self._graph is not None
        for kept, new in zip(self._inputs, inputs, strict=True):
            kept.copy_(new)
        self._graph.replay()
        # The next replay writes where these lie.
        return {name: value.clone() for name, value in self._losses.items()}

    def _plainly(self, *inputs: Tensor) -> Losses:
        for parameter in self._parameters:
            parameter.grad = None
        losses = self._function(*inputs)
        return {name: value.detach() for name, value in losses.items()}

    def _record(self, *inputs: Tensor) -> None:
        self._inputs = tuple(value.clone() for value in inputs)
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._plainly(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            self._losses = self._plainly(*self._inputs)
        self._graph = graph
