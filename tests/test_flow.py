"""The flow decoder: its mask and attention, how far it sees, its hops, noise and guidance."""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mosstalk.config import FlowConfig
from mosstalk.errors import ConfigError
from mosstalk.models.flow import NOISE_FRAMES, FlowDecoder, RecomputingFlowStream, fixed_noise
from mosstalk.models.flow_networks import RelativeAttention, block_mask, relative_positions
from mosstalk.models.voices import Voice

SMALL = FlowConfig(
    input_size=32,
    attention_heads=2,
    linear_units=64,
    encoder_blocks=2,
    up_encoder_blocks=1,
    estimator_channels=32,
    estimator_head_dim=16,
    estimator_heads=2,
    estimator_mid_blocks=1,
    estimator_transformer_blocks=1,
    vocab_size=64,
)
NEVER_CHANGES = 2e-5
"""Float32 rounding of products of different lengths, through ten guided steps; values are to 4."""


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Weights of the size that keeps activations what they are; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        fan_in = value[0].numel() if value.ndim > 1 else 100
        drawn = torch.randn(value.shape, generator=generator) * fan_in**-0.5
        value.data = drawn + 1 if "norm" in name and name.endswith("weight") else drawn
    module.requires_grad_(False).eval()


@lru_cache
def make_flow(config: FlowConfig = SMALL) -> FlowDecoder:
    flow = FlowDecoder(config)
    randomise(flow)
    return flow


def make_codes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(SMALL.vocab_size, (count,), generator=generator)


def make_voice(codes: int) -> Voice:
    generator = torch.Generator().manual_seed(codes)
    return Voice(
        make_codes(codes, seed=50),
        torch.randn((4 * codes, 80), generator=generator),
        torch.randn(192, generator=generator),
    )


def estimator_inputs(frames: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, mu, t, speaker and condition for a batch of two."""
    generator = torch.Generator().manual_seed(frames)
    shapes = ((2, 80, frames), (2, 80, frames), (2, 80), (2, 80, frames))
    x, mu, speaker, condition = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, mu, torch.tensor([0.1, 0.7]), speaker, condition


# The mask and the attention.


@examples(50)
@given(length=st.integers(1, 40), block=st.integers(1, 45))
def test_a_position_sees_its_own_and_all_earlier_blocks(length: int, block: int) -> None:
    mask = block_mask(length, block, torch.device("cpu"))

    assert mask is not None
    expected = [[j // block <= i // block for j in range(length)] for i in range(length)]
    assert mask.tolist() == expected


def test_without_a_block_everything_is_seen() -> None:
    assert block_mask(9, None, torch.device("cpu")) is None


def naive_attention(layer: RelativeAttention, x: Tensor, block: int | None) -> Tensor:
    """Transformer-XL's formula one pair of positions at a time; ``x`` (T, C)."""
    length, width = x.shape
    size = width // layer.heads
    query, key, value = (linear(x) for linear in (layer.linear_q, layer.linear_k, layer.linear_v))
    mixed = torch.zeros(length, width, dtype=x.dtype)
    for head in range(layer.heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(length):
            seen = [j for j in range(length) if block is None or j // block <= i // block]
            scores = []
            for j in seen:
                angles = [(i - j) / 10000 ** (2 * k / width) for k in range(width // 2)]
                waves = [wave(a) for a in angles for wave in (math.sin, math.cos)]
                place = layer.linear_pos(torch.tensor(waves, dtype=x.dtype))[part]
                by_content = (query[i, part] + layer.pos_bias_u[head]) @ key[j, part]
                by_distance = (query[i, part] + layer.pos_bias_v[head]) @ place
                scores.append((by_content + by_distance) / math.sqrt(size))
            weights = torch.stack(scores).softmax(0)
            mixed[i, part] = weights @ value[seen, part]
    return layer.linear_out(mixed)


@pytest.mark.parametrize("block", [None, 1, 3, 20])
def test_relative_attention_equals_its_formula_pair_by_pair(block: int | None) -> None:
    layer = RelativeAttention(12, 3)
    randomise(layer)
    layer.double()
    x = torch.randn((8, 12), generator=torch.Generator().manual_seed(1)).double()
    mask = block_mask(8, block, x.device)

    found = layer(x[None], relative_positions(8, 12, x), mask)[0]

    # The table of sines is float32.
    torch.testing.assert_close(found, naive_attention(layer, x, block), rtol=0, atol=1e-6)


# How far it sees.


@pytest.mark.parametrize("changed", ["x", "mu", "condition"])
@pytest.mark.parametrize(("block", "first_changed"), [(20, 40), (20, 53), (7, 30), (1, 33)])
def test_the_estimator_does_not_see_later_blocks(
    changed: str, block: int, first_changed: int
) -> None:
    # With blocks of one frame the attention is causal, and so is everything else.
    estimator = make_flow().decoder.estimator
    x, mu, t, speaker, condition = estimator_inputs(80)
    before = estimator(x, mu, t, speaker, condition, block)

    {"x": x, "mu": mu, "condition": condition}[changed][:, :, first_changed:] += 1.0
    difference = (estimator(x, mu, t, speaker, condition, block) - before).abs().amax((0, 1))

    unseen = first_changed // block * block
    assert float(difference[:unseen].max()) < 1e-5
    assert float(difference[unseen]) > 1e-4


def test_without_a_mask_the_estimator_sees_everything() -> None:
    estimator = make_flow().decoder.estimator
    x, mu, t, speaker, condition = estimator_inputs(80)
    before = estimator(x, mu, t, speaker, condition, None)

    mu[:, :, 79] += 10.0
    difference = (estimator(x, mu, t, speaker, condition, None) - before).abs().amax((0, 1))

    assert float(difference[0]) > 1e-5


@pytest.mark.parametrize(("chunk", "changed"), [(1, 9), (1, 4), (5, 17), (5, 21)])
def test_mu_sees_three_codes_past_its_block_and_no_more(chunk: int, changed: int) -> None:
    flow = make_flow(replace(SMALL, chunk_size=chunk))
    codes = make_codes(30)
    other = codes.clone()
    other[changed] = (other[changed] + 1) % SMALL.vocab_size

    before, after = (flow.mean(ids, final=True, masked=True)[0] for ids in (codes, other))
    difference = (after - before).abs().amax(1)

    unseen = 4 * ((changed - 3) // chunk * chunk)
    assert float(difference[:unseen].max()) < 1e-5
    assert float(difference[unseen : unseen + 4 * chunk].max()) > 1e-4


# Hops.


def streamed(flow: FlowDecoder, voice: Voice, pieces: list[list[int]]) -> list[Tensor]:
    stream = RecomputingFlowStream(flow, voice)
    hops = [hop for piece in pieces for hop in stream.push(piece)]
    last = stream.finish()
    return hops if last is None else [*hops, last]


@st.composite
def sliced_replies(draw: st.DrawFn, longest: int = 40) -> list[list[int]]:
    """A reply in pieces, some of them empty."""
    codes = make_codes(draw(st.integers(1, longest)), draw(st.integers(0, 3))).tolist()
    cuts = sorted(draw(st.lists(st.integers(0, len(codes)), max_size=8)))
    return [codes[start:end] for start, end in pairwise([0, *cuts, len(codes)])]


@examples(8)
@given(pieces=sliced_replies(), prompt=st.integers(0, 23))
def test_streamed_frames_are_those_of_the_whole_reply(pieces: list[list[int]], prompt: int) -> None:
    flow, voice = make_flow(), make_voice(prompt)
    codes = [code for piece in pieces for code in piece]

    hops = streamed(flow, voice, pieces)
    whole = flow.decode(voice, torch.tensor(codes), final=True, masked=True)

    assert sum(hop.shape[1] for hop in hops) == 4 * len(codes) == whole.shape[1]
    torch.testing.assert_close(torch.cat(hops, dim=1), whole, rtol=0, atol=NEVER_CHANGES)


@examples(8)
@given(pieces=sliced_replies(longest=80), prompt=st.sampled_from([0, 1, 25, 30, 49]))
def test_a_flow_of_other_blocks_streams_the_same_way(pieces: list[list[int]], prompt: int) -> None:
    flow, voice = make_flow(replace(SMALL, chunk_size=25)), make_voice(prompt)
    codes = [code for piece in pieces for code in piece]

    found = torch.cat(streamed(flow, voice, pieces), dim=1)
    whole = flow.decode(voice, torch.tensor(codes), final=True, masked=True)

    torch.testing.assert_close(found, whole, rtol=0, atol=NEVER_CHANGES)


def test_without_the_mask_early_frames_depend_on_later_codes() -> None:
    # What streaming would get wrong: the published offline decoding is not what is streamed.
    flow, voice, codes = make_flow(), make_voice(10), make_codes(30)

    offline = flow.decode(voice, codes, final=True, masked=False)
    masked = flow.decode(voice, codes, final=True, masked=True)

    assert float((offline - masked)[:, :20].abs().max()) > 1e-3


@pytest.mark.parametrize("chunk", [5, 25])
@pytest.mark.parametrize("prompt", [0, 1, 10, 13, 24, 25])
def test_the_first_hop_completes_the_voices_block_and_each_needs_three_codes_more(
    chunk: int, prompt: int
) -> None:
    # Fewer steps: when hops come does not depend on what is in them.
    flow = make_flow(replace(SMALL, chunk_size=chunk, n_timesteps=1))
    stream = RecomputingFlowStream(flow, make_voice(prompt))
    first = chunk + (-prompt % chunk)

    came = {}
    for pushed, code in enumerate(make_codes(2 * first + chunk).tolist(), 1):
        assert stream.codes_needed >= pushed
        for hop in stream.push([code]):
            came[pushed] = hop.shape[1]

    due = [first + 3, *range(first + chunk + 3, 2 * first + chunk + 1, chunk)]
    assert came == {at: 4 * (first if at == first + 3 else chunk) for at in due}


def test_pushing_nothing_changes_nothing() -> None:
    flow, codes = make_flow(), make_codes(12).tolist()
    stream = RecomputingFlowStream(flow, make_voice(10))

    assert stream.push([]) == []
    hops = stream.push(codes)
    needed = stream.codes_needed
    assert [stream.push([]) for _ in range(3)] == [[], [], []]
    assert stream.codes_needed == needed
    last = stream.finish()

    assert last is not None
    expected = torch.cat(streamed(flow, make_voice(10), [codes]), dim=1)
    assert torch.equal(torch.cat([*hops, last], dim=1), expected)


def test_a_reply_without_codes_has_no_mel() -> None:
    stream = RecomputingFlowStream(make_flow(), make_voice(10))

    assert stream.push([]) == []
    assert stream.finish() is None


# Noise and guidance.


def test_the_noise_is_the_published_block_and_shorter_noise_its_beginning() -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    published = torch.randn([1, 80, 15000], generator=generator)

    assert NOISE_FRAMES == 15_000
    assert torch.equal(fixed_noise(15_000), published)
    for frames in (1, 4, 777, 14_999):
        assert torch.equal(fixed_noise(frames), published[:, :, :frames])


def test_past_300_s_the_noise_continues_without_changing_what_came_before() -> None:
    longer, longest = fixed_noise(15_020), fixed_noise(30_001)

    assert torch.equal(longer[:, :, :15_000], fixed_noise(15_000))
    assert torch.equal(longest[:, :, :15_020], longer)
    # A continuation that repeated the block would be deterministic too, but no noise.
    assert not torch.equal(longest[:, :, 15_000:30_000], longest[:, :, :15_000])
    second = torch.randn([1, 80, 15000], generator=torch.Generator().manual_seed(1))
    assert torch.equal(longest[:, :, 15_000:30_000], second)


def test_the_noise_does_not_touch_the_global_random_state() -> None:
    before = torch.get_rng_state()
    fixed_noise(60_001)

    assert torch.equal(torch.get_rng_state(), before)


def euler(flow: FlowDecoder, voice: Voice, codes: Tensor, guidance: float) -> Tensor:
    """The flow's ten steps written out, the two branches computed one after the other."""
    mu = flow.mean(torch.cat([voice.codes, codes]), final=True, masked=True).transpose(1, 2)
    prompt = voice.mel.shape[0]
    condition = F.pad(voice.mel.T[None], (0, mu.shape[2] - prompt))
    unit = voice.embedding / voice.embedding.square().sum().sqrt()
    speaker = flow.spk_embed_affine_layer(unit[None])
    x = torch.randn([1, 80, 15000], generator=torch.Generator().manual_seed(0))[:, :, : mu.shape[2]]
    times = [1 - math.cos(math.pi / 2 * step / 10) for step in range(11)]
    for now, then in pairwise(times):
        t = torch.tensor([now])
        velocity = flow.decoder.estimator(x, mu, t, speaker, condition, 20)
        if guidance:
            nothing = (torch.zeros_like(value) for value in (speaker, condition))
            free = flow.decoder.estimator(x, torch.zeros_like(mu), t, *nothing, 20)
            velocity = (1 + guidance) * velocity - guidance * free
        x = x + (then - now) * velocity
    return x[0, :, prompt:]


@pytest.mark.parametrize("guidance", [0.0, 0.7, 2.0])
def test_guidance_moves_away_from_the_unconditioned_velocity(guidance: float) -> None:
    # Without guidance the unconditioned branch has no say at all.
    flow = make_flow(replace(SMALL, cfg_rate=guidance))
    voice, codes = make_voice(10), make_codes(9)

    found = flow.decode(voice, codes, final=True, masked=True)

    torch.testing.assert_close(found, euler(flow, voice, codes, guidance), rtol=0, atol=5e-5)


def test_guidance_matters() -> None:
    voice, codes = make_voice(10), make_codes(9)
    weak, strong = (
        make_flow(replace(SMALL, cfg_rate=rate)).decode(voice, codes, final=True, masked=True)
        for rate in (0.0, 0.7)
    )

    assert float((weak - strong).abs().max()) > 0.1


def test_a_voices_embedding_counts_by_direction_alone() -> None:
    flow, voice, codes = make_flow(), make_voice(10), make_codes(9)
    louder = replace(voice, embedding=voice.embedding * 7)

    found, expected = (
        flow.decode(each, codes, final=True, masked=True) for each in (louder, voice)
    )

    torch.testing.assert_close(found, expected, rtol=0, atol=NEVER_CHANGES)


# Sizes.


def test_sizes_survive_being_written_and_read() -> None:
    for config in (FlowConfig(), SMALL, replace(SMALL, cfg_rate=0.3, chunk_size=25)):
        assert FlowConfig.from_dict(config.to_dict()) == config
    assert FlowConfig.from_dict({}) == FlowConfig()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"chunk_sizes": 5}, "unknown key 'chunk_sizes'"),
        ({"chunk_size": 5.5}, "chunk_size must be int"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"cfg_rate": "0.7"}, "cfg_rate must be float"),
    ],
)
def test_sizes_that_are_not_understood_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FlowConfig.from_dict(values)
