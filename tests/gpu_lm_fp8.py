"""Checks, times and tunes the language model's matmuls in FP8: ``gpu_lm_linear.py --fp8``.

Claims against ``model.fp8`` at the published sizes; then divisions, one matmul at a time with
cold weights, the best few then within all matmuls of 36 layers, rows rounded by their own
kernel as in a step. A table for ``FP8_TILES`` of ``ops/linear_tiles.py`` comes last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lm_layers
import torch
from lm_layers import EPS, HIDDEN, LAYERS, QKV, SHAPES, Draw, weight_shape
from lm_timing import (
    BEST,
    Bench,
    Table,
    Try,
    better,
    compiled,
    milliseconds,
    relative,
    replaced,
    say,
    tries_for,
    tune,
    undrawn,
    without_dependent_launches,
    workspace_on,
    written,
    wrong_in_company,
)
from torch import Tensor

from mosstalk.numerics.fp8 import E4M3, Fp8Weight
from mosstalk.ops import linear_tiles
from mosstalk.ops.launch import Workspace, compiled_together
from mosstalk.ops.linear_fp8 import (
    divided_fp8_linear,
    fp8_library,
    fp8_linear,
    fp8_rows,
    library_takes,
)
from mosstalk.ops.linear_tiles import FP8_CANDIDATES, KINDS, Division, Kind

BRAIN = torch.bfloat16
BOUND = 3e-3
"""Rounding to bfloat16 makes 1.1e-3 of it, sums of fewer bits at most 2^-10, SwiGLU twice that."""
ROUNDED_OTHERWISE = 0.02
"""Of numbers in 8 bits, those that the norm's rounding to bfloat16 moves."""
MANY_ROWS = 512


@dataclass(frozen=True)
class Matmul:
    """One matmul of a layer, all but its weights; rows are rounded by ``rounded``."""

    kind: Kind
    x: Tensor
    gain: Tensor | None
    q: Tensor
    scale: Tensor
    out: Tensor
    residual: Tensor | None
    workspace: Workspace

    @classmethod
    def of(cls, kind: Kind, rows: int, draw: Draw, workspace: Workspace) -> "Matmul":
        columns, channels = SHAPES[kind]
        normed = kind in ("normed", "gated")
        return cls(
            kind,
            draw(rows, channels, dtype=BRAIN),
            1 + 0.3 * draw(channels, dtype=BRAIN) if normed else None,
            torch.zeros(rows, channels, dtype=torch.uint8, device=workspace.sums.device).view(E4M3),
            draw(rows).abs(),
            draw(rows, columns, dtype=BRAIN),
            None if normed else draw(rows, columns, dtype=BRAIN),
            workspace,
        )

    @property
    def how(self) -> dict[str, Any]:
        return {"residual": self.residual, "gated": self.kind == "gated"}

    def rounded(self, fixed: Tensor | None = None) -> "Matmul":
        fp8_rows(self.x, self.gain, EPS, self.q, self.scale, fixed=fixed)
        return self

    def first(self, rows: int) -> "Matmul":
        """Of the first so many rows alone, rounded anew."""
        return replace(
            self,
            x=self.x[:rows],
            q=torch.empty_like(self.q[:rows]),
            scale=torch.empty_like(self.scale[:rows]),
            out=torch.empty_like(self.out[:rows]),
            residual=None if self.residual is None else self.residual[:rows],
        ).rounded()

    def run(self, weight: Fp8Weight, *, invariant: bool = False) -> Tensor:
        return fp8_linear(
            self.q, self.scale, weight, self.out,
            **self.how, invariant=invariant, workspace=self.workspace,
        )  # fmt: skip

    def run_divided(self, weight: Fp8Weight, divided: Division) -> Tensor:
        self.planned(weight, divided).run()
        return self.out

    def planned(self, weight: Fp8Weight, divided: Division) -> Any:
        return divided_fp8_linear(
            self.q, self.scale, weight, self.out,
            **self.how, divided=divided, workspace=self.workspace,
        )  # fmt: skip

    def expected(self, weight: Fp8Weight) -> Tensor:
        out = torch.empty(self.out.shape, device=self.x.device)
        return fp8_linear.reference(self.q, self.scale, weight, out, **self.how)


def weight_of(kind: Kind, draw: Draw) -> Fp8Weight:
    return Fp8Weight.of(lm_layers.weight_of(kind, BRAIN, draw))


def undrawn_weight(kind: Kind, device: torch.device) -> Fp8Weight:
    wide, channels = weight_shape(kind)
    q = torch.empty(wide, channels, dtype=E4M3, device=device)
    return Fp8Weight(q, torch.empty(wide, device=device))


def bytes_of(kind: Kind) -> int:
    """Bytes of one matmul's weights and scales."""
    wide, channels = weight_shape(kind)
    return (channels + 4) * wide


def compile_some(tries: list[Try]) -> list[str]:
    """Compile for Triton's cache on disk; what could not be."""
    device = torch.device("cuda")
    draw, workspace = undrawn(device), workspace_on(device)

    def compile_one(one: Try) -> None:
        matmul = Matmul.of(one.kind, one.divided.tile.rows, draw, workspace)
        matmul.planned(undrawn_weight(one.kind, device), one.divided).compile()

    return compiled(tries, compile_one)


def claims(draw: Draw, workspace: Workspace) -> None:
    """Rows and matmuls against their references; rows against their company; a library's."""
    cases = [
        (kind, rows, inv) for kind in KINDS for rows in (1, 8, 32, 64) for inv in (False, True)
    ]
    weights = {kind: weight_of(kind, draw) for kind in KINDS}
    with compiled_together():
        for kind, rows, invariant in cases:
            matmul = Matmul.of(kind, rows, draw, workspace)
            matmul.rounded().run(weights[kind], invariant=invariant)
            matmul.rounded(matmul.scale[0])
        for kind in KINDS:
            Matmul.of(kind, 200, draw, workspace).rounded().run(weights[kind], invariant=True)
    say("compiled for claims")
    wrong, worst = 0, dict.fromkeys(KINDS, 0.0)
    for kind, rows, invariant in cases:
        matmul = Matmul.of(kind, rows, draw, workspace)
        wrong += wrong_rows(matmul)
        matmul.rounded()
        expected = matmul.expected(weights[kind])
        error = relative(matmul.run(weights[kind], invariant=invariant), expected)
        worst[kind] = max(worst[kind], error)
        if not error <= BOUND:
            wrong += 1
            say(f"WRONG {kind} {rows} invariant {invariant}: {error:.2e}")
    for kind in KINDS:
        wrong += company(kind, weights[kind], draw, workspace)
        wrong += wrong_library(kind, weights[kind], draw, workspace)
    wrong += int(workspace.counters.count_nonzero())
    found = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items())
    say(f"{len(cases)} matmuls checked, {wrong} wrong; furthest off: {found}; bound {BOUND}")


def wrong_rows(matmul: Matmul) -> int:
    """Whether rows are rounded otherwise than the reference does it, alone or by a number."""
    wrong = 0
    for fixed in (None, torch.tensor(0.004, device=matmul.x.device)):
        q, scale = torch.empty_like(matmul.q), torch.empty_like(matmul.scale)
        fp8_rows.reference(matmul.x, matmul.gain, EPS, q, scale, fixed=fixed)
        matmul.rounded(fixed)
        share = float((matmul.q.float() != q.float()).float().mean())
        limit = ROUNDED_OTHERWISE if matmul.gain is not None else 0.0
        if share > limit or not torch.allclose(matmul.scale, scale, rtol=2**-7, atol=0):
            wrong += 1
            say(f"WRONG rows of {matmul.kind}, fixed {fixed is not None}: {share:.1e} differ")
    return wrong


def company(kind: Kind, weight: Fp8Weight, draw: Draw, workspace: Workspace) -> int:
    """How many numbers of rows change an invariant row's bits."""
    matmul = Matmul.of(kind, 200, draw, workspace).rounded()
    whole = matmul.run(weight, invariant=True).clone()
    wrong = wrong_in_company(matmul, weight, whole)
    if wrong:
        say(f"WRONG {kind}: rows depend on company in {wrong} cases")
    return wrong


def wrong_library(kind: Kind, weight: Fp8Weight, draw: Draw, workspace: Workspace) -> int:
    """Whether a library's matmul of many rows is wrong; prints its time, and bfloat16's."""
    if not library_takes(weight, BRAIN):
        say(f"WRONG {kind}: torch has no matmul of scaled rows here")
        return 1
    matmul = Matmul.of(kind, MANY_ROWS, draw, workspace).rounded()
    out = torch.empty(MANY_ROWS, len(weight.q), dtype=BRAIN, device=matmul.x.device)
    expected = fp8_linear.reference(matmul.q, matmul.scale, weight, torch.empty_like(out))
    error = relative(fp8_library(matmul.q, matmul.scale, weight, out), expected)
    wide = weight.dequantized().to(BRAIN)
    several = 8
    ours = milliseconds([lambda: fp8_library(matmul.q, matmul.scale, weight, out)] * several)
    rows = milliseconds([lambda: matmul.rounded()] * several)
    plain = milliseconds([lambda: torch.mm(matmul.x, wide.t(), out=out)] * several)
    say(
        f"{MANY_ROWS} rows {kind}: {1000 * ours / several:.1f} us, rounding rows "
        f"{1000 * rows / several:.1f} us; in bfloat16 {1000 * plain / several:.1f} us; {error:.1e}"
    )
    if error > 2 * BOUND:
        say(f"WRONG {kind}: torch's matmul is {error:.1e} off")
    return int(error > 2 * BOUND)


def sweep(rows: int, tries: list[Try], bench: Bench[Fp8Weight]) -> dict[Kind, list[Division]]:
    """The best divisions of each kind, best first."""
    best: dict[Kind, list[Division]] = {}
    for kind in KINDS:
        matmul = Matmul.of(kind, rows, bench.draw, bench.workspace).rounded()
        rounding = 1000 * milliseconds([matmul.rounded] * 20) / 20
        found = bench.best(tries, matmul)
        say(f"rows {rows} {kind} {SHAPES[kind]}, {len(found)} tried; rounding {rounding:.2f} us")
        for taken, divided in [*found[:5], *found[-1:]]:
            print(f"    {bench.shown(taken, kind)}  {written(divided)}")
        best[kind] = [divided for _, divided in found[:BEST]]
    return best


class Chain:
    """All matmuls of a step one after another, without attention, each with its own weights."""

    def __init__(self, rows: int, bench: Bench[Fp8Weight]) -> None:
        draw, device = bench.draw, bench.workspace.sums.device
        self.weights, self.workspace = bench.weights, bench.workspace
        self.stream = draw(rows, HIDDEN, dtype=BRAIN)
        self.qkv = draw(rows, QKV, dtype=BRAIN)
        self.active = draw(rows, SHAPES["deep"][1], dtype=BRAIN)
        self.gain = 1 + 0.3 * draw(HIDDEN, dtype=BRAIN)
        self.q = torch.zeros(self.active.numel(), dtype=torch.uint8, device=device).view(E4M3)
        self.scale = torch.ones(rows, device=device)

    def runs(self, *, invariant: bool = False, rounds: bool = True) -> Sequence[Callable[[], None]]:
        """One call for each layer; without ``rounds`` rows are what was left in their room."""
        return [partial(self.layer, n, invariant, rounds) for n in range(LAYERS)]

    def layer(self, n: int, invariant: bool, rounds: bool) -> None:
        """One layer; what attention would mix is its queries themselves."""
        w = {kind: weights[n] for kind, weights in self.weights.items()}
        how: dict[str, Any] = {"invariant": invariant, "workspace": self.workspace}

        def rounded(x: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
            q = self.q[: x.numel()].view(x.shape)
            if rounds:
                fp8_rows(x, gain, EPS, q, self.scale)
            return q, self.scale

        stream = self.stream
        fp8_linear(*rounded(stream, self.gain), w["normed"], self.qkv, **how)
        mixed = rounded(self.qkv[:, :HIDDEN], None)
        fp8_linear(*mixed, w["plain"], stream, residual=stream, **how)
        fp8_linear(*rounded(stream, self.gain), w["gated"], self.active, gated=True, **how)
        fp8_linear(*rounded(self.active, None), w["deep"], stream, residual=stream, **how)


def chained(rows: int, tries: list[Try], bench: Bench[Fp8Weight]) -> Table:
    """The best of the best within a whole step; prints its times."""
    best = sweep(rows, tries, bench)
    chain = Chain(rows, bench)
    first = {kind: few[0] for kind, few in best.items()}
    limit = bench.limit_ms(LAYERS)

    def timed(given: Table, **how: bool) -> float:
        chain.stream.normal_()
        with replaced(linear_tiles.FP8_TILES, given):
            return milliseconds(chain.runs(**how))

    chosen = better(best, timed, first, timed(first))
    without = without_dependent_launches(timed, chosen)
    least, fixed = timed(chosen), timed(chosen, invariant=True)
    alone = timed(chosen, rounds=False)
    say(
        f"rows {rows} x {LAYERS} layers: {least:.3f} ms ({100 * limit / least:.1f} % of copy), "
        f"matmuls alone {alone:.3f}, without dependent launches {without:.3f}, "
        f"invariant {fixed:.3f}; limit {limit:.3f} ms"
    )
    return chosen


def bench_of(draw: Draw, workspace: Workspace, copy: float) -> Bench[Fp8Weight]:
    """With weights of all layers."""
    weights = {kind: [weight_of(kind, draw) for _ in range(LAYERS)] for kind in KINDS}
    return Bench(weights, draw, workspace, copy, bytes_of, BOUND)


def main(every: list[int], *, check: bool) -> None:
    """All sections in turn, for these numbers of rows."""
    tries = {rows: tries_for(rows, FP8_CANDIDATES) for rows in every}
    tune(tries, compile_some, claims if check else None, bench_of, chained)
