"""Measure the batched vocoder on a GPU, at full size with random weights: python tests/gpu_hift.py

Correctness against the float32 single stream, graphs against calls without them, milliseconds
a call, memory of graphs, and the kernels that take the time. Takes under two minutes.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_bigvgan import FOLDERS, V2, random_weights
from test_hift import make_mel, prepare

from mosstalk.codec.bigvgan_stream import BatchedBigVgan, BigVganOptions
from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.config import HiftConfig
from mosstalk.models.bigvgan import BigVgan, BigVganConfig
from mosstalk.models.hift import HiftStream, HiftVocoder
from mosstalk.runtime.device import pick_device

BATCHES = (1, 2, 4, 8, 16, 32)
RUNS = 30
VARIANTS = [
    HiftOptions("float32", replies=33),
    HiftOptions("float32", replies=33, tune=True),
    HiftOptions("float16", replies=33),
    HiftOptions("float16", replies=33, tune=True),
    HiftOptions("bfloat16", replies=33),
]


def named(options: HiftOptions) -> str:
    """What tells one variant from another."""
    return options.dtype + (" tuned" if options.tune else "")


def sound(hift: BatchedHift, replies: int, hops: int = 4) -> Tensor:
    """Sound (replies, samples) of several replies."""
    opened = [hift.open(n) for n in range(replies)]
    heard = []
    for hop in range(hops):
        mels = [make_mel(20, 50 * n + hop).to(hift.device) for n in range(replies)]
        work = [(reply, mel, False) for reply, mel in zip(opened, mels, strict=True)]
        heard.append(torch.stack(hift.push(work)))
    for reply in opened:
        hift.close(reply)
    return torch.cat(heard, dim=1)


def captured(vocoder: HiftVocoder, options: HiftOptions, bucket: int) -> BatchedHift:
    """A batch with the graphs of one size alone."""
    hift = BatchedHift(vocoder, options)
    for frames in (20, 28):
        hift.capture(bucket, frames)
    return hift


def correctness(vocoder: HiftVocoder) -> None:
    """Every variant against ``HiftStream`` in float32, in batches of 1 and 5."""
    stream = HiftStream(vocoder, 0)
    expected = torch.cat([stream.push(make_mel(20, hop).to(vocoder.conv_pre.weight.device))
                          for hop in range(4)])  # fmt: skip
    for options, replies in product([VARIANTS[0], *VARIANTS[2:]], (1, 5)):
        hift = captured(vocoder, options, 1 if replies == 1 else 8)
        found = sound(hift, replies)[0]
        error = float((found - expected).norm() / expected.norm())
        again = sound(BatchedHift(vocoder, HiftOptions(options.dtype, False, 33)), replies)[0]
        print(
            f"  {named(options):28} batch {replies}: largest difference "
            f"{float((found - expected).abs().max()):.2e}, relative {error:.2e}, "
            f"graph against eager {float((found - again).abs().max()):.1e}"
        )


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds of ``call``: median, 95th percentile, and of the host until it returns."""
    whole, host = [], []
    for _ in range(RUNS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    kept = sorted(whole[5:])
    return statistics.median(kept), kept[int(0.95 * len(kept))], statistics.median(host[5:])


def hop_of(hift: BatchedHift, replies: int, frames: int) -> Callable[[], object]:
    """A call of ``replies`` with ``frames`` in all; 20 are a reply's beginning."""
    opened = [hift.open(n) for n in range(replies)]
    mels = [make_mel(20, n).to(hift.device) for n in range(replies)]
    if frames == 28:
        hift.push([(reply, mel, False) for reply, mel in zip(opened, mels, strict=True)])

    def call() -> None:
        for reply in opened:
            reply.frames = 20 * (frames == 28)
        hift.push([(reply, mel, False) for reply, mel in zip(opened, mels, strict=True)])

    return call


def timing(vocoder: HiftVocoder) -> None:
    """Milliseconds of a call for each variant, batch and length; time and memory of warm-up."""
    for options in VARIANTS:
        hift = BatchedHift(vocoder, options)
        start = time.perf_counter()
        hift.warm()
        figures = hift.figures()
        print(
            f"  {named(options)}: warm-up {time.perf_counter() - start:.1f} s, {figures.graphs} "
            f"graphs of {figures.graph_bytes / 2**20:.0f} MiB, weights "
            f"{figures.weight_bytes / 2**20:.0f} MiB, state {figures.state_bytes / 2**20:.1f} MiB"
        )
        for frames, replies in product((28, 20), BATCHES):
            middle, late, host = timed(hop_of(hift, replies, frames))
            print(f"    T {frames} batch {replies:2}: {middle:6.2f} ms p50, {late:6.2f} p95, "
                  f"host {host:.2f}")  # fmt: skip
            release(hift)


def release(hift: BatchedHift) -> None:
    """Make all places free again."""
    slots = hift._slots
    slots.free = list(range(slots.count, 0, -1))


def eager(vocoder: HiftVocoder) -> None:
    """The single stream and the batch without graphs, for comparison."""
    stream, mel = HiftStream(vocoder), make_mel(20).to(vocoder.conv_pre.weight.device)
    print(f"  HiftStream: {timed(lambda: stream.push(mel))[0]:.2f} ms p50")
    for dtype, replies in product(("float32", "float16"), (1, 32)):
        hift = BatchedHift(vocoder, HiftOptions(dtype, graphs=False, replies=33))
        print(f"  no graph, {dtype}, batch {replies}: "
              f"{timed(hop_of(hift, replies, 28))[0]:.2f} ms p50")  # fmt: skip


def kernels(vocoder: HiftVocoder) -> None:
    """The twelve kernels that take the most time."""
    for dtype, replies in product(("float32", "float16"), (1, 32)):
        hift = captured(vocoder, HiftOptions(dtype, replies=33), replies)
        call = hop_of(hift, replies, 28)
        call()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                call()
            torch.cuda.synchronize()
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows) / 1e4
        count = sum(row.count for row in rows) / 10
        print(f"  {dtype} batch {replies}: {total:.2f} ms in {count:.0f} kernels a call")
        for row in rows[:12]:
            print(f"    {row.self_device_time_total / 1e4:7.3f} ms {row.count / 10:5.0f} x "
                  f"{row.key[:100]}")  # fmt: skip


def bigvgan(vocoder: HiftVocoder) -> None:
    """Milliseconds of an ordinary hop through BigVGAN-v2 24 kHz/100 at its published size."""
    device = vocoder.conv_pre.weight.device
    sizes = {"upsample_initial_channel": 1536, **FOLDERS["24 kHz/100"]}
    network = BigVgan(BigVganConfig.from_dict(V2 | sizes)).requires_grad_(False).eval()
    random_weights(network)
    network.to(device)
    for dtype, replies in product(("float32", "float16"), (1, 8)):
        batch = BatchedBigVgan(network, BigVganOptions(dtype, replies=8))
        opened = [batch.open() for _ in range(replies)]
        mels = [make_mel(20, n).to(device) for n in range(replies)]
        work = [(reply, mel, False) for reply, mel in zip(opened, mels, strict=True)]
        for _ in range(6):
            batch.push(work)
        middle, late, _ = timed(partial(batch.push, work))
        print(
            f"  {dtype} batch {replies}: {middle:.2f} ms p50, {late:.2f} p95; reach {batch.reach}"
        )


def main() -> None:
    """Run every part; one that fails is printed and does not stop the others."""
    device = pick_device("cuda")
    print(torch.__version__, torch.cuda.get_device_name(device))
    vocoder = HiftVocoder(HiftConfig())
    prepare(vocoder, None)
    vocoder.to(device)
    for part in (correctness, timing, eager, kernels, bigvgan):
        print(part.__name__)
        start = time.perf_counter()
        try:
            part(vocoder)
        except Exception:
            traceback.print_exc()
        print(f"  [{time.perf_counter() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
