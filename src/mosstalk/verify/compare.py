"""Bounds, and the comparison of one tensor with what is expected of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

ABSOLUTE = 2e-4
RELATIVE = 1e-5
"""Float32 bound of a tensor: ABSOLUTE + RELATIVE x its largest expected magnitude."""
WAVE = 1e-3
"""Float32 bound of waves and vocoder sources."""

LOW_PRECISION = {torch.bfloat16: 0.2, torch.float16: 0.05}
"""In lower precision a tensor passes where ||error|| / ||expected|| is at most this.

These bounds are this project's own, wide enough for rounding and far below what a wrong
operation gives. Ids and rows are then compared and printed, but not judged: one rounding
can turn a greedy choice, and everything after it.
"""


@dataclass(frozen=True)
class Check:
    """One comparison: the error, its bound, and whether it counts."""

    name: str
    error: float
    bound: float
    judged: bool = True
    note: str = ""

    @property
    def passed(self) -> bool:
        """Within the bound; NaN never is."""
        return self.error <= self.bound or not self.judged


@dataclass(frozen=True)
class Comparer:
    """Compares results computed in ``dtype``."""

    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether float32 bounds apply and ids must be equal."""
        return self.dtype not in LOW_PRECISION

    def tensor(self, name: str, found: Tensor, expected: Tensor, *, wave: bool = False) -> Check:
        """Compare shapes and values of floating-point tensors."""
        found, expected = found.detach().double().cpu(), expected.double()
        if found.shape != expected.shape:
            note = f"shape {list(found.shape)}, expected {list(expected.shape)}"
            return Check(name, float("inf"), 0.0, note=note)
        difference = found - expected
        if not self.exact:
            error = float(difference.norm() / expected.norm().clamp_min(1e-12))
            return Check(name, error, LOW_PRECISION[self.dtype], note="relative norm")
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        bound = WAVE if wave else ABSOLUTE + RELATIVE * largest
        return Check(name, float(difference.abs().max()) if expected.numel() else 0.0, bound)

    def ids(self, name: str, found: list[int] | list[list[int]], expected: Tensor) -> Check:
        """Compare ids, rows or modes: they must be equal one by one."""
        wanted = expected.tolist()
        equal = sum(a == b for a, b in zip(found, wanted, strict=False))
        different = max(len(found), len(wanted)) - equal
        note = f"{equal} of {len(wanted)} equal"
        return Check(name, float(different), 0.0, judged=self.exact, note=note)

    def value(self, name: str, found: object, expected: object, *, always: bool = False) -> Check:
        """Compare a plain value, such as a finish reason; ``always`` judges in any precision."""
        note = f"{found}" if found == expected else f"{found}, expected {expected}"
        error = 0.0 if found == expected else 1.0
        return Check(name, error, 0.0, judged=self.exact or always, note=note)
