"""Checks, times and tunes the language model's products on this machine's GPU.

    python tests/gpu_lm_linear.py [--rows 1,8,32,64] [--claims 0] [--fp8]

Weights are cold: those of all layers in turn. Divisions are tried one product at a time, the
best few then within a whole step's products; tables for ``kernels/lm_tiles.py`` come last.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from lm_layers import EPS, LAYERS, SHAPES, Chain, Draw, Product, Weights, bytes_of, weight_of
from torch import Tensor

from mosstalk.device import pick_device
from mosstalk.kernels import lm_tiles
from mosstalk.kernels.gate_up import gate_up, gate_up_twin
from mosstalk.kernels.launch import SWITCHES, compiled_together
from mosstalk.kernels.lm_candidates import CANDIDATES
from mosstalk.kernels.lm_tiles import KINDS, Division, Kind
from mosstalk.kernels.rms_linear import LinearWorkspace
from mosstalk.kernels.rms_norm import rms_norm, rms_norm_twin

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CLAIMED_ROWS = {torch.float32: (1, 8, 64), torch.float16: (1, 8), torch.bfloat16: (1, 8, 32, 64)}
TIMED_BYTES = 4_000_000_000
"""Of weights in one graph."""
REPLAYS = 5
BEST = 4
BRAIN = torch.bfloat16
STARTED = time.monotonic()


class Try(NamedTuple):
    """A division of one kind of product."""

    kind: Kind
    divided: Division


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f}]", *words, flush=True)


def drawn(device: torch.device) -> Draw:
    """Draws of a standard normal on ``device``."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype).normal_(generator=generator)

    return draw


def workspace_on(device: torch.device) -> LinearWorkspace:
    return LinearWorkspace(1 << 26, device)


def compile_some(tries: list[Try]) -> list[str]:
    """Compile for Triton's cache on disk; what could not be."""
    device = torch.device("cuda")
    workspace = LinearWorkspace(1 << 26, device)
    failed = []
    for kind, divided in tries:

        def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*size, device=device, dtype=dtype)

        try:
            rows = divided.tile.rows
            product = Product.of(kind, rows, BRAIN, draw, workspace)
            product.compile_divided(weight_of(kind, BRAIN, draw), divided)
        except Exception as fault:
            failed.append(f"{kind} {divided}: {type(fault).__name__} {str(fault)[:100]}")
    return failed


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def claims(draw: Draw, workspace: LinearWorkspace) -> None:
    """Every product against its twin in three precisions; rows against their company."""
    cases = [
        (dtype, kind, rows, invariant)
        for dtype in BOUND
        for kind in KINDS
        for rows in CLAIMED_ROWS[dtype]
        for invariant in (False, True)
    ]
    with compiled_together():
        for dtype, kind, rows, invariant in cases:
            product = Product.of(kind, rows, dtype, draw, workspace)
            product.run(weight_of(kind, dtype, draw), invariant=invariant)
    say("compiled for claims")
    wrong = 0
    for dtype, kind, rows, invariant in cases:
        weight = weight_of(kind, dtype, draw)
        product = Product.of(kind, rows, dtype, draw, workspace)
        error = relative(product.run(weight, invariant=invariant), product.expected(weight))
        if not error <= BOUND[dtype]:
            wrong += 1
            say(f"WRONG {kind} {dtype} {rows} invariant {invariant}: {error:.2e}")
    for dtype, bound in BOUND.items():
        for kind in KINDS:
            wrong += company(kind, weight_of(kind, dtype, draw), draw, workspace)
        wrong += others(dtype, draw, bound)
    wrong += int(workspace.counters.count_nonzero())
    say(f"{len(cases)} products checked, {wrong} wrong")


def company(kind: Kind, weight: Tensor, draw: Draw, workspace: LinearWorkspace) -> int:
    """How many numbers of rows change an invariant row's bits, or lets NaN in."""
    product = Product.of(kind, 200, weight.dtype, draw, workspace)
    whole = product.run(weight, invariant=True).clone()
    wrong = 0
    for rows in (1, 3, 16, 64, 65, 130):
        few = replace(
            product,
            x=product.x[:rows],
            out=torch.empty_like(product.out[:rows]),
            residual=None if product.residual is None else product.residual[:rows],
        )
        wrong += not torch.equal(few.run(weight, invariant=True), whole[:rows])
    product.x[1::2] = float("nan")
    wrong += not torch.equal(product.run(weight, invariant=True)[::2], whole[::2])
    if wrong:
        say(f"WRONG {kind} {weight.dtype}: rows depend on company in {wrong} cases")
    return wrong


def others(dtype: torch.dtype, draw: Draw, bound: float) -> int:
    """Norms and gates of many rows."""
    wrong = 0
    for rows in (1, 64, 576):
        x, add, gain = (
            draw(rows, 4096, dtype=dtype),
            draw(rows, 4096, dtype=dtype),
            draw(4096, dtype=dtype),
        )
        other, out = x.clone(), torch.empty_like(x)
        expected = rms_norm_twin(other, gain, EPS, torch.empty_like(x), add=add)
        error = relative(rms_norm(x, gain, EPS, out, add=add), expected)
        wrong += not (error <= bound and torch.equal(x, other))
        y = draw(rows, 24576, dtype=dtype)
        out = torch.empty(rows, 12288, dtype=dtype, device=y.device)
        wrong += not relative(gate_up(y, out), gate_up_twin(y, torch.empty_like(out))) <= bound
    if wrong:
        say(f"WRONG {dtype}: {wrong} norms or gates")
    return wrong


def tile_rows_matter(draw: Draw, workspace: LinearWorkspace) -> None:
    """Whether invariant divisions give the same bits if only their tiles' rows differ."""

    def found(kind: Kind) -> list[Tensor]:
        product = Product.of(kind, 16, BRAIN, draw, workspace)
        weight, base = weight_of(kind, BRAIN, draw), lm_tiles.INVARIANT[kind]
        divisions = [replace(base, tile=replace(base.tile, rows=rows)) for rows in (64, 16, 32)]
        return [product.run_divided(weight, divided).clone() for divided in divisions]

    with compiled_together():
        for kind in KINDS:
            found(kind)
    for kind in KINDS:
        of_64, *fewer = found(kind)
        same = [torch.equal(of_64, other) for other in fewer]
        say(f"{kind}: same bits with tiles of 16 and of 32 rows as of 64: {same}")


def milliseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Median time of all ``runs``, launched in turn in a CUDA graph."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copied_gb_per_s(device: torch.device) -> float:
    """What a copy within the memory reads and writes."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds([lambda: y.copy_(x)] * 3) * 3e-6


def product_us(weights: list[Tensor], kind: Kind, run: Callable[[Tensor], object]) -> float:
    """Time of one of a kind's products, of all layers' weights in turn."""
    count = max(8, min(len(weights), TIMED_BYTES // bytes_of(kind)))
    return 1000 * milliseconds([partial(run, weight) for weight in weights[:count]]) / count


class Bench(NamedTuple):
    """What all sections use."""

    weights: Weights
    draw: Draw
    workspace: LinearWorkspace
    copy: float


def sweep(rows: int, tries: list[Try], bench: Bench) -> dict[Kind, list[Division]]:
    """The best divisions of each kind, best first."""
    best: dict[Kind, list[Division]] = {}
    for kind in KINDS:
        product = Product.of(kind, rows, BRAIN, bench.draw, bench.workspace)
        found = [pair for one in tries if one.kind == kind for pair in tried(one, product, bench)]
        found.sort(key=lambda pair: pair[0])
        library = product_us(bench.weights[kind], kind, partial(F.linear, product.x))
        say(
            f"rows {rows} {kind} {SHAPES[kind]}, {len(found)} tried; "
            f"torch's product alone {shown(library, kind, bench.copy)}"
        )
        for taken, divided in [*found[:6], *found[-1:]]:
            print(f"    {shown(taken, kind, bench.copy)}  {written(divided)}")
        best[kind] = [divided for _, divided in found[:BEST]]
    return best


def tried(one: Try, product: Product, bench: Bench) -> list[tuple[float, Division]]:
    """Its time in microseconds, if it is right."""
    kind, divided = one
    weights = bench.weights[kind]
    try:
        error = relative(product.run_divided(weights[0], divided), product.expected(weights[0]))
        if error <= BOUND[BRAIN]:
            run = partial(product.run_divided, divided=divided)
            return [(product_us(weights, kind, run), divided)]
        say(f"WRONG {kind} {divided}: {error:.1e}")
    except Exception as fault:
        say(f"{kind} {divided}: {type(fault).__name__} {str(fault)[:100]}")
    return []


def shown(us: float, kind: Kind, copy: float) -> str:
    rate = bytes_of(kind) / us / 1e3
    return f"{us:7.2f} us {rate:5.0f} GB/s {100 * rate / copy:5.1f} %"


def written(divided: Division) -> str:
    """As source."""
    t = divided.tile
    given: list[str] = []
    for name in ("splits", "ask", "run", "apart", "one"):
        value = getattr(divided, name)
        if value != getattr(Division(t), name):
            given.append(f"{name}={value}")
    tile = f"Tile({t.rows}, {t.columns}, {t.inner}, {t.warps}, {t.stages})"
    return f"Division({', '.join([tile, *given])})"


@contextmanager
def table(best: dict[Kind, Division]) -> Iterator[None]:
    """These divisions for any number of rows."""
    before = {kind: lm_tiles.TILES[kind] for kind in best}
    lm_tiles.TILES.update({kind: {lm_tiles.ANY_ROWS: divided} for kind, divided in best.items()})
    try:
        yield
    finally:
        lm_tiles.TILES.update(before)


def chained(rows: int, best: dict[Kind, list[Division]], bench: Bench) -> dict[Kind, Division]:
    """The best of the best within a whole step; prints its times."""
    chain = Chain(rows, bench.weights, bench.draw, bench.workspace)
    chosen = {kind: few[0] for kind, few in best.items()}
    limit = sum(bytes_of(kind) for kind in KINDS) * LAYERS / bench.copy / 1e6

    def timed(given: dict[Kind, Division], *, invariant: bool = False) -> float:
        with table(given):
            return milliseconds(chain.runs(invariant=invariant))

    least = timed(chosen)
    say(f"rows {rows} x {LAYERS} layers, each product's best: {least:.3f} ms; limit {limit:.3f}")
    for kind in KINDS:
        for divided in best[kind][1:]:
            now = timed(chosen | {kind: divided})
            if now < least:
                least, chosen = now, chosen | {kind: divided}
    SWITCHES.dependent = False
    without = timed(chosen)
    SWITCHES.dependent = True
    least, fixed = timed(chosen), timed(chosen, invariant=True)
    say(
        f"rows {rows} x {LAYERS} layers: {least:.3f} ms ({100 * limit / least:.1f} % of copy), "
        f"without dependent launches {without:.3f}, invariant {fixed:.3f}; limit {limit:.3f} ms"
    )
    return chosen


def tries_for(rows: int) -> dict[int, list[Try]]:
    """By the rows of their tiles; one row may be done by tiles of more, too."""
    limit = next(limit for limit in CANDIDATES if rows <= limit)
    limits = (1, 16) if limit == 1 else (limit,)
    return {
        each: [Try(kind, divided) for kind in KINDS for divided in CANDIDATES[each][kind]]
        for each in limits
    }


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
    tries = {rows: [one for few in tries_for(rows).values() for one in few] for rows in every}
    unique = list(dict.fromkeys(one for few in tries.values() for one in few))
    workers = max(1, min(14, (os.cpu_count() or 2) - 3))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool, torch.inference_mode():
        lots = [unique[n :: 4 * workers] for n in range(4 * workers)]
        compiling = pool.map_async(compile_some, lots, chunksize=1)
        device = pick_device("cuda")
        draw, workspace = drawn(device), workspace_on(device)
        say(torch.cuda.get_device_name(device), torch.__version__, f"{len(unique)} divisions")
        if given.claims:
            claims(draw, workspace)
            tile_rows_matter(draw, workspace)
        for fault in (fault for lot in compiling.get() for fault in lot):
            say("NOT COMPILED", fault)
        say("compiled")
        copy = copied_gb_per_s(device)
        say(f"a copy: {copy:.0f} GB/s read and written")
        weights: Weights = {
            kind: [weight_of(kind, BRAIN, draw) for _ in range(LAYERS)] for kind in KINDS
        }
        bench = Bench(weights, draw, workspace, copy)
        chosen = {rows: chained(rows, sweep(rows, tries[rows], bench), bench) for rows in every}
    for kind in KINDS:
        print(f'    "{kind}": {{')
        for rows, found in chosen.items():
            print(f"        {rows}: {written(found[kind])},")
        print("    },")
    say("done")


if __name__ == "__main__":
    main()
