"""Times of the language model's step at its published size, on a GPU.

    python tests/gpu_lm_step.py [--fp8 [all]] [--calibrated]

Random weights in bfloat16; with ``--fp8`` the trunk's (``all``: every layer's) are quantised in
place, rows by themselves or, ``--calibrated``, by a number. Of every load: the device's time of
trunk, audio block and audio head (median of runs queued one after another), beside the bytes that
they must read over a copy's bandwidth, and the host's time to queue them; then which kernels
took how long.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.profiler import ProfilerActivity, profile

from mosstalk.bench.timed import measure_ceilings
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layers import LayerOptions, Layers
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.engine.step_plan import Layout, QuerySpan
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, quantize_in_place
from mosstalk.ops.sampling_parts import AUDIO
from mosstalk.plan.limits import Ceilings, Load, step_work
from mosstalk.runtime.device import pick_device
from mosstalk.synthesis.sizes import FULL, TINY
from mosstalk.synthesis.weights import random_language_model

BLOCK_ROWS = 16
LOADS = {
    "1 row after 511": Load(1, 511),
    "64 rows after 999": Load(64, 999),
    "prefill of 512 rows": Load(1, 0, new=512),
    "6 rows after 994": Load(1, 994, new=6),
}
RUNS = 20
BUDGET_S = 80.0
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Case:
    """A load laid out in a store: spans, and the row of each that is drawn from."""

    load: Load
    spans: list[QuerySpan]
    wanted: list[int]

    @classmethod
    def of(cls, load: Load, pool: BlockPool, pad: int) -> "Case":
        end = load.kept + load.new
        spans = []
        for _ in range(load.sessions):
            sequence = Sequence(pool, pad, [(pad, 7)] * end)
            assert sequence.make_room(end)
            spans.append(QuerySpan(sequence, load.kept, end))
        wanted = [(number + 1) * load.new - 1 for number in range(load.sessions)]
        return cls(load, spans, wanted)

    def queue(self, layers: Layers, step: int) -> None:
        """Trunk, audio block and audio head."""
        rows = [row for s in self.spans for row in s.sequence.rows[s.start : s.end]]
        layers.trunk(step, rows, self.spans)
        layers.logits(AUDIO, layers.block(step, Part.AUDIO, self.spans, self.wanted))


def asked() -> Quantization | None:
    """What is to be quantised."""
    options = argparse.ArgumentParser()
    options.add_argument("--fp8", nargs="?", const="shared", choices=("shared", "all"))
    options.add_argument("--calibrated", action="store_true")
    given = options.parse_args()
    if given.fp8 is None:
        return None
    return Quantization(given.fp8, "calibrated" if given.calibrated else "row")


def main() -> None:
    record = asked()
    device = pick_device("cuda" if torch.cuda.is_available() else "cpu")
    small = device.type == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    say("drawing weights")
    model = random_language_model(TINY if small else FULL, device, dtype)
    if record is not None:
        say(f"quantising: {record.scheme}, {record.blocks}, by {record.activations}")
        # Rows are normed or nearly so: 0.02 reaches 9.
        scale = torch.tensor(0.02, device=device)
        names = record.linears(model.config)
        quantize_in_place(model, record, {name: scale.clone() for name in names})
    ceilings = measure_ceilings(device, dtype, fp8=record is not None)
    kind = "" if record is None else f" in {record.scheme}, {record.blocks}"
    print(f"{device}, torch {torch.__version__}, random weights{kind}: {ceilings.describe()}")
    pool = BlockPool(sum(ld.sessions * (ld.kept + ld.new + 15) for ld in LOADS.values()) // 16, 16)
    store = KVStore.allocate(model.config, pool, device, dtype)
    for part in (store.keys, store.values, store.hidden):
        part.normal_()
    pad = model.config.modality_pad_token_id
    cases = {name: Case.of(load, pool, pad) for name, load in LOADS.items()}
    latest = torch.zeros((64, 2), dtype=torch.int64, device=device)
    for invariant in (None, True):
        say(f"batch-invariant: {bool(invariant)}")
        layers = Layers(model, store, latest, LayerOptions(invariant=invariant))
        measure(layers, cases, model, ceilings, record)


def say(what: str) -> None:
    print(f"\n## {what} ({time.perf_counter() - STARTED:.1f} s)", flush=True)


@torch.inference_mode()
def measure(
    layers: Layers,
    cases: dict[str, Case],
    model: LanguageModel,
    ceilings: Ceilings,
    record: Quantization | None,
) -> None:
    sizes = [Layout.of(case.spans, layers.limits).size for case in cases.values()]
    layers.warm(sizes)
    say(f"{layers.graph_count} graphs captured")
    print(f"rooms {layers.fixed_bytes / 1e6:,.0f} MB, layers {layers.weight_bytes / 1e9:,.2f} GB")
    print(f"{'load':22} {'ms':>8} {'limit ms':>9} {'of it':>6} {'GB/s':>6} {'host ms':>8}")
    for name, case in cases.items():
        if time.perf_counter() - STARTED > BUDGET_S:
            print(f"{name:22} left out: out of time")
            continue
        device_ms, host_ms = timed(partial(case.queue, layers), model.device)
        work = step_work(model.config, model.dtype, case.load, record)
        limit = ceilings.limit_ms(work)
        speed = work.moved_bytes / device_ms / 1e6
        print(
            f"{name:22} {device_ms:8.3f} {limit:9.3f} {limit / device_ms:6.1%} {speed:6,.0f} "
            f"{host_ms:8.3f}",
            flush=True,
        )
    if not layers.invariant and model.device.type == "cuda":
        for name in list(cases)[:2]:
            table(name, cases[name], layers)


def timed(run: Callable[[int], None], device: torch.device) -> tuple[float, float]:
    """Medians of milliseconds on the device, one run queued behind another, and on the host."""
    for step in range(3):
        run(step)
    if device.type == "cpu":
        started = time.perf_counter()
        run(0)
        return (1000 * (time.perf_counter() - started),) * 2
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    host = []
    torch.cuda.synchronize()
    marks[0].record()
    for step, mark in enumerate(marks[1:]):
        started = time.perf_counter()
        run(step)
        host.append(1000 * (time.perf_counter() - started))
        mark.record()
    torch.cuda.synchronize()
    spans = [one.elapsed_time(other) for one, other in pairwise(marks)]
    # The first few fill the queue: none waits for the one before it.
    return statistics.median(spans[5:]), statistics.median(host)


def table(name: str, case: Case, layers: Layers) -> None:
    """Which kernels take how long in one step; profiled, so a little longer than unobserved."""
    say(f"kernels of a step: {name}")
    runs = 3
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for step in range(runs):
            case.queue(layers, step)
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events) / runs
    print(f"{'kernel':60} {'calls':>6} {'us each':>8} {'us a step':>10}")
    for event in events[:16]:
        each = event.device_time_total / max(event.count, 1)
        print(
            f"{event.key[:60]:60} {event.count / runs:6.0f} {each:8.2f} "
            f"{event.device_time_total / runs:10.1f}"
        )
    print(f"{'all':60} {'':6} {'':8} {total:10.1f}")


if __name__ == "__main__":
    main()
