"""Turns: from probabilities of speech to where a user's turn begins and ends, in samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.errors import OptionError
from mosstalk.vad import (
    BargeIn,
    Frames,
    IdleTimeout,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
    TurnDetector,
    TurnEvent,
)
from mosstalk.vad.turns import Eagerness

FRAME = 512
LEVELS = {".": 0.0, "-": 0.42, "+": 0.6, "#": 0.95}
"""Silence; doubt, between the two thresholds of 0.35 and 0.5; speech; speech beyond doubt."""
SILENCE = "." * 16
"""The first whole number of frames that is 500 ms."""


def frames(pattern: str, start: int = 0) -> Frames:
    return Frames(FRAME * start, FRAME, np.array([LEVELS[each] for each in pattern], np.float32))


class Listening:
    """Turns of a stream that is written as a pattern, with events in frames."""

    def __init__(
        self, settings: TurnDetection | None = None, barge_in: BargeIn | None = None
    ) -> None:
        self.turns = TurnDetector(settings, barge_in)
        self.length = 0

    def hear(self, pattern: str) -> list[TurnEvent]:
        events = self.turns.push(frames(pattern, self.length))
        self.length += len(pattern)
        return events


def only(events: list[TurnEvent]) -> TurnEvent:
    assert len(events) == 1, events
    return events[0]


# A turn.


def test_a_turn_begins_once_speech_has_lasted_and_reaches_back_by_its_prefix() -> None:
    user = Listening()
    assert user.hear("." * 20 + "##") == []
    started = only(user.hear("#"))
    assert started == SpeechStarted(20 * FRAME - 4800, 20 * FRAME, 23 * FRAME)
    assert user.turns.speaking


def test_the_prefix_stops_at_the_first_sample() -> None:
    assert only(Listening().hear("....###")) == SpeechStarted(0, 4 * FRAME, 7 * FRAME)


def test_a_turn_ends_after_its_last_speech_once_silence_was_long_enough() -> None:
    user = Listening()
    user.hear("....#####")
    assert user.hear(SILENCE[:-1]) == []
    stopped = only(user.hear("."))
    assert stopped == SpeechStopped(9 * FRAME, 25 * FRAME)
    assert isinstance(stopped, SpeechStopped)
    assert 8000 <= stopped.decided_samples - stopped.end_samples < 8000 + FRAME
    assert not user.turns.speaking


def test_silence_begins_with_the_quiet_end_of_the_last_speech() -> None:
    user = Listening()
    user.hear("....#####")
    speech = np.array([0.95] * 6 + [0.0] * 13, np.float32)
    quiet = np.zeros(19, bool)
    quiet[1] = quiet[4:6] = True  # the first of them is a pause within speech
    assert user.turns.push(Frames(9 * FRAME, FRAME, speech, quiet)) == []
    (stopped,) = user.turns.push(Frames(28 * FRAME, FRAME, np.zeros(1, np.float32)))
    assert stopped == SpeechStopped(13 * FRAME, 29 * FRAME)


def test_sound_behind_the_last_frame_is_taken_to_be_as_silent() -> None:
    user = Listening()
    user.hear("....#####" + SILENCE[:-1])
    nothing, heard = frames("", 24), 9 * FRAME + 8000
    assert heard - 24 * FRAME < FRAME
    assert user.turns.push(nothing, heard - 1) == []
    assert user.turns.push(nothing, 25 * FRAME) == [], "a frame that is whole must be told"
    assert user.turns.push(nothing, heard) == [SpeechStopped(9 * FRAME, heard)]
    assert user.turns.push(nothing, heard + 1) == []


def test_what_may_end_a_turn_or_its_sound_is_known_before_it_is_heard() -> None:
    user = Listening()
    assert not user.turns.may_end(100 * FRAME)
    user.hear("####")
    assert not user.turns.may_end(100 * FRAME), "who still speaks ends nothing"
    sound_end, end = 4 * FRAME + 160 * 16, 4 * FRAME + 500 * 16
    for heard in range(5, 20):
        user.hear(".")
        before, now = heard * FRAME, (heard + 1) * FRAME
        wanted = any(before < place <= now for place in (sound_end, end))
        assert user.turns.may_end(now) == wanted, heard
        assert not user.turns.may_end(before)
    user.hear("." * 5)
    assert not user.turns.speaking
    assert not user.turns.may_end(100 * FRAME)


def test_no_sample_is_in_two_turns() -> None:
    user = Listening(TurnDetection(prefix_padding_ms=600))
    user.hear("....###")
    end = only(user.hear(SILENCE))
    started = only(user.hear("..###"))
    assert isinstance(end, SpeechStopped)
    assert isinstance(started, SpeechStarted)
    assert started.start_samples == end.sound_end_samples


@pytest.mark.parametrize(("silence_ms", "trailing_ms"), [(1200, 160), (200, 160), (100, 128)])
def test_a_turns_sound_ends_soon_after_its_speech_however_long_the_silence(
    silence_ms: int, trailing_ms: int
) -> None:
    user = Listening(TurnDetection(silence_duration_ms=silence_ms))
    user.hear("....###")
    assert user.turns.sound_end is None
    user.hear(".")
    assert user.turns.sound_end == 7 * FRAME + 2560
    assert user.hear("#") == []
    assert user.turns.sound_end is None, "a pause is the turn's once speech comes after it"
    stopped = only(user.hear("." * 40))
    assert isinstance(stopped, SpeechStopped)
    assert stopped.sound_end_samples == 9 * FRAME + 16 * trailing_ms


def test_a_pause_within_a_turn_does_not_end_it() -> None:
    user = Listening()
    assert len(user.hear("....###" + SILENCE[:-1] + "#" + SILENCE[:-1] + "#")) == 1


@pytest.mark.parametrize("click", ["#", "##", "#.#", "##.#", "+-"])
def test_a_click_is_no_turn(click: str) -> None:
    assert Listening().hear(".." + click + "." * 20) == []


def test_one_weak_frame_does_not_start_the_count_anew() -> None:
    started = only(Listening().hear(".." + "##.##"))
    assert started == SpeechStarted(0, 2 * FRAME, 7 * FRAME)


def test_clicks_apart_do_not_add_up() -> None:
    assert Listening().hear("##..##..##..##..") == []


def test_doubt_begins_no_turn_and_ends_none() -> None:
    user = Listening()
    assert user.hear("-" * 40) == []
    assert len(user.hear("###")) == 1
    assert user.hear("-" * 40) == []
    # Once silent, doubt does not make it speech again.
    assert only(user.hear("." + "-" * 15)) == SpeechStopped(83 * FRAME, 99 * FRAME)


def test_a_start_and_a_stop_come_in_order_from_one_push() -> None:
    events = Listening().hear("..###" + SILENCE + "...###" + SILENCE)
    assert [type(event) for event in events] == [SpeechStarted, SpeechStopped] * 2


# Settings.


def test_settings_hold_from_the_next_frame_on() -> None:
    user = Listening()
    user.hear("###....")
    user.turns.settings = TurnDetection(silence_duration_ms=200)
    assert isinstance(only(user.hear("...")), SpeechStopped)
    user.turns.settings = TurnDetection(threshold=0.9, prefix_padding_ms=0)
    assert user.hear("++++") == []
    started = only(user.hear("###"))
    assert isinstance(started, SpeechStarted)
    assert started.start_samples == started.speech_samples


def test_a_high_minimum_is_for_a_detector_that_says_yes_to_clicks() -> None:
    turns = TurnDetector(minimum_speech_ms=210)
    assert turns.push(frames("#" * 6)) == []
    assert len(turns.push(frames("#", 6))) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"threshold": 0.0}, "threshold must lie between 0 and 1, not 0"),
        ({"threshold": 1.0}, "threshold must lie between 0 and 1"),
        ({"threshold": float("nan")}, "threshold must lie between 0 and 1"),
        ({"prefix_padding_ms": -1}, "prefix_padding_ms must be 0 or more, not -1"),
        ({"silence_duration_ms": -1}, "silence_duration_ms must be"),
        ({"idle_timeout_ms": -1}, "idle_timeout_ms must be"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        TurnDetection(**options)  # type: ignore[arg-type]


def test_a_strictness_that_means_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="threshold"):
        BargeIn(threshold=2)
    with pytest.raises(OptionError, match="minimum_speech_ms"):
        BargeIn(minimum_speech_ms=-1)
    with pytest.raises(OptionError, match="prefix_padding_ms"):
        BargeIn(prefix_padding_ms=-1)


def test_the_eager_wait_least() -> None:
    order: tuple[Eagerness, ...] = ("high", "medium", "low")
    waits = [TurnDetection.for_eagerness(each).silence_duration_ms for each in order]
    assert waits == sorted(set(waits))
    assert TurnDetection.for_eagerness() == TurnDetection.for_eagerness("medium")
    with pytest.raises(OptionError, match="choose from low, medium, high, auto"):
        TurnDetection.for_eagerness("keen")  # type: ignore[arg-type]


# While the assistant can be heard.


def test_over_the_assistant_speech_must_be_clearer_and_longer() -> None:
    user = Listening()
    user.turns.playing = True
    assert user.hear("+" * 20) == []
    assert user.hear("#####") == []
    started = only(user.hear("#"))
    assert isinstance(started, SpeechStarted)
    assert started.speech_samples == 20 * FRAME


@pytest.mark.parametrize(("asked_ms", "given_ms"), [(0, 450), (300, 450), (600, 600)])
def test_over_the_assistant_a_turn_reaches_further_back(asked_ms: int, given_ms: int) -> None:
    user = Listening(TurnDetection(prefix_padding_ms=asked_ms))
    user.turns.playing = True
    user.hear("." * 20)
    started = only(user.hear("#" * 7))
    assert isinstance(started, SpeechStarted)
    assert started.start_samples == started.speech_samples - given_ms * 16


def test_a_turn_that_interrupted_goes_on_by_its_usual_settings() -> None:
    user = Listening(barge_in=BargeIn(0.7, 96))
    user.turns.playing = True
    assert len(user.hear("###")) == 1
    assert user.hear("+" * 40) == []


# Idle.


def idle(pattern_after: str, playing: str = "....") -> list[TurnEvent]:
    user = Listening(TurnDetection(idle_timeout_ms=640))
    user.turns.playing = True
    events = user.hear(playing)
    user.turns.playing = False
    return events + user.hear(pattern_after)


def test_nobody_speaking_after_the_assistant_is_reported_once() -> None:
    assert only(idle("." * 80)) == IdleTimeout(4 * FRAME, 24 * FRAME)


def test_speech_in_time_is_no_idleness() -> None:
    events = idle("." * 18 + "###" + SILENCE + "." * 60)
    assert [type(event) for event in events] == [SpeechStarted, SpeechStopped]


def test_speech_that_just_begins_puts_idleness_off() -> None:
    assert isinstance(only(idle("." * 18 + "###")), SpeechStarted)
    assert only(idle("." * 18 + "##" + "....")) == IdleTimeout(4 * FRAME, 26 * FRAME)


def test_nobody_is_idle_before_the_assistant_has_spoken_or_while_it_does() -> None:
    user = Listening(TurnDetection(idle_timeout_ms=640))
    assert user.hear("." * 80) == []
    user.turns.playing = True
    assert user.hear("." * 80) == []


def test_a_reply_that_the_user_ended_waits_for_no_one() -> None:
    user = Listening(TurnDetection(idle_timeout_ms=640))
    user.turns.playing = True
    assert len(user.hear("#" * 8)) == 1
    user.turns.playing = False
    assert [type(event) for event in user.hear("." * 80)] == [SpeechStopped]


# Ended by hand.


def test_reset_forgets_the_turn_and_nothing_later_begins_before_it() -> None:
    user = Listening()
    user.hear("....#####")
    user.turns.reset()
    assert not user.turns.speaking
    assert only(user.hear("###")) == SpeechStarted(9 * FRAME, 9 * FRAME, 12 * FRAME)


def test_reset_may_name_a_sample_of_its_own() -> None:
    user = Listening()
    user.hear("....####")
    user.turns.reset(9 * FRAME + 100)
    assert only(user.hear(".." + "###")) == SpeechStarted(9 * FRAME + 100, 10 * FRAME, 13 * FRAME)


def test_reset_forgets_speech_that_was_no_turn_yet() -> None:
    user = Listening()
    user.hear("....##")
    user.turns.reset()
    assert user.hear("##" + "." * 40) == []


# Any probabilities.

STREAMS = st.lists(st.floats(0, 1, width=32), max_size=300)


@given(speech=STREAMS, silence_ms=st.integers(0, 400), prefix_ms=st.integers(0, 600))
def test_turns_follow_one_another(speech: list[float], silence_ms: int, prefix_ms: int) -> None:
    turns = TurnDetector(TurnDetection(0.5, prefix_ms, silence_ms))
    events = turns.push(Frames(0, FRAME, np.array(speech, np.float32)))
    before = 0
    for place, event in enumerate(events):
        if place % 2 == 0:
            assert isinstance(event, SpeechStarted)
            assert before <= event.start_samples <= event.speech_samples < event.decided_samples
            before = event.speech_samples
        else:
            assert isinstance(event, SpeechStopped)
            assert before < event.end_samples <= event.decided_samples
            assert event.decided_samples - event.end_samples >= 16 * silence_ms
            assert event.end_samples <= event.sound_end_samples <= event.decided_samples
            before = event.sound_end_samples
    assert turns.speaking is (len(events) % 2 == 1)


@given(speech=STREAMS, sizes=st.lists(st.integers(0, 40)), playing=st.booleans())
def test_frames_in_any_pieces_give_the_same_events(
    speech: list[float], sizes: list[int], playing: bool
) -> None:
    whole = Frames(0, FRAME, np.array(speech, np.float32))
    once, piecewise = TurnDetector(), TurnDetector()
    once.playing = piecewise.playing = playing
    events, start = [], 0
    for size in [*sizes, len(speech)]:
        piece = whole.speech[start : start + size]
        events += piecewise.push(Frames(FRAME * start, FRAME, piece))
        start += len(piece)
    assert events == once.push(whole)
