"""What this device does at best, measured: bytes it copies and products it makes in a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mosstalk.numerics.fp8 import E4M3, Fp8Weight
from mosstalk.ops.linear_fp8 import fp8_library, library_takes
from mosstalk.runtime.device import synchronize

_COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
_SIDE = {"cuda": 8192, "cpu": 1024}
_RUNS = 5


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved at least once, and operations (a multiply-add is two).

    Of the operations ``fp8`` are products of numbers in E4M3.
    """

    moved_bytes: float
    operations: float
    fp8: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
            self.fp8 + other.fp8,
        )


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a large copy (read and written), and operations a second of a large
    matrix product of random values in ``dtype``, and in E4M3 where it was measured; the best of a
    few runs each.
    """

    bytes_per_s: float
    flops_per_s: float
    dtype: torch.dtype
    fp8_per_s: float | None = None

    def limit_ms(self, work: Work) -> float:
        """The longer of the two: moving the bytes, or doing the operations."""
        computing_s = (work.operations - work.fp8) / self.flops_per_s
        computing_s += work.fp8 / (self.fp8_per_s or self.flops_per_s)
        return 1000 * max(work.moved_bytes / self.bytes_per_s, computing_s)

    def describe(self) -> str:
        """For people."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"copies {self.bytes_per_s / 1e9:,.0f} GB/s, multiplies {kind} at "
            f"{self.flops_per_s / 1e12:,.2f} TFLOP/s"
            + (f", E4M3 at {self.fp8_per_s / 1e12:,.2f}" if self.fp8_per_s else "")
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Ceilings:
    """Measure on ``device``; takes up to 8 GiB of it for a moment. ``fp8``: on a GPU, E4M3 too."""
    in_fp8 = _fp8_per_s(device, dtype) if fp8 and device.type == "cuda" else None
    return Ceilings(_copied_per_s(device), _multiplied_per_s(device, dtype), dtype, in_fp8)


def _copied_per_s(device: torch.device) -> float:
    size = _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_s(device, lambda: target.copy_(source))


def _multiplied_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE.get(device.type, _SIDE["cpu"])
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    product = torch.empty_like(a)
    return 2 * side**3 / _best_s(device, lambda: torch.mm(a, b, out=product))


def _fp8_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """By torch's product of rows and channels that have a scale each; None: it has none."""
    side = _SIDE["cuda"]
    values = torch.randn(side, side, device=device).to(dtype)
    weight, out = Fp8Weight.of(values), torch.empty_like(values)
    if not library_takes(weight, dtype):
        return None
    scale = torch.ones(side, device=device)
    rows = values.to(E4M3)
    return 2 * side**3 / _best_s(device, lambda: fp8_library(rows, scale, weight, out))


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_RUNS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
