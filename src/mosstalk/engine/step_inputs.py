"""What one pass over packed rows reads: its size, its descriptors, and one copy to the device.

Letters: N packed rows, S of them single (the only row of their span), T tiles of rows of
longer spans, B blocks of the longest context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.errors import EngineInputError
from mosstalk.runtime.device_inputs import DeviceInputs, Field, Values, check_values

NOTHING = -1


@dataclass(frozen=True)
class PassSize:
    """What a pass has room for; one graph of each stack of layers is captured for each."""

    rows: int
    singles: int
    tiles: int
    blocks: int

    @property
    def contexts(self) -> int:
        """Tables of blocks: one of each single row and of each span."""
        return self.singles + self.tiles


@dataclass(frozen=True)
class Planned:
    """A pass before it is on the device: the ``step`` it is for, its size and its ``values``."""

    step: int
    size: PassSize
    values: Values


def _fields(size: PassSize, *, embeds: bool) -> dict[str, Field]:
    rows, singles, tiles = (size.rows,), (size.singles,), (size.tiles, 4)
    common = {
        "positions": Field(rows, count="rows"),
        "slot_mapping": Field(rows, count="rows", padding=NOTHING),
        "written": Field(rows, count="rows", padding=NOTHING),
        "context_lens": Field(singles, count="singles"),
        "tiles": Field(tiles, count="tiles"),
        "block_tables": Field((size.contexts, size.blocks), count="contexts", padding=None),
    }
    if not embeds:
        return common | {"wanted": Field(rows, count="wanted", padding=NOTHING)}
    return common | {
        "rows": Field((size.rows, 2), "int64", "rows", padding=NOTHING),
        "slots": Field(rows, count="rows", padding=NOTHING),
    }


def check_planned(planned: Planned, step: int, *, embeds: bool) -> None:
    """Raise EngineInputError unless a pass's descriptors are what they must be.

    See ``runtime.device_inputs.check_values``.
    """
    fields = _fields(planned.size, embeds=embeds)
    check_values(planned.values, fields, made_for=planned.step, step=step)


class PassInputs:
    """The descriptors of a pass on the device.

    ``positions`` (N,) and ``slot_mapping`` (N,) in the store, which is where ``written`` (N,) tells
    ``rope_kv`` to write: not the single rows, which attention itself writes. ``context_lens``
    (S,) are the keys that single rows see, their own included. ``tiles`` (T, 4): first packed
    row, rows, position of the first, and its table. ``block_tables`` (S + T, B): blocks of single
    rows, then of spans. Besides, the trunk's have ``rows`` (N, 2) int64 and ``slots`` (N,),
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
    size: PassSize


class ExactInputs(PassInputs):
    """What was planned as it is, without padding: for a pass that no graph has captured.

    Raises:
        EngineInputError: see ``check_planned``.
    """

    def __init__(self, planned: Planned, step: int, device: torch.device, *, embeds: bool) -> None:
        check_planned(planned, step, embeds=embeds)
        self.size = planned.size
        for name, value in planned.values.items():
            setattr(self, name, torch.from_numpy(value).to(device))


class StepInputs(PassInputs):
    """Descriptors with room for a size of pass: one buffer, and one copy to fill it."""

    def __init__(self, size: PassSize, device: torch.device, *, embeds: bool) -> None:
        self.size = size
        self._inputs = DeviceInputs(_fields(size, embeds=embeds), device)
        for name, tensor in self._inputs.tensors.items():
            setattr(self, name, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._inputs.nbytes

    def clear(self) -> None:
        """Fill with padding alone: a pass that reads and writes nothing."""
        self._inputs.clear()

    def fill(self, planned: Planned, step: int) -> None:
        """Copy a pass's descriptors to the device, in stream order and without waiting.

        Raises:
            EngineInputError: see ``check_planned``, or they are of another size; nothing was
                copied.
        """
        if planned.size != self.size:
            raise EngineInputError(f"the inputs are for {planned.size}, this pass is {self.size}")
        self._inputs.fill(planned.values, made_for=planned.step, step=step)
