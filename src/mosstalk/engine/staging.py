"""Named host arrays to a device without waiting for it: one pinned buffer, one copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosstalk.runtime.device_inputs import PinnedRing

Arrays = Mapping[str, NDArray[Any]]
_ALIGNED_BYTES = 16
_LEAST_BYTES = 4096


class Staging:
    """Copies arrays to ``device`` in stream order; on a CPU they become tensors as they lie."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = PinnedRing(device, _Growing)

    def put(self, arrays: Arrays) -> dict[str, Tensor]:
        """The arrays as tensors of the same shape and dtype, all parts of one new buffer."""
        if self.device.type != "cuda":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        begins, total = dict[str, int](), 0
        for name, array in arrays.items():
            begins[name] = total
            total += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        with self._hosts.turn() as growing:
            host = growing.first(total)
            flat = host.numpy()
            for name, array in arrays.items():
                place = slice(begins[name], begins[name] + array.nbytes)
                flat[place] = np.ascontiguousarray(array).view(np.uint8).ravel()
            found = torch.empty(total, dtype=torch.uint8, device=self.device)
            found.copy_(host, non_blocking=True)
        return {name: _part(found, begins[name], array) for name, array in arrays.items()}


class _Growing:
    """A host buffer that is replaced by a larger one when more is asked of it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def first(self, size: int) -> Tensor:
        """Its first ``size`` bytes."""
        if len(self._buffer) < size:
            room = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
            self._buffer = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffer[:size]


def _part(flat: Tensor, begin: int, array: NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return flat[begin : begin + array.nbytes].view(dtype).view(array.shape)
