"""The flow for many replies at once: the single stream's frames, whatever the company."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from test_flow import SMALL, make_codes, make_flow, make_voice, randomise
from test_flow_stream import FLOW_GOLDENS, assert_same_hops, frames, sliced
from torch import Tensor

from evals import codec_parts
from evals.codec_parts import CONTEXTS_S, STEPS, curve_tables, flow_curve
from mosstalk.codec import flow_paged
from mosstalk.codec.flow import batched_flow, with_steps
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.errors import CodecFullError, ConfigError, OptionError
from mosstalk.models import flow as flow_module
from mosstalk.models.flow import FlowDecoder, RecomputingFlowStream
from mosstalk.models.voices import Voice
from mosstalk.synthesis.sizes import named_sizes
from mosstalk.synthesis.weights import random_codec, random_voice
from mosstalk.verify import codec as verify_codec
from mosstalk.verify.run import run_case

FEW = replace(SMALL, n_timesteps=2)
BOTH = pytest.mark.parametrize("paged", [False, True], ids=["host", "paged"])
FEW_ITEMS = 4
SMALL_PART = 0.05
"""What forgetting costs in relative error at most here; other noise costs more than 1."""


@lru_cache
def shared(paged: bool) -> BatchedFlow:
    """A flow that tests share: replies of one must not notice those of another."""
    return batched_flow(make_flow(), FlowOptions(paged=paged, pages=120, max_items=FEW_ITEMS))


def batched(paged: bool, flow: FlowDecoder | None = None, **options: object) -> BatchedFlow:
    given = {"paged": paged, "pages": 60, "max_items": FEW_ITEMS} | options
    return batched_flow(flow or make_flow(FEW), FlowOptions(**given))  # type: ignore[arg-type]


def alone(flow: BatchedFlow, voice: Voice, pieces: list[list[int]]) -> list[Tensor]:
    """Hops of a reply that is decoded by itself, and closed."""
    reply = flow.open(voice)
    hops = frames(reply, pieces)
    reply.close()
    return hops


# The same frames.


@BOTH
@examples(8)
@given(pieces=sliced(30), prompt=st.integers(0, 33))
def test_hops_are_those_of_the_recomputing_stream(
    paged: bool, pieces: list[list[int]], prompt: int
) -> None:
    voice = make_voice(prompt)

    found = alone(shared(paged), voice, pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(make_flow(), voice), pieces))


@BOTH
@pytest.mark.parametrize(
    # Slow: hops after the second end as it does.
    "codes",
    [*range(1, 14), *(pytest.param(codes, marks=pytest.mark.slow) for codes in range(14, 23))],
)
def test_every_length_of_reply_ends_right(paged: bool, codes: int) -> None:
    flow, pieces = make_flow(FEW), [make_codes(codes).tolist()]
    for prompt in (10, 12):
        voice = make_voice(prompt)

        found = alone(batched(paged, flow), voice, pieces)

        assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@BOTH
@pytest.mark.parametrize("prompt", [0, 24, 60])
def test_a_flow_of_other_blocks_too(paged: bool, prompt: int) -> None:
    flow = make_flow(replace(FEW, chunk_size=25))
    voice, pieces = make_voice(prompt), [make_codes(63).tolist()]

    found = alone(batched(paged, flow), voice, pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@BOTH
@pytest.mark.parametrize("mids", [1, 2, 3])
def test_every_layer_step_and_stage_keeps_its_own(paged: bool, mids: int) -> None:
    sizes = {"estimator_transformer_blocks": 2, "encoder_blocks": 3, "up_encoder_blocks": 2}
    flow = make_flow(replace(FEW, estimator_mid_blocks=mids, **sizes))
    voice, pieces = make_voice(13), [make_codes(18).tolist()]

    found = alone(batched(paged, flow), voice, pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@BOTH
def test_a_voice_of_more_blocks_than_a_pass_and_a_long_reply(paged: bool) -> None:
    # Past 25 pages of frames the distances are more than one product's.
    flow = make_flow(replace(SMALL, n_timesteps=1))
    voice, pieces = make_voice(61), [make_codes(130).tolist()]

    found = alone(batched(paged, flow), voice, pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@BOTH
@pytest.mark.parametrize(
    "folder",
    # Slow: one flow is enough here.
    [FLOW_GOLDENS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FLOW_GOLDENS[1:])],
    ids=lambda folder: folder.name,
)
def test_it_gives_the_goldens_hops(
    paged: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(flow: FlowDecoder, voice: Voice) -> FlowReply:
        return batched(paged, flow).open(voice)

    monkeypatch.setattr(verify_codec, "RecomputingFlowStream", opened)
    checks = run_case(folder, torch.device("cpu"), torch.float32)

    hops = [c for c in checks if re.search(r"(hop\d+|final_streaming)\.mel", c.name)]
    assert hops
    assert all(check.error <= 5e-4 for check in hops)
    assert [check.name for check in checks if not check.passed] == []


@BOTH
def test_past_300_s_the_noise_continues(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # With blocks of 1.4 s instead, so that a short reply passes three of them.
    flow_module._noise_block.cache_clear()
    for module in (flow_module, flow_paged):
        monkeypatch.setattr(module, "NOISE_FRAMES", 70)
    flow, voice, pieces = make_flow(FEW), make_voice(10), [make_codes(45).tolist()]

    found = alone(batched(paged, flow), voice, pieces)
    expected = frames(RecomputingFlowStream(flow, voice), pieces)
    flow_module._noise_block.cache_clear()

    assert_same_hops(found, expected)


# Company.


def conversations(count: int, seed: int) -> list[tuple[Voice, list[int]]]:
    draw = random.Random(seed)
    return [
        (make_voice(draw.choice([0, 10, 10, 13, 25])), make_codes(draw.randint(1, 30), n).tolist())
        for n in range(count)
    ]


def in_company(
    flow: BatchedFlow, talks: list[tuple[Voice, list[int]]], seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Hops (number of the reply, mel) of replies that join, wait and leave at random."""
    draw = random.Random(seed)
    waiting, running = dict(enumerate(talks)), dict[int, tuple[FlowReply, list[int]]]()
    while waiting or running:
        if waiting and draw.random() < 0.6:
            number = draw.choice(list(waiting))
            voice, codes = waiting.pop(number)
            running[number] = flow.open(voice), list(codes)
        chosen = [number for number in running if draw.random() < 0.7]
        hops = []
        for number in chosen:
            reply, codes = running[number]
            given, codes[:] = codes[: (due := reply.codes_needed - len(reply.codes))], codes[due:]
            hops.append((reply, given, not given))
        for number, (_, _, final), mel in zip(chosen, hops, flow.advance(hops), strict=True):
            yield number, mel
            if final:
                running.pop(number)[0].close()


@BOTH
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_replies_are_bit_identical_in_any_company(paged: bool, seed: int) -> None:
    flow, talks = shared(paged), conversations(6, seed)
    expected = [torch.cat(alone(flow, voice, [codes]), dim=1) for voice, codes in talks]

    found: dict[int, list[Tensor]] = {}
    for number, mel in in_company(flow, talks, seed):
        found.setdefault(number, []).append(mel)

    assert len(found) == len(expected)
    for number, mels in found.items():
        assert torch.equal(torch.cat(mels, dim=1), expected[number])


@BOTH
def test_closing_one_leaves_the_others_bit_identical(paged: bool) -> None:
    flow, voice, codes = shared(paged), make_voice(10), make_codes(23).tolist()
    expected = alone(flow, voice, [codes])
    replies = [flow.open(voice) for _ in range(3)]

    first = flow.advance([(reply, codes[:8], False) for reply in replies])
    replies[1].close()
    newcomer = flow.open(make_voice(13))
    second = flow.advance(
        [(replies[0], codes[8:13], False), (newcomer, codes, False), (replies[2], codes[8:], False)]
    )

    assert all(torch.equal(mel, expected[0]) for mel in first)
    assert torch.equal(second[0], expected[1])
    assert torch.equal(second[2], expected[1])
    for reply in (*replies, newcomer):
        reply.close()


@BOTH
def test_too_few_codes_give_no_frames_and_are_kept(paged: bool) -> None:
    flow, voice, codes = shared(paged), make_voice(10), make_codes(8).tolist()
    reply, other = flow.open(voice), flow.open(voice)

    none, some = flow.advance([(reply, codes[:7], False), (other, codes, False)])
    (late,) = flow.advance([(reply, codes[7:], False)])

    assert none.shape == (80, 0)
    assert torch.equal(late, some)
    assert flow.advance([]) == []
    reply.close()
    other.close()


@BOTH
def test_a_closed_reply_and_a_reply_twice_are_faults_of_the_caller(paged: bool) -> None:
    flow, codes = batched(paged), make_codes(8).tolist()
    reply, other = flow.open(make_voice(10)), flow.open(make_voice(10))
    reply.push(codes)
    reply.close()

    with pytest.raises(AssertionError, match="closed"):
        flow.advance([(reply, codes, False)])
    with pytest.raises(AssertionError, match="twice"):
        flow.advance([(other, codes, False), (other, codes, False)])


# Room.


@BOTH
def test_closed_replies_give_their_pages_back_at_once(paged: bool) -> None:
    flow, voice = batched(paged), make_voice(10)
    flow.prepare(voice)
    held = flow.figures().pages_in_use

    reply = flow.open(voice)
    unbegun = flow.figures().pages_in_use
    reply.push(make_codes(33).tolist())
    begun = flow.figures().pages_in_use
    reply.close()
    reply.close()

    assert (held, unbegun, begun) == (1, 1, 1 + 1 + 6)
    assert flow.figures().pages_in_use == 1


@BOTH
def test_a_full_flow_refuses_and_nothing_has_moved(paged: bool) -> None:
    flow, voice, codes = batched(paged, pages=8), make_voice(10), make_codes(30).tolist()
    expected = alone(batched(paged), voice, [codes])
    reply, other = flow.open(voice), flow.open(voice)
    found = flow.advance([(reply, codes[:8], False), (other, codes[:8], False)])[:1]
    found += flow.advance([(reply, codes[8:13], False), (other, codes[8:13], False)])[:1]

    with pytest.raises(CodecFullError, match=r"1 of 8 pages left and 2 are needed.*memory_mib"):
        flow.advance([(reply, codes[13:18], False), (other, codes[13:18], False)])
    assert flow.figures().pages_in_use == 7
    other.close()
    found += [flow.advance([(reply, codes[n : n + 5], False)])[0] for n in (13, 18, 23)]
    found += flow.advance([(reply, codes[28:], True)])

    assert_same_hops(found, expected)
    reply.close()
    assert flow.figures().pages_in_use == 1


@BOTH
def test_a_flow_that_grows_refuses_nothing_and_gives_the_same_bits(paged: bool) -> None:
    talks = [(make_voice(10), make_codes(33).tolist()), (make_voice(25), make_codes(8).tolist())]
    flow = batched(paged, pages=2, grows=True)
    (voice, codes), (other, few) = talks
    reply = flow.open(voice)
    found = reply.push(codes[:13])

    between = alone(flow, other, [few])
    found += frames(reply, [codes[13:]])

    expected, expected_between = (alone(batched(paged), v, [own]) for v, own in talks)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, between, expected_between))
    assert len(found) == len(expected)
    assert flow.figures().pages >= flow.figures().pages_in_use > 2


@BOTH
def test_a_reply_refused_at_its_first_hop_can_begin_later(paged: bool) -> None:
    flow, voice, codes = batched(paged, pages=4), make_voice(10), make_codes(8).tolist()
    first, second = flow.open(voice), flow.open(voice)
    (expected,) = first.push(codes)

    for _ in range(2):
        with pytest.raises(CodecFullError):
            flow.advance([(second, codes, False)])
    first.close()
    flow.prepare(make_voice(20))  # three pages: the voice that nobody uses goes

    (found,) = flow.advance([(second, codes, False)])
    assert torch.equal(found, expected)
    second.close()
    assert flow.figures().voices == flow.figures().pages_in_use == 1


@BOTH
def test_a_voice_that_does_not_fit_is_refused_and_leaves_nothing(paged: bool) -> None:
    flow = batched(paged, pages=5)
    reply = flow.open(make_voice(60))

    with pytest.raises(CodecFullError):
        reply.push(make_codes(8).tolist())

    assert flow.figures().pages_in_use == flow.figures().voices == 0


@BOTH
def test_unused_voices_make_room_the_longest_unused_first(paged: bool) -> None:
    flow = batched(paged, pages=10)
    voices = [make_voice(codes) for codes in (15, 20, 25)]  # 2, 3 and 4 blocks
    for voice in voices:
        flow.prepare(voice)
    flow.prepare(voices[0])
    assert (flow.figures().voices, flow.figures().pages_in_use) == (3, 9)

    reply = flow.open(voices[0])
    reply.push(make_codes(8).tolist())  # two pages: the second voice goes

    assert (flow.figures().voices, flow.figures().pages_in_use) == (2, 2 + 4 + 2)
    other = flow.open(voices[0])
    other.push(make_codes(18).tolist())  # four more: the third goes, the first is in use
    assert (flow.figures().voices, flow.figures().pages_in_use) == (1, 2 + 2 + 4)


@BOTH
def test_voices_are_known_by_content_and_kept_up_to_a_count(paged: bool) -> None:
    flow, voice = batched(paged, voices=2), make_voice(10)
    same = Voice(voice.codes.clone(), voice.mel.clone(), voice.embedding.clone())

    for each in (voice, same, voice):
        flow.prepare(each)
    assert flow.figures().voices == 1
    for codes in (15, 20, 25):
        flow.prepare(make_voice(codes))
    assert flow.figures().voices == 2
    assert flow.figures().pages_in_use == 3 + 4


@BOTH
@pytest.mark.parametrize("context_s", [0.3, 0.4, 0.8, 1.2])
def test_a_reply_holds_no_more_than_its_context(paged: bool, context_s: float) -> None:
    flow, blocks = batched(paged, context_s=context_s), -(-int(10 * context_s) // 4)
    reply, voice_pages = flow.open(make_voice(10)), 1

    for code in make_codes(62).tolist():  # the last hop is two blocks
        reply.push([code])
        held = flow.figures().pages_in_use - voice_pages
        assert held <= max(2, blocks)
    reply.finish()
    assert flow.figures().pages_in_use - voice_pages <= max(2, blocks)
    reply.close()
    assert flow.figures().pages_in_use == voice_pages


@BOTH
def test_warming_up_holds_nothing_and_changes_nothing(paged: bool) -> None:
    flow, voice, pieces = batched(paged), make_voice(10), [make_codes(14).tolist()]
    reply, expected = flow.open(voice), alone(flow, voice, pieces)
    found = reply.push(pieces[0][:8])
    held = flow.figures()

    flow.warm(most_s=3.0)

    assert replace(flow.figures(), fixed_bytes=held.fixed_bytes) == held
    found += reply.push(pieces[0][8:])
    last = reply.finish()
    assert last is not None
    assert all(map(torch.equal, [*found, last], expected))


# Context and steps.


@pytest.mark.parametrize("context_s", [0.4, 0.8, 2.0])
@pytest.mark.parametrize("codes", [33, 36, 38, 41])
def test_what_is_forgotten_is_the_same_on_both_paths(context_s: float, codes: int) -> None:
    voice, pieces = make_voice(13), [make_codes(codes).tolist()]

    found, expected = (
        alone(batched(paged, context_s=context_s), voice, pieces) for paged in (True, False)
    )

    assert_same_hops(found, expected)


@BOTH
def test_a_context_that_holds_the_reply_changes_nothing_and_a_shorter_one_does(
    paged: bool,
) -> None:
    flow, replies = make_flow(FEW), [(make_voice(10), make_codes(28, n).tolist()) for n in (0, 1)]
    options = FlowOptions(paged=paged, pages=40, max_items=2)

    ways = {context_s: replace(options, context_s=context_s) for context_s in (0.4, 1.2, 4.0)}
    curve = flow_curve(flow, replies, ways, options)

    assert list(curve) == [0.4, 1.2, 4.0]
    for short, longer, whole in zip(*curve.values(), strict=True):
        assert whole < 1e-5
        assert 1e-4 < longer < short < SMALL_PART


@BOTH
def test_forgetting_leaves_the_noise_where_it_is(paged: bool) -> None:
    # Frames that see little of what came before are still close to those that see it all.
    flow, replies = make_flow(FEW), [(make_voice(10), make_codes(48).tolist())]
    full = FlowOptions(paged=paged, pages=40, max_items=2)

    curve = flow_curve(flow, replies, {0.4: replace(full, context_s=0.4)}, full)

    assert curve[0.4][0] < SMALL_PART


@BOTH
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_other_steps_are_the_same_schedule_with_fewer_points(paged: bool, steps: int) -> None:
    voice, pieces = make_voice(10), [make_codes(14).tolist()]
    expected = frames(
        RecomputingFlowStream(make_flow(replace(FEW, n_timesteps=steps)), voice), pieces
    )

    found = alone(batched(paged, steps=steps), voice, pieces)

    assert_same_hops(found, expected)
    assert make_flow(FEW).config.n_timesteps == 2
    assert with_steps(make_flow(FEW), 2) is make_flow(FEW)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_lower_precision_stays_close_and_halves_the_pages(dtype: torch.dtype, bound: float) -> None:
    voice, pieces = make_voice(10), [make_codes(18).tolist()]
    exact = torch.cat(alone(shared(True), voice, pieces), dim=1)

    flow = batched(True, make_flow(), dtype=dtype)
    found = torch.cat(alone(flow, voice, pieces), dim=1)

    assert found.dtype == torch.float32
    assert 1e-5 < float((found - exact).norm() / exact.norm()) < bound
    assert flow.figures().page_bytes < 0.75 * shared(True).figures().page_bytes


# Refusals.


@pytest.mark.parametrize(
    "options",
    [
        {"context_s": 0.0},
        {"context_s": float("nan")},
        {"steps": 0},
        {"pages": 0},
        {"max_items": 0},
        {"dtype": torch.float64},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        FlowOptions(**options)  # type: ignore[arg-type]


def test_what_a_flow_cannot_do_is_refused() -> None:
    with pytest.raises(OptionError, match="float32"):
        batched_flow(make_flow(), FlowOptions(dtype=torch.float16, paged=False))
    with pytest.raises(ConfigError, match="one code"):
        batched_flow(make_flow(replace(SMALL, chunk_size=1)))
    large = FlowDecoder(replace(SMALL, estimator_head_dim=4096))
    randomise(large)
    with pytest.raises(OptionError, match="less than a page"):
        batched_flow(large, FlowOptions(memory_mib=1))


@pytest.mark.slow
def test_the_benchs_curves_have_an_error_for_each_context_and_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec_parts, "_REPLIES", 1)
    codec = random_codec(named_sizes("tiny"), torch.device("cpu"))
    tables, values = curve_tables(codec, random_voice(codec, 3))
    assert [len(table.rows) for table in tables] == [len(CONTEXTS_S), len(STEPS)]
    for errors in values.values():
        first, *_, last = errors.values()
        assert 0 < last < first, "more history and more steps are nearer to the whole"
