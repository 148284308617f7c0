"""What a step reads, by name: checked, written to one host buffer, brought over in one copy.

A captured graph reads its inputs where they lay when it was captured. So each set of inputs is
declared once and has one buffer on the device for good, of which every input is a part.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.errors import EngineInputError

Values = Mapping[str, NDArray[Any]]
Held = TypeVar("Held")
_ALIGNED_BYTES = 128
"""Every input begins at a multiple: kernels are compiled for aligned inputs, and again for
others."""
_ENTRIES, _LARGE_ENTRIES = 8, 2
"""Host buffers that take turns; of those over 64 KiB fewer, since all are pinned."""
_LARGE_BYTES = 1 << 16


class PinnedRing(Generic[Held]):
    """Entries that take turns, each with a buffer from which copies go to ``device``.

    On a GPU there are eight unless ``entries`` says otherwise, whose buffers are pinned, and each
    is handed out again only after its last copy has ended, which has long been so. A CPU has ended
    a copy at once: there is one. ``make`` makes an entry; it is told whether to pin.
    """

    def __init__(
        self, device: torch.device, make: Callable[[bool], Held], entries: int = _ENTRIES
    ) -> None:
        self._pinned = device.type == "cuda"
        self._entries = [make(self._pinned) for _ in range(entries if self._pinned else 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._entries)
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[Held]:
        """The next entry, free to be written; its copy must be queued within, on this stream."""
        self._turn = (self._turn + 1) % len(self._entries)
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        yield self._entries[self._turn]
        if self._pinned:
            copied = self._copied[self._turn] = copied or torch.cuda.Event()
            copied.record()


@dataclass(frozen=True)
class Field:
    """One input.

    Attributes:
        shape: of all that there is room for.
        dtype: numpy's name of it.
        count: inputs that count the same thing, of which a step may have fewer than
            ``shape[0]``, all of them the same number; None: a step always has the whole shape.
        padding: what stands where a step has fewer; None: whatever stood there before.
    """

    shape: tuple[int, ...]
    dtype: str = "int32"
    count: str | None = None
    padding: float | None = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole shape."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class DeviceInputs:
    """Named inputs of a step on ``device``: ``tensors``, each of its field's whole shape.

    ``fill`` checks, writes and copies in stream order, and waits for nothing: pinned host buffers
    take turns, and each is written again only after its copy has ended. Who fills from
    one stream what was last filled from another has the former wait for the latter, readers
    included. On a CPU there is one buffer, written where it is read.

    One thread at a time.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self.fields = dict(fields)
        places, nbytes = dict[str, slice](), 0
        for name, field in self.fields.items():
            places[name] = slice(nbytes, nbytes + field.nbytes)
            nbytes += -(-field.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self._buffer[places[name]].view(_torch_dtype(field.dtype)).view(field.shape)
            for name, field in self.fields.items()
        }
        self._stream: torch.cuda.Stream | None = None

        entries = _ENTRIES if nbytes <= _LARGE_BYTES else _LARGE_ENTRIES
        on_gpu = device.type == "cuda"
        # In one piece: each piece of pinned memory is rounded up, and takes time to get.
        size = (entries, nbytes) if on_gpu else (0, nbytes)
        hosts = iter(torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu))

        def host(pinned: bool) -> tuple[Tensor, dict[str, NDArray[Any]]]:
            buffer = next(hosts) if pinned else self._buffer
            flat = buffer.numpy()
            return buffer, {
                name: flat[places[name]].view(field.dtype).reshape(field.shape)
                for name, field in self.fields.items()
            }

        self._hosts = PinnedRing(device, host, entries)
        self.clear()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.nbytes

    def clear(self) -> None:
        """Fill with padding alone; inputs that always have their whole shape with theirs."""
        self._copy({
            name: np.zeros((0, *field.shape[1:]), field.dtype)
            for name, field in self.fields.items()
        })  # fmt: skip

    def fill(self, values: Values, *, made_for: int = 0, step: int = 0) -> None:
        """Bring a step's ``values`` to the device, behind what is queued on this stream.

        ``made_for`` is the step whose they are, ``step`` the one that is about to be launched.

        Raises:
            EngineInputError: see ``check_values``; nothing was copied.
        """
        check_values(values, self.fields, made_for=made_for, step=step)
        self._copy(values)

    def _copy(self, values: Values) -> None:
        self._follow()
        with self._hosts.turn() as (host, views):
            for name, field in self.fields.items():
                value, view = values[name], views[name]
                count = value.shape[0]
                view[:count] = value
                if field.padding is not None and count < field.shape[0]:
                    view[count:] = field.padding
            if host is not self._buffer:
                self._buffer.copy_(host, non_blocking=True)

    def _follow(self) -> None:
        """Wait on this stream for what was queued on the last one that filled these inputs."""
        if self._buffer.is_cuda:
            current = torch.cuda.current_stream(self._buffer.device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current


def check_values(
    values: Values, fields: Mapping[str, Field], *, made_for: int = 0, step: int = 0
) -> None:
    """Raise EngineInputError unless ``values`` are what the coming step must read.

    They are not if they were made for another step, or if one, which is named, is missing,
    unknown, misshapen or of another dtype.
    """
    if made_for != step:
        raise EngineInputError(f"the inputs are of step {made_for}, this is step {step}")
    if values.keys() != fields.keys():
        wrong = min(values.keys() ^ fields.keys())
        raise EngineInputError(f"input {wrong!r} is missing or not one of this step's")
    counts: dict[str, int] = {}
    for name, field in fields.items():
        value = values[name]
        if value.dtype != field.dtype:
            raise EngineInputError(f"input {name!r} is {value.dtype}, must be {field.dtype}")
        _check_shape(name, value.shape, field, counts)


def _check_shape(name: str, found: tuple[int, ...], field: Field, counts: dict[str, int]) -> None:
    """Raise EngineInputError unless a value has its field's shape, or a first part of it."""
    most, *others = field.shape
    fits = len(found) == len(field.shape) and [*found[1:]] == others
    if field.count is None:
        if not fits or found[0] != most:
            raise EngineInputError(f"input {name!r} has the shape {found}, must be {field.shape}")
        return
    count = counts.get(field.count)
    if not fits or found[0] > most or count not in (None, found[0]):
        shown = (f"at most {most}" if count is None else count, *others)
        raise EngineInputError(f"input {name!r} has the shape {found}, must be {shown}")
    counts[field.count] = found[0]


def _torch_dtype(name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, name)).dtype
