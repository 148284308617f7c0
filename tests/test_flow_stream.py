"""The flow on kept rows: the recomputing stream's frames, from state that nobody else touches."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise, zip_longest

import pytest
import torch
from conftest import GOLDENS, examples
from hypothesis import given
from hypothesis import strategies as st
from test_flow import SMALL, make_codes, make_flow, make_voice, randomise
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mosstalk.codec.flow import batched_flow
from mosstalk.codec.flow_pages import FlowOptions
from mosstalk.codec.flow_replies import BatchedFlow, FlowReply
from mosstalk.codec.flow_row_state import KeptKeys, RowFrames, RowState, seen_mask
from mosstalk.codec.flow_weights import Conv, Linear, packed
from mosstalk.models.flow import FlowDecoder, FlowStream, RecomputingFlowStream, fixed_noise
from mosstalk.models.flow_networks import block_mask
from mosstalk.models.voices import Voice

FLOW_GOLDENS = [
    path.parent
    for path in sorted(GOLDENS.glob("*/case.json"))
    if json.loads(path.read_text())["component"] == "flow"
]
RELATIVE = 1e-5
"""Float32 rounding of products of other shapes, against the largest value of the mel."""


def kept(flow: FlowDecoder) -> BatchedFlow:
    """A flow that keeps the rows of its replies side by side."""
    return batched_flow(flow, FlowOptions(paged=False))


def opened(flow: FlowDecoder, voice: Voice) -> FlowReply:
    """A reply of such a flow."""
    return kept(flow).open(voice)


def frames(stream: FlowStream, pieces: list[list[int]]) -> list[Tensor]:
    hops = [hop for piece in pieces for hop in stream.push(piece)]
    last = stream.finish()
    return hops if last is None else [*hops, last]


def assert_same_hops(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [hop.shape for hop in found] == [hop.shape for hop in expected]
    for hop, wanted in zip(found, expected, strict=True):
        bound = RELATIVE * float(wanted.abs().max())
        torch.testing.assert_close(hop, wanted, rtol=0, atol=bound)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in a state, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


@st.composite
def sliced(draw: st.DrawFn, longest: int) -> list[list[int]]:
    """A reply of 1 to ``longest`` codes in pieces, some of them empty."""
    codes = make_codes(draw(st.integers(1, longest)), draw(st.integers(0, 3))).tolist()
    cuts = sorted(draw(st.lists(st.integers(0, len(codes)), max_size=6)))
    return [codes[start:end] for start, end in pairwise([0, *cuts, len(codes)])]


# The same frames.


@examples(25)
@given(pieces=sliced(30), prompt=st.sampled_from([5, 10, 40]))
def test_cached_hops_are_the_recomputed_ones(pieces: list[list[int]], prompt: int) -> None:
    flow, voice = make_flow(), make_voice(prompt)

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@examples(15)
@given(pieces=sliced(12), prompt=st.integers(0, 14))
def test_they_are_for_voices_that_end_inside_a_block(pieces: list[list[int]], prompt: int) -> None:
    flow, voice = make_flow(), make_voice(prompt)

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@pytest.mark.parametrize("codes", range(1, 31))
def test_every_length_of_reply_ends_as_the_recomputed_one(codes: int) -> None:
    # Fewer steps: what differs between lengths is the last hop's mask and look-ahead.
    flow, voice = make_flow(replace(SMALL, n_timesteps=2)), make_voice(10)
    pieces = [make_codes(codes).tolist()]

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@pytest.mark.parametrize("prompt", [0, 24, 27, 28, 60])
@pytest.mark.parametrize("codes", [1, 30, 80])
def test_a_flow_of_other_blocks_is_cached_the_same_way(prompt: int, codes: int) -> None:
    flow = make_flow(replace(SMALL, chunk_size=25, n_timesteps=3))
    voice, pieces = make_voice(prompt), [make_codes(codes).tolist()]

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


@pytest.mark.parametrize("sizes", [{"encoder_blocks": 3}, {"estimator_transformer_blocks": 3}])
def test_each_layer_has_its_own_keys(sizes: dict[str, int]) -> None:
    flow = make_flow(replace(SMALL, estimator_mid_blocks=2, n_timesteps=3, **sizes))
    voice, pieces = make_voice(10), [make_codes(16).tolist()]

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


def test_a_reply_longer_than_every_first_buffer_stays_exact() -> None:
    # Past 512 frames the tables of distances grow, and the keys have moved four times.
    flow = make_flow(replace(SMALL, n_timesteps=1))
    voice, pieces = make_voice(5), [make_codes(160).tolist()]

    found = frames(opened(flow, voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


def test_a_short_reply_after_a_long_one_stays_exact() -> None:
    flow = make_flow(replace(SMALL, n_timesteps=1))
    ours = kept(flow)
    frames(ours.open(make_voice(5)), [make_codes(140).tolist()])
    voice, pieces = make_voice(60), [make_codes(9).tolist()]

    found = frames(ours.open(voice), pieces)

    assert_same_hops(found, frames(RecomputingFlowStream(flow, voice), pieces))


def test_a_reply_without_codes_has_no_mel() -> None:
    stream = opened(make_flow(), make_voice(10))

    assert stream.push([]) == []
    assert stream.finish() is None


def test_noise_from_the_middle_is_that_of_the_whole() -> None:
    whole = fixed_noise(45_000)

    for start, stop in ((0, 7), (14_990, 15_000), (14_990, 15_010), (15_000, 15_020), (7, 31_000)):
        assert torch.equal(fixed_noise(stop - start, start=start), whole[:, :, start:stop])


# Nobody else's state.


def test_replies_leave_their_voices_state_bit_identical() -> None:
    flow, voice = kept(make_flow()), make_voice(10)
    held = flow.open(voice)
    held.push(make_codes(8).tolist())
    computed = held.computed
    before = [tensor.clone() for tensor in tensors_in(computed)]

    first, again = (frames(flow.open(voice), [make_codes(17).tolist()]) for _ in range(2))

    assert len(before) > 20
    assert held.computed is computed
    assert all(map(torch.equal, tensors_in(computed), before))
    assert all(map(torch.equal, first, again))


@examples(10)
@given(ours=sliced(20), theirs=sliced(20))
def test_two_streams_at_once_do_not_disturb_one_another(
    ours: list[list[int]], theirs: list[list[int]]
) -> None:
    flow, voice = kept(make_flow()), make_voice(10)
    alone = [frames(flow.open(voice), pieces) for pieces in (ours, theirs)]

    one, other = flow.open(voice), flow.open(voice)
    together: tuple[list[Tensor], list[Tensor]] = ([], [])
    for piece, their_piece in zip_longest(ours, theirs):
        together[0].extend(one.push(piece or []))
        together[1].extend(other.push(their_piece or []))
    for hops, stream in zip(together, (one, other), strict=True):
        last = stream.finish()
        hops += [] if last is None else [last]

    for hops, expected in zip(together, alone, strict=True):
        assert all(map(torch.equal, hops, expected))


# The same cost.


def products(stream: FlowStream, codes: int) -> int:
    """Multiply-adds of the layers, attention aside, in pushing ``codes`` more codes."""
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as counter:
        stream.push(make_codes(codes).tolist())
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(operation, 0) for operation in (aten.addmm, aten.mm))


def test_every_hop_costs_the_same_and_the_first_its_two_blocks() -> None:
    # What attention reads does grow: a frame sees all before it.
    flow, voice = kept(make_flow()), make_voice(40)
    flow.prepare(voice)
    stream = flow.open(voice)

    first = products(stream, 8)
    later = [products(stream, 5) for _ in range(15)]

    assert set(later) == {later[0]}
    assert 1.9 * later[0] < first <= 2 * later[0]


def test_keys_are_moved_a_constant_number_of_times() -> None:
    keys, moves = KeptKeys(torch.empty(1, 2, 1, 1, 0, 4)), 0
    for _ in range(200):
        before = keys.buffer
        keys.extend(5)
        moves += keys.buffer is not before

    assert keys.rows == 1000
    assert moves <= 9


def test_rows_put_by_a_fork_are_its_own() -> None:
    keys = KeptKeys(torch.zeros(1, 2, 1, 1, 8, 4), rows=3)  # room for five more
    fork = keys.fork()

    fork.extend(2)[0].put(torch.ones(1, 2, 12))
    keys.extend(2)[0].put(torch.full((1, 2, 12), 2.0))

    assert (keys.rows, fork.rows) == (5, 5)
    for kept, value in ((keys, 2.0), (fork, 1.0)):
        rows = kept.buffer[0, :, 0, 0, :5]
        assert torch.equal(rows[:, :3], torch.zeros(2, 3, 4))
        assert torch.equal(rows[:, 3:], torch.full((2, 2, 4), value))


# The pieces.


@examples(50)
@given(done=st.integers(0, 30), new=st.integers(1, 30), block=st.integers(1, 20))
def test_new_rows_see_what_the_block_mask_lets_them_see(done: int, new: int, block: int) -> None:
    whole = block_mask(done + new, block, torch.device("cpu"))
    found = seen_mask(done, new, block, torch.device("cpu"))

    assert whole is not None
    seen = whole[done:]
    assert bool(seen.all()) if found is None else torch.equal(found, seen)


@examples(20)
@given(cuts=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_a_convolution_in_pieces_is_the_whole_one(cuts: list[int]) -> None:
    conv = torch.nn.Conv1d(6, 4, 3)
    randomise(conv)
    x = torch.randn((2, sum(cuts), 6), generator=torch.Generator().manual_seed(1))
    whole = conv(torch.nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)

    layer, found = packed(Conv.of(conv), torch.float32), []
    none = KeptKeys(torch.empty(0, 2, 1, 1, 0, 4))
    empty, tails = torch.empty(0), [[torch.zeros(2, 2, 6)]]
    state = RowState(empty, empty, empty, none, none, tails, none)
    for piece in x.split(cuts, dim=1):
        rows = RowFrames([state], [[]], [None])
        rows.begin(0)
        found.append(rows.conv(piece.flatten(0, 1), layer, None).unflatten(0, (2, -1)))

    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_fused_layers_give_what_each_gives(bias: bool) -> None:
    layers = [torch.nn.Linear(6, size, bias=bias) for size in (4, 3, 5)]
    for seed, layer in enumerate(layers):
        randomise(layer, seed)
    x = torch.randn((2, 7, 6), generator=torch.Generator().manual_seed(1))

    expected = torch.cat([layer(x) for layer in layers], dim=2)

    torch.testing.assert_close(Linear.of(*layers)(x), expected, rtol=0, atol=1e-6)
