"""Choice of device and dtype, torch's threads and streams, and the garbage collector's freeze."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mosstalk.environment import threads_were_chosen
from mosstalk.errors import DeviceError
from mosstalk.runtime.sharing import Helpers

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_WORTH_SHARING = 50_000_000
"""Parameters from which on a second thread for an operation pays: below, a hop is slower."""


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
    each other is shared by ``sharing.at_once``.
    """
    if device.type != "cpu" or threads_were_chosen():
        return
    size = sum(weight.numel() for part in parts for weight in part.parameters())
    if size < _WORTH_SHARING:
        torch.set_num_threads(1)
        Helpers.begin()


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
