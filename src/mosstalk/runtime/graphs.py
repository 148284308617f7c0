"""Capturing CUDA graphs, so that all of a process leave as little behind as they can."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch

from mosstalk.runtime.busy import BusyPart, at_work

DECODING, LISTENING, STEPPING = "decoding", "listening", "stepping"
"""What graphs are for that are captured on one stream."""
_ERRORS = "thread_local"
"""Only what the capturing thread must not do is an error: others go on with their work."""
_one_at_a_time = RLock()


@cache
def capture_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """The stream of ``device`` on which all graphs of one ``use`` are captured.

    cuBLAS has a workspace for every stream, 32 MiB on an H100, which a graph goes on working in:
    with a stream each, graphs would keep one each. Graphs that may run at the same time must not
    share one, so they are of different uses.
    """
    del use
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device, use: str) -> Iterator[torch.cuda.Stream]:
    """That stream, after all that was queued before, for one thread at a time."""
    with _one_at_a_time:
        stream, current = capture_stream(device, use), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        yield stream
        current.wait_stream(stream)


@contextmanager
def _at_once(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """``torch.cuda.graph`` without the wait for the device and the emptying of caches before it."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode=_ERRORS)
        try:
            yield
        finally:
            graph.capture_end()


def captured(
    compute: Callable[[], None],
    device: torch.device,
    use: str,
    pool: Any,
    warm_ups: int = 1,
    *,
    empty_caches: bool = True,
) -> torch.cuda.CUDAGraph:
    """``compute`` as a graph, after as many calls as libraries need to make what they keep.

    ``pool``: torch's handle of memory that graphs share which never run at the same time, from
    ``torch.cuda.graph_pool_handle``; None is memory of its own. ``empty_caches``: wait for the
    device and return what memory is free to it before, as ``torch.cuda.graph`` does; to be
    turned off in the middle of a conversation. Other threads may be at work on the device
    meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with at_work(BusyPart.CAPTURE), _beside(device, use) as stream:
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                compute()
        capturing: AbstractContextManager[None] = _at_once(graph, pool, stream)
        if empty_caches:
            capturing = torch.cuda.graph(graph, pool, stream=stream, capture_error_mode=_ERRORS)
        with capturing:
            compute()
    return graph
