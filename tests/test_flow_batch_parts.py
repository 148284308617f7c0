"""What a pass of the batched flow reads, and who holds which page."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from test_flow import SMALL, make_codes, make_flow, make_voice

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_paged import buckets_for
from mosstalk.codec.flow_paged_state import splits_for
from mosstalk.codec.flow_pages import (
    NOTHING,
    FlowOptions,
    FlowPages,
    Item,
    PageLayout,
    PageStore,
    PassInputs,
    VoiceCache,
    descriptors,
    in_blocks,
)
from mosstalk.config import FlowConfig
from mosstalk.errors import CodecFullError, EngineInputError

CPU = torch.device("cpu")


def item(codes: int, pages: list[int], before: int = NOTHING, **values: object) -> Item:
    given = {"ahead": [7, 8, 9], "start": 0, "speaker": 0, "condition": None} | values
    return Item(codes=make_codes(codes).tolist(), pages=pages, before=before, **given)  # type: ignore[arg-type]


@given(count=st.integers(0, 23), after=st.integers(0, 3), chunk=st.integers(2, 7))
def test_blocks_are_all_codes_in_order_each_with_what_follows(
    count: int, after: int, chunk: int
) -> None:
    codes, ahead = list(range(count)), list(range(count, count + after))

    blocks = in_blocks(codes, ahead, replace(SMALL, chunk_size=chunk))

    assert [code for block, _ in blocks for code in block] == codes
    assert all(len(block) == chunk for block, _ in blocks[:-1])
    for block, known in blocks:
        last = block[-1]
        assert known == [n for n in range(last + 1, last + 4) if n < count + after]


def test_an_item_finds_its_predecessor_in_the_batch_or_in_a_page() -> None:
    inputs = PassInputs(4, 8, SMALL, CPU)
    items = [item(5, [3, 4], before=3), item(2, [3, 4, 5], before=4), item(5, [9])]

    values = descriptors(items, inputs, SMALL)

    assert values["page"].tolist() == [4, 5, 9, 0]
    assert values["before_item"].tolist() == [-1, 0, -1, -1]
    assert values["before_page"].tolist() == [3, -1, -1, -1]
    assert values["table"][1].tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    assert values["valid_codes"].tolist() == [5, 2, 5, 0]
    assert values["visible_codes"].tolist() == [10, 12, 5, 0]
    assert values["visible_frames"].tolist() == [40, 48, 20, 0]


def test_codes_not_known_are_marked() -> None:
    inputs = PassInputs(3, 2, SMALL, CPU)

    values = descriptors([item(5, [1], ahead=[7]), item(2, [2], ahead=[])], inputs, SMALL)

    known = [(row >= 0).tolist() for row in values["codes"]]
    assert known == [[True] * 6 + [False] * 2, [True] * 2 + [False] * 6, [False] * 8]


def test_inputs_arrive_as_they_were_given() -> None:
    inputs = PassInputs(3, 4, SMALL, CPU)
    for pages in ([1, 2], [5, 6, 7]):
        values = descriptors([item(5, pages)], inputs, SMALL)
        inputs.fill(values)
        for name, value in values.items():
            assert getattr(inputs, name).tolist() == value.tolist(), name
            assert getattr(inputs, name).is_contiguous()


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_inputs_that_are_not_a_passs_are_refused_by_name(fault: str) -> None:
    inputs = PassInputs(3, 4, SMALL, CPU)
    values = descriptors([item(5, [1])], inputs, SMALL)
    if fault == "missing":
        del values["page"]
    elif fault == "unknown":
        values["leaf"] = values["page"]
    else:
        values["page"] = np.zeros(
            2 if fault == "shape" else 3, np.int32 if fault == "shape" else np.int64
        )

    with pytest.raises(EngineInputError, match="leaf" if fault == "unknown" else "page"):
        inputs.fill(values)


@examples(50)
@given(asked=st.lists(st.integers(0, 6), max_size=20), seed=st.integers(0, 99))
def test_no_page_has_two_holders_and_none_is_lost(asked: list[int], seed: int) -> None:
    pool, held, order = FlowPages(12), list[list[int]](), np.random.default_rng(seed)
    for count in asked:
        if held and order.random() < 0.5:
            pool.give(held.pop(int(order.integers(len(held)))))
        if count > pool.free:
            before = pool.free
            with pytest.raises(CodecFullError):
                pool.take(count)
            assert pool.free == before
        else:
            held.append(pool.take(count))
        pages = [page for each in held for page in each]
        assert len(set(pages)) == len(pages) == pool.in_use
        assert all(1 <= page <= 12 for page in pages)


def test_a_page_holds_what_it_says() -> None:
    for config in (SMALL, replace(SMALL, estimator_mid_blocks=2, chunk_size=25)):
        layout = PageLayout(config, 3, torch.float32)
        store = PageStore(layout, 4, "cpu")
        held = sum(part.numel() * part.element_size() for part in vars(store).values())
        assert held == 4 * layout.bytes
        for step in store.conv_tails(layout):
            assert [tails.shape[3] for tails in step] == layout.conv_inputs


def test_a_second_of_own_history_at_the_published_sizes() -> None:
    layout = PageLayout(FlowConfig(), 10, torch.float16)
    keys_and_values = 10 * 56 * 2 * 2 * 512 * 20 * 2
    assert keys_and_values < layout.bytes < 1.04 * keys_and_values
    assert FlowOptions(memory_mib=1024).page_count(layout) == (1 << 30) // layout.bytes


@pytest.mark.parametrize(
    ("context_s", "blocks"), [(None, None), (0.1, 1), (0.4, 1), (0.41, 2), (1.2, 3), (10, 25)]
)
def test_a_context_is_whole_blocks(context_s: float | None, blocks: int | None) -> None:
    assert FlowOptions(context_s=context_s).context_blocks(SMALL) == blocks


def test_voices_in_use_are_never_dropped() -> None:
    dropped = list[str]()
    cache: VoiceCache[str] = VoiceCache(1, dropped.append)
    for name in ("a", "b", "a"):
        assert cache.take(name.encode(), lambda name=name: name) == name  # type: ignore[misc]

    assert not cache.evict()
    cache.give(b"a")
    assert not cache.evict()
    cache.give(b"b")
    cache.give(b"a")  # two are unused, one too many
    assert dropped == ["b"]
    assert cache.evict()
    assert dropped == ["b", "a"]


def test_in_float32_every_pass_has_one_size() -> None:
    assert buckets_for(32, torch.float32) == (32,)
    assert buckets_for(32, torch.float16) == (1, 2, 4, 8, 16, 24, 32)
    assert buckets_for(6, torch.bfloat16) == (1, 2, 4, 6)
    assert [splits_for(items) for items in (1, 2, 8, 32)] == [8, 8, 2, 1]


def test_the_flow_itself_is_left_as_it_is() -> None:
    flow = make_flow(replace(SMALL, n_timesteps=2))
    before = [weight.clone() for weight in flow.parameters()]
    reply = batched_flow(flow, FlowOptions(paged=True, pages=9, max_items=2)).open(make_voice(10))
    reply.push(make_codes(18).tolist())

    assert all(map(torch.equal, flow.parameters(), before))
