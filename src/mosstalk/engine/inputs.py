"""What a step reads, by name: nothing missing, misshapen or left from another step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mosstalk.errors import EngineInputError

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Spec:
    """Shape of an input, sizes by number or by a letter that is the same everywhere; dtype."""

    shape: Shape
    dtype: torch.dtype = torch.int64


@dataclass
class Inputs:
    """Named tensors of one step; ``check`` before every launch, in production too."""

    step: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def check(self, specs: Mapping[str, Spec], step: int, device: torch.device) -> None:
        """Raise EngineInputError, naming the input, unless all are as ``specs`` say."""
        if self.step != step:
            raise EngineInputError(f"the inputs are of step {self.step}, this is step {step}")
        sizes: dict[str, int] = {}
        for name, spec in specs.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise EngineInputError(f"input {name!r} is missing")
            if tensor.dtype != spec.dtype or tensor.device != device:
                raise EngineInputError(
                    f"input {name!r} is {tensor.dtype} on {tensor.device}, must be "
                    f"{spec.dtype} on {device}"
                )
            _check_shape(name, tuple(tensor.shape), spec.shape, sizes)
        unknown = self.tensors.keys() - specs.keys()
        if unknown:
            raise EngineInputError(f"input {min(unknown)!r} is not one of this step's")


def _check_shape(name: str, found: tuple[int, ...], wanted: Shape, sizes: dict[str, int]) -> None:
    fits = len(found) == len(wanted)
    for size, want in zip(found, wanted, strict=False):
        known = sizes.setdefault(want, size) if isinstance(want, str) else want
        fits = fits and size == known
    if not fits:
        shown = tuple(sizes.get(w, w) if isinstance(w, str) else w for w in wanted)
        raise EngineInputError(f"input {name!r} has the shape {found}, must be {shown}")
