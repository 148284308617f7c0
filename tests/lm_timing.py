"""How divisions of the language model's matmuls are tried, timed and chosen on a GPU.

For ``gpu_lm_linear.py`` and ``gpu_lm_fp8.py``, whose weights differ.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from lm_layers import Draw
from torch import Tensor

from mosstalk.ops import linear_tiles
from mosstalk.ops.launch import SWITCHES, Workspace
from mosstalk.ops.linear_tiles import KINDS, Division, Kind
from mosstalk.runtime.device import pick_device

TIMED_BYTES = 4_000_000_000
"""Of weights in one graph."""
REPLAYS = 5
BEST = 4
STARTED = time.monotonic()
Weight = TypeVar("Weight")
Table = dict[Kind, Division]


class Try(NamedTuple):
    """A division of one kind of matmul."""

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


def undrawn(device: torch.device) -> Draw:
    """Rooms on ``device`` for what need not be drawn."""

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype)

    return draw


def workspace_on(device: torch.device) -> Workspace:
    return Workspace(1 << 26, device)


def compiled(tries: Sequence[Try], compile_one: Callable[[Try], object]) -> list[str]:
    """Compile for Triton's cache on disk; what could not be."""
    failed = []
    for one in tries:
        try:
            compile_one(one)
        except Exception as fault:
            failed.append(f"{one.kind} {one.divided}: {type(fault).__name__} {str(fault)[:100]}")
    return failed


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def wrong_in_company(matmul: Any, weight: object, whole: Tensor) -> int:
    """How many numbers of rows change an invariant row's bits; ``whole`` is of all rows."""
    return sum(
        not torch.equal(matmul.first(rows).run(weight, invariant=True), whole[:rows])
        for rows in (1, 3, 16, 64, 65, 130)
    )


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


@dataclass(frozen=True)
class Bench(Generic[Weight]):
    """What all sections use; a matmul may be ``bound`` off."""

    weights: dict[Kind, list[Weight]]
    draw: Draw
    workspace: Workspace
    copy: float
    bytes_of: Callable[[Kind], int]
    bound: float

    def matmul_us(self, kind: Kind, run: Callable[[Weight], object]) -> float:
        """Time of one of a kind's matmuls, of all layers' weights in turn."""
        weights = self.weights[kind]
        count = max(8, min(len(weights), TIMED_BYTES // self.bytes_of(kind)))
        return 1000 * milliseconds([partial(run, weight) for weight in weights[:count]]) / count

    def tried(self, one: Try, matmul: Any) -> list[tuple[float, Division]]:
        """Its time in microseconds, if it is right."""
        kind, divided = one
        weight = self.weights[kind][0]
        try:
            error = relative(matmul.run_divided(weight, divided), matmul.expected(weight))
            if error <= self.bound:
                run = partial(matmul.run_divided, divided=divided)
                return [(self.matmul_us(kind, run), divided)]
            say(f"WRONG {kind} {divided}: {error:.1e}")
        except Exception as fault:
            say(f"{kind} {divided}: {type(fault).__name__} {str(fault)[:100]}")
        return []

    def best(self, tries: list[Try], matmul: Any) -> list[tuple[float, Division]]:
        """All divisions of the matmul's kind that are right, with their times, best first."""
        of_kind = [one for one in tries if one.kind == matmul.kind]
        found = [pair for one in of_kind for pair in self.tried(one, matmul)]
        return sorted(found, key=lambda pair: pair[0])

    def shown(self, us: float, kind: Kind) -> str:
        rate = self.bytes_of(kind) / us / 1e3
        return f"{us:7.2f} us {rate:5.0f} GB/s {100 * rate / self.copy:5.1f} %"

    def limit_ms(self, layers: int) -> float:
        """What the weights of all matmuls of ``layers`` layers take at the rate of a copy."""
        return sum(self.bytes_of(kind) for kind in KINDS) * layers / self.copy / 1e6


@contextmanager
def replaced(tiles: dict[Kind, dict[int, Division]], given: Table) -> Iterator[None]:
    """In ``tiles`` the divisions ``given`` for any number of rows."""
    before = dict(tiles)
    tiles.update({kind: {linear_tiles.ANY_ROWS: divided} for kind, divided in given.items()})
    try:
        yield
    finally:
        tiles.update(before)


def better(
    best: dict[Kind, list[Division]], timed: Callable[[Table], float], chosen: Table, least: float
) -> Table:
    """Of each kind the division with which a step is fastest; ``chosen`` took ``least``."""
    for kind in KINDS:
        for divided in best[kind][1:]:
            now = timed(chosen | {kind: divided})
            if now < least:
                least, chosen = now, chosen | {kind: divided}
    return chosen


def without_dependent_launches(timed: Callable[[Table], float], chosen: Table) -> float:
    SWITCHES.dependent = False
    without = timed(chosen)
    SWITCHES.dependent = True
    return without


def tries_for(rows: int, candidates: Mapping[int, Mapping[Kind, list[Division]]]) -> list[Try]:
    """One row may be done by tiles of more, too."""
    limit = next(limit for limit in candidates if rows <= limit)
    limits = (1, 16) if limit == 1 else (limit,)
    return [
        Try(kind, divided)
        for each in limits
        for kind in KINDS
        for divided in candidates[each][kind]
    ]


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


def tune(
    tries: Mapping[int, list[Try]],
    compile_some: Callable[[list[Try]], list[str]],
    check: Callable[[Draw, Workspace], None] | None,
    bench_of: Callable[[Draw, Workspace, float], Bench[Weight]],
    choose: Callable[[int, list[Try], Bench[Weight]], Table],
) -> None:
    """All sections in turn, for the numbers of rows of ``tries``; a table comes last."""
    unique = list(dict.fromkeys(one for few in tries.values() for one in few))
    workers = max(1, min(14, (os.cpu_count() or 2) - 3))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool, torch.inference_mode():
        lots = [unique[n :: 4 * workers] for n in range(4 * workers)]
        compiling = pool.map_async(compile_some, lots, chunksize=1)
        device = pick_device("cuda")
        draw, workspace = drawn(device), workspace_on(device)
        say(torch.cuda.get_device_name(device), torch.__version__, f"{len(unique)} divisions")
        if check:
            check(draw, workspace)
        for fault in (fault for lot in compiling.get() for fault in lot):
            say("NOT COMPILED", fault)
        say("compiled")
        copy = copied_gb_per_s(device)
        say(f"a copy: {copy:.0f} GB/s read and written")
        bench = bench_of(draw, workspace, copy)
        chosen = {rows: choose(rows, few, bench) for rows, few in tries.items()}
    for kind in KINDS:
        print(f'    "{kind}": {{')
        for rows, found in chosen.items():
            print(f"        {rows}: {written(found[kind])},")
        print("    },")
    say("done")
