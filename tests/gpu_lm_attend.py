"""Checks, times and tunes the kernels around the language model's attention on a GPU.

    python tests/gpu_lm_attend.py [--claims 0] [--seconds 75] [--only tiles]

Keys and values are cold: those of as many layers as outgrow the cache, in turn. ``alone`` is a
kernel among its like; ``after`` is what it adds behind one that reads 50 MB of weights, as the
matmul before it in a step does. Constants for the kernels' files come last.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lm_attend_candidates import ROW_TRIES, TILE_TRIES, reading
from torch import Tensor

from mosstalk.ops import attention_decode as by_rows
from mosstalk.ops import attention_prefill as by_tiles
from mosstalk.ops.launch import Launch, triton
from mosstalk.ops.move_rows import Latest, embed_rows, gather_rows
from mosstalk.ops.parts import Shares
from mosstalk.ops.rope_kv import rope_kv, rotary_table
from mosstalk.runtime.device import pick_device

HEADS, KV_HEADS, CHANNELS, BLOCK, EPS = 32, 8, 128, 16, 1e-6
SIZES = HEADS, KV_HEADS, CHANNELS
WIDTH = (HEADS + 2 * KV_HEADS) * CHANNELS
BRAIN = torch.bfloat16
BOUND = 1.6e-2
COLD_BYTES = 250_000_000
WEIGHT_NUMBERS = 4096 * WIDTH
"""Of the matmul before attention."""
REPLAYS = 10
PROCESSES = 14
BEST = 6
STARTED = time.monotonic()
CLAIMS = Path(__file__).resolve().parent / "lm_attend_claims.py"


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f}]", *words, flush=True)


@contextmanager
def tried(module: Any, one: Shares) -> Iterator[None]:
    """A kernel's file with other shares."""
    values = {"SHARES": {by_rows.ANY_ITEMS: one} if module is by_rows else one, "WHOLE": one}
    before = {name: getattr(module, name) for name in values if hasattr(module, name)}
    for name in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True)
class Scene:
    """One kernel's call with as many layers as are cold; ``seen`` bytes of K and V a call."""

    name: str
    module: Any
    seen: int
    layers: int
    plan: Callable[[int], Launch]
    reference: Callable[[], Tensor]
    out: Tensor


@dataclass(frozen=True)
class Store:
    """Layers of keys and values, items' tables, gains and angles."""

    keys: Tensor
    values: Tensor
    table: Tensor
    gains: tuple[Tensor, Tensor]
    angles: Tensor

    @classmethod
    def of(cls, items: int, keys: int) -> "Store":
        """For so many items of so many keys, in blocks that lie in no order."""
        blocks = -(-keys // BLOCK)
        places = items * blocks * BLOCK
        layers = max(4, -(-COLD_BYTES // (4 * places * KV_HEADS * CHANNELS)))
        shape = (layers, places, KV_HEADS, CHANNELS)
        kept = [torch.randn(shape, device="cuda", dtype=BRAIN) for _ in range(2)]
        table = torch.randperm(items * blocks).view(items, blocks).to("cuda", torch.int32)
        gains = (1 + 0.3 * torch.randn(2, CHANNELS, device="cuda")).to(BRAIN)
        angles = rotary_table(40960, CHANNELS, 1e6, torch.device("cuda"))
        return cls(kept[0], kept[1], table, (gains[0], gains[1]), angles)


def rows_scene(items: int, keys: int, span: int) -> Scene:
    """Single rows of so many items that see so many keys each."""
    store = Store.of(items, keys)
    qkv = torch.randn(items, WIDTH, device="cuda").to(BRAIN)
    length = torch.full((items,), keys, device="cuda", dtype=torch.int32)
    out = torch.empty(items, HEADS * CHANNELS, device="cuda", dtype=BRAIN)
    other = torch.empty_like(out)
    work = torch.zeros(1 << 24, device="cuda")

    def given(layer: int, result: Tensor) -> tuple[Any, ...]:
        kept = store.keys[layer], store.values[layer]
        return qkv, store.gains, EPS, store.angles, *kept, store.table, length, result

    return Scene(
        f"{items} rows @{keys}", by_rows, 4 * items * keys * KV_HEADS * CHANNELS,
        store.keys.shape[0],
        lambda layer: by_rows.attention_decode.plan(
            *given(layer, out), block_rows=BLOCK, span=span, work=work
        ),
        lambda: by_rows.attention_decode.reference(*given(0, other), block_rows=BLOCK),
        out,
    )  # fmt: skip


def tiles_scene(rows: int, before: int, span: int) -> Scene:
    """So many new rows of one sequence behind so many it has."""
    store = Store.of(1, before + rows)
    q = torch.randn(rows, HEADS * CHANNELS, device="cuda").to(BRAIN)
    lines = list(by_tiles.tiles_of(0, rows, before, 0))
    tiles = torch.tensor(lines, device="cuda", dtype=torch.int32)
    out, other = torch.empty_like(q), torch.empty_like(q)
    work = torch.zeros(1 << 26, device="cuda")

    def given(layer: int, result: Tensor) -> tuple[Any, ...]:
        return q, store.keys[layer], store.values[layer], store.table, tiles, result

    return Scene(
        f"{rows} rows behind {before}", by_tiles, 4 * (before + rows) * KV_HEADS * CHANNELS,
        store.keys.shape[0],
        lambda layer: by_tiles.attention_prefill.plan(
            *given(layer, out), block_rows=BLOCK, span=span, work=work
        ),
        lambda: by_tiles.attention_prefill.reference(*given(0, other), block_rows=BLOCK),
        out,
    )  # fmt: skip


Scenes = list[Callable[[], Scene]]
SCENES: dict[str, Scenes] = {
    "rows": [
        partial(rows_scene, 1, 512, 512),
        partial(rows_scene, 1, 8192, 8192),
        partial(rows_scene, 8, 1000, 1024),
        partial(rows_scene, 64, 1000, 1024),
    ],
    "tiles": [
        partial(tiles_scene, 512, 0, 512),
        partial(tiles_scene, 6, 1000, 1024),
    ],
}
SMALL_SCENES: Scenes = [
    partial(rows_scene, 1, 128, 512),
    partial(tiles_scene, 6, 100, 512),
]
"""What is compiled: sizes of rows, items and spans are no constants of a kernel."""


def compile_one(one: tuple[int, Shares]) -> str:
    """Compile for Triton's cache on disk; what went wrong."""
    place, chosen = one
    try:
        scene = SMALL_SCENES[place]()
        with tried(scene.module, chosen):
            scene.plan(0).compile()
    except Exception as fault:
        return f"{chosen}: {type(fault).__name__} {str(fault)[:90]}"
    return ""


def microseconds(launches: Sequence[Launch]) -> float:
    """Time of all ``launches`` in a row in a CUDA graph."""
    launches[0].run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    for _ in range(2):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / REPLAYS


def repeated(launches: list[Launch], least: int = 24) -> list[Launch]:
    """So many that a graph's own launch is small beside them."""
    return launches * max(1, -(-least // len(launches)))


class Weights(NamedTuple):
    """What stands for the matmuls' weights, and the time of reading it alone."""

    launches: list[Launch]
    us: float


def some_weights() -> Weights:
    kept = torch.empty(384 * 4096, device="cuda")
    weights = torch.randn(20, WEIGHT_NUMBERS, device="cuda", dtype=BRAIN)
    launches = [reading(weight, kept) for weight in weights]
    return Weights(launches, microseconds(launches) / len(launches))


def behind(weights: Weights, launches: list[Launch]) -> float:
    """What one of ``launches`` adds to reading weights before it."""
    both: list[Launch] = []
    for index, launch in enumerate(launches):
        both += [weights.launches[index % len(weights.launches)], launch]
    return microseconds(both) / len(launches) - weights.us


class Found(NamedTuple):
    """Microseconds a call, by how it is launched, of one try."""

    one: Shares
    alone: float
    after: float


def timed(scene: Scene, one: Shares, weights: Weights, expected: Tensor) -> Found | None:
    """A try's times, None where its result is wrong or it does not fit."""
    try:
        with tried(scene.module, one):
            launches = [scene.plan(layer) for layer in range(scene.layers)]
        scene.out.fill_(float("nan"))
        launches[0].run()
        error = float((scene.out.double() - expected).norm() / expected.norm())
        if not error <= BOUND:
            say(f"WRONG {scene.name} {one}: {error:.1e}")
            return None
        launches = repeated(launches)
        alone = microseconds(launches) / len(launches)
        return Found(one, alone, behind(weights, launches))
    except Exception as fault:
        say(f"{scene.name} {one}: {type(fault).__name__} {str(fault)[:90]}")
        return None


def shown(one: Shares) -> str:
    return f"Shares{tuple(vars(one).values())}"


def show(scene: Scene, results: list[Found], copied: float) -> None:
    """The best tries of a scene, and what the files have now."""
    say(f"{scene.name}: {len(results)} tries; alone, after weights, GB/s alone (of a copy's)")
    best = sorted(results, key=lambda found: found.after)[:BEST]
    now = [found for found in results if is_now(scene.module, found.one)]
    for found in [*best, *now]:
        rate = scene.seen / found.alone / 1000
        times = f"{found.alone:7.2f} {found.after:7.2f} us {rate:6.0f} ({rate / copied:4.0%})"
        print(f"    {times} {shown(found.one)}{' now' if found in now else ''}")


def sweep(seconds: float, weights: Weights, copied: float, scenes: Scenes) -> None:
    """Every try in every scene, as far as time goes; the best of each, and for all."""
    until = time.monotonic() + seconds
    total: dict[tuple[Any, Shares], list[float]] = {}
    for number, make in enumerate(scenes):
        end = time.monotonic() + (until - time.monotonic()) / (len(scenes) - number)
        scene = make()
        expected = scene.reference().double()
        results: list[Found] = []
        tries = ROW_TRIES if scene.module is by_rows else TILE_TRIES
        for place, one in enumerate(tries):
            if time.monotonic() > end:
                say(f"{len(tries) - place} tries left out")
                break
            taken = timed(scene, one, weights, expected)
            results += [taken] if taken else []
        show(scene, results, copied)
        best = min((found.after for found in results), default=0.0)
        for found in results:
            total.setdefault((scene.module, found.one), []).append(found.after - best)
    for module in (by_rows, by_tiles):
        most = max([0, *(len(worse) for (where, _), worse in total.items() if where is module)])
        whole = [(sum(worse), one) for (where, one), worse in total.items()
                 if where is module and len(worse) == most]  # fmt: skip
        print(f"{module.__name__}, us behind the best of each, all in all:")
        for worse, one in sorted(whole, key=lambda pair: pair[0])[:BEST]:
            print(f"    {worse:7.2f} {shown(one)}")


def is_now(module: Any, one: Shares) -> bool:
    kept = module.SHARES.values() if module is by_rows else (module.SHARES, module.WHOLE)
    return one in tuple(kept)


def other_kernels(weights: Weights) -> None:
    """Times of those that have nothing to be tuned."""
    store = Store.of(1, 512)
    for rows in (64, 512):
        qkv = torch.randn(rows, WIDTH, device="cuda").to(BRAIN)
        query = torch.empty(rows, HEADS * CHANNELS, device="cuda", dtype=BRAIN)
        order = torch.arange(rows, device="cuda", dtype=torch.int32)
        ids = torch.randint(0, 150_000, (rows, 2), device="cuda")
        table = torch.randn(151_680, 4096, device="cuda", dtype=BRAIN)
        kept = store.keys[0], store.values[0]
        latest = Latest(ids[:1], torch.full_like(order, -1))
        places = store.angles, order, order
        launches = {
            "rope_kv": rope_kv.plan(qkv, store.gains, EPS, *places, *kept, query),
            "gather_rows": gather_rows.plan(table, order, query),
            "embed_rows": embed_rows.plan(ids, table, table, 151_667, query, latest),
        }
        for name, launch in launches.items():
            alone = microseconds([launch] * 24) / 24
            say(f"{rows} rows {name}: {alone:.2f} us, after {behind(weights, [launch] * 24):.2f}")


def claim(names: list[str]) -> str:
    """Run some claims in a process of its own; its output."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    run = subprocess.run(words, capture_output=True, text=True, check=False, cwd=CLAIMS.parent)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "E  "))]
    return "\n".join([*failed[:12], *run.stdout.strip().splitlines()[-1:]])


def claims() -> None:
    """All claims, in as many processes as compile at once."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", str(CLAIMS)],
        capture_output=True, text=True, check=False, cwd=CLAIMS.parent,
    )  # fmt: skip
    names = [f"{CLAIMS}::{line.split('::', 1)[1]}" for line in listed.stdout.splitlines()
             if "::" in line]  # fmt: skip
    if not names:
        say(f"no claims: {listed.stdout[-500:]} {listed.stderr[-500:]}")
        return
    with ThreadPoolExecutor(PROCESSES) as threads:
        for text in threads.map(claim, [names[first::PROCESSES] for first in range(PROCESSES)]):
            print("    " + text)
    say(f"{len(names)} claims run")


def copy_rate() -> float:
    """GB/s of a copy, bytes read and written."""
    source = torch.randn(1 << 29, device="cuda", dtype=BRAIN)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 2 * source.nbytes * 10 / start.elapsed_time(end) / 1e6


def main() -> None:
    """Claims, compiling, then times."""
    options = argparse.ArgumentParser()
    options.add_argument("--claims", type=int, default=1)
    options.add_argument("--seconds", type=float, default=60, help="of the sweep")
    options.add_argument("--only", choices=sorted(SCENES))
    given = options.parse_args()
    device = pick_device("cuda")
    say(torch.cuda.get_device_name(device), torch.__version__, triton.__version__, os.cpu_count())
    if given.claims:
        claims()
    kinds = [given.only] if given.only else list(SCENES)
    tries = [(0, one) for one in ROW_TRIES if "rows" in kinds]
    tries += [(1, one) for one in TILE_TRIES if "tiles" in kinds]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        faults = pool.map(compile_one, tries, chunksize=1)
    for fault in filter(None, faults):
        print("    " + fault)
    say(f"{len(tries)} variants compiled")
    with torch.inference_mode():
        copied = copy_rate()
        weights = some_weights()
        rate = 2 * WEIGHT_NUMBERS / weights.us / 1000
        say(f"copy {copied:.0f} GB/s; 50 MB of weights {weights.us:.2f} us ({rate:.0f} GB/s)")
        sweep(given.seconds, weights, copied, [scene for kind in kinds for scene in SCENES[kind]])
        other_kernels(weights)
    say("done")


if __name__ == "__main__":
    main()
