"""On an NVIDIA GPU: the batched flow's kernels and graphs give the plain stream's frames."""

import re
from pathlib import Path

import pytest
import torch
from flow_rig import random_codes, random_flow, random_voice
from test_flow import SMALL
from test_flow_batch import alone, conversations, in_company
from test_flow_stream import FLOW_GOLDENS
from torch import Tensor

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.config import FlowConfig
from mosstalk.models.flow import FlowDecoder, RecomputingFlowStream
from mosstalk.models.voices import Voice
from mosstalk.runtime.device import pick_device
from mosstalk.verify import codec as verify_codec
from mosstalk.verify.run import run_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FULL = FlowConfig()
LOWER = (torch.float16, torch.bfloat16)
GIB = 1 << 30


@pytest.fixture(scope="module")
def device() -> torch.device:
    return pick_device("cuda")


@pytest.fixture(scope="module")
def full(device: torch.device) -> FlowDecoder:
    return random_flow(FULL, device)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def small(device: torch.device, **options: object) -> BatchedFlow:
    given = {"pages": 120, "max_items": 4} | options
    return batched_flow(random_flow(SMALL, device), FlowOptions(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("folder", FLOW_GOLDENS, ids=lambda folder: folder.name)
def test_it_gives_the_goldens_hops(
    folder: Path, graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(flow: FlowDecoder, voice: Voice) -> FlowReply:
        options = FlowOptions(pages=60, max_items=4, graphs=graphs)
        return batched_flow(flow, options).open(voice)

    monkeypatch.setattr(verify_codec, "RecomputingFlowStream", opened)
    checks = run_case(folder, device, torch.float32)

    hops = [c for c in checks if re.search(r"(hop\d+|final_streaming)\.mel", c.name)]
    assert hops
    assert all(check.error <= 5e-4 for check in hops)
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.parametrize("seed", range(3))
def test_in_float32_replies_are_bit_identical_in_any_company(
    seed: int, device: torch.device
) -> None:
    flow, talks = small(device), conversations(7, seed)
    expected = [torch.cat(alone(flow, voice, [codes]), dim=1) for voice, codes in talks]

    found: dict[int, list[Tensor]] = {}
    for number, mel in in_company(flow, talks, seed):
        found.setdefault(number, []).append(mel)

    for number, mels in found.items():
        assert torch.equal(torch.cat(mels, dim=1), expected[number])


@pytest.mark.parametrize("dtype", [torch.float32, *LOWER])
def test_a_graph_gives_the_bits_that_eager_launches_give(
    dtype: torch.dtype, device: torch.device, full: FlowDecoder
) -> None:
    voice, codes = random_voice(FULL, 28), random_codes(FULL, 23)
    for flow, most in ((random_flow(SMALL, device), 4), (full, 2)):
        known = flow.config.vocab_size
        mine = Voice(voice.codes % known, voice.mel, voice.embedding)
        captured, eager = (
            alone(
                batched_flow(
                    flow, FlowOptions(dtype=dtype, pages=20, max_items=most, graphs=graphs)
                ),
                mine,
                [[code % known for code in codes]],
            )
            for graphs in (True, False)
        )
        assert len(captured) == 4
        assert all(map(torch.equal, captured, eager))


@pytest.mark.parametrize("warm", [False, True])
def test_a_warmed_flow_gives_the_plain_frames(warm: bool, device: torch.device) -> None:
    flow, voice, codes = (
        random_flow(SMALL, device),
        random_voice(SMALL, 28),
        random_codes(SMALL, 23),
    )
    plain = RecomputingFlowStream(flow, voice)
    expected = [*plain.push(codes), plain.finish()]
    batched = batched_flow(flow, FlowOptions(pages=40, max_items=4))
    if warm:
        batched.warm(most_s=6.0)
    found = alone(batched, voice, [codes])
    assert len(found) == len(expected)
    for mel, wanted in zip(found, expected, strict=True):
        assert wanted is not None
        assert relative(mel, wanted) < 1e-5


def test_full_size_over_60_hops_it_is_the_recomputed_prefix(full: FlowDecoder) -> None:
    voice, codes = random_voice(FULL, 85), random_codes(FULL, 303)
    reply = batched_flow(full, FlowOptions(pages=90, max_items=2)).open(voice)
    truth = RecomputingFlowStream(full, voice)

    for start in range(0, 303, 101):
        piece = codes[start : start + 101]
        for found, expected in zip(reply.push(piece), truth.push(piece), strict=True):
            assert relative(found, expected) < 1e-4
    assert reply.done_codes == 300


@pytest.mark.parametrize("dtype", LOWER)
def test_lower_precision_is_no_worse_than_plain_torch_in_it(
    dtype: torch.dtype, full: FlowDecoder, device: torch.device
) -> None:
    voice, codes = random_voice(FULL, 28), random_codes(FULL, 43)
    exact = torch.cat(RecomputingFlowStream(full, voice).push(codes), dim=1)
    plain_flow = random_flow(FULL, device).to(dtype)

    found = batched_flow(full, FlowOptions(dtype=dtype, pages=30, max_items=2)).open(voice)
    plain = RecomputingFlowStream(plain_flow, voice)
    ours, theirs = (
        relative(torch.cat(stream.push(codes), dim=1), exact) for stream in (found, plain)
    )

    print(f"{dtype}: relative error {ours:.2e}, plain torch {theirs:.2e}")
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_reply_among_32_is_what_it_is_alone(dtype: torch.dtype, full: FlowDecoder) -> None:
    flow = batched_flow(full, FlowOptions(dtype=dtype, pages=220, max_items=32, graphs=False))
    voice, codes = random_voice(FULL, 15), random_codes(FULL, 13)
    expected = torch.cat(alone(flow, voice, [codes]), dim=1)
    replies = [flow.open(voice) for _ in range(32)]

    hops = [
        flow.advance([(reply, part, not part) for reply in replies])
        for part in (codes[:8], codes[8:], [])
    ]

    for number in (0, 13, 31):
        found = torch.cat([hop[number] for hop in hops], dim=1)
        if dtype == torch.float32:
            assert torch.equal(found, expected)
        else:
            assert relative(found, expected) < 2e-2


@pytest.mark.parametrize("count", [2, 8])
def test_a_hop_never_waits_for_the_device(count: int, device: torch.device) -> None:
    flow, voice, codes = small(device), random_voice(SMALL, 10), random_codes(SMALL, 30)
    replies = [flow.open(voice) for _ in range(count)]
    for part in (codes[:8], codes[8:13]):
        flow.advance([(reply, part, False) for reply in replies])
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    try:
        for start in (13, 18):
            part = codes[start : start + 5]
            flow.advance([(reply, part, False) for reply in replies])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert [reply.done_codes for reply in replies] == [20] * count


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_passes_at_the_same_time_give_the_bits_of_one_after_another(
    dtype: torch.dtype, graphs: bool, full: FlowDecoder
) -> None:
    voices = [random_voice(FULL, 15 + n, n) for n in range(3)]
    found = []
    for lanes in (1, 4):
        options = FlowOptions(
            dtype=dtype, pages=120, max_items=8, graphs=graphs, lanes=lanes, context_s=0.8
        )
        flow = batched_flow(full, options)
        for voice in voices:
            flow.prepare(voice)
        replies = [flow.open(voices[n % 3]) for n in range(32)]
        codes = [random_codes(FULL, 40, n) for n in range(32)]
        mels = []
        for _ in range(5):
            hops = [
                (reply, own[len(reply.codes) : reply.codes_needed], False)
                for reply, own in zip(replies, codes, strict=True)
            ]
            mels.append([mel.cpu() for mel in flow.advance(hops)])
        found.append(mels)
        del flow

    # In 16 bit first hops, of one block or two, are in other passes and rounded otherwise.
    for hop, (one, four) in enumerate(zip(*found, strict=True)):
        for mel, other in zip(one, four, strict=True):
            if dtype == torch.float32:
                assert torch.equal(mel, other), hop
            else:
                assert relative(other, mel) < 1e-2, hop


def test_what_is_queued_later_waits_for_all_lanes(device: torch.device) -> None:
    voice, codes = random_voice(SMALL, 10), random_codes(SMALL, 150)
    quick, alone_flow = (small(device, max_items=2, lanes=lanes, pages=400) for lanes in (4, 1))
    expected = alone(alone_flow, voice, [codes])
    replies = [quick.open(voice) for _ in range(8)]
    stream = torch.cuda.Stream(device)
    sums = []
    with torch.cuda.stream(stream):
        for hop in range(len(expected) - 1):
            due = [codes[len(r.codes) : r.codes_needed] for r in replies]
            mels = flow_hops(quick, replies, due)
            # Mels are dropped at once: what takes their memory must not come too early.
            sums.append(torch.stack([mel - expected[hop] for mel in mels]).abs().amax())
            del mels
    stream.synchronize()

    assert len(sums) > 20
    assert float(torch.stack(sums).max()) == 0


def flow_hops(flow: BatchedFlow, replies: list[FlowReply], due: list[list[int]]) -> list[Tensor]:
    return flow.advance([(reply, part, False) for reply, part in zip(replies, due, strict=True)])


def reserved(device: torch.device) -> int:
    """Bytes of the card that this process's tensors and graphs take, whatever others have."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def test_a_lane_takes_at_most_200_mib(full: FlowDecoder, device: torch.device) -> None:
    taken = []
    for lanes in (1, 3):
        before = reserved(device)
        flow = batched_flow(
            full, FlowOptions(dtype=torch.float16, pages=100, context_s=2.0, lanes=lanes)
        )
        flow.warm()
        taken.append(reserved(device) - before)
        del flow

    print(f"MiB with one lane and with three: {[size >> 20 for size in taken]}")
    assert 0 < taken[1] - taken[0] <= 2 * 200 << 20


def test_besides_pages_a_full_size_flow_takes_at_most_1_gib(
    full: FlowDecoder, device: torch.device
) -> None:
    before = reserved(device)
    options = FlowOptions(dtype=torch.float16, pages=100, context_s=2.0, lanes=1)
    flow = batched_flow(full, options)
    flow.warm()

    figures = flow.figures()
    taken = reserved(device) - before - 101 * figures.page_bytes
    print(f"{figures}, {taken / GIB:.2f} GiB besides pages")
    assert taken <= GIB
