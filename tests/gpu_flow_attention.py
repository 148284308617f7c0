"""Times the flow's attention at the published sizes on this machine's GPU, form beside form.

python tests/gpu_flow_attention.py [--seconds 120]

A case is so many blocks of replies in a pass, a voice and so many own pages of each; a form is one
way to launch it. Forms take turns, as graphs of one launch for each layer of a pass: alone, and on
four lanes at once. Printed are microseconds a launch, the smallest and the median, the distance to
the reference, and whether a run on four lanes repeats a run alone bit for bit. Beside them stands
what the keys and values take that must come from memory, at the rate of a copy, and how many bytes
of them all programs read, from the cache.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosstalk.codec.flow_paged_state import splits_for
from mosstalk.codec.flow_pages import packs_of
from mosstalk.ops import attention_flow as module
from mosstalk.ops import tiles
from mosstalk.ops.attention_flow import MEMBERS
from mosstalk.ops.launch import Launch, compiled_together
from mosstalk.ops.tiles import ANY_ROWS, Tile
from mosstalk.runtime.device import pick_device

HEADS, CHANNELS, FRAMES, BRANCHES = 8, 64, 20, 2
LAYERS, LAUNCHES, LANES = 28, 280, 4
"""Layers whose pages lie apart; launches in a graph, half of a pass's."""
PASS = 560
Plan = Callable[["Problem"], Launch]


class Problem(NamedTuple):
    """One launch's inputs and the list of its packs."""

    q: Tensor
    kv: Tensor
    table: Tensor
    visible: Tensor
    packs: Tensor
    out: Tensor
    bias: Tensor | None
    workspace: Tensor


class Case(NamedTuple):
    """``items`` in ``voices`` voices of so many pages, each with 1 to ``own`` pages of its own."""

    name: str
    items: int
    voices: int
    voice_pages: int
    own: Sequence[int]
    lanes: int
    dtype: torch.dtype = torch.float16


CASES = [
    Case("32 blocks, voice 6.8 s", 32, 1, 17, (6,), 4),
    Case("32 blocks, voice 26.8 s", 32, 1, 67, (6,), 4),
    Case("first hops of 16, voice 6.8 s", 32, 1, 17, (1, 2), 4),
    Case("first hops of 16, voice 26.8 s", 32, 1, 67, (1, 2), 4),
    Case("32 blocks, 32 voices of 6.8 s", 32, 32, 17, (6,), 1),
    Case("16 blocks, voice 6.8 s", 16, 1, 17, (6,), 1),
    Case("1 block, voice 6.8 s", 1, 1, 17, (6,), 1),
    Case("1 block, voice 26.8 s", 1, 1, 67, (6,), 1),
    Case("8 blocks, voice 26.8 s", 8, 1, 67, (6,), 1),
    Case("encoder, 1 block, voice 26.8 s", 1, 1, 67, (6,), 1, torch.float32),
    Case("encoder, 32 blocks, voice 26.8 s", 32, 1, 67, (6,), 1, torch.float32),
]


@contextmanager
def tile_of(kernel: str, tile: Tile | None, dtype: torch.dtype, rows: int | None) -> Iterator[None]:
    """Launches planned within have ``tile``, and so many ``rows`` where not packed."""
    table, exact, before = dict(tiles.TILES), dict(tiles.EXACT), module._tile_rows
    if tile is not None:
        if dtype == torch.float32:
            tiles.EXACT[kernel] = tile  # type: ignore[index]
        else:
            tiles.TILES[kernel] = {ANY_ROWS: tile}  # type: ignore[index]
    if rows is not None:
        module._tile_rows = lambda *_: rows
    try:
        yield
    finally:
        tiles.TILES.update(table)
        tiles.EXACT.update(exact)
        module._tile_rows = before


def new(
    values: tuple[int, ...] | None, *, pack: str = "yes", splits: int = 0, least: int = 512,
    rows: int | None = None, registers: int | None = None,
) -> Plan:  # fmt: skip
    """The op as it is, with another tile; ``pack``: yes, alone (in packs of one) or no."""

    def plan(one: Problem) -> Launch:
        call = one._asdict()
        items = one.table.shape[0]
        if pack == "alone":
            call |= {"packs": torch.tensor([1, 0]).to(one.packs).repeat(items, 1)}
        if pack == "no":
            call |= {"packs": None}
        tile = None if values is None else Tile(*values)
        with tile_of("attention_flow", tile, one.q.dtype, rows):
            launch = module.attention_flow.plan(
                frames=FRAMES, splits=splits or splits_for(items), least=least, **call
            )
        return launch._replace(registers=registers)

    return plan


def loaded(name: str) -> Any:
    """A module that lies beside this file, if it does: an older form to compare with."""
    path = Path(__file__).resolve().parent / f"{name}.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def old(values: tuple[int, ...] | None, *, splits: int = 0, least: int = 512) -> Plan | None:
    """One item a program, as it was before."""
    before = loaded("old_attention_flow")

    def plan(one: Problem) -> Launch:
        call = {k: v for k, v in one._asdict().items() if k != "packs"}
        tile = None if values is None else Tile(*values)
        with tile_of("attention_flow", tile, one.q.dtype, None):
            return before.attention_flow.plan(
                frames=FRAMES,
                splits=splits or splits_for(one.table.shape[0]),
                least=least,
                **call,
            )

    return plan if before else None


def groups(values: tuple[int, ...]) -> Plan | None:
    """Groups of three, as they were long before."""
    before = loaded("old_attend_groups")

    def plan(one: Problem) -> Launch:
        items = one.table.shape[0]
        page, seen = one.kv.shape[4], one.visible.tolist()
        pages = [one.table[item, : -(-seen[item] // page)].tolist() for item in range(items)]
        rows = before.groups_of(pages, FRAMES)
        rows += [[0, -1, -1, -1]] * (items - len(rows))
        listed = torch.tensor(rows, dtype=torch.int32, device=one.q.device)
        tiles.TILES["attend_groups"] = {ANY_ROWS: Tile(*values)}  # type: ignore[index]
        return before.plan_attend_groups(
            one.q, one.kv, one.table, one.visible, listed, one.out, frames=FRAMES
        )

    return plan if before else None


def forms(case: Case) -> dict[str, Plan]:
    """What takes turns in a case."""
    found: dict[str, Plan | None] = {}
    if case.dtype == torch.float32:
        found["before"] = old((32, 32, 0, 8, 1), least=128)
        found["now"] = new(None, least=128)
        found["now 4 warps"] = new((32, 32, 0, 4, 1), least=128)
    elif BRANCHES * case.items * FRAMES > tiles.SOME_ROWS:
        found["before 32x64 w2 s3"] = old((32, 64, 0, 2, 3))
        found["groups 64x64 w4 s3"] = groups((64, 64, 0, 4, 3))
        found["packed 64x64 w4 s3, 1"] = new((64, 64, 0, 4, 3), splits=1)
        found["packed 64x64 w4 s3, 2"] = new((64, 64, 0, 4, 3), splits=2, least=256)
        found["packed 64x64 w4 s3, 3"] = new((64, 64, 0, 4, 3), splits=3, least=256)
        found["packed 64x64 w4 s4, 1"] = new((64, 64, 0, 4, 4), splits=1)
        found["packed 64x64 w4 s4, 2"] = new((64, 64, 0, 4, 4), splits=2, least=256)
        found["packed 64x64 w4 s2, 2"] = new((64, 64, 0, 4, 2), splits=2, least=256)
        found["packed 64x128 w4 s2, 2"] = new((64, 128, 0, 4, 2), splits=2, least=256)
        found["packed 64x128 w8 s2, 2"] = new((64, 128, 0, 8, 2), splits=2, least=256)
        found["packed 64x64 w4 s3, 1, r128"] = new((64, 64, 0, 4, 3), splits=1, registers=128)
        found["packed 64x32 w4 s4, 1"] = new((64, 32, 0, 4, 4), splits=1)
        found["packed 64x32 w4 s4, 2"] = new((64, 32, 0, 4, 4), splits=2, least=256)
        found["packs of one 64x64 w4 s3"] = new((64, 64, 0, 4, 3), pack="alone", splits=1)
        found["one by one 32x64 w2 s3"] = new((32, 64, 0, 2, 3), pack="no", splits=1)
    else:
        found["before 32x128 w4 s3"] = old((32, 128, 0, 4, 3))
        found["now 32x128 w4 s3"] = new((32, 128, 0, 4, 3))
        found["now 32x64 w2 s3"] = new((32, 64, 0, 2, 3))
        found["now 32x64 w4 s3"] = new((32, 64, 0, 4, 3))
        found["now 64x64 w4 s3"] = new((64, 64, 0, 4, 3), rows=64)
        found["now 64x64 w4 s4"] = new((64, 64, 0, 4, 4), rows=64)
        found["now 64x128 w4 s2"] = new((64, 128, 0, 4, 2), rows=64)
    return {name: plan for name, plan in found.items() if plan is not None}


def problems(case: Case, kv: Tensor, lane: int) -> list[Problem]:
    """A launch's inputs for each layer of ``kv`` (pages, layers, branches, 2, H, F, d)."""
    device, items = kv.device, case.items
    branches = kv.shape[2]
    voice = torch.arange(case.voices * case.voice_pages).view(case.voices, -1)
    most, kept = max(case.own), case.voices * case.voice_pages + lane * items * max(case.own)
    table = torch.zeros(items, 128, dtype=torch.int32)
    seen = []
    for item in range(items):
        own = case.own[item % len(case.own)]
        first = kept + (item - item % len(case.own)) * most
        count = case.voice_pages + own
        table[item, : case.voice_pages] = voice[item * case.voices // items]
        table[item, case.voice_pages : count] = torch.arange(first, first + own)
        seen.append(count)
    packs = torch.from_numpy(packs_of(table.numpy(), seen)).to(device)
    visible = torch.tensor(seen, dtype=torch.int32, device=device) * FRAMES
    rows = branches * items * FRAMES
    workspace = torch.zeros(1 << 23, device=device)
    bias = None
    if case.dtype == torch.float32:
        bias = torch.randn(items, HEADS, FRAMES, 3072, device=device)
    return [
        Problem(
            torch.randn(rows, HEADS * CHANNELS, device=device, dtype=case.dtype),
            kv[:, layer],
            table.to(device),
            visible,
            packs,
            torch.empty(rows, HEADS * CHANNELS, device=device, dtype=case.dtype),
            bias,
            workspace,
        )
        for layer in range(kv.shape[1])
    ]


class Form:
    """A form's graphs, one a lane."""

    outs: list[Tensor]

    def __init__(self, name: str, launches: list[list[Launch]]) -> None:
        self.name, self.launches = name, launches
        self.alone: list[float] = []
        self.together: list[float] = []
        self.error, self.repeats = float("nan"), True
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, streams: list[torch.cuda.Stream]) -> None:
        """One graph a lane."""
        for lane, stream in zip(self.launches, streams, strict=False):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for number in range(LAUNCHES):
                    lane[number % len(lane)].run()
            self.graphs.append(graph)

    def time(self, lanes: int, streams: list[torch.cuda.Stream]) -> float:
        """Microseconds a launch of one lane, of so many at the same time."""
        main = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for stream in streams[:lanes]:
            stream.wait_stream(main)
        for graph, stream in zip(self.graphs[:lanes], streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[:lanes]:
            main.wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / LAUNCHES / lanes


def copy_rate(device: torch.device) -> float:
    """Bytes a microsecond that a large copy reads and writes."""
    x, best = torch.ones(1 << 28, device=device), float("inf")
    y = torch.empty_like(x)
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / 10)
    return 2 * x.numel() * 4 / best


def limits(case: Case, one: Problem) -> tuple[float, float, float]:
    """Megabytes of keys and values there are, all programs read one by one, and packed."""
    row = 2 * HEADS * CHANNELS * one.kv.element_size() * one.kv.shape[1] / 1e6
    seen = one.visible.tolist()
    own = sum(count - case.voice_pages * FRAMES for count in seen)
    there = (own + case.voices * case.voice_pages * FRAMES) * row
    packed = sum(seen) * row
    for count, shared in one.packs.tolist():
        packed -= max(count - 1, 0) * shared * FRAMES * row
    return there, sum(seen) * row, packed


def prepared(
    name: str, plan: Plan, given: list[list[Problem]], streams: list[torch.cuda.Stream]
) -> Form:
    """A form whose graphs have run alone and at the same time."""
    launches = [[plan(one) for one in lane] for lane in given]
    launches[0][0].run()
    form, one = Form(name, launches), given[0][0]
    call: dict[str, Any] = {"frames": FRAMES, "bias": one.bias}
    right = torch.empty_like(one.out)
    module.attention_flow.reference(one.q, one.kv, one.table, one.visible, right, **call)
    form.error = float((one.out.float() - right.float()).norm() / right.float().norm())
    form.capture(streams)
    form.time(1, streams)
    form.outs = [problem.out.clone() for problem in given[0]]
    form.time(len(streams), streams)
    pairs = zip(form.outs, given[0], strict=True)
    form.repeats = all(torch.equal(found, problem.out) for found, problem in pairs)
    return form


def run(case: Case, kv: Tensor, rate: float, until: float, rounds: int) -> None:
    """Print a case's table."""
    streams = [torch.cuda.Stream(kv.device) for _ in range(case.lanes)]
    given = [problems(case, kv, lane) for lane in range(case.lanes)]
    there, read, packed = limits(case, given[0][0])
    print(
        f"\n{case.name}: {there:.1f} MB of keys and values are {there / rate * 1e6:.1f} us; read "
        f"one by one {read:.0f} MB, packed {packed:.0f} MB"
    )
    chosen = []
    for name, plan in forms(case).items():
        try:
            chosen.append(prepared(name, plan, given, streams))
        except Exception as fault:
            print(f"  {name}: {type(fault).__name__} {str(fault)[:200]}")
    for done in range(rounds):
        if done > 1 and time.monotonic() > until:
            break
        for form in chosen:
            form.alone.append(form.time(1, streams))
            if case.lanes > 1:
                form.together.append(form.time(case.lanes, streams))
    for form in chosen:
        line = f"  {form.name:28} alone {min(form.alone):6.2f} {statistics.median(form.alone):6.2f}"
        line += f" ({PASS * statistics.median(form.alone) / 1000:5.1f} ms a pass)"
        if form.together:
            median = statistics.median(form.together)
            line += f"; {case.lanes} lanes {min(form.together):6.2f} {median:6.2f}"
            line += f" ({PASS * median * case.lanes / 1000:5.1f} ms for all)"
        print(line, f"; error {form.error:.1e}, repeats {form.repeats}")
    same = [form for form in chosen if form.name in ("before", "now")]
    if len(same) == 2:
        pairs = zip(same[0].outs, same[1].outs, strict=True)
        print(f"  before and now, bit for bit: {all(torch.equal(*pair) for pair in pairs)}")


def compile_all(kvs: dict[torch.dtype, Tensor]) -> None:
    """All forms of all cases at the same time."""
    with compiled_together(strict=False):
        for case in CASES:
            one = problems(case, kvs[case.dtype][:, :1], 0)[0]
            for name, plan in forms(case).items():
                try:
                    plan(one).run()
                except Exception as fault:
                    print(f"{case.name}, {name}: {type(fault).__name__} {str(fault)[:200]}")


def main() -> None:
    """All cases in turn."""
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=120)
    given = options.parse_args()
    begun = time.monotonic()
    device = pick_device("cuda")
    torch.manual_seed(0)
    rate = copy_rate(device)
    print(torch.cuda.get_device_name(device), torch.__version__, f"packs of {MEMBERS}")
    print(f"copies {rate / 1e3:.0f} GB/s")
    with torch.inference_mode():
        pages = 67 + LANES * 32 * 6
        shape = (HEADS, FRAMES, CHANNELS)
        kvs = {
            torch.float16: torch.empty(
                pages, LAYERS, BRANCHES, 2, *shape, device=device, dtype=torch.float16
            ).normal_(),
            torch.float32: torch.empty(67 + 32 * 6, 4, 1, 2, *shape, device=device).normal_(),
        }
        compile_all(kvs)
        print(f"compiled after {time.monotonic() - begun:.0f} s")
        for place, case in enumerate(CASES):
            left = begun + given.seconds - time.monotonic()
            until = time.monotonic() + left / (len(CASES) - place)
            run(case, kvs[case.dtype], rate, until, 7)
    print(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
