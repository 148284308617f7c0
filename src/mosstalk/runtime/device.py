"""Choice of device and dtype, torch's threads and streams, and the garbage collector's freeze."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import TypeVar, cast

import torch

from mosstalk.environment import threads_were_chosen
from mosstalk.errors import DeviceError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_WORTH_SHARING = 50_000_000
"""Parameters from which on a second thread for an operation pays: below, a hop is slower."""
_MOST_HELPERS = 2
"""Threads beside the caller's: no more parts than three are ever computed at once."""

T = TypeVar("T")


def pick_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is CUDA where there is a usable GPU.

    TF32 is switched off, so that float32 on a GPU means the same as on a CPU.

    Raises:
        DeviceError: the machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DeviceError(f"device {name!r} cannot be used ({reason}); try --device cpu") from None
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return device


def pick_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``; raise DeviceError naming the choices."""
    if name not in DTYPES:
        raise DeviceError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def fit_threads(device: torch.device, parts: Iterable[torch.nn.Module]) -> None:
    """Run a small model on a CPU with one thread an operation, unless the user chose how many.

    Its operations are too short to be worth sharing. What consists of several that do not need
    each other is shared by ``at_once``.
    """
    if device.type != "cpu" or threads_were_chosen():
        return
    size = sum(weight.numel() for part in parts for weight in part.parameters())
    if size < _WORTH_SHARING:
        torch.set_num_threads(1)
        _Helpers.begin()


class _Helpers:
    """Threads that compute parts beside their caller; none where operations are shared."""

    pool: ThreadPoolExecutor | None = None
    count = 0

    @classmethod
    def begin(cls) -> None:
        """Have as many as there are other cores for this process, up to two."""
        # Not every system tells which cores a process may use.
        ours = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        cls.count = min(_MOST_HELPERS, len(ours) - 1)
        if cls.pool is None and cls.count:
            cls.pool = ThreadPoolExecutor(cls.count, "mosstalk-beside")


def at_once(parts: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """What each of ``parts``, which compute on ``device``, returns, in their order.

    They are begun in their order: by the caller alone, or by several threads where
    ``fit_threads`` found a small model on a CPU. One of their exceptions is raised, once none of
    them runs any more.
    """
    pool = _Helpers.pool
    if pool is None or device.type != "cpu":
        return [part() for part in parts]
    numbers, results = iter(range(len(parts))), cast(list[T], [None] * len(parts))
    mode = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(mode):
            for number in numbers:
                results[number] = parts[number]()

    beside = range(min(_Helpers.count, len(parts) - 1))
    helpers = [pool.submit(copy_context().run, work) for _ in beside]
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()
    return results


def own_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which work is queued on a stream of its own, beside everybody else's.

    On a CPU they do nothing.
    """
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)
    return lambda: torch.cuda.stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on ``device`` has run, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Within, the garbage collector leaves out what is alive on entry, after a last full run.

    A process with torch and a model holds hundreds of thousands of objects. Looking at all of
    them takes longer than a listener has sound in hand, and stops every thread. What is made
    within is collected as ever. For a process that has loaded what it works with.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
