"""What a step on the device reads, by name, sent there in one copy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.errors import EngineInputError

Values = npt.NDArray[np.float32] | npt.NDArray[np.int32] | np.float32 | np.int32

_ALIGNED = 16
_NUMPY = {torch.float32: np.float32, torch.int32: np.int32}


@dataclass(frozen=True)
class Named:
    """An input for each item: the shape of one, its type, and what unused items have."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    blank: float = 0


class NamedBuffer:
    """Inputs of so many items, on the host and at fixed places on the device.

    A captured graph reads ``tensors``, each (items, ...). Every input must be put before each
    ``send``, so that no step can read what another one left.
    """

    def __init__(self, items: int, specs: Mapping[str, Named], device: torch.device) -> None:
        self.items = items
        self._specs = dict(specs)
        self._missing = set(specs)
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, spec in specs.items():
            length = items * math.prod(spec.shape) * spec.dtype.itemsize
            places[name] = (size, size + length)
            size += -(-length // _ALIGNED) * _ALIGNED
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._arrays = {
            name: self._view(self._host, name, *at).numpy() for name, at in places.items()
        }
        self.tensors = {name: self._view(self._device, name, *at) for name, at in places.items()}

    def put(self, name: str, values: Sequence[Values]) -> None:
        """Set an input of the first items, one value (...) for each; the others get its blank.

        Raises:
            EngineInputError: there is no such input, or it has another shape or type.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise EngineInputError(f"input {name!r} is not one of this step's")
        if len(values) > self.items:
            raise EngineInputError(f"input {name!r} is for {len(values)} items, not {self.items}")
        wanted = np.dtype(_NUMPY[spec.dtype])
        array = self._arrays[name]
        for index, value in enumerate(values):
            if value.dtype != wanted or value.shape != spec.shape:
                raise EngineInputError(
                    f"input {name!r} is {value.dtype} {value.shape}, must be {wanted} {spec.shape}"
                )
            array[index] = value
        array[len(values) :] = spec.blank
        self._missing.discard(name)

    def send(self) -> None:
        """Bring all to the device, behind what is queued there.

        Raises:
            EngineInputError: an input was not put since the last time; it is named.
        """
        if self._missing:
            raise EngineInputError(f"input {min(self._missing)!r} is missing")
        self._device.copy_(self._host, non_blocking=True)
        self._missing = set(self._specs)

    def _view(self, store: Tensor, name: str, start: int, end: int) -> Tensor:
        spec = self._specs[name]
        return store[start:end].view(spec.dtype).view(self.items, *spec.shape)
