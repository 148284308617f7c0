"""Pages of live streams, and blocks of many streams in one run: the codes they would get alone."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from claims_rig import outcomes_of, require_kept
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from live_rig import CODE, LIVE, Consumer, Kind, heard, noise, quiet, rising, silent, sliced, speech
from torch import Tensor

from mosstalk.codec import tokenizer_state
from mosstalk.codec.tokenizer_block import BUCKETS
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import CodecFullError
from mosstalk.models.speech_tokenizer import EncoderAttention

BLOCK = 5 * CODE
TOKENIZER = LIVE["goldens"].tokenizer


def tokenizer_with(
    page_s: float | None = 2, *, together: bool = True, limit_s: float | None = None
) -> LiveTokenizer:
    options = LiveOptions(together=together, graphs=False, page_s=page_s, limit_s=limit_s)
    return LiveTokenizer(TOKENIZER, options=options)


APART = tokenizer_with(0.5, together=False)
TOGETHER = tokenizer_with(0.5)
WAYS = [APART, TOGETHER]
every_way = pytest.mark.parametrize("live", WAYS, ids=["apart", "together"])


# Pages.


@every_way
def test_pages_are_taken_as_sound_arrives_and_given_back_at_the_end(live: LiveTokenizer) -> None:
    state = live.open()
    assert live.pages.taken == 0

    live.push(state, speech(INPUT_RATE // 2))
    one = live.pages.taken
    live.push(state, speech(2 * INPUT_RATE))
    five = live.pages.taken
    live.finish(state)

    # 2.5 s and what silence completes of the last code.
    assert (one, five) == (2, 6)
    assert live.pages.taken == 0


@every_way
def test_a_stream_that_is_closed_or_dropped_gives_its_pages_back(live: LiveTokenizer) -> None:
    closed, dropped = live.open(), live.open()
    live.push_many([closed, dropped], [speech(BLOCK), noise(BLOCK)])
    assert live.pages.taken == 2

    live.close(closed)
    assert live.pages.taken == 1
    del dropped
    gc.collect()

    assert live.pages.taken == 0
    assert closed.finished


def test_a_turn_of_many_segments_holds_the_pages_of_one() -> None:
    state = APART.open()
    for piece in speech(70 * INPUT_RATE).split(10 * INPUT_RATE):
        APART.push(state, piece)
        assert len(state.segment.held.ids) <= APART.pages.longest == 60
    APART.close(state)


def test_over_the_limit_is_refused_at_once_and_no_stream_took_any() -> None:
    live = tokenizer_with(1, limit_s=4)
    one, other = live.open(), live.open()
    live.push_many([one, other], [speech(INPUT_RATE), speech(INPUT_RATE)])

    with pytest.raises(CodecFullError, match="limited to 4 s"):
        live.push_many([one, other], [speech(INPUT_RATE), speech(3 * INPUT_RATE)])

    assert (one.samples, other.samples) == (INPUT_RATE, INPUT_RATE)
    live.close(other)
    live.push(one, speech(INPUT_RATE, start=INPUT_RATE))
    live.finish(one)
    assert one.codes == TOKENIZER.encode(speech(2 * INPUT_RATE))
    assert live.pages.count == 4


@pytest.mark.parametrize("begun_s", [0, 3, 33])
def test_a_turn_ends_without_a_page_and_has_the_offline_codes(begun_s: int) -> None:
    live, clip = tokenizer_with(1, limit_s=30), rising(37 * INPUT_RATE + 77)
    state, begun = live.open(), begun_s * INPUT_RATE
    live.push(state, clip[:begun])
    before = list(state.codes)
    taken = live.pages.take(live.pages.count - live.pages.taken)

    change = live.finish_anew(state, clip[begun:])

    assert state.codes == TOKENIZER.encode(clip) == [*before[: change.kept], *change.codes]
    assert (state.samples, state.finished, live.pages.taken) == (len(clip), True, len(taken))


def test_pages_are_reserved_within_the_limit_alone() -> None:
    live = tokenizer_with(1, limit_s=30)

    live.pages.reserve_all()
    assert live.pages.count == 30

    with pytest.raises(CodecFullError):
        live.pages.reserve(31)


def test_what_is_kept_stays_when_the_pool_grows() -> None:
    live = tokenizer_with(None)
    first = live.open()
    clip = rising(8 * BLOCK)
    live.push(first, clip[: 4 * BLOCK])
    fits = live.pages.count

    others = [live.open() for _ in range(fits)]
    live.push_many(others, [quiet(CODE)] * fits)
    live.push(first, clip[4 * BLOCK :])
    live.finish(first)

    assert live.pages.grown == 2
    assert live.pages.count > fits
    assert first.codes == TOKENIZER.encode(clip)


def test_a_pool_that_found_no_memory_to_grow_can_grow_by_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_state, "_FEWEST_BYTES", 0)
    live, clip = tokenizer_with(0.5), rising(8 * BLOCK)
    state = live.open()
    live.push(state, clip[: 4 * BLOCK])
    count, grown, zeros = live.pages.count, live.pages.grown, torch.zeros

    def features_fail(size: tuple[int, ...], **how: Any) -> Tensor:
        if len(size) == live.pages.log_mel.ndim:
            raise torch.OutOfMemoryError
        return zeros(size, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", features_fail)
        with pytest.raises(CodecFullError, match="no memory for 100 more pages"):
            live.pages.reserve(100 + live.pages.count - live.pages.taken)

    # Keys and values have moved: graphs that read them must be captured anew.
    assert (live.pages.count, live.pages.grown) == (count, grown + 1)
    live.push(state, clip[4 * BLOCK :])
    live.finish(state)
    assert state.codes == TOKENIZER.encode(clip)
    assert count < live.pages.count < 100


def test_a_page_is_as_large_as_what_lies_in_it() -> None:
    config = TOKENIZER.config
    live = tokenizer_with(2)
    rows = 100 * 2 * config.quantize_position * config.d_model
    frames = 200 * config.num_mel_bins
    assert live.pages.page_bytes == 4 * (rows + frames)
    live.pages.reserve(1)
    assert live.pages.page_bytes == 4 * (rows + frames)


def test_three_projections_in_one_product_keep_no_weight_twice() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    clip = speech(20 * CODE)
    before = tokenizer.encode(clip)

    LiveTokenizer(tokenizer)
    attentions = [m for m in tokenizer.modules() if isinstance(m, EncoderAttention)]
    places = [attention.q_proj.weight.data_ptr() for attention in attentions]
    LiveTokenizer(tokenizer)

    assert len(places) == TOKENIZER.config.quantize_position
    for attention, place in zip(attentions, places, strict=True):
        weights, biases = attention.fused_qkv()
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert weights.data_ptr() == attention.q_proj.weight.data_ptr() == place
        assert torch.equal(weights, torch.cat([part.weight for part in parts]))
        query, key, value = biases.chunk(3)
        assert torch.equal(query, attention.q_proj.bias)
        assert torch.equal(value, attention.v_proj.bias)
        assert not key.any()
    assert tokenizer.encode(clip) == before


# In one run.


@examples(25)
@given(
    turns=st.lists(sliced(25 * CODE), min_size=1, max_size=4),
    blocks=st.lists(st.sampled_from([speech, rising, noise, silent, quiet]), max_size=4),
    page_s=st.sampled_from([0.02, 0.14, 2, None]),
)
def test_streams_in_one_run_get_the_offline_codes(
    turns: list[list[Tensor]], blocks: list[Kind], page_s: float | None
) -> None:
    live = tokenizer_with(page_s)
    waiting = [list(turn) for turn in turns]
    waiting += [list(kind(6 * BLOCK).split(BLOCK)) for kind in blocks]
    clips = [torch.cat(pieces) for pieces in waiting]
    states, consumers = [live.open() for _ in waiting], [Consumer() for _ in waiting]
    while any(waiting):
        due = [index for index, pieces in enumerate(waiting) if pieces]
        sounds = [waiting[index].pop(0) for index in due]
        changes = live.push_many([states[index] for index in due], sounds)
        for index, change in zip(due, changes, strict=True):
            consumers[index].take(change)
            assert consumers[index].codes == states[index].codes
    live.push_many(states, [torch.zeros(0)] * len(states), [True] * len(states))
    assert [state.codes for state in states] == [TOKENIZER.encode(clip) for clip in clips]
    assert live.pages.taken == 0


def test_blocks_of_a_turn_need_what_stream_by_stream_they_need() -> None:
    clip = torch.cat([rising(20 * CODE), speech(80 * CODE)])

    together, apart = (heard(live, list(clip.split(BLOCK))) for live in (TOGETHER, APART))

    assert together.codes == apart.codes == TOKENIZER.encode(clip)
    assert [each.at_s for each in together.repairs] == [each.at_s for each in apart.repairs]
    assert len(apart.repairs) > 3
    assert together.rows - together.rows_again == apart.rows - apart.rows_again == 4 * 100


def test_a_block_that_is_repaired_costs_its_own_rows_again_too() -> None:
    clip = torch.cat([quiet(2 * BLOCK), speech(2 * BLOCK)])

    together, apart = (heard(live, list(clip.split(BLOCK))) for live in (TOGETHER, APART))

    repaired = {each.at_samples for each in apart.repairs}
    assert repaired
    assert together.rows_again - apart.rows_again == 20 * len(repaired)


def test_blocks_of_one_stream_share_a_run_and_so_does_their_repair() -> None:
    live, clip = tokenizer_with(None), torch.cat([quiet(7 * BLOCK), speech(BLOCK)])
    state = live.open()

    live.push(state, clip[: 7 * BLOCK])
    assert set(live._blocks._steps) == {8}, "a step for 7 blocks, and none for one of them"
    live.push(state, clip[7 * BLOCK :])
    assert set(live._blocks._steps) == {1, 8}, "one that is new, and all 8 again"
    live.finish(state)

    assert state.repairs[0].rows_again == 8 * 20
    assert state.codes == TOKENIZER.encode(clip)


@pytest.mark.parametrize("others", [0, 60])
def test_a_whole_segment_at_once_gets_the_offline_codes(others: int) -> None:
    live, clip = tokenizer_with(None), rising(80 * BLOCK)
    states = [live.open() for _ in range(1 + others)]

    live.push_many(states, [*[speech(BLOCK)] * others, clip])
    live.push_many(states, [torch.zeros(0)] * len(states), [True] * len(states))

    assert states[-1].codes == TOKENIZER.encode(clip)


@pytest.mark.parametrize("streams", [3, 64, 70])
def test_any_number_of_streams_fits_a_run(streams: int) -> None:
    clips = [speech(3 * BLOCK, start=1000 * number) for number in range(streams)]
    states = [TOGETHER.open() for _ in clips]

    for part in range(3):
        TOGETHER.push_many(states, [clip[part * BLOCK : (part + 1) * BLOCK] for clip in clips])
    TOGETHER.push_many(states, [torch.zeros(0)] * streams, [True] * streams)

    assert [state.codes for state in states] == [TOKENIZER.encode(clip) for clip in clips]


def test_steps_are_made_once_and_again_when_the_pool_has_moved() -> None:
    live = tokenizer_with(None)
    state = live.open()
    live.push(state, speech(BLOCK))
    first = live._blocks.step_for(1)

    assert live._blocks.step_for(1) is first
    live.pages.reserve(live.pages.count + 1)

    assert live._blocks.step_for(1) is not first
    assert [live._blocks.step_for(n).items for n in (1, 2, 3, 33, 64)] == [1, 2, 4, 64, 64]
    assert max(BUCKETS) == 64


# With the kernel itself.


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_claimed_with_the_kernel_holds_in_the_interpreter(tmp_path: Path) -> None:
    require_kept(outcomes_of("live_kernel_claims.py", tmp_path, interpret=True))
