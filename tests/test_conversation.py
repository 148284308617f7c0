"""Turns, rows and modes; how replies become history."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.constants import codes_heard
from mosstalk.conversation import (
    Conversation,
    FinishReason,
    Mode,
    Reply,
    Row,
    Segment,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    next_mode,
    start_mode,
)

IDS = SpecialIds(256, 257, 258, 259, 260, 1024, 512, stop=frozenset((256, 258)))
PAD, SOSP, EOSP, SILENT = IDS.modality_pad, IDS.sosp, IDS.eosp, IDS.audio_pad

CODES = st.lists(st.integers(0, EOSP - 1), max_size=12).map(tuple)
WORDS = st.lists(st.integers(0, 255), min_size=1, max_size=8).map(tuple)
SPEECH = CODES.map(SpeechSegment)
SEGMENTS = st.lists(st.one_of(SPEECH, WORDS.map(TextSegment)), min_size=1, max_size=3).map(tuple)


def encode(text: str) -> list[int]:
    return list(text.encode())


def fresh(turns: list[Turn]) -> list[Row]:
    conversation = Conversation(IDS, encode)
    for turn in turns:
        conversation.add_turn(turn)
    return conversation.rows


def generated(segments: tuple[Segment, ...], noise: st.DataObject, *, speech: bool) -> Reply:
    """The rows a model draws for ``segments``: text rows carry any audio draw."""
    reply = Reply()

    def add(row: Row, mode: Mode) -> None:
        reply.rows.append(row)
        reply.modes.append(mode)

    def any_audio() -> int:
        return noise.draw(st.integers(0, EOSP - 1))

    for index, segment in enumerate(segments):
        if isinstance(segment, TextSegment):
            for token in segment.ids:
                add((token, any_audio()), Mode.TEXT)
            continue
        if not (speech and index == 0):
            add((SOSP, any_audio()), Mode.TEXT)
        for code in (*segment.codes, EOSP):
            add((PAD, code), Mode.AUDIO)
    return reply


@given(system=st.text(max_size=5), codes=CODES)
def test_a_prompt_is_laid_out_as_the_contract_says(system: str, codes: tuple[int, ...]) -> None:
    conversation = Conversation(IDS, encode)
    conversation.add_text("system", system)
    conversation.add_speech("user", codes)
    conversation.open_reply(speech=True)
    text = [257, *b"system\n", *system.encode(), 258, 10, 257, *b"user\n"]
    after = [258, 10, 257, *b"assistant\n"]
    assert conversation.rows == [
        *((token, SILENT) for token in text),
        (SOSP, SILENT),
        *((PAD, code) for code in codes),
        (PAD, EOSP),
        *((token, SILENT) for token in after),
        (SOSP, SILENT),
    ]


@given(segments=SEGMENTS, stop=st.sampled_from([IDS.im_end, IDS.endoftext]), data=st.data())
def test_a_stopped_reply_equals_a_fresh_prompt(
    segments: tuple[Segment, ...], stop: int, data: st.DataObject
) -> None:
    speech = isinstance(segments[0], SpeechSegment)
    reply = generated(segments, data, speech=speech)
    reply.rows.append((stop, data.draw(st.integers(0, EOSP))))
    reply.modes.append(Mode.TEXT)
    conversation = Conversation(IDS, encode)
    conversation.open_reply(speech=speech)
    kept = conversation.close_reply(replace(reply, finish_reason=FinishReason.STOP))
    assert conversation.rows == fresh([Turn("assistant", segments)])
    # All but the stop row and the newline have K and V.
    assert kept == len(conversation.rows) - 2


@given(codes=CODES, drawn=st.integers(0, 12), data=st.data())
def test_a_reply_cut_by_length_equals_a_fresh_prompt_of_what_was_said(
    codes: tuple[int, ...], drawn: int, data: st.DataObject
) -> None:
    reply = generated((SpeechSegment(codes),), data, speech=True)
    reply.rows, reply.modes = reply.rows[:drawn], reply.modes[:drawn]
    conversation = Conversation(IDS, encode)
    conversation.open_reply(speech=True)
    before = len(conversation.rows)
    kept = conversation.close_reply(reply)
    assert conversation.rows == fresh([Turn("assistant", (SpeechSegment(codes[:drawn]),))])
    assert kept == before + max(len(reply.rows) - 1, 0)


@given(words=WORDS, codes=CODES, played_ms=st.floats(0, 2000), data=st.data())
def test_an_interrupted_reply_keeps_exactly_the_codes_heard(
    words: tuple[int, ...], codes: tuple[int, ...], played_ms: float, data: st.DataObject
) -> None:
    reply = generated((TextSegment(words), SpeechSegment(codes)), data, speech=False)
    heard = codes_heard(played_ms)
    conversation = Conversation(IDS, encode)
    conversation.open_reply(speech=False)
    kept = conversation.close_reply(reply, heard_codes=heard)
    said = Turn("assistant", (TextSegment(words), SpeechSegment(codes[:heard])))
    assert conversation.rows == fresh([said])
    assert kept <= len(conversation.rows) - 2


@pytest.mark.parametrize(
    ("played_ms", "codes"), [(0, 0), (1, 1), (79, 1), (80, 1), (80.5, 2), (160, 2), (6000, 75)]
)
def test_played_time_is_rounded_up_to_whole_codes(played_ms: float, codes: int) -> None:
    assert codes_heard(played_ms) == codes


@given(segments=st.lists(SEGMENTS, min_size=1, max_size=3), data=st.data())
def test_several_turns_kept_equal_several_turns_built(
    segments: list[tuple[Segment, ...]], data: st.DataObject
) -> None:
    conversation, turns = Conversation(IDS, encode), list[Turn]()
    for said in segments:
        question = data.draw(CODES)
        conversation.add_speech("user", question)
        speech = isinstance(said[0], SpeechSegment)
        conversation.open_reply(speech=speech)
        reply = generated(said, data, speech=speech)
        reply.rows.append((IDS.im_end, 3))
        reply.modes.append(Mode.TEXT)
        conversation.close_reply(reply)
        turns += [Turn("user", (SpeechSegment(question),)), Turn("assistant", said)]
    assert conversation.rows == fresh(turns)


@given(rows=st.lists(st.tuples(st.sampled_from([5, PAD, SOSP, IDS.im_end]), st.integers(0, EOSP))))
def test_history_never_changes_what_a_row_embeds(rows: list[Row]) -> None:
    conversation = Conversation(IDS, encode)
    conversation.open_reply(speech=False)
    reply = Reply(list(rows), [Mode.TEXT] * len(rows))
    before = len(conversation.rows)
    kept = conversation.close_reply(reply)

    def embedded(row: Row) -> Row:
        return (PAD, row[1]) if row[0] == PAD else (row[0], -1)

    expected = [embedded(row) for row in rows[: kept - before]]
    assert [embedded(row) for row in conversation.rows[before:kept]] == expected


@given(
    first=st.tuples(st.sampled_from([5, PAD, SOSP]), st.sampled_from([SILENT, 7, EOSP])),
    rows=st.lists(
        st.tuples(st.sampled_from([5, PAD, SOSP]), st.sampled_from([SILENT, 7, EOSP])), max_size=20
    ),
)
def test_the_mode_machine_equals_the_contracts_sentences(first: Row, rows: list[Row]) -> None:
    mode = start_mode(first, IDS)
    audio = first[0] == PAD
    if first[1] == SILENT:
        audio = False
    for row in (first, *rows):
        assert mode is (Mode.AUDIO if audio else Mode.TEXT)
        if not audio and row[0] == SOSP:
            audio = True
        if audio and row[1] == EOSP:
            audio = False
        mode = next_mode(mode, row, IDS)


def test_a_row_that_opens_and_closes_goes_there_and_back() -> None:
    assert next_mode(Mode.TEXT, (SOSP, EOSP), IDS) is Mode.TEXT
    assert next_mode(Mode.TEXT, (SOSP, 3), IDS) is Mode.AUDIO
    assert next_mode(Mode.AUDIO, (PAD, EOSP), IDS) is Mode.TEXT


def test_a_second_reply_cannot_open_before_the_first_is_closed() -> None:
    conversation = Conversation(IDS, encode)
    conversation.open_reply(speech=True)
    with pytest.raises(AssertionError, match="close it first"):
        conversation.open_reply(speech=True)
