"""Times, memory and errors of the batched flow at the published sizes, on a GPU.

    python tests/gpu_flow.py

Random weights. Prints medians of passes that are queued, run and waited for one by one.
"""

import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from flow_rig import random_codes, random_flow, random_voice
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.config import FlowConfig
from mosstalk.models.flow import FlowDecoder, RecomputingFlowStream
from mosstalk.models.voices import Voice
from mosstalk.ops.launch import SWITCHES
from mosstalk.runtime.device import pick_device

FULL = FlowConfig()
COUNTS = (1, 8, 32)
RUNS = 9
SHORT, LONG = 85, 335
"""Voices of 6.8 s and 26.8 s, in codes."""
CONTEXT_S = 2.0
BUDGET_S = 110.0
STARTED = time.perf_counter()


def main() -> None:
    device = pick_device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, random weights, n={RUNS}")
    flow = random_flow(FULL, device)
    sections: list[Callable[[FlowDecoder], None]] = [
        fast_path,
        one_after_another,
        errors,
        long_reply,
    ]
    for section in sections:
        print(f"\n## {section.__name__} ({time.perf_counter() - STARTED:.0f} s)", flush=True)
        if time.perf_counter() - STARTED > BUDGET_S:
            print("left out: out of time")
            continue
        try:
            section(flow)
        except Exception:
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()


def elapsed_ms(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def used_mib() -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


class Talk:
    """Replies in one voice that move on together."""

    def __init__(self, flow: BatchedFlow, voice: Voice, count: int) -> None:
        self.flow = flow
        self.replies: list[FlowReply] = [flow.open(voice) for _ in range(count)]

    def hop(self) -> list[Tensor]:
        """One hop of every reply."""
        needed = [reply.codes_needed - len(reply.codes) for reply in self.replies]
        hops = [
            (r, random_codes(FULL, n), False) for r, n in zip(self.replies, needed, strict=True)
        ]
        return self.flow.advance(hops)

    def times(self, runs: int = RUNS) -> tuple[float, float]:
        """First hop, median of later hops, in ms."""
        first = elapsed_ms(self.hop)
        return first, statistics.median(elapsed_ms(self.hop) for _ in range(runs + 1))

    def close(self) -> None:
        """Close all replies."""
        for reply in self.replies:
            reply.close()


def batched(flow: FlowDecoder, dtype: torch.dtype, pages: int, **options: object) -> BatchedFlow:
    given = {"dtype": dtype, "pages": pages, "context_s": CONTEXT_S} | options
    return batched_flow(flow, FlowOptions(**given))  # type: ignore[arg-type]


def fast_path(flow: FlowDecoder) -> None:
    """Float16 with graphs: memory, batch sizes, both voices, 128 replies, the profile."""
    before = used_mib()
    fast = batched(flow, torch.float16, 860)
    figures = fast.figures()
    pages = (figures.pages + 1) * figures.page_bytes / 2**20
    built = used_mib()
    print(f"besides pages {built - before - pages:.0f} MiB before graphs; {figures}")
    with split_time() as parts:
        warmed = elapsed_ms(fast.warm)
    print(f"graphs: {fast.figures().graphs} in {warmed / 1000:.1f} s, {used_mib() - built:.0f} MiB")
    print(f"  of which, in s: {parts}")
    print(f"a reply at {CONTEXT_S} s of context: {5 * figures.page_bytes / 2**20:.0f} MiB")
    for codes in (SHORT, LONG):
        voice = random_voice(FULL, codes)
        print(f"voice of {codes} codes: {elapsed_ms(partial(fast.prepare, voice)):.1f} ms once")
        for count in COUNTS:
            talk = Talk(fast, voice, count)
            first, later = talk.times()
            print(f"  {count:3} replies: first hop {first:7.2f} ms, later hops {later:7.2f} ms")
            talk.close()
    crowd = Talk(fast, random_voice(FULL, SHORT), 128)
    first, later = crowd.times(5)
    print(f"  128 replies, 4 passes: first hop {first:.2f} ms, later hops {later:.2f} ms")
    crowd.close()
    for count in (8, 32):
        show_kernels(fast, count)


@contextmanager
def split_time() -> Iterator[dict[str, float]]:
    """Seconds spent in compiling, by kernel, and in capturing graphs."""
    parts: dict[str, float] = defaultdict(float)
    compiled = Counter[str]()

    def listener(*, src: Any, times: Any, **_: object) -> None:
        parts["compiling"] += times.total / 1e6
        compiled[src.name] += 1

    capture = torch.cuda.CUDAGraph.capture_end

    def timed_capture(graph: torch.cuda.CUDAGraph) -> None:
        started = time.perf_counter()
        capture(graph)
        parts["ending captures"] += time.perf_counter() - started

    triton.knobs.compilation.listener = listener
    torch.cuda.CUDAGraph.capture_end = timed_capture  # type: ignore[method-assign,assignment]
    try:
        yield parts
    finally:
        triton.knobs.compilation.listener = None
        torch.cuda.CUDAGraph.capture_end = capture  # type: ignore[method-assign]
        print(f"  compiled {sum(compiled.values())}: {dict(compiled)}")


def show_kernels(fast: BatchedFlow, count: int) -> None:
    """The kernels' share of one pass, top 9."""
    talk = Talk(fast, random_voice(FULL, SHORT), count)
    for _ in range(6):
        talk.hop()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        talk.hop()
        torch.cuda.synchronize()
    talk.close()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    launches = sum(event.count for event in events)
    print(f"  {count} replies: {whole / 1000:.2f} ms in {launches} kernels")
    for event in events[:9]:
        share, each = event.self_device_time_total / whole, event.self_device_time_total
        print(f"    {share:6.1%} {event.count:5} x {each / event.count:7.2f} us  {event.key[:60]}")


def errors(flow: FlowDecoder) -> None:
    """Relative error of the mel against float32, beside plain torch in the same precision."""
    voice, codes = random_voice(FULL, SHORT), random_codes(FULL, 53)
    exact = torch.cat(RecomputingFlowStream(flow, voice).push(codes), dim=1)
    names = {"float32": torch.float32, "float16": torch.float16}
    for name, dtype in names.items():
        reply = batched(flow, dtype, 40, context_s=None, graphs=False, max_items=2).open(voice)
        ours = torch.cat(reply.push(codes), dim=1)
        plain = RecomputingFlowStream(random_flow(FULL, exact.device).to(dtype), voice)
        theirs = torch.cat(plain.push(codes), dim=1)
        found = [float((mel.float() - exact).norm() / exact.norm()) for mel in (ours, theirs)]
        print(f"  {name}: {found[0]:.2e}, plain torch {found[1]:.2e}")


def long_reply(flow: FlowDecoder) -> None:
    """Hop 2 and hop 200 of one reply, with a bounded context and with everything kept."""
    for context_s, codes in ((CONTEXT_S, SHORT), (None, SHORT)):
        fast = batched(flow, torch.float16, 300, context_s=context_s, max_items=2)
        fast.warm(most_s=codes / 12.5 + (context_s or 81))
        fast.warm(most_s=codes / 12.5 + 4)
        talk = Talk(fast, random_voice(FULL, codes), 1)
        times = [elapsed_ms(talk.hop) for _ in range(205)]
        early, late = statistics.median(times[1:8]), statistics.median(times[-8:])
        print(
            f"  context {context_s}, voice of {codes} codes: first hop {times[0]:.2f} ms, "
            f"hop 2 {early:.2f} ms, hop 200 {late:.2f} ms"
        )
        talk.close()


def one_after_another(flow: FlowDecoder) -> None:
    """Without programmatic dependent launches, which few rows are launched with."""
    SWITCHES.dependent = False
    try:
        show_kernels(times_of(flow, torch.float16, (1,)), 1)
    finally:
        SWITCHES.dependent = True


def times_of(flow: FlowDecoder, dtype: torch.dtype, counts: tuple[int, ...]) -> BatchedFlow:
    fast, voice = batched(flow, dtype, 260), random_voice(FULL, SHORT)
    for count in counts:
        talk = Talk(fast, voice, count)
        talk.hop()
        first, later = talk.times()
        del first
        print(f"  {dtype}, {count:3} replies: later hops {later:7.2f} ms")
        talk.close()
    return fast


if __name__ == "__main__":
    main()
