"""What this device does at best, measured: bytes it copies and products it makes in a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mosstalk.device import synchronize

_COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
_SIDE = {"cuda": 8192, "cpu": 1024}
_RUNS = 5


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved at least once, and operations (a multiply-add is two)."""

    moved_bytes: float
    operations: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.moved_bytes + other.moved_bytes, self.operations + other.operations)


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a large copy (read and written), and operations a second of a large
    matrix product of random values in ``dtype``; the best of a few runs each.
    """

    bytes_per_s: float
    flops_per_s: float
    dtype: torch.dtype

    def limit_ms(self, moved_bytes: float, operations: float) -> float:
        """The longer of the two: moving the bytes, or doing the operations."""
        return 1000 * max(moved_bytes / self.bytes_per_s, operations / self.flops_per_s)

    def describe(self) -> str:
        """For people."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"copies {self.bytes_per_s / 1e9:,.0f} GB/s, multiplies {kind} at "
            f"{self.flops_per_s / 1e12:,.2f} TFLOP/s"
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure both on ``device``; takes up to 8 GiB of it for a moment."""
    return Ceilings(_copied_per_s(device), _multiplied_per_s(device, dtype), dtype)


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


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_RUNS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
