"""Measure live codes on a GPU, at full size with random weights: python tests/gpu_tokenizer.py

Live against offline codes alone and in company, graphs against steps without them, errors of
matmuls, milliseconds for 400 ms of sound, memory, the kernels that take the time, and tiles.
``--small`` runs it with a small tokenizer; without a GPU, it only shows that the script works.
``--no-sweep`` leaves out the search for better tiles.
"""

import contextlib
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mosstalk.audio.sound import read_audio
from mosstalk.codec.tokenizer_block import BUCKETS, Blocks, BlockSpan
from mosstalk.codec.tokenizer_state import LiveCodes, LiveSegment
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE
from mosstalk.models.speech_tokenizer import EncoderLayer, SpeechTokenizer
from mosstalk.ops import attention_tokenizer, linear_tf32x3
from mosstalk.ops.launch import SWITCHES, Launch
from mosstalk.ops.linear_tf32x3 import Precision, Tf32x3
from mosstalk.ops.tiles import Tile
from mosstalk.runtime.device import pick_device, synchronize

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--small" in sys.argv
DEVICE = pick_device("auto")
GRAPHS = DEVICE.type == "cuda"
CONFIG = (
    SpeechTokenizerConfig(64, 4, 128, 2, 32, 1500, 4, 2, 64)
    if SMALL
    else SpeechTokenizerConfig(1280, 20, 5120, 32, 128, 1500, 4, 16, 16384)
)
BLOCK = 6400
STREAMS = (1, 8, 64)
POSITIONS_S = (0.4, 10.0, 28.0)
RUNS = 1 if SMALL else 40
ALL_TURN_S = 60.0
"""Trusting a maximum for the whole turn spares every repair: what is timed is the common push."""


def random_tokenizer() -> SpeechTokenizer:
    """Weights scaled by their fan-in; a codebook spread as this network's own outputs are."""
    with torch.device(DEVICE):
        tokenizer = SpeechTokenizer(CONFIG).requires_grad_(False).eval()
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, weight in tokenizer.named_parameters():
        scale, offset = 1 / math.sqrt(weight[0].numel()), 0.0
        if name.endswith("bias"):
            scale = 0.02
        elif "norm" in name:
            scale, offset = 0.1, 1.0
        elif "embed" in name:
            scale = 0.3
        weight.normal_(generator=generator).mul_(scale).add_(offset)
    pooled = tokenizer.encode_segment(speech(20 * INPUT_RATE)).pooled
    codebook = tokenizer.encoder.codebook.weight
    codebook.normal_(generator=generator).mul_(pooled.std(0)).add_(pooled.mean(0))
    return tokenizer


RECORDED = [
    torch.from_numpy(read_audio(path, INPUT_RATE).samples)
    for path in sorted((ROOT / "assets").glob("*.flac"))
]


def speech(samples: int, start: int = 0) -> Tensor:
    """So much of the recordings in assets/, over and over."""
    sound = torch.cat(RECORDED)
    return sound[torch.arange(start, start + samples) % len(sound)]


def live_of(
    tokenizer: SpeechTokenizer, *, graphs: bool = GRAPHS, trusted_s: float = 1.0,
    precision: Precision = "tf32x3",
) -> LiveTokenizer:  # fmt: skip
    options = LiveOptions(together=True, graphs=graphs, page_s=1.28, precision=precision)
    return LiveTokenizer(tokenizer, trusted_s, options)


def heard(live: LiveTokenizer, clips: Sequence[Tensor], piece: int = BLOCK) -> list[LiveCodes]:
    """The finished streams of clips that came side by side."""
    states = [live.open() for _ in clips]
    parts = [list(clip.split(piece)) for clip in clips]
    while any(parts):
        due = [index for index, waiting in enumerate(parts) if waiting]
        live.push_many([states[i] for i in due], [parts[i].pop(0) for i in due])
    live.push_many(states, [torch.zeros(0)] * len(states), [True] * len(states))
    return states


def correctness(tokenizer: SpeechTokenizer) -> None:
    """Codes alone and of 64 streams at once, by every way to compute them."""
    clips = [*RECORDED, speech(31 * INPUT_RATE), 10**-(2.5) * speech(7 * INPUT_RATE, 9000)]
    many = [
        10 ** (-number % 4 / 2)
        * speech(INPUT_RATE * (1 + number % 17) + 37 * number, 7919 * number)
        for number in range(64)
    ]
    expected, expected_many = ([tokenizer.encode(c) for c in each] for each in (clips, many))
    print(f"  different codes: {len({code for codes in expected for code in codes})}")
    live = live_of(tokenizer)
    alone = [heard(live, [clip])[0] for clip in clips]
    ties, repairs = (sum(s.ties for s in alone), sum(len(s.repairs) for s in alone))
    equal = sum(s.codes == codes for s, codes in zip(alone, expected, strict=True))
    print(f"  {equal}/{len(clips)} clips alone equal offline, {repairs} repairs, {ties} segments "
          "encoded whole")  # fmt: skip
    states = heard(live, many)
    equal = sum(s.codes == codes for s, codes in zip(states, expected_many, strict=True))
    print(f"  {equal}/64 streams at once equal offline, {sum(len(s.repairs) for s in states)} "
          f"repairs, {sum(s.ties for s in states)} whole, {live.pages.taken} pages still held"
    )  # fmt: skip


def leads(tokenizer: SpeechTokenizer) -> None:
    """How near the two nearest entries are, and how far rounding moves their distance."""
    clip = speech(20 * INPUT_RATE)
    with torch.inference_mode():
        segment = tokenizer.encode_segment(clip)
        least, ids = segment.distances.topk(2, largest=False)
        squares = tokenizer.encoder.codebook.weight.float().square().sum(1)[ids[:, 0]]
        offline = least.diff(dim=1)[:, 0] / (segment.pooled.float().square().sum(1) + squares)
    print(f"  leads of {len(offline)} codes: least {float(offline.min()):.1e}, "
          f"{100 * float((offline < 1e-5).float().mean()):.2f} % under 1e-5")  # fmt: skip
    for precision in get_args(Precision):
        for streams in (1, 64):
            live = live_of(tokenizer, precision=precision)
            live.pages.reserve(streams * 16)
            states = [live.open() for _ in range(streams)]
            for part in clip.split(BLOCK):
                live.push_many(states, [part] * streams)
            gaps = torch.tensor([state.leads for state in states])
            moved = (gaps - offline.cpu()[: gaps.shape[1]]).abs()
            print(f"  {precision:6} {streams:2} streams: moved by {float(moved.max()):.1e} at "
                  f"most, {float(moved.mean()):.1e} on average")  # fmt: skip
            for state in states:
                live.close(state)


def graphs_equal_steps(tokenizer: SpeechTokenizer) -> None:
    """The same blocks with and without a graph, bit for bit, in every bucket."""
    for items in BUCKETS:
        found = []
        for graphs in (GRAPHS, False):
            live = live_of(tokenizer, graphs=graphs, trusted_s=ALL_TURN_S)
            states = at_position(live, items, 0.8)
            segments = [state.segment for state in states]
            for n, segment in enumerate(segments):
                segment.write(speech(BLOCK, 1000 * n).numpy())
                segment.held.cover(60)
            with torch.inference_mode():
                found.append(live._blocks.run(next_blocks(segments)))
        same = all(
            a.codes == b.codes and a.leads == b.leads and (a.quietest == b.quietest).all()
            for a, b in zip(*found, strict=True)
        )
        print(f"  {items:2} streams: graph and step {'equal' if same else 'DIFFER'}")


def next_blocks(segments: Sequence[LiveSegment]) -> list[BlockSpan]:
    """The next 400 ms of each, whether or not that much was heard."""
    places = [(segment, segment.rows) for segment in segments]
    return [BlockSpan(each, row, row + 20, 2 * row + 39, 2.0) for each, row in places]


def at_position(live: LiveTokenizer, streams: int, position_s: float) -> list[LiveCodes]:
    """Streams that have heard so much, each something else."""
    states = [live.open(2.0) for _ in range(streams)]
    for n in range(0, streams, 8):
        part = states[n : n + 8]
        clips = [speech(round(position_s * INPUT_RATE), 7919 * (n + i)) for i in range(len(part))]
        for piece in zip(*(clip.split(4 * INPUT_RATE) for clip in clips), strict=True):
            live.push_many(part, piece)
    return states


def rewind(states: Sequence[LiveCodes]) -> Callable[[], None]:
    """What brings the streams back to where they are now; their pages hold no less then."""
    names = ("samples", "frames", "rows", "loudest", "floor")
    kept = [
        (list(s.codes), list(s.leads), s.samples, [getattr(s.segment, name) for name in names])
        for s in states
    ]

    def back() -> None:
        for state, (codes, gaps, samples, values) in zip(states, kept, strict=True):
            state.codes, state.leads, state.samples = list(codes), list(gaps), samples
            for name, value in zip(names, values, strict=True):
                setattr(state.segment, name, value)

    return back


def timed(run: Callable[[], object], after: Callable[[], None]) -> list[float]:
    """Milliseconds of each run after three to warm up."""
    times = []
    for _ in range(RUNS + 3):
        synchronize(DEVICE)
        start = time.perf_counter()
        run()
        synchronize(DEVICE)
        times.append(1000 * (time.perf_counter() - start))
        after()
    return times[3:]


def told(times: Sequence[float]) -> str:
    ordered = sorted(times)
    return (
        f"mean {statistics.mean(times):7.2f}  p50 {statistics.median(times):7.2f}  "
        f"p95 {ordered[int(0.95 * (len(ordered) - 1))]:7.2f}"
    )


def pushes(tokenizer: SpeechTokenizer) -> None:
    """400 ms of each stream, and how much of that the device takes."""
    for dependent in (False, True):
        SWITCHES.dependent = dependent
        live = live_of(tokenizer, trusted_s=ALL_TURN_S)
        start = time.perf_counter()
        live.pages.reserve(max(STREAMS) * live.pages.longest)
        live.warm(max(STREAMS))
        print(f"  {'with' if dependent else 'no'} dependent launches; warmed for {max(STREAMS)} "
              f"streams of 30 s in {time.perf_counter() - start:.1f} s")  # fmt: skip
        for streams in STREAMS:
            for position_s in POSITIONS_S:
                states = at_position(live, streams, position_s)
                sounds = [speech(BLOCK, 999 * n).numpy() for n in range(streams)]
                times = timed(lambda: live.push_many(states, sounds), rewind(states))  # noqa: B023
                device = device_ms(live._blocks, states)
                shown = statistics.mean(times)
                print(f"  {streams:2} streams at {position_s:4.1f} s: {told(times)} ms; device "
                      f"{device:6.2f} ms, host {100 * (1 - device / shown):3.0f} %")  # fmt: skip
                for state in states:
                    live.close(state)
    SWITCHES.dependent = False


def device_ms(blocks: Blocks, states: Sequence[LiveCodes]) -> float:
    """Mean of one run at these streams' places, by the device's own clock."""
    spans, step = next_blocks([state.segment for state in states]), blocks.step_for(len(states))
    with torch.inference_mode():
        blocks.run(spans)
        if step._graphs is None:
            start = time.perf_counter()
            blocks.run(spans)
            return 1000 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(RUNS):
            step._graphs.replay(step.items)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / RUNS


def other_pushes(tokenizer: SpeechTokenizer) -> None:
    """What is not the common push: 320 ms, 800 ms, a repair of 10 s, the end of a turn."""
    live = live_of(tokenizer, trusted_s=ALL_TURN_S)
    for streams in (1, 16):
        states = at_position(live, streams, 10.0)
        for what, samples in (("320 ms", 5120), ("800 ms", 2 * BLOCK)):
            sounds = [speech(samples, 999 * n).numpy() for n in range(streams)]
            times = timed(lambda: live.push_many(states, sounds), rewind(states))  # noqa: B023
            print(f"  {streams:2} streams, {what} at 10 s: {told(times)} ms")
        for state in states:
            live.close(state)
    live = live_of(tokenizer)
    for _ in range(3):
        state = live.open(2.0)
        live.push(state, 0.01 * speech(10 * INPUT_RATE))
        synchronize(DEVICE)
        start = time.perf_counter()
        live.push(state, speech(BLOCK))
        repaired = time.perf_counter()
        live.push_many([state], [speech(3000)], [True])
        print(f"  a push that repairs 10 s: {1000 * (repaired - start):.1f} ms, the end of that "
              f"turn: {1000 * (time.perf_counter() - repaired):.1f} ms")  # fmt: skip


def matmuls(tokenizer: SpeechTokenizer) -> None:
    """Relative errors of matmuls against float64: of a card's float32, and of the kernel's."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    layer = tokenizer.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    for name, weight in (("fc1", layer.fc1.weight), ("fc2", layer.fc2.weight)):
        for rows in (20, 160, 1280):
            x = torch.randn(rows, weight.shape[1], generator=generator, device=DEVICE)
            exact = x.double() @ weight.double().T
            found = {"cuBLAS": x @ weight.T}
            for precision in get_args(Precision):
                for split in (False, True):
                    given = Tf32x3.of(x, split=split)
                    made = linear_tf32x3.linear_float32(given, weight, precision=precision)
                    found[precision + (" of halves" if split else "")] = made.high
            shown = [f"{way} {float((y - exact).norm() / exact.norm()):.1e}, bias "
                     f"{float((y * exact).sum() / exact.square().sum()) - 1:+.0e}"
                     for way, y in found.items()]  # fmt: skip
            print(f"  {name} {rows:4} rows: {'; '.join(shown)}")


def memory(tokenizer: SpeechTokenizer) -> None:
    """What a stream holds, and what the steps hold besides."""
    if DEVICE.type != "cuda":
        return
    mib = 2**20
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    weights = sum(weight.nbytes for weight in tokenizer.parameters())
    live = live_of(tokenizer)
    print(f"  weights {weights / mib:.0f} MiB; a live tokenizer before any stream: "
          f"{(torch.cuda.memory_allocated() - before) / mib:.0f} MiB more")  # fmt: skip
    live.warm(64)
    pages = (live.pages.count + 1) * live.pages.page_bytes
    steps = torch.cuda.memory_reserved() - reserved - pages
    print(f"  steps for 1 to 64 streams: {steps / mib:.0f} MiB reserved besides {pages / mib:.0f} "
          "MiB of pages")  # fmt: skip
    page = live.pages.page_bytes / mib
    for seconds in (2, 10, 30):
        held = -(-seconds * 50 // live.pages.rows)
        print(f"  a stream of {seconds:2} s: {held} pages, {held * page:.0f} MiB")


def kernels(tokenizer: SpeechTokenizer) -> None:
    """The kernels that take the time."""
    if DEVICE.type != "cuda":
        return
    for streams in (1, 64):
        live = live_of(tokenizer, graphs=False, trusted_s=ALL_TURN_S)
        states = at_position(live, streams, 10.0)
        spans = next_blocks([state.segment for state in states])
        with torch.inference_mode():
            live._blocks.run(spans)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(3):
                    live._blocks.run(spans)
        found = [event for event in seen.key_averages() if event.self_device_time_total > 0]
        found.sort(key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in found)
        print(f"  {streams} streams at 10 s: {total / 3000:.2f} ms in kernels")
        for event in found[:12]:
            print(f"    {event.self_device_time_total / 3000:7.3f} ms {event.count // 3:5} x "
                  f"{event.key[:90]}")  # fmt: skip


FEW = [
    (Tile(32, 64, 32, 4, 4), (4, 8, 16), True),
    (Tile(32, 64, 32, 4, 6), (4, 8, 16), True),
    (Tile(32, 64, 64, 4, 3), (4, 8), True),
    (Tile(32, 128, 32, 4, 4), (8, 16), True),
]
SOME = [
    (Tile(64, 128, 32, 8, 3), (2, 4, 8), True),
    (Tile(32, 128, 32, 8, 3), (2, 4), True),
]
MANY = [
    (Tile(64, 128, 32, 8, 3), (1,), True),
    (Tile(64, 128, 32, 8, 4), (1,), True),
    (Tile(64, 64, 32, 4, 3), (1,), True),
]
KEYS = [
    Tile(32, 64, 0, 4, 3),
    Tile(32, 64, 0, 4, 5),
    Tile(32, 32, 0, 4, 5),
    Tile(32, 128, 0, 8, 3),
]
LAYERS = 8
"""So many weights in turn are more than a card's cache holds."""


def trials() -> Iterator[tuple[str, Callable[[int], Launch]]]:
    """Launches to time, the n-th of them on the n-th weights: what they are, and how to make it."""
    for rows, tiles in ((20, FEW), (160, SOME), (1280, MANY)):
        for channels, columns in ((1280, 5120), (5120, 1280)):
            for tile, splits, split in tiles:
                for count in splits:
                    yield (
                        f"{rows:4} rows {channels:4} to {columns:4}: {tile}, {count} splits, "
                        f"{'halves' if split else 'whole'}",
                        matmul_trial(rows, channels, columns, tile, count, split=split),
                    )
    for streams, seen, splits in ((64, 500, (1,)), (1, 1400, (8, 16))):
        for tile in KEYS:
            for count in splits:
                name = f"{streams:2} streams of {seen:4} keys: {tile}, {count} splits"
                yield name, attention_trial(streams, seen, tile, count)


def matmul_trial(
    rows: int, channels: int, columns: int, tile: Tile, splits: int, *, split: bool
) -> Callable[[int], Launch]:
    weights = drawn(LAYERS, columns, channels)
    given = Tf32x3.of(drawn(rows, channels), split=split)
    stream, bias = drawn(rows, columns), drawn(columns)
    out = Tf32x3.empty(stream, columns, split=False)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    divided = linear_tf32x3.Division(tile, splits * tiles)
    return lambda n: linear_tf32x3.divided_float32(
        given, weights[n], bias, out, residual=stream, divided=divided
    )


def attention_trial(streams: int, seen: int, tile: Tile, splits: int) -> Callable[[int], Launch]:
    heads, channels, page = 20, 64, 64
    longest = -(-seen // page)
    kv = drawn(3, streams * longest, 1, 2, heads, page, channels)
    query = drawn(streams * 20, heads * channels)
    table = torch.arange(streams * longest, dtype=torch.int32, device=DEVICE).view(streams, -1)
    source = torch.arange(streams, dtype=torch.int32, device=DEVICE)
    items = attention_tokenizer.Items(
        source, 20 * source, torch.full_like(source, 20), torch.full_like(source, seen)
    )

    def launch(n: int) -> Launch:
        kept, attention_tokenizer.TILE = attention_tokenizer.TILE, tile
        try:
            return attention_tokenizer.attention_tokenizer.plan(
                query, kv[n % 3], table, items, splits=splits
            )
        finally:
            attention_tokenizer.TILE = kept

    return launch


KEPT: dict[tuple[int, ...], Tensor] = {}


def drawn(*size: int) -> Tensor:
    """Numbers of that size, the same tensor each time: draws take longer than what is timed."""
    if size not in KEPT:
        KEPT[size] = torch.randn(size, device=DEVICE)
    return KEPT[size]


def compile_share(share: int, shares: int) -> None:
    """Compile this process's share of the trials into the cache on disk."""
    for number, (_, trial) in enumerate(trials()):
        if number % shares == share:
            with contextlib.suppress(Exception):
                trial(0).run()


def sweep(_: SpeechTokenizer) -> None:
    """Microseconds of each tile, launches in a graph over weights that no cache holds."""
    if DEVICE.type != "cuda":
        return
    KEPT.clear()
    torch.cuda.empty_cache()
    for name, trial in trials():
        try:
            launches = [trial(n) for n in range(LAYERS)]
            launches[0].run()
            synchronize(DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for launch in launches:
                    launch.run()
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _replay in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            print(f"  {1000 * begin.elapsed_time(end) / 10 / LAYERS:8.1f} us  {name}", flush=True)
        except Exception as error:
            print(f"    failed  {name}: {str(error)[:80]}", flush=True)


def compile_first() -> None:
    """Compile the sweep's kernels in several processes at once."""
    start = time.perf_counter()
    shares = 8
    words = [["--compile", str(share), str(shares)] for share in range(shares)]
    words += [["--warm", "0"], ["--warm", "1"]]
    runs = [subprocess.Popen([sys.executable, __file__, *each]) for each in words]
    for run in runs:
        run.wait()
    print(f"compiled all kernels in {time.perf_counter() - start:.0f} s", flush=True)


def compile_steps(*, dependent: bool) -> None:
    """Compile what the live tokenizer runs."""
    SWITCHES.dependent = dependent
    tokenizer = random_tokenizer()
    start = time.perf_counter()
    live_of(tokenizer).warm(64)
    print(f"all steps stood after {time.perf_counter() - start:.1f} s, compiling", flush=True)


def warm_up(tokenizer: SpeechTokenizer) -> None:
    """Seconds until all steps stand, with their kernels on disk or compiled by this process."""
    for _ in range(2):
        start = time.perf_counter()
        live_of(tokenizer).warm(64)
        print(f"  {time.perf_counter() - start:.1f} s")


def main() -> None:
    if "--compile" in sys.argv:
        compile_share(*map(int, sys.argv[sys.argv.index("--compile") + 1 :][:2]))
        return
    if "--warm" in sys.argv:
        compile_steps(dependent=sys.argv[-1] == "1")
        return
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, random weights, float32, {RUNS} runs")
    started = time.perf_counter()
    sweeps = DEVICE.type == "cuda" and "--no-sweep" not in sys.argv
    if sweeps:
        compile_first()
    tokenizer = random_tokenizer()
    sections = [warm_up, correctness, pushes, memory, kernels, matmuls, leads,
                graphs_equal_steps, other_pushes]  # fmt: skip
    for section in [*sections, sweep] if sweeps else sections:
        begun = time.perf_counter()
        print(f"{section.__doc__ or section.__name__}")
        try:
            section(tokenizer)
        except Exception:
            traceback.print_exc(file=sys.stdout)
        print(f"  [{time.perf_counter() - begun:.1f} s]", flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
