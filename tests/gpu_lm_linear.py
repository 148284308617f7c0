"""Checks, times and tunes the language model's matmuls on this machine's GPU.

    python tests/gpu_lm_linear.py [--rows 1,8,32,64] [--claims 0] [--fp8]

Weights are cold: those of all layers in turn. Divisions are tried one matmul at a time, the
best few then within a whole step's matmuls; tables for ``ops/linear_tiles.py`` come last.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from lm_layers import EPS, LAYERS, SHAPES, Chain, Draw, Matmul, Weights, bytes_of, weight_of
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

from mosstalk.ops import linear_tiles
from mosstalk.ops.launch import Workspace, compiled_together
from mosstalk.ops.linear import gate_up
from mosstalk.ops.linear_tiles import CANDIDATES, KINDS, Division, Kind
from mosstalk.ops.norm import rms_norm

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CLAIMED_ROWS = {torch.float32: (1, 8, 64), torch.float16: (1, 8), torch.bfloat16: (1, 8, 32, 64)}
BRAIN = torch.bfloat16


def compile_some(tries: list[Try]) -> list[str]:
    """Compile for Triton's cache on disk; what could not be."""
    device = torch.device("cuda")
    draw, workspace = undrawn(device), workspace_on(device)

    def compile_one(one: Try) -> None:
        matmul = Matmul.of(one.kind, one.divided.tile.rows, BRAIN, draw, workspace)
        matmul.compile_divided(weight_of(one.kind, BRAIN, draw), one.divided)

    return compiled(tries, compile_one)


def claims(draw: Draw, workspace: Workspace) -> None:
    """Every matmul against its reference in three precisions; rows against their company."""
    cases = [
        (dtype, kind, rows, invariant)
        for dtype in BOUND
        for kind in KINDS
        for rows in CLAIMED_ROWS[dtype]
        for invariant in (False, True)
    ]
    with compiled_together():
        for dtype, kind, rows, invariant in cases:
            matmul = Matmul.of(kind, rows, dtype, draw, workspace)
            matmul.run(weight_of(kind, dtype, draw), invariant=invariant)
    say("compiled for claims")
    wrong = 0
    for dtype, kind, rows, invariant in cases:
        weight = weight_of(kind, dtype, draw)
        matmul = Matmul.of(kind, rows, dtype, draw, workspace)
        error = relative(matmul.run(weight, invariant=invariant), matmul.expected(weight))
        if not error <= BOUND[dtype]:
            wrong += 1
            say(f"WRONG {kind} {dtype} {rows} invariant {invariant}: {error:.2e}")
    for dtype, bound in BOUND.items():
        for kind in KINDS:
            wrong += company(kind, weight_of(kind, dtype, draw), draw, workspace)
        wrong += others(dtype, draw, bound)
    wrong += int(workspace.counters.count_nonzero())
    say(f"{len(cases)} matmuls checked, {wrong} wrong")


def company(kind: Kind, weight: Tensor, draw: Draw, workspace: Workspace) -> int:
    """How many numbers of rows change an invariant row's bits, or lets NaN in."""
    matmul = Matmul.of(kind, 200, weight.dtype, draw, workspace)
    whole = matmul.run(weight, invariant=True).clone()
    wrong = wrong_in_company(matmul, weight, whole)
    matmul.x[1::2] = float("nan")
    wrong += not torch.equal(matmul.run(weight, invariant=True)[::2], whole[::2])
    if wrong:
        say(f"WRONG {kind} {weight.dtype}: rows depend on company in {wrong} cases")
    return wrong


def others(dtype: torch.dtype, draw: Draw, bound: float) -> int:
    """Norms and gates of many rows."""
    wrong = 0
    for rows in (1, 64, 576):
        x, gain = draw(rows, 4096, dtype=dtype), draw(4096, dtype=dtype)
        expected = rms_norm.reference(x, gain, EPS, torch.empty_like(x))
        wrong += not relative(rms_norm(x, gain, EPS, torch.empty_like(x)), expected) <= bound
        y = draw(rows, 24576, dtype=dtype)
        out = torch.empty(rows, 12288, dtype=dtype, device=y.device)
        wrong += not relative(gate_up(y, out), gate_up.reference(y, torch.empty_like(out))) <= bound
    if wrong:
        say(f"WRONG {dtype}: {wrong} norms or gates")
    return wrong


def tile_rows_matter(draw: Draw, workspace: Workspace) -> None:
    """Whether invariant divisions give the same bits if only their tiles' rows differ."""

    def found(kind: Kind) -> list[Tensor]:
        matmul = Matmul.of(kind, 16, BRAIN, draw, workspace)
        weight, base = weight_of(kind, BRAIN, draw), linear_tiles.INVARIANT[kind]
        divisions = [replace(base, tile=replace(base.tile, rows=rows)) for rows in (64, 16, 32)]
        return [matmul.run_divided(weight, divided).clone() for divided in divisions]

    with compiled_together():
        for kind in KINDS:
            found(kind)
    for kind in KINDS:
        of_64, *fewer = found(kind)
        same = [torch.equal(of_64, other) for other in fewer]
        say(f"{kind}: same bits with tiles of 16 and of 32 rows as of 64: {same}")


def sweep(rows: int, tries: list[Try], bench: Bench[Tensor]) -> dict[Kind, list[Division]]:
    """The best divisions of each kind, best first."""
    best: dict[Kind, list[Division]] = {}
    for kind in KINDS:
        matmul = Matmul.of(kind, rows, BRAIN, bench.draw, bench.workspace)
        found = bench.best(tries, matmul)
        library = bench.matmul_us(kind, partial(F.linear, matmul.x))
        say(
            f"rows {rows} {kind} {SHAPES[kind]}, {len(found)} tried; "
            f"torch's matmul alone {bench.shown(library, kind)}"
        )
        for taken, divided in [*found[:6], *found[-1:]]:
            print(f"    {bench.shown(taken, kind)}  {written(divided)}")
        best[kind] = [divided for _, divided in found[:BEST]]
    return best


def chained(rows: int, tries: list[Try], bench: Bench[Tensor]) -> Table:
    """The best of the best within a whole step; prints its times."""
    best = sweep(rows, tries, bench)
    chain = Chain(rows, bench.weights, bench.draw, bench.workspace)
    first = {kind: few[0] for kind, few in best.items()}
    limit = bench.limit_ms(LAYERS)

    def timed(given: Table, *, invariant: bool = False) -> float:
        with replaced(linear_tiles.TILES, given):
            return milliseconds(chain.runs(invariant=invariant))

    least = timed(first)
    say(f"rows {rows} x {LAYERS} layers, each product's best: {least:.3f} ms; limit {limit:.3f}")
    chosen = better(best, timed, first, least)
    without = without_dependent_launches(timed, chosen)
    least, fixed = timed(chosen), timed(chosen, invariant=True)
    say(
        f"rows {rows} x {LAYERS} layers: {least:.3f} ms ({100 * limit / least:.1f} % of copy), "
        f"without dependent launches {without:.3f}, invariant {fixed:.3f}; limit {limit:.3f} ms"
    )
    return chosen


def bench_of(draw: Draw, workspace: Workspace, copy: float) -> Bench[Tensor]:
    """With weights of all layers."""
    weights: Weights = {
        kind: [weight_of(kind, BRAIN, draw) for _ in range(LAYERS)] for kind in KINDS
    }
    return Bench(weights, draw, workspace, copy, bytes_of, BOUND[BRAIN])


def check(draw: Draw, workspace: Workspace) -> None:
    """Claims, and whether tiles' rows change bits."""
    claims(draw, workspace)
    tile_rows_matter(draw, workspace)


def main() -> None:
    """All sections in turn."""
    options = argparse.ArgumentParser()
    options.add_argument("--rows", help="1,8,32,64; in FP8 1,8,64")
    options.add_argument("--claims", type=int, default=1)
    options.add_argument("--fp8", action="store_true", help="weights in FP8: gpu_lm_fp8.py")
    given = options.parse_args()
    rows_asked = given.rows or ("1,8,64" if given.fp8 else "1,8,32,64")
    every = [int(rows) for rows in rows_asked.split(",")]
    if given.fp8:
        import gpu_lm_fp8

        gpu_lm_fp8.main(every, check=bool(given.claims))
        return
    tries = {rows: tries_for(rows, CANDIDATES) for rows in every}
    tune(tries, compile_some, check if given.claims else None, bench_of, chained)


if __name__ == "__main__":
    main()
