"""Losses and gradients on a card as CUDA graphs: hundreds of small kernels begin as one.

Where a launch costs the host a tenth of a millisecond or more, as on some virtual machines, a card
waits for nearly all of a step that is not recorded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Losses = dict[str, Tensor]
_WARM_UPS = 3
"""Plain calls before a recording, in which libraries choose their kernels."""


@dataclass(frozen=True)
class _Recording:
    """A graph, what it reads, and where it leaves losses (one after another) and gradients."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    losses: Tensor
    gradients: tuple[Tensor | None, ...]


class Recorded:
    """``function`` of tensors that fills gradients and returns losses; on a CPU a plain call.

    On a card the first call with inputs of some shapes, and with some flags, is recorded, and every
    further one replays that recording. So ``function`` waits for no value of the card's and copies
    nothing to it, and nothing but its inputs, the parameters and the card's random numbers changes
    from call to call. All recordings share their memory. With ``plain`` nothing is recorded.
    """

    def __init__(
        self,
        function: Callable[..., Losses],
        parameters: Iterable[nn.Parameter],
        *,
        plain: bool = False,
    ) -> None:
        self._function, self._parameters, self._plain = function, list(parameters), plain
        self._recordings: dict[object, _Recording] = {}
        self._aside: torch.cuda.Stream | None = None

    def __call__(self, *inputs: Tensor, **flags: bool) -> Losses:
        """Losses of ``inputs``, whose gradients take the place of those that the parameters had."""
        if self._plain or not inputs[0].is_cuda:
            losses = self._filled(inputs, flags)
            return {name: value.detach() for name, value in losses.items()}
        key = (tuple(value.shape for value in inputs), tuple(flags.items()))
        if key not in self._recordings:
            self._recordings[key] = self._record(inputs, flags)
        kept = self._recordings[key]
        for place, new in zip(kept.inputs, inputs, strict=True):
            place.copy_(new)
        kept.graph.replay()
        for parameter, gradient in zip(self._parameters, kept.gradients, strict=True):
            parameter.grad = gradient
        # The next replay writes where these lie.
        return dict(zip(kept.names, kept.losses.clone().unbind(), strict=True))

    def _filled(self, inputs: tuple[Tensor, ...], flags: dict[str, bool]) -> Losses:
        for parameter in self._parameters:
            parameter.grad = None
        return self._function(*inputs, **flags)

    def _record(self, inputs: tuple[Tensor, ...], flags: dict[str, bool]) -> _Recording:
        inputs = tuple(value.clone() for value in inputs)
        # One stream for all warm-ups: memory that was used on one is not used on another.
        aside = self._aside = self._aside or torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._filled(inputs, flags)
        torch.cuda.current_stream().wait_stream(aside)
        graph, shared = torch.cuda.CUDAGraph(), next(iter(self._recordings.values()), None)
        with torch.cuda.graph(graph, pool=shared.graph.pool() if shared else None):
            losses = self._filled(inputs, flags)
            told = torch.stack([value.detach().float() for value in losses.values()])
        gradients = tuple(parameter.grad for parameter in self._parameters)
        return _Recording(graph, inputs, tuple(losses), told, gradients)
