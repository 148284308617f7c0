"""Whether the seams of streamed sound can be told from the sound itself.

At a cross-fade's ends its weights jump (a Hamming window begins at 0.08), so these are the
samples to look at: the largest step from one sample to the next, and the largest change of that
step, beside the same over all samples elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.constants import MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.hift import KEPT_FRAMES

_NEAR = 2
"""Samples on either side of a seam that count to it."""
_BESIDE = OUTPUT_RATE // 50
"""20 ms."""
_QUIET = 1e-6
_SHARES = (0.5, 0.99, 0.999)


@dataclass(frozen=True)
class Jumps:
    """Steps between samples, and changes of that step, at seams and elsewhere.

    ``steps`` and ``changes`` are the 50th, 99th and 99.9th percentiles elsewhere; ``rank`` is
    the share of changes elsewhere that are smaller than the largest at a seam. ``beside`` holds,
    for each seam, its largest change over the largest within 20 ms of it: loud speech that
    happens to lie at a seam has large changes there and beside it, a click there alone.
    """

    seams: int
    largest_step_at_seams: float
    largest_step: float
    steps: tuple[float, ...]
    largest_change_at_seams: float
    largest_change: float
    changes: tuple[float, ...]
    rank: float
    beside: tuple[float, ...]

    def __str__(self) -> str:
        lines = [f"{self.seams} seams; largest change there exceeds {self.rank:.3%} of all others"]
        lines += [
            f"{name:6} at seams {at:.5f}; elsewhere {most:.5f}, p50 {p50:.5f}, p99 {p99:.5f}, "
            f"p99.9 {p999:.5f}"
            for name, at, most, (p50, p99, p999) in (
                ("step", self.largest_step_at_seams, self.largest_step, self.steps),
                ("change", self.largest_change_at_seams, self.largest_change, self.changes),
            )
        ]
        ordered = sorted(self.beside)
        lines.append(
            f"change at a seam over the largest within 20 ms: median "
            f"{ordered[len(ordered) // 2]:.2f}, largest {ordered[-1]:.2f}"
        )
        return "\n".join(lines)


def seam_samples(frames: Sequence[int]) -> list[int]:
    """Where HiFT's cross-fades begin and end: calls of ``frames`` new frames each, in order."""
    seams, done = list[int](), 0
    for count in frames[:-1]:
        done += count
        seams += [(done - KEPT_FRAMES) * MEL_FRAME_SAMPLES, done * MEL_FRAME_SAMPLES]
    return seams


def jumps_at(wave: Tensor, seams: Sequence[int]) -> Jumps:
    """Compare ``wave`` (n,) at ``seams``, sample indices, with the rest of it."""
    steps = wave.double().diff().abs().cpu()
    changes = wave.double().diff(n=2).abs().cpu()
    results = []
    for values, offset in ((steps, 1), (changes, 2)):
        at = torch.zeros(values.shape[0], dtype=torch.bool)
        for seam in seams:
            at[max(0, seam - offset - _NEAR + 1) : seam + _NEAR] = True
        results.append((values[at], values[~at]))
    (steps_at, steps_off), (changes_at, changes_off) = results
    return Jumps(
        len(seams),
        float(steps_at.max()),
        float(steps_off.max()),
        _percentiles(steps_off),
        float(changes_at.max()),
        float(changes_off.max()),
        _percentiles(changes_off),
        float((changes_off < changes_at.max()).double().mean()),
        tuple(_beside(changes, seam) for seam in seams),
    )


def _beside(changes: Tensor, seam: int) -> float:
    """The largest change at ``seam`` over the largest of its neighbourhood without it."""
    start, end = max(0, seam - 2 - _NEAR + 1), seam + _NEAR
    near = torch.cat([changes[max(0, start - _BESIDE) : start], changes[end : end + _BESIDE]])
    return float(changes[start:end].max() / near.max().clamp_min(_QUIET))


def _percentiles(values: Tensor) -> tuple[float, ...]:
    ordered = values.sort().values
    return tuple(float(ordered[int(share * (len(ordered) - 1))]) for share in _SHARES)
