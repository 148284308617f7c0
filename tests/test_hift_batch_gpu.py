"""The batched vocoder on a GPU: near the CPU's float32, graphs as calls without them."""

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from test_hift import make_mel, make_vocoder, prepare
from torch import Tensor

from mosstalk.codec.hift_vocoder import BatchedHift, HiftOptions
from mosstalk.config import HiftConfig
from mosstalk.models.hift import HiftStream, HiftVocoder
from mosstalk.runtime.device import pick_device

pytestmark = pytest.mark.gpu


@lru_cache
def on_gpu(*, full_size: bool = False) -> HiftVocoder:
    vocoder = HiftVocoder(HiftConfig()) if full_size else copy.deepcopy(make_vocoder())
    if full_size:
        prepare(vocoder, None)
    return vocoder.to(pick_device("cuda"))


def hift(*, full_size: bool = False, **options: Any) -> BatchedHift:
    return BatchedHift(on_gpu(full_size=full_size), HiftOptions(**{"replies": 40} | options))


def run(vocoder: BatchedHift, replies: int, hops: int = 3) -> list[Tensor]:
    """Sound (replies, samples) of each hop; reply n has seed n and its own mel."""
    opened = [vocoder.open(n) for n in range(replies)]
    heard = []
    for hop in range(hops):
        mels = [make_mel(20, 100 * n + hop).cuda() for n in range(replies)]
        work = [(reply, mel, hop == hops - 1) for reply, mel in zip(opened, mels, strict=True)]
        heard.append(torch.stack(vocoder.push(work)))
    for reply in opened:
        vocoder.close(reply)
    return heard


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("replies", [1, 3, 33])
def test_float32_is_the_cpus_stream(replies: int, *, graphs: bool) -> None:
    found = [heard.cpu() for heard in run(hift(graphs=graphs), replies)]
    for n in {0, replies - 1}:
        stream = HiftStream(make_vocoder(), n)
        for hop, heard in enumerate(found):
            expected = stream.push(make_mel(20, 100 * n + hop), final=hop == 2)
            torch.testing.assert_close(heard[n], expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_graph_gives_what_the_same_call_gives_without(dtype: str) -> None:
    with_graphs = hift(dtype=dtype)
    for frames in (20, 28):
        with_graphs.capture(4, frames)
    graphed, eager = (run(vocoder, 4) for vocoder in (with_graphs, hift(dtype=dtype, graphs=False)))
    assert with_graphs.figures().graphs == 2
    for one, other in zip(eager, graphed, strict=True):
        assert torch.equal(one, other)


def test_resetting_one_row_leaves_the_others_bit_identical() -> None:
    def others(*, disturb: bool) -> list[Tensor]:
        vocoder, heard = hift(), []
        replies = [vocoder.open(n) for n in range(3)]
        for call in range(4):
            if disturb and call == 2:
                vocoder.close(replies[2])
                replies[2] = vocoder.open(9)
            frames = 28 if disturb and call == 2 else 20
            mels = [make_mel(frames if n == 2 else 20, call + n).cuda() for n in range(3)]
            waves = vocoder.push([(r, m, False) for r, m in zip(replies, mels, strict=True)])
            heard += waves[:2]
        return heard

    for calm, disturbed in zip(others(disturb=False), others(disturb=True), strict=True):
        assert torch.equal(calm, disturbed)


def test_graphs_of_all_sizes_keep_less_than_200_mib_besides_their_pool() -> None:
    vocoder = hift(full_size=True, dtype="float16")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    vocoder.warm()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated() - before
    figures = vocoder.figures()
    print(f"{figures.graphs} graphs: {taken >> 20} MiB, {figures.graph_bytes >> 20} with the pool")
    assert figures.graphs == 46
    assert taken < 200 << 20


def test_once_warm_nothing_is_captured_whatever_comes() -> None:
    vocoder = hift(full_size=True, dtype="float16")
    vocoder.warm()
    captured = vocoder.figures().graphs
    for frames in (8, 12, 20, 36, 44, 48, 80):
        for replies in (1, 3, 5, 33):
            opened = [vocoder.open(n) for n in range(replies)]
            for hop in (frames, 20, 4):
                work = [
                    (reply, make_mel(hop, n).cuda(), hop == 4) for n, reply in enumerate(opened)
                ]
                assert all(torch.isfinite(wave).all() for wave in vocoder.push(work))
            for reply in opened:
                vocoder.close(reply)
    assert vocoder.figures().graphs == captured


@pytest.mark.parametrize("frames", [12, 24, 36])
def test_more_replies_than_a_length_has_a_graph_for_sound_the_same(frames: int) -> None:
    def heard(*, graphs: bool) -> Tensor:
        vocoder = hift(graphs=graphs)
        vocoder.warm()
        work = [(vocoder.open(n), make_mel(frames, n).cuda(), True) for n in range(6)]
        return torch.stack(vocoder.push(work))

    torch.testing.assert_close(heard(graphs=True), heard(graphs=False), rtol=0, atol=5e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.05), ("bfloat16", 0.2)])
def test_16_bit_is_near_float32_at_full_size(dtype: str, bound: float) -> None:
    exact, rough = (torch.cat(run(hift(full_size=True, dtype=d), 2), 1) for d in ("float32", dtype))
    assert 0 < float((rough - exact).norm() / exact.norm()) < bound
