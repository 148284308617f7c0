"""Checks, times and tunes the flow's kernels on this machine's GPU: python tests/gpu_kernels.py.

Tiles are tried in the order in which kernels follow one another in the flow, the best is kept
for those tried next, and a table comes last that can be put into ``ops/tiles.py``.
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from kernel_candidates import CANDIDATES, Values
from kernel_cases import LAYERS, Case, cases, rooms
from torch import Tensor

from mosstalk.ops import tiles
from mosstalk.ops.launch import SWITCHES
from mosstalk.ops.tiles import Tile
from mosstalk.runtime.device import pick_device

REPLAYS = 20
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SEQUENCES = {
    "transformer block": (
        "norm_qkv",
        "attention_flow",
        "linear_add of heads",
        "norm_linear",
        "linear_add of wide",
    ),
    "transformer block, norms apart": (
        "norm_act",
        "norm_qkv of half",
        "attention_flow",
        "linear_add of heads",
        "norm_act",
        "norm_linear of half",
        "linear_add of wide",
    ),
    "residual block": ("conv1d", "norm_act", "conv1d", "close_residual"),
}
"""Kernels as the flow launches them; the first or second 560 times a pass, the third 140."""
AT_ONCE_LAYERS = 10
PROCESSES = 12
LONG_VOICE_PAGES = 67
"""Of a voice of 26.8 s."""


class Setting(NamedTuple):
    """What is timed: so many items in one precision, so many splits of an item's keys."""

    items: int
    dtype: torch.dtype
    splits: int


class Try(NamedTuple):
    """A tile for a kernel, within a sequence; so many splits for attention."""

    kernel: tiles.Kernel
    sequence: str
    values: Values
    splits: int


def drawn(device: torch.device) -> Callable[..., Tensor]:
    """Draws of a standard normal on ``device``."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype).normal_(generator=generator)

    return draw


def splits_for(items: int) -> int:
    """As ``flow_paged_state`` has it."""
    return max(1, 8 // items)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Print a fault, and go on."""
    try:
        yield
    except Exception:
        print(f"FAILED {what}\n{traceback.format_exc(limit=3)}", flush=True)


def difference(case: Case) -> float:
    """Largest relative norm of what kernel and reference write differently, each from a copy."""
    pristine = {name: case.call[name].clone() for name in case.written}
    mine = replace(case, call=case.call | {k: _like(case.call[k]) for k in pristine})
    reference = replace(case, call=case.call | {k: _like(case.call[k]) for k in pristine})
    mine.run()
    reference.run_reference()
    found = 0.0
    for name in pristine:
        one, other = mine.call[name].float(), reference.call[name].float()
        found = max(found, float((one - other).norm() / other.norm()))
    return found


def _like(value: Tensor) -> Tensor:
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def check(draw: Callable[..., Tensor], every_items: Sequence[int]) -> None:
    """Every kernel against its reference at full size."""
    checked = 0
    for dtype in (torch.float16, torch.float32):
        for items in every_items:
            with going_on(f"check {dtype} {items}"):
                shared = rooms(dtype, items, draw, splits_for(items), layers=1)
                for name, case in cases(shared, 0, dtype, draw).items():
                    with going_on(name):
                        error = difference(case)
                        checked += 1
                        if not error <= BOUND[dtype]:
                            print(f"{str(dtype)[6:]:9} {items:3} {name:20} {error:.1e} WRONG")
    print(f"{checked} kernels checked against their references")


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Time of one of ``runs``, which are launched in turn in a CUDA graph."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / (REPLAYS * len(runs))


Layers = list[dict[str, Case]]


def sequence_us(layers: Layers, sequence: str) -> float:
    """Time of one block, each with its own weights and pages, as many as fill a graph."""
    names = SEQUENCES[sequence]
    runs = [layer[name].run for layer in layers[:AT_ONCE_LAYERS] for name in names]
    return microseconds(runs) * len(names)


@contextmanager
def dependent(on: bool) -> Iterator[None]:
    """Programmatic dependent launch on or off."""
    before, SWITCHES.dependent = SWITCHES.dependent, on
    try:
        yield
    finally:
        SWITCHES.dependent = before


def times(layers: Layers, items: int) -> None:
    """Every kernel by itself, and blocks, with and without dependent launches."""
    for name in layers[0]:
        with going_on(f"time {name}"):
            taken = microseconds([layer[name].run for layer in layers[:50]])
            print(f"{items:3} {name:20} {taken:7.2f} us", flush=True)
    for sequence in SEQUENCES:
        with going_on(f"time {sequence}"):
            shown = []
            for on in (False, True):
                with dependent(on):
                    shown.append(f"{sequence_us(layers, sequence):7.2f}")
            print(f"{items:3} {sequence}: {shown[0]} us, dependent {shown[1]}", flush=True)


def times_of_a_long_voice(setting: Setting, draw: Callable[..., Tensor]) -> None:
    """Attention in another voice, by splits where they are made."""
    for splits in sorted({setting.splits, *((4, 16) if setting.splits > 1 else ())}):
        shared = rooms(setting.dtype, setting.items, draw, splits, 20, LONG_VOICE_PAGES)
        layers = [cases(shared, layer, setting.dtype, draw) for layer in range(20)]
        taken = microseconds([layer["attention_flow"].run for layer in layers])
        print(f"{setting.items:3} attention of a long voice, splits {splits}: {taken:.2f} us")


@contextmanager
def set_tile(kernel: tiles.Kernel, values: Values, setting: Setting) -> Iterator[None]:
    """One tile in the table for any number of rows."""
    table: Any = tiles.EXACT if setting.dtype == torch.float32 else tiles.TILES
    before, tile = table[kernel], Tile(*values)
    table[kernel] = tile if setting.dtype == torch.float32 else {tiles.ANY_ROWS: tile}
    try:
        yield
    finally:
        table[kernel] = before


def with_splits(layers: Layers, splits: int) -> Layers:
    """The same calls, attention in so many splits; there is room for more already."""
    return [
        layer
        | {
            "attention_flow": replace(
                layer["attention_flow"], call=layer["attention_flow"].call | {"splits": splits}
            )
        }
        for layer in layers
    ]


def compile_one(given: tuple[Try, Setting]) -> None:
    """Compile what a try launches, for Triton's cache on disk."""
    one, setting = given
    try:
        draw = drawn(torch.device("cuda"))
        with torch.inference_mode(), set_tile(one.kernel, one.values, setting):
            shared = rooms(setting.dtype, setting.items, draw, setting.splits, 1)
            layer = with_splits([cases(shared, 0, setting.dtype, draw)], one.splits)[0]
            for name in {n for n in SEQUENCES[one.sequence] if n.startswith(one.kernel)}:
                layer[name].run()
        torch.cuda.synchronize()
    except Exception as fault:
        print(f"    {one.kernel} {one.values}: {type(fault).__name__} {str(fault)[:80]}")


def tries_for(setting: Setting) -> list[Try]:
    """All tiles to try, in the order in which to."""
    few = setting.items * 40 <= tiles.SOME_ROWS
    found = []
    for kernel, sequence, candidates in CANDIDATES["few" if few else "many"]:
        splits = (setting.splits, setting.splits // 2, 1) if few else (1,)
        if kernel != "attention_flow" or setting.splits == 1:
            splits = (setting.splits,)
        found += [Try(kernel, sequence, values, n) for n in splits for values in candidates]
    return found


def sweep(layers: Layers, setting: Setting, tries: list[Try], until: float) -> None:
    """The best tile of each kernel, whole blocks timed, the best so far of the others in place."""
    few = setting.items * 40 <= tiles.SOME_ROWS
    print(f"{setting.items} items, {setting.dtype}: {len(tries)} tiles to try")
    jobs = list(dict.fromkeys((one.kernel, one.sequence) for one in tries))
    splits, started = setting.splits, time.monotonic()
    for place, (kernel, sequence) in enumerate(jobs):
        end = started + (until - started) * (place + 1) / len(jobs)
        found = []
        for one in tries:
            if (one.kernel, one.sequence) != (kernel, sequence) or time.monotonic() > end:
                continue
            here = with_splits(layers, one.splits if kernel == "attention_flow" else splits)
            try:
                with set_tile(kernel, one.values, setting):
                    found.append((sequence_us(here, sequence), one))
            except Exception as fault:
                print(f"    {kernel} {one.values}: {type(fault).__name__} {str(fault)[:80]}")
        before = sequence_us(with_splits(layers, splits), sequence)
        found.sort(key=lambda pair: pair[0])
        shown = "  ".join(f"{us:.2f} {tuple(one.values)}/{one.splits}" for us, one in found[:6])
        print(f"{setting.items:3} {kernel} in {sequence}, now {before:.2f} us: {shown}", flush=True)
        if found and found[0][0] < before and (few or "norms apart" in sequence or kernel in SOLE):
            best = found[0][1]
            splits = best.splits if kernel == "attention_flow" else splits
            tiles.TILES[kernel] = {tiles.ANY_ROWS: Tile(*best.values)}
    for sequence in SEQUENCES:
        taken = sequence_us(with_splits(layers, splits), sequence)
        print(f"{setting.items:3} {sequence} now: {taken:.2f} us, splits {splits}")
    for kernel in dict.fromkeys(kernel for kernel, _ in jobs):
        tile = next(iter(tiles.TILES[kernel].values()))
        if len(tiles.TILES[kernel]) == 1:
            print(f'        "{kernel}": Tile{astuple(tile)},')


SOLE = ("conv1d", "norm_act", "close_residual")
"""Kernels that are launched in one way whether norms are apart or not."""


def main() -> None:
    """All sections in turn."""
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=150, help="when the sweep ends")
    options.add_argument("--items", default="1,32", help="numbers of items")
    given = options.parse_args()
    until = time.monotonic() + given.seconds
    every_items = [int(items) for items in given.items.split(",")]
    settings = [Setting(items, torch.float16, splits_for(items)) for items in every_items]
    tries = {setting: tries_for(setting) for setting in settings}
    device = pick_device("cuda")
    draw, table = drawn(device), dict(tiles.TILES)
    print(torch.cuda.get_device_name(device), torch.__version__)
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool, torch.inference_mode():
        everything = [(one, setting) for setting in settings for one in tries[setting]]
        compiling = pool.map_async(compile_one, everything, chunksize=4)
        check(draw, every_items)
        compiling.wait(max(1.0, (until - time.monotonic()) / 2))
        print(f"{len(everything)} tiles compiled, {until - time.monotonic():.0f} s left")
        for place, setting in enumerate(settings):
            with going_on(f"items {setting.items}"):
                shared = rooms(setting.dtype, setting.items, draw, setting.splits)
                layers = [cases(shared, layer, setting.dtype, draw) for layer in range(LAYERS)]
                times(layers, setting.items)
                times_of_a_long_voice(setting, draw)
                left = (until - time.monotonic()) / (len(settings) - place)
                sweep(layers, setting, tries[setting], time.monotonic() + left)
                tiles.TILES.update(table)
        pool.terminate()
    print(f"done, {until - time.monotonic():.0f} s left")


if __name__ == "__main__":
    main()
