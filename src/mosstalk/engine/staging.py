"""Named host arrays to a device without waiting for it: one pinned buffer, one copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any]]
_ALIGNED_BYTES = 16
_ENTRIES = 8
_LEAST_BYTES = 4096


class Staging:
    """Copies arrays to ``device`` in stream order; on a CPU they become tensors as they lie.

    Pinned buffers take turns, and each is written again only after its last copy has ended:
    with ``_ENTRIES`` of them that has long been so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Tensor | None] = [None] * _ENTRIES
        self._copied: list[torch.cuda.Event | None] = [None] * _ENTRIES
        self._turn = 0

    def put(self, arrays: Arrays) -> dict[str, Tensor]:
        """The arrays as tensors of the same shape and dtype, all parts of one new buffer."""
        if self.device.type != "cuda":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        begins, total = dict[str, int](), 0
        for name, array in arrays.items():
            begins[name] = total
            total += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        pinned = self._pinned(total)
        flat = pinned.numpy()
        for name, array in arrays.items():
            begin = begins[name]
            flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        found = torch.empty(total, dtype=torch.uint8, device=self.device)
        found.copy_(pinned[:total], non_blocking=True)
        self._copied[self._turn] = event = self._copied[self._turn] or torch.cuda.Event()
        event.record()
        return {name: _part(found, begins[name], array) for name, array in arrays.items()}

    def _pinned(self, size: int) -> Tensor:
        """The next buffer, large enough and free to be written."""
        self._turn = (self._turn + 1) % _ENTRIES
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        buffer = self._buffers[self._turn]
        if buffer is None or len(buffer) < size:
            room = max(_LEAST_BYTES, 1 << (size - 1).bit_length()) if size else _LEAST_BYTES
            buffer = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            self._buffers[self._turn] = buffer
        return buffer


def _part(flat: Tensor, begin: int, array: NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return flat[begin : begin + array.nbytes].view(dtype).view(array.shape)
