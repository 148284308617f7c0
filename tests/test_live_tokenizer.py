"""Live codes: the offline ones however the sound came, and what is repaired on the way there."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import GOLDENS, examples
from hypothesis import given
from hypothesis import strategies as st
from live_rig import (
    BOTH,
    CODE,
    LIVE,
    Consumer,
    heard,
    noise,
    quiet,
    rising,
    silent,
    sliced,
    speech,
)
from torch import Tensor

from evals.codec_parts import live_codes
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveOptions, LiveTokenizer
from mosstalk.constants import INPUT_RATE, codes_in
from mosstalk.errors import AudioError
from mosstalk.models.weights import open_safetensors

SEGMENT = 480_000
LAST_READ = 1160
"""Samples of a code after which nothing but the floor changes it."""


@pytest.fixture(params=sorted(LIVE))
def live(request: pytest.FixtureRequest) -> LiveTokenizer:
    """Each tokenizer in turn."""
    return LIVE[request.param]


def arrays_of(live: LiveTokenizer, state: LiveCodes) -> Iterator[Tensor]:
    """All that a stream keeps: its sound, and what is in its pages."""
    yield from map(torch.from_numpy, (state.segment.sound, state.segment.quietest))
    for kept in (*live.pages.kv, live.pages.log_mel):
        yield from (kept[page] for page in state.segment.held.ids)


def places_of(live: LiveTokenizer, state: LiveCodes) -> list[int]:
    """Where a stream's things are in memory."""
    return [array.data_ptr() for array in arrays_of(live, state)]


# Equal to the offline codes.


@examples(60)
@given(name=BOTH, pieces=sliced())
def test_codes_at_the_end_are_the_offline_ones(name: str, pieces: list[Tensor]) -> None:
    live = LIVE[name]

    state = heard(live, pieces)

    assert state.codes == live.tokenizer.encode(torch.cat(pieces))


@pytest.mark.parametrize(
    "samples", [1, 40, 200, 201, LAST_READ - 1, LAST_READ, CODE - 1, CODE, CODE + 1, CODE + 1200]
)
def test_short_turns_heard_sample_by_sample_have_the_offline_codes(
    live: LiveTokenizer, samples: int
) -> None:
    clip = speech(samples, start=8000)

    state = heard(live, list(clip.split(1)))

    assert state.codes == live.tokenizer.encode(clip)
    assert len(state.codes) == codes_in(samples)


@pytest.mark.parametrize("samples", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 65 * INPUT_RATE])
def test_turns_of_several_segments_have_the_offline_codes(samples: int) -> None:
    live, clip = LIVE["goldens"], rising(samples)

    at_once, in_pieces = heard(live, [clip]), heard(live, list(clip.split(7 * CODE + 11)))

    assert at_once.codes == in_pieces.codes == live.tokenizer.encode(clip)


# Slow: a minute of sound; turns of several segments are heard below.
@pytest.mark.slow
def test_a_minute_of_speech_in_blocks_has_the_offline_codes() -> None:
    live, clip = LIVE["pocket"], speech(65 * INPUT_RATE)

    state = heard(live, list(clip.split(CODE)))

    assert state.codes == live.tokenizer.encode(clip)
    assert state.seconds == 65


@examples(30)
@given(name=BOTH, pieces=sliced(30 * CODE), maximum=st.floats(-10, 4), trusted_s=st.floats(0, 3))
def test_no_maximum_to_begin_with_changes_the_codes_at_the_end(
    name: str, pieces: list[Tensor], maximum: float, trusted_s: float
) -> None:
    tokenizer = LIVE[name].tokenizer

    state = heard(LiveTokenizer(tokenizer, trusted_s), pieces, maximum)

    assert state.codes == tokenizer.encode(torch.cat(pieces))


@examples(60)
@given(
    name=BOTH, pieces=sliced(30 * CODE), asked=st.sets(st.integers(0, 20)),
    maximum=st.none() | st.floats(-10, 4), trusted_s=st.floats(0, 3), together=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_what_a_turn_would_be_is_told_and_it_goes_on_as_if_nobody_had_asked(
    name: str, pieces: list[Tensor], asked: set[int], maximum: float | None, trusted_s: float,
    together: bool, data: st.DataObject,
) -> None:  # fmt: skip
    tokenizer = LIVE[name].tokenizer
    options = LiveOptions(together=together, graphs=False, page_s=2 if together else None)
    live = LiveTokenizer(tokenizer, trusted_s, options)
    state, other = live.open(maximum), live.open(maximum)
    for place, piece in enumerate(pieces):
        if place in asked:
            more = piece[: data.draw(st.integers(0, len(piece)))]
            before = copy.deepcopy((state.codes, state.samples, state.settled, state.leads))
            (foreseen,) = live.foresee([state], [more])
            assert (state.codes, state.samples, state.settled, state.leads) == before
            if foreseen is None:
                assert state.samples + len(more) == 0
            else:
                assert foreseen.codes == tokenizer.encode(torch.cat([*pieces[:place], more]))
                last = heard(live, [*pieces[:place], more], maximum)
                assert foreseen.maximum == last.maximum
        found, alone = live.push(state, piece), live.push(other, piece)
        assert (found.kept, found.codes) == (alone.kept, alone.codes)
    live.finish(state)
    live.finish(other)
    assert (state.codes, state.maximum) == (other.codes, other.maximum)
    assert live.pages.taken == 0


def test_a_turn_that_would_begin_another_segment_is_not_foreseen() -> None:
    live = LIVE["pocket"]
    state = live.open()
    live.push(state, speech(SEGMENT - 100))
    assert live.foresee([state], [silent(100)]) == [None]
    (foreseen,) = live.foresee([state], [silent(99)])
    assert foreseen is not None
    assert foreseen.finished
    live.close(state)


def test_the_codes_of_the_golden_clips_are_those_of_the_public_code() -> None:
    expected = open_safetensors(GOLDENS / "speech-tokenizer" / "expected.safetensors")
    names = [name.removesuffix(".tokens") for name in expected if name.endswith(".tokens")]
    assert len(names) == 5
    for name in names:
        pcm = expected[f"{name}.pcm16"].load().float() / 32768

        state = heard(LIVE["goldens"], list(pcm.split(CODE)))

        assert state.codes == expected[f"{name}.tokens"].load().tolist()


def test_where_rounding_decides_the_segment_is_encoded_whole(live: LiveTokenizer) -> None:
    tokenizer = copy.deepcopy(live.tokenizer)
    codebook = tokenizer.encoder.codebook.weight.data
    half = codebook.shape[0] // 2
    codebook[half:] = codebook[:half] * (1 + 1e-7)
    clip = speech(40 * CODE)

    references = heard(LiveTokenizer(tokenizer), list(clip.split(CODE)))

    assert references.ties == 1
    assert references.codes == tokenizer.encode(clip)
    assert heard(live, [clip]).ties == 0


def test_lower_precision_gives_as_many_codes_and_looks_for_no_ties() -> None:
    tokenizer = copy.deepcopy(LIVE["pocket"].tokenizer).bfloat16()
    clip = speech(20 * CODE)

    state = heard(LiveTokenizer(tokenizer), list(clip.split(CODE)))

    offline = tokenizer.encode(clip)
    assert state.ties == 0
    assert len(state.codes) == 20
    assert sum(a == b for a, b in zip(state.codes, offline, strict=True)) > 10


# While the sound comes.


@examples(20)
@given(pieces=sliced(20 * CODE))
def test_a_code_is_there_as_soon_as_all_that_it_reads_is(pieces: list[Tensor]) -> None:
    live = LIVE["goldens"]
    state = live.open()
    for piece in pieces:
        live.push(state, piece)

        assert len(state.codes) == max(0, (state.samples - LAST_READ) // CODE + 1)


def test_a_louder_end_takes_back_the_codes_that_its_floor_reaches(live: LiveTokenizer) -> None:
    soft, loud = 1e-3 * speech(30 * CODE), speech(10 * CODE, start=9000)
    state = live.open()
    live.push(state, soft)
    before = list(state.codes)

    change = live.push(state, loud)

    assert change.repaired
    assert change.kept < len(before)
    assert state.codes[change.kept] != before[change.kept]
    assert state.codes[: change.kept] == before[: change.kept]
    repair = state.repairs[-1]
    assert repair.at_s == 40 * CODE / INPUT_RATE
    assert 4 * (len(before) - change.kept) <= repair.rows_again <= 4 * len(before)


def test_rising_sound_is_repaired_again_and_again_and_every_row_is_counted() -> None:
    live = LIVE["pocket"]

    state = heard(live, list(rising(60 * CODE).split(CODE)))

    assert len(state.repairs) > 5
    assert state.rows == 4 * 60 + state.rows_again
    assert state.rows_again > state.rows / 2


def test_the_last_turns_maximum_spares_the_repairs(live: LiveTokenizer) -> None:
    clip = torch.cat([rising(10 * CODE), speech(20 * CODE)])
    first = heard(live, list(clip.split(CODE)))
    trusting = LiveTokenizer(live.tokenizer, trusted_s=2)

    again = heard(trusting, list(clip.split(CODE)), first.maximum)

    assert len(first.repairs) > 3
    assert again.repairs == []
    assert (again.blocks, again.rows) == (30, 4 * 30)
    assert again.codes == first.codes
    assert again.maximum == first.maximum


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_a_maximum_that_is_not_reached_is_repaired_once(
    live: LiveTokenizer, seconds: float
) -> None:
    clip = speech(round(seconds * INPUT_RATE))
    settled = heard(live, [clip, clip])
    assert settled.maximum is not None

    state = live.open(settled.maximum + 1)
    changes = [live.push(state, piece) for piece in clip.split(CODE)]
    last = live.finish(state)

    assert last.repaired is (seconds < 1)
    assert any(change.repaired for change in [*changes, last])
    assert state.codes == live.tokenizer.encode(clip)


def test_a_floor_that_was_too_high_is_repaired_where_only_it_was_reached(
    live: LiveTokenizer,
) -> None:
    clip = noise(30 * CODE)
    settled = heard(live, [clip])
    assert settled.maximum is not None
    assert settled.repairs == []

    state = heard(live, list(clip.split(CODE)), settled.maximum + 7)

    assert [repair.rows_again for repair in state.repairs] == [4 * 12]
    assert state.codes == settled.codes


def test_the_maximum_is_that_of_the_whole_turns_features(live: LiveTokenizer) -> None:
    # Loudest in the very last frame, which reads 40 samples mirrored at the end.
    clip = 0.01 * noise(10 * CODE)
    clip[-30:] += noise(30)

    state = heard(live, [clip])

    loudest = live.tokenizer.encode_segment(clip).log_mel.max() * 4 - 4
    assert state.maximum == pytest.approx(float(loudest), abs=1e-5)


def test_digital_silence_needs_no_repair(live: LiveTokenizer) -> None:
    state = heard(live, list(silent(400 * CODE).split(5 * CODE)))

    assert state.repairs == []
    assert state.codes == live.tokenizer.encode(silent(400 * CODE))


def test_no_code_of_a_finished_segment_is_ever_taken_back() -> None:
    live = LIVE["goldens"]
    state = live.open()
    live.push(state, quiet(SEGMENT - 1))
    assert state.settled == 0
    live.push(state, silent(1))
    assert state.settled == len(state.codes) == 375

    change = live.push(state, speech(5 * INPUT_RATE))

    assert change.kept >= 375


def test_a_turn_without_a_sample_has_no_code(live: LiveTokenizer) -> None:
    state = live.open()

    assert live.push(state, torch.zeros(0)) == Change(0, [], repaired=False)
    assert live.finish(state) == Change(0, [], repaired=False)
    assert state.codes == live.tokenizer.encode(torch.zeros(0)) == []
    assert state.maximum is None


def test_a_push_moves_nothing_that_is_kept() -> None:
    live = LIVE["pocket"]
    state = live.open()
    live.push(state, speech(CODE))
    places = places_of(live, state)

    for piece in rising(SEGMENT + 20 * CODE).split(30 * CODE):
        live.push(state, piece)

    assert places_of(live, state) == places


# In company.


@examples(20)
@given(name=BOTH, turns=st.lists(sliced(25 * CODE), min_size=2, max_size=5), data=st.data())
def test_streams_that_join_and_leave_a_batch_get_the_codes_they_get_alone(
    name: str, turns: list[list[Tensor]], data: st.DataObject
) -> None:
    live = LIVE[name]
    waiting = [(turn, live.open(), Consumer(), list(turn)) for turn in turns]
    while waiting:
        chosen = data.draw(st.sets(st.sampled_from(range(len(waiting))), min_size=1))
        batch = [waiting[index] for index in sorted(chosen)]
        states = [state for _, state, *_ in batch]
        sounds = [pieces.pop(0) for *_, pieces in batch]
        last = [not pieces for *_, pieces in batch]
        changes = live.push_many(states, sounds, last)
        for change, (turn, state, consumer, _) in zip(changes, batch, strict=True):
            consumer.take(change)
            assert consumer.codes == state.codes
            if state.finished:
                assert state.codes == live.tokenizer.encode(torch.cat(turn))
        waiting = [each for each in waiting if not each[1].finished]


def test_a_turn_ends_within_a_push_over_segments_in_company() -> None:
    live = LIVE["goldens"]
    sounds = [rising(SEGMENT + 5000), speech(9000), quiet(0), noise(2 * SEGMENT)]
    states = [live.open() for _ in sounds]

    live.push_many(states, sounds, [True, True, True, False])

    assert [state.finished for state in states] == [True, True, True, False]
    live.finish(states[3])
    for state, sound in zip(states, sounds, strict=True):
        assert state.codes == live.tokenizer.encode(sound)


def test_a_push_touches_no_other_stream() -> None:
    live = LIVE["goldens"]
    one, other = live.open(), live.open()
    live.push_many([one, other], [speech(20 * CODE), noise(13 * CODE)])
    before = [array.clone() for array in arrays_of(live, other)]
    assert len(before) > 2 + len(live.pages.kv)
    codes = list(other.codes)

    live.push(one, rising(20 * CODE))
    live.finish(one)

    assert other.codes == codes
    for now, then in zip(arrays_of(live, other), before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


@pytest.mark.parametrize(
    "sound",
    [
        torch.zeros(2, 100),
        torch.tensor(0.5),
        torch.zeros(100, dtype=torch.int16),
        torch.tensor([0.0, float("nan")]),
        torch.tensor([0.0, float("inf")]),
    ],
)
def test_what_is_no_sound_is_refused_and_no_stream_takes_any(sound: Tensor) -> None:
    live = LIVE["goldens"]
    states = [live.open(), live.open()]

    with pytest.raises(AudioError, match="sound"):
        live.push_many(states, [speech(5000), sound])

    assert [state.samples for state in states] == [0, 0]


def test_arrays_are_taken_whether_or_not_they_may_be_written() -> None:
    live, clip = LIVE["goldens"], speech(20 * CODE)
    frozen = np.frombuffer(clip.numpy().tobytes(), np.float32)
    state = live.open()

    live.push_many([state], [frozen], [True])

    assert state.codes == live.tokenizer.encode(clip)


# The bench.


def test_the_bench_finds_the_repairs_and_compares_every_clip() -> None:
    loud, soft = speech(2 * INPUT_RATE), 1e-3 * speech(INPUT_RATE)
    figures = live_codes(LIVE["pocket"], [torch.cat([soft, loud]), silent(700)])

    assert (figures.clips, figures.valid) == (2, 2)
    assert figures.codes == codes_in(3 * INPUT_RATE) + 1
    assert figures.seconds == 3 + 700 / INPUT_RATE
    assert figures.repaired_clips == 1
    assert figures.late_repairs == 0
    assert len(figures.push_ms) + len(figures.repairs) == codes_in(3 * INPUT_RATE) + 1
    assert len(figures.finish_ms) == 2
    assert max(repair.codes_changed for repair in figures.repairs) > 5
    assert 0 < figures.again_share == figures.rows_again / (4 * figures.codes)
    for repair in figures.repairs:
        assert repair.at_s + repair.to_end_s == pytest.approx(3)


def test_the_bench_gives_one_speakers_turns_the_maximum_before() -> None:
    turns = [speech(2 * INPUT_RATE)] * 2
    apart = live_codes(LIVE["pocket"], turns)
    together = live_codes(LIVE["pocket"], turns, one_speaker=True)

    assert apart.valid == together.valid == 2
    assert len(together.repairs) < len(apart.repairs)
