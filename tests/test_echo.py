"""The assistant's own echo interrupts nothing, a user who talks over it does."""

import copy

import numpy as np
import pytest
from conftest import QUESTION, ROOT, examples
from hypothesis import given
from hypothesis import strategies as st

from evals.vad import barge_in_table, measure_barge_in
from evals.vad_clips import EARLY_S, Setting, simulate
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.errors import AudioError
from mosstalk.vad import EchoGate, Frames, TurnDetector, open_detector

ASSISTANT = [read_audio(ROOT / "assets" / "librivox.flac", 16_000).samples]
PIECES = [ASSISTANT[0][start : start + 24_000] for start in range(0, len(ASSISTANT[0]), 24_000)]
USER = [read_audio(QUESTION, 16_000).samples]
DETECTOR = open_detector()
FRAME = DETECTOR.frame_samples
CALL = simulate(Setting(-12.0, 5.0, replies=2), ASSISTANT, USER, seed=1)
HEARD = DETECTOR.push(DETECTOR.start(), CALL.microphone)[1]
SLOW, FAULTS = pytest.mark.slow, pytest.mark.faults
NOTHING = np.zeros(0, np.float32)


def judged(gate: EchoGate | None = None) -> Samples:
    gate = gate or EchoGate()
    gate.played(CALL.played, 0)
    return gate.heard(CALL.microphone, HEARD).speech


def places(speech: Samples) -> np.ndarray[tuple[int], np.dtype[np.int_]]:
    """The samples at which frames of speech end."""
    return (np.flatnonzero(speech >= 0.5) + 1) * FRAME


# Rates, in simulated rooms; `mosstalk bench vad` has more of them.


# Slow, here and below: more levels, and more users, of what is shown at one. What takes minutes
# runs with `make test-faults`.


@pytest.mark.parametrize("echo_db", [-18.0, *(pytest.param(n, marks=SLOW) for n in (-6.0, -30.0))])
def test_an_echo_alone_interrupts_nothing(echo_db: float) -> None:
    row = measure_barge_in(DETECTOR, Setting(echo_db, replies=3), ASSISTANT, USER, range(4))
    assert row.replies == 12
    assert row.interrupted <= 1


def test_without_the_gate_every_reply_would_interrupt_itself() -> None:
    setting = Setting(-12.0, replies=2)
    row = measure_barge_in(DETECTOR, setting, ASSISTANT, USER, range(3), gate=None)
    assert row.interrupted == row.replies == 6


@pytest.mark.parametrize(
    ("user_db", "soon", "late"),
    [
        pytest.param(0.0, 0.2, 0.4, marks=SLOW),
        (5.0, 0.6, 0.85),
        pytest.param(10.0, 0.75, 0.85, marks=SLOW),
    ],
)
def test_a_user_who_talks_over_the_echo_is_heard(user_db: float, soon: float, late: float) -> None:
    setting = Setting(-12.0, user_db, replies=2)
    row = measure_barge_in(DETECTOR, setting, ASSISTANT, USER, range(8))
    assert row.soon is not None
    assert row.soon >= soon
    assert row.late is not None
    assert row.late >= late
    assert row.interrupted == 0


# Slow: as those with headsets below, who begin sooner.
@pytest.mark.slow
def test_a_user_with_headphones_is_heard() -> None:
    row = measure_barge_in(DETECTOR, Setting(None, 5.0, replies=2), ASSISTANT, USER, range(4))
    assert row.soon == 1
    assert row.interrupted == 0


@pytest.mark.parametrize(
    ("replies", "users"),
    [
        (1, 20),
        pytest.param(3, 20, marks=SLOW),
        *(pytest.param(n, 100, marks=FAULTS) for n in (1, 3)),
    ],
)
def test_of_users_with_headsets_none_is_lost(replies: int, users: int) -> None:
    """They begin 0.05 to 1 s after the first reply, or a later one."""
    setting = Setting(None, 5.0, replies, EARLY_S, reply_s=1.5)
    row = measure_barge_in(DETECTOR, setting, PIECES, USER, range(users))
    print(barge_in_table([row]).as_text())
    assert row.users == users
    assert row.whole == 1
    assert row.p95_ms is not None
    assert row.p95_ms <= 600
    assert row.interrupted == 0


@pytest.mark.parametrize(
    ("echo_db", "replies"),
    [
        (-6.0, 1),
        pytest.param(-24.0, 1, marks=SLOW),
        pytest.param(-6.0, 3, marks=SLOW),
        pytest.param(-24.0, 3, marks=FAULTS),
    ],
)
def test_a_user_who_talks_over_an_echo_from_its_beginning_is_heard_whole(
    echo_db: float, replies: int
) -> None:
    setting = Setting(echo_db, 5.0, replies, EARLY_S)
    row = measure_barge_in(DETECTOR, setting, ASSISTANT, USER, range(20))
    assert row.late is not None
    assert row.late >= 0.8
    assert row.whole is not None
    assert row.whole >= 0.8


def test_an_echo_whose_delay_changes_between_replies_interrupts_nothing() -> None:
    reply = np.concatenate([ASSISTANT[0], np.zeros(16_000, np.float32)])
    delays = [1600, 5600, 3200, 800]
    echoes = [np.roll(reply, delay) / 4 for delay in delays]
    gate, microphone = EchoGate(), np.concatenate(echoes).astype(np.float32)
    gate.played(np.tile(reply, len(delays)), 0)
    found = DETECTOR.push(DETECTOR.start(), microphone)[1]
    turns = TurnDetector()
    turns.playing = True
    assert turns.push(gate.heard(microphone, found)) == []
    assert turns.push(Frames(turns.position, FRAME, found.speech)) != []


# How it is used.


def test_frames_keep_their_places_and_speech_that_is_no_echo_its_probability() -> None:
    gate = EchoGate()
    gate.played(CALL.played, 0)
    after = gate.heard(CALL.microphone, HEARD)
    assert (after.start_samples, after.frame_samples) == (0, HEARD.frame_samples)
    changed = after.speech != HEARD.speech
    assert (after.speech[changed] == 0).all()
    assert CALL.user_samples is not None
    assert places(HEARD.speech)[0] < CALL.user_samples < places(after.speech)[0]


def test_where_nothing_is_played_nothing_is_changed() -> None:
    found = DETECTOR.push(DETECTOR.start(), USER[0])[1]
    silent = EchoGate()
    silent.played(np.zeros(2 * len(USER[0]), np.float32))
    for gate in (EchoGate(), silent):
        np.testing.assert_array_equal(gate.heard(USER[0], found).speech, found.speech)


def test_what_is_heard_before_a_reply_counts_in_it_although_it_was_worked_out_late() -> None:
    before = USER[0][: len(USER[0]) // FRAME * FRAME]
    sound = np.concatenate([before, CALL.microphone])
    found = DETECTOR.push(DETECTOR.start(), sound)[1]
    late, at_once = EchoGate(), EchoGate()
    at_once.played(np.zeros(len(before), np.float32), 0)  # played, so worked out hop by hop
    heard = []
    for gate in (late, at_once):
        first, rest = found.speech[: len(before) // FRAME], found.speech[len(before) // FRAME :]
        gate.heard(before, Frames(0, FRAME, first))
        gate.played(CALL.played, len(before))
        heard.append(gate.heard(sound[len(before) :], Frames(len(before), FRAME, rest)).speech)
    np.testing.assert_array_equal(heard[0], heard[1])
    for each in ("noise", "late"):
        one, other = (getattr(gate.state, each) for gate in (late, at_once))
        np.testing.assert_allclose(one, other, atol=1e-9)
    np.testing.assert_allclose(late.state.path.peak, at_once.state.path.peak, atol=1e-9)


def test_no_path_is_learned_from_a_voice() -> None:
    gate = EchoGate()
    gate.played(ASSISTANT[0], 8000)
    sound = np.tile(USER[0], 2)
    found = DETECTOR.push(DETECTOR.start(), sound)[1]
    after = gate.heard(sound, found).speech
    assert gate.state.path.hops == 0
    np.testing.assert_array_equal(after, found.speech[: len(after)])
    assert len(found) - len(after) < 0.4 * 16_000 / FRAME


@examples(20)
@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=60),
    ahead=st.integers(0, 40_000),
)
def test_sound_in_any_pieces_is_judged_the_same(sizes: list[int], ahead: int) -> None:
    gate, state, got, sent = EchoGate(), DETECTOR.start(), [], 0
    sizes = [*sizes, len(CALL.microphone)]
    for start, size in zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True):
        piece = CALL.microphone[start : start + size]
        # What is played is known a little, or long, before it can be heard.
        known = start + len(piece) + ahead
        gate.played(CALL.played[sent:known], sent)
        sent = max(sent, int(known))
        state, frames = DETECTOR.push(state, piece)
        got.append(gate.heard(piece, frames).speech)
    np.testing.assert_array_equal(np.concatenate(got) > 0, judged() > 0)


def test_what_follows_on_needs_no_place() -> None:
    gate = EchoGate()
    gate.played(CALL.played[:30_000], 0)
    gate.played(CALL.played[30_000:])
    np.testing.assert_array_equal(gate.heard(CALL.microphone, HEARD).speech, judged())


def test_a_stretch_may_be_given_anew_and_the_past_is_dropped() -> None:
    gate = EchoGate()
    gate.played(np.full(len(CALL.played), 0.5, np.float32), 0)
    gate.played(CALL.played, 0)
    np.testing.assert_array_equal(gate.heard(CALL.microphone, HEARD).speech, judged())

    late = EchoGate()
    late.heard(CALL.microphone[:4096], Frames(0, FRAME, HEARD.speech[: 4096 // FRAME]))
    late.played(CALL.played, 0)
    after = late.heard(CALL.microphone[4096:], Frames(4096, FRAME, HEARD.speech[4096 // FRAME :]))
    np.testing.assert_array_equal(after.speech > 0, judged()[4096 // FRAME :] > 0)


def test_what_is_cut_off_is_no_longer_expected() -> None:
    start, end = CALL.replies[0]
    cut = start + 32_000
    silent_after = CALL.microphone.copy()
    silent_after[cut:end] = 0
    gate = EchoGate()
    gate.played(CALL.played[:end], 0)
    gate.stopped(cut)
    assert len(gate.state.reference) == cut
    gate.heard(silent_after[:end], DETECTOR.push(DETECTOR.start(), silent_after[:end])[1])
    assert gate.state.path.silent
    # Whoever speaks now is the user, at once.
    found = DETECTOR.push(DETECTOR.start(), USER[0])[1]
    shifted = Frames(gate.state.position, FRAME, found.speech)
    np.testing.assert_array_equal(gate.heard(USER[0], shifted).speech, found.speech)


def test_a_copied_state_goes_on_as_the_first_does() -> None:
    half = len(HEARD) // 2
    gate, other = EchoGate(), EchoGate()
    gate.played(CALL.played, 0)
    gate.heard(CALL.microphone[: half * FRAME], Frames(0, FRAME, HEARD.speech[:half]))
    other.state = copy.deepcopy(gate.state)
    rest = Frames(half * FRAME, FRAME, HEARD.speech[half:])
    first = gate.heard(CALL.microphone[half * FRAME :], rest)
    np.testing.assert_array_equal(
        other.heard(CALL.microphone[half * FRAME :], rest).speech, first.speech
    )


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_sound_that_is_not_finite_is_refused(bad: float) -> None:
    gate = EchoGate()
    with pytest.raises(AudioError, match="NaN or infinite"):
        gate.played(np.full(10, bad, np.float32))
    with pytest.raises(AudioError, match="NaN or infinite"):
        gate.heard(np.full(10, bad, np.float32), Frames(0, FRAME, NOTHING))
    np.testing.assert_array_equal(judged(gate), judged())
