"""Checks, times and tunes the kernels that draw tokens on this machine's GPU.

``python tests/gpu_lm_pick.py``. The claims run first, in processes of their own, while the
sweep's candidates are compiled; tables for ``topk_candidates`` and ``sampling`` come last.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lm_pick_cases import AUDIO_IDS, EOSP, TEXT_IDS, Draws, draws

from mosstalk.ops import sampling
from mosstalk.ops.launch import Launch, compiled_together
from mosstalk.ops.sampling import ModeTokens, update_modes
from mosstalk.ops.sampling_parts import AUDIO, HELD, TEXT, DrawState
from mosstalk.ops.tiles import Tile
from mosstalk.runtime.device import pick_device

HERE = Path(__file__).resolve().parent
DEVICE = pick_device("cuda")
PARTS = ("bfloat16", "float32", "float16 and not bfloat16", "not float")
BUDGETS_US = {(AUDIO_IDS, 1): 12.0, (AUDIO_IDS, 64): 40.0, (TEXT_IDS, 1): 60.0}
CHUNKS = {AUDIO_IDS: (512, 1024, 2048, 4096), TEXT_IDS: (2048, 4096, 8192)}
WARPS = {AUDIO_IDS: (2, 4, 8), TEXT_IDS: (4, 8, 16)}
REPLAYS, AT_ONCE = 20, 20


def claims() -> list[subprocess.Popen[str]]:
    """The claims, a process for each precision."""
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300")
    file = str(HERE / "lm_pick_claims.py")
    return [
        subprocess.Popen(
            [*words, file, "-k", part],
            cwd=HERE.parent,
            env=os.environ | {"TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in PARTS
    ]


def spoken(vocabulary: int, rows: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Draws:
    """Draws of a channel at its published size."""
    audio = vocabulary == AUDIO_IDS
    return draws(
        rows, vocabulary, dtype, DEVICE, channel=AUDIO if audio else TEXT,
        last_token=EOSP if audio else None, seed=seed, spread=3.0,
    )  # fmt: skip


def usual(case: Draws) -> Draws:
    """All rows sampled as the public demo does."""
    values = {"temperature": 0.6, "top_k": 20, "tail": 1 - 0.95, "penalty": 1.1, "forced": -1}
    every = {name: torch.full_like(getattr(case.settings, name), v) for name, v in values.items()}
    return replace(case, settings=replace(case.settings, **every))


def check(vocabulary: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    """Compare with the general path; what differs is drawn again on the CPU, the reference."""
    case = spoken(vocabulary, rows, dtype, seed)
    expected = case.expected()
    before = replace(case, state=DrawState(case.state.seen.clone()))
    case.pick()
    differing = (case.tokens != expected).nonzero()[:, 0]
    wrong = 0
    for row in differing.tolist():
        one = before.rows(torch.tensor([row], device=DEVICE))
        settings = {name: value.cpu() for name, value in vars(one.settings).items()}
        alone = replace(
            one,
            logits=one.logits.cpu(),
            state=DrawState(one.state.seen.cpu()),
            settings=type(one.settings)(**settings),
        )
        wrong += int(alone.expected()[0]) != int(case.tokens[row])
    verdict = "WRONG" if wrong else "right"
    print(
        f"{vocabulary:7} {str(dtype)[6:]:9} {rows} rows: {verdict}, {wrong} differ from the CPU, "
        f"{len(differing)} from the GPU's general path",
        flush=True,
    )


def microseconds(runs: Callable[[], object]) -> float:
    """Time of ``runs``, launched many times in a CUDA graph."""
    runs()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(AT_ONCE):
            runs()
    return eagerly(graph.replay) / AT_ONCE


def eagerly(runs: Callable[[], object]) -> float:
    """Microseconds of ``runs`` on the current stream."""
    for _ in range(3):
        runs()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        runs()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / REPLAYS


@contextmanager
def tiles(chunk: int, first_warps: int, second_warps: int) -> Iterator[None]:
    """One pair of tiles for any size."""
    before = sampling.CANDIDATE_TILES, sampling.SAMPLE_TILES
    sampling.CANDIDATE_TILES = {sampling.ANY_TOKENS: Tile(1, chunk, HELD, first_warps, 1)}
    sampling.SAMPLE_TILES = {sampling.ANY_KEYS: Tile(1, 1024, HELD, second_warps, 1)}
    try:
        yield
    finally:
        sampling.CANDIDATE_TILES, sampling.SAMPLE_TILES = before


def launches(case: Draws) -> tuple[Launch, ...]:
    """The two kernels with the tiles that are set, over room of their own."""
    return sampling.sample.launches(
        case.logits, case.state, case.settings, case.tokens, case.bad,
        channel=case.channel, last_token=case.last_token,
    )  # fmt: skip


Candidate = tuple[int, int, int]


def candidates(vocabulary: int) -> list[Candidate]:
    """Chunks, with warps of the first and of the second kernel."""
    warps = WARPS[vocabulary]
    return [(chunk, a, b) for chunk in CHUNKS[vocabulary] for a in warps for b in warps]


def compile_all(cases: dict[tuple[int, int], Draws]) -> None:
    """Compile every candidate, in threads."""
    started = time.monotonic()
    with compiled_together():
        for (vocabulary, _), case in cases.items():
            for candidate in candidates(vocabulary):
                with tiles(*candidate):
                    for launch in launches(case):
                        launch.run()
    print(f"candidates compiled in {time.monotonic() - started:.0f} s", flush=True)


def both(pair: tuple[Launch, ...]) -> Callable[[], None]:
    """The kernels, one after the other."""

    def run() -> None:
        for launch in pair:
            launch.run()

    return run


def sweep(vocabulary: int, cases: dict[tuple[int, int], Draws]) -> None:
    """Time every candidate for one row and for many, and print the best."""
    found: list[tuple[dict[int, float], Candidate]] = []
    sizes = [rows for v, rows in cases if v == vocabulary]
    for candidate in candidates(vocabulary):
        with tiles(*candidate):
            pairs = {rows: launches(cases[vocabulary, rows]) for rows in sizes}
            found.append(({r: microseconds(both(pair)) for r, pair in pairs.items()}, candidate))
    for rows in sizes:
        found.sort(key=lambda pair: pair[0][rows])
        shown = "  ".join(f"{us[rows]:.2f} {candidate}" for us, candidate in found[:6])
        budget = BUDGETS_US.get((vocabulary, rows), float("nan"))
        print(f"{vocabulary:7} rows {rows:3} (budget {budget} us): {shown}", flush=True)
    least = {rows: min(us[rows] for us, _ in found) for rows in sizes}
    times, best = min(found, key=lambda pair: sum(pair[0][r] / least[r] for r in sizes))
    with tiles(*best):
        for rows in sizes:
            apart = [microseconds(one.run) for one in launches(cases[vocabulary, rows])]
            print(f"    topk_candidates {apart[0]:.2f}, sampling {apart[1]:.2f} us at {rows} rows")
    chunk, first, second = best
    print(f"    {times} -> topk_candidates {astuple(Tile(1, chunk, HELD, first, 1))}")
    print(f"       sampling of {-(-vocabulary // chunk) * HELD} keys: {second} warps", flush=True)


def beside(cases: dict[tuple[int, int], Draws]) -> None:
    """What else a step draws with, and the costs of unusual rows."""
    for (vocabulary, rows), case in cases.items():
        general = eagerly(case.expected)
        case_us = microseconds(both(launches(case)))
        print(f"{vocabulary:7} rows {rows:3}: table now {case_us:.2f} us, general {general:.0f} us")
    for vocabulary in CHUNKS:
        case = cases[vocabulary, 1]
        equal = replace(case, logits=torch.zeros_like(case.logits))
        taken = microseconds(both(launches(equal)))
        print(f"{vocabulary:7} one row of equal logits: {taken:.2f} us")
    case = spoken(AUDIO_IDS, 64)
    mode = torch.ones(len(case.state.seen), dtype=torch.int8, device=DEVICE)
    state = replace(case.state, mode=mode)
    bad = torch.zeros(64, 2, dtype=torch.bool, device=DEVICE)
    stop, tokens = torch.tensor([3, 4], device=DEVICE), ModeTokens(5, EOSP, 6, 512)
    settled = microseconds(
        lambda: update_modes(state, case.settings.slots, bad, stop, tokens, deferred=True)
    )
    print(f"update_modes of 64 rows: {settled:.2f} us")


def main() -> None:
    """All sections in turn."""
    options = argparse.ArgumentParser()
    options.add_argument("--no-claims", action="store_true", help="checks and times alone")
    given = options.parse_args()
    print(torch.cuda.get_device_name(DEVICE), torch.__version__)
    started = time.monotonic()
    running = [] if given.no_claims else claims()
    sizes = [(AUDIO_IDS, 1), (AUDIO_IDS, 64), (TEXT_IDS, 1), (TEXT_IDS, 64)]
    cases = {(vocabulary, rows): usual(spoken(vocabulary, rows)) for vocabulary, rows in sizes}
    compile_all(cases)
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check(AUDIO_IDS, 1000, dtype, seed=5)
        check(AUDIO_IDS, 1000, torch.bfloat16, seed=6)
        check(TEXT_IDS, 150, torch.bfloat16, seed=7)
    failed = 0
    for part, process in zip(PARTS, running, strict=False):
        output, _ = process.communicate()
        failed += process.returncode != 0
        print(f"claims '{part}': {output[-3000 if process.returncode else -200 :].strip()}")
    print(f"{time.monotonic() - started:.0f} s; now times", flush=True)
    with torch.inference_mode():
        for vocabulary in CHUNKS:
            sweep(vocabulary, cases)
        beside(cases)
    print(f"done in {time.monotonic() - started:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
