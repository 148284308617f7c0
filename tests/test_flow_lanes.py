"""Passes at the same time: which blocks may be apart, and that being apart changes no bit."""

import pytest
import torch
from test_flow import make_codes, make_flow, make_voice
from test_flow_batch import FEW, alone, conversations, in_company
from torch import Tensor

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_paged import _whole_hops
from mosstalk.codec.flow_pages import FlowOptions, Item
from mosstalk.codec.flow_replies import BatchedFlow
from mosstalk.errors import OptionError


def lanes(count: int, items: int = 2) -> BatchedFlow:
    options = FlowOptions(paged=True, pages=120, max_items=items, lanes=count)
    return batched_flow(make_flow(FEW), options)


@pytest.mark.parametrize(("count", "items"), [(2, 2), (3, 1), (4, 3)])
def test_on_lanes_replies_are_bit_identical_to_those_alone(count: int, items: int) -> None:
    # With passes of one block some hops are longer than a pass, and have to be cut.
    talks = conversations(6, count)
    expected = [torch.cat(alone(lanes(1, items), voice, [codes]), dim=1) for voice, codes in talks]

    found: dict[int, list[Tensor]] = {}
    for number, mel in in_company(lanes(count, items), talks, count):
        found.setdefault(number, []).append(mel)

    assert len(found) == len(expected)
    for number, mels in found.items():
        assert torch.equal(torch.cat(mels, dim=1), expected[number])


def test_a_lane_has_rooms_of_its_own_and_no_other_weights() -> None:
    one, four = lanes(1), lanes(4)
    voice, codes = make_voice(10), make_codes(8).tolist()
    replies = [four.open(voice) for _ in range(8)]
    before = four.figures()
    four.advance([(reply, codes, False) for reply in replies])
    after = four.figures()

    assert after.weight_bytes == one.figures().weight_bytes
    assert after.fixed_bytes > before.fixed_bytes
    assert (one.hops_at_once, four.hops_at_once) == (2, 8)


def test_no_hop_is_in_two_passes() -> None:
    def hop(blocks: int, page: int) -> list[Item]:
        return [Item([1], [], 0, [page + n], page + n - 1, 0, None) for n in range(blocks)]

    hops = [hop(blocks, 10 * place) for place, blocks in enumerate((1, 2, 3, 1, 4, 1, 1, 2))]
    lots = _whole_hops(hops, 4)

    assert [len(lot) for lot in lots] == [3, 4, 4, 4]
    assert [item for lot in lots for item in lot] == [item for hop in hops for item in hop]


def test_lanes_are_as_many_as_replies_need_and_none_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert FlowOptions().lane_count(cpu) == 1
    assert FlowOptions(lanes=3).lane_count(cpu) == 3
    wanted = {None: 4, 1: 1, 32: 1, 33: 2, 128: 4, 1000: 4}
    assert {n: FlowOptions(replies=n).lane_count(gpu) for n in wanted} == wanted
    with pytest.raises(OptionError, match="lanes must be at least 1"):
        FlowOptions(lanes=0)


def test_pages_are_as_many_as_replies_need_unless_memory_is_given() -> None:
    layout = lanes(1).layout
    block_s = layout.config.chunk_size / 12.5
    given = FlowOptions(context_s=3 * block_s, replies=7)
    assert given.page_count(layout) == 7 * 4 + -int(-40 / block_s // 1)
    assert FlowOptions(context_s=1.0, replies=7, pages=5).page_count(layout) == 5
    for options in ({"memory_mib": 64}, {"context_s": 1.0, "replies": 7, "memory_mib": 64}):
        assert FlowOptions(**options).page_count(layout) == (64 << 20) // layout.bytes


def test_a_pass_of_many_blocks_gives_the_frames_of_one_of_few() -> None:
    # From nine on, scores of distances are computed tile by tile.
    voice, codes = make_voice(13), make_codes(18).tolist()
    expected = alone(lanes(1), voice, [codes])
    many = lanes(1, 12)
    replies = [many.open(voice) for _ in range(12)]
    first = many.advance([(reply, codes[: reply.codes_needed], False) for reply in replies])
    for mel in first:
        torch.testing.assert_close(mel, expected[0], rtol=1e-5, atol=1e-5)
