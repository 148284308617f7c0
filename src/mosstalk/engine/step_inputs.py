"""What one pass over packed rows reads: its size, its descriptors, and one copy to the device.

Letters: N packed rows, S of them single (the only row of their stretch), T tiles of rows of
longer stretches, B blocks of the longest context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosstalk.errors import EngineInputError
from mosstalk.runtime.device_inputs import PinnedRing

Values = Mapping[str, npt.NDArray[Any]]
NOTHING = -1
_ALIGNED_BYTES = 128
"""Every input begins at a multiple: kernels are compiled for aligned inputs, and again for
others."""
_DTYPES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class PassSize:
    """What a pass has room for; one graph of each stack of layers is captured for each."""

    rows: int
    singles: int
    tiles: int
    blocks: int

    @property
    def contexts(self) -> int:
        """Tables of blocks: one of each single row and of each stretch."""
        return self.singles + self.tiles


@dataclass(frozen=True)
class Planned:
    """A pass before it is on the device: the ``step`` it is for, its size and its ``values``."""

    step: int
    size: PassSize
    values: Values


@dataclass(frozen=True)
class _Field:
    """One input: its full shape and what stands where a pass has less (None: what stood there)."""

    shape: tuple[int, ...]
    padding: int | None = NOTHING
    dtype: str = "int32"
    count: str = "rows"
    """Inputs that count the same thing must have the same number."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _fields(size: PassSize, *, embeds: bool) -> dict[str, _Field]:
    rows = (size.rows,)
    common = {
        "positions": _Field(rows, 0),
        "slot_mapping": _Field(rows),
        "written": _Field(rows),
        "context_lens": _Field((size.singles,), 0, count="singles"),
        "tiles": _Field((size.tiles, 4), 0, count="tiles"),
        "block_tables": _Field((size.contexts, size.blocks), None, count="contexts"),
    }
    if embeds:
        return common | {"rows": _Field((size.rows, 2), dtype="int64"), "slots": _Field(rows)}
    return common | {"wanted": _Field(rows, count="wanted")}


class StepInputs:
    """The descriptors of a pass, one buffer on the device and one copy to fill it.

    ``positions`` (N,) and ``slot_mapping`` (N,) in the store, which is where ``written`` (N,) tells
    ``rope_kv`` to write: not the single rows, which attention itself writes. ``context_lens``
    (S,) are the keys that single rows see, their own included. ``tiles`` (T, 4): first packed
    row, rows, position of the first, and its table. ``block_tables`` (S + T, B): blocks of single
    rows, then of stretches. Besides, the trunk's have ``rows`` (N, 2) int64 and ``slots`` (N,),
    whose latest row stands for a row not seen yet; a modality block's have ``wanted`` (N,),
    packed rows whose output is asked for. All int32 otherwise. Where a pass has fewer, -1 is
    no row, no place, no block, and a length or a tile of 0 rows is none.
    """

    rows: Tensor
    slots: Tensor
    wanted: Tensor
    positions: Tensor
    slot_mapping: Tensor
    written: Tensor
    context_lens: Tensor
    tiles: Tensor
    block_tables: Tensor

    def __init__(self, size: PassSize, device: torch.device, *, embeds: bool) -> None:
        self.size = size
        self._fields = _fields(size, embeds=embeds)
        places, nbytes = dict[str, slice](), 0
        for name, field in self._fields.items():
            places[name] = slice(nbytes, nbytes + field.nbytes)
            nbytes += -(-field.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for name, field in self._fields.items():
            part = self._buffer[places[name]].view(_DTYPES[field.dtype])
            setattr(self, name, part.view(field.shape))

        def host(pinned: bool) -> tuple[Tensor, dict[str, npt.NDArray[Any]]]:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
            return buffer, self._host_views(buffer.numpy(), places)

        self._hosts = PinnedRing(device, host)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.nbytes

    def clear(self) -> None:
        """Fill with padding alone: a pass that reads and writes nothing."""
        self._copy({
            name: np.zeros((0, *field.shape[1:]), field.dtype)
            for name, field in self._fields.items()
        })  # fmt: skip

    def fill(self, planned: Planned, step: int) -> None:
        """Copy a pass's descriptors to the device, in stream order and without waiting.

        Raises:
            EngineInputError: see ``check``; nothing was copied.
        """
        self.check(planned, step)
        self._copy(planned.values)

    def check(self, planned: Planned, step: int) -> None:
        """Raise EngineInputError unless a pass's descriptors are what they must be.

        They are not if they are of another step or size, or if one, which is named, is missing,
        unknown, misshapen or of another dtype.
        """
        if planned.step != step:
            raise EngineInputError(f"the inputs are of step {planned.step}, this is step {step}")
        if planned.size != self.size:
            raise EngineInputError(f"the inputs are for {planned.size}, this pass is {self.size}")
        self._check(planned.values)

    def _check(self, values: Values) -> None:
        if values.keys() != self._fields.keys():
            wrong = min(values.keys() ^ self._fields.keys())
            raise EngineInputError(f"input {wrong!r} is missing or not one of this step's")
        counts: dict[str, int] = {}
        for name, field in self._fields.items():
            value = values[name]
            if value.dtype != field.dtype:
                raise EngineInputError(f"input {name!r} is {value.dtype}, must be {field.dtype}")
            most, *others = field.shape
            count = counts.get(field.count)
            fits = value.ndim == len(field.shape) and [*value.shape[1:]] == others
            if not fits or value.shape[0] > most or count not in (None, value.shape[0]):
                shown = (f"at most {most}" if count is None else count, *others)
                raise EngineInputError(
                    f"input {name!r} has the shape {value.shape}, must be {shown}"
                )
            counts[field.count] = value.shape[0]

    def _copy(self, values: Values) -> None:
        with self._hosts.turn() as (host, views):
            for name, field in self._fields.items():
                value, view = values[name], views[name]
                count = value.shape[0]
                view[:count] = value
                if field.padding is not None and count < field.shape[0]:
                    view[count:] = field.padding
            self._buffer.copy_(host, non_blocking=True)

    def _host_views(
        self, flat: npt.NDArray[np.uint8], places: dict[str, slice]
    ) -> dict[str, npt.NDArray[Any]]:
        return {
            name: flat[places[name]].view(field.dtype).reshape(field.shape)
            for name, field in self._fields.items()
        }
