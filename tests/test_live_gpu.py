"""Live codes on an NVIDIA GPU: graphs, pages that move, and company change no code."""

import copy

import pytest
import torch
from live_rig import CODE, LIVE, heard, noise, quiet, rising, speech

from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.runtime.device import pick_device

pytestmark = pytest.mark.gpu

BLOCK = 5 * CODE


@pytest.fixture(scope="module")
def tokenizer() -> SpeechTokenizer:
    """The tokenizer that ships, in float32 on the GPU."""
    return copy.deepcopy(LIVE["pocket"].tokenizer).to(pick_device("cuda"))


@pytest.mark.parametrize("graphs", [True, False])
def test_streams_of_all_kinds_at_once_get_the_offline_codes(
    tokenizer: SpeechTokenizer, *, graphs: bool
) -> None:
    live = LiveTokenizer(tokenizer, options=LiveOptions(graphs=graphs))
    kinds = (speech, rising, noise, quiet)
    clips = [kinds[n % 4](n * 997 + (n % 5 + 2) * BLOCK) for n in range(20)]
    states = [live.open() for _ in clips]
    parts = [list(clip.split(BLOCK)) for clip in clips]
    while any(parts):
        due = [n for n, waiting in enumerate(parts) if waiting]
        live.push_many([states[n] for n in due], [parts[n].pop(0) for n in due])
    live.push_many(states, [torch.zeros(0)] * 20, [True] * 20)

    assert [state.codes for state in states] == [tokenizer.encode(clip) for clip in clips]
    assert live.pages.taken == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_what_turns_would_be_is_told_and_they_go_on_as_if_nobody_had_asked(
    tokenizer: SpeechTokenizer, *, graphs: bool
) -> None:
    live = LiveTokenizer(tokenizer, options=LiveOptions(graphs=graphs))
    clips = [kind(6 * BLOCK + n * 997) for n, kind in enumerate((speech, rising, noise, quiet))]
    asked, others = ([live.open(2.0) for _ in clips] for _ in range(2))
    for start in range(0, 6 * BLOCK, 2 * BLOCK + 300):
        ends = live.foresee(asked, [clip[start : start + 2000] for clip in clips])
        for end, clip in zip(ends, clips, strict=True):
            assert end is not None
            assert end.codes == tokenizer.encode(clip[: start + 2000])
        for states in (asked, others):
            live.push_many(states, [clip[start : start + 2 * BLOCK + 300] for clip in clips])
        assert [state.codes for state in asked] == [state.codes for state in others]
    for states in (asked, others):
        live.push_many(states, [torch.zeros(0)] * 4, [True] * 4)
    assert [state.codes for state in asked] == [state.codes for state in others]


def test_a_graph_gives_what_its_step_gives_bit_for_bit(tokenizer: SpeechTokenizer) -> None:
    found = []
    for graphs in (True, False):
        live = LiveTokenizer(tokenizer, 60, LiveOptions(graphs=graphs))
        states = [live.open(2.0) for _ in range(3)]
        for part in range(4):
            sounds = [speech(BLOCK, start=n * 5000 + part * BLOCK) for n in range(3)]
            live.push_many(states, sounds)
        found.append([(state.codes, state.leads) for state in states])

    assert found[0] == found[1]


def test_a_pool_that_moves_beneath_a_graph_changes_nothing(tokenizer: SpeechTokenizer) -> None:
    live, clip = LiveTokenizer(tokenizer), speech(8 * BLOCK)
    state = live.open()
    live.push(state, clip[:BLOCK])
    live.push(state, clip[BLOCK : 2 * BLOCK])
    grown = live.pages.grown

    live.warm(1)
    live.pages.reserve(live.pages.count + 1)
    for piece in clip[2 * BLOCK :].split(BLOCK):
        live.push(state, piece)
    live.finish(state)

    assert live.pages.grown == grown + 1
    assert state.codes == tokenizer.encode(clip)


@pytest.mark.parametrize("graphs", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gives_as_many_codes(
    dtype: torch.dtype, tokenizer: SpeechTokenizer, *, graphs: bool | None
) -> None:
    # Kernels take float32 alone, and what stands in for them cannot be captured.
    rough = copy.deepcopy(tokenizer).to(dtype)
    live = LiveTokenizer(rough, options=LiveOptions(graphs=graphs))
    live.warm(2)

    state = heard(live, list(speech(20 * CODE).split(BLOCK)))

    same = sum(a == b for a, b in zip(state.codes, rough.encode(speech(20 * CODE)), strict=True))
    assert same > 10
