"""Long text and long recordings in pieces: nothing lost, none too long, cut where it is polite."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosstalk.audio.sound import Samples
from mosstalk.offline.pieces import cut_blocks, sound_pieces, text_pieces

RATE = 1000
CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u8d70\u5427\u3002"
"""A sentence of twelve signs without blanks, with a comma in it and a full stop at its end."""
LONG = (
    "The neighbors told us that the water will be turned off tomorrow morning, so we should fill "
    "a few bottles before we go to bed."
)


@given(
    text=st.text(alphabet='ab .,!?"\n\t。—', max_size=300),
    longest=st.integers(1, 40),
)
def test_pieces_of_text_hold_every_sign_and_none_is_too_long(text: str, longest: int) -> None:
    pieces = text_pieces(text, longest)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    for piece in pieces:
        assert 0 < len(piece) <= longest
        assert piece == " ".join(piece.split())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        (" \n\t\n ", []),
        ("One. Two.", ["One. Two."]),
        ("One line\nand the next.", ["One line and the next."]),
        ("A title\n\nIts text.", ["A title", "Its text."]),
        ("The first is here. The second too.", ["The first is here.", "The second too."]),
        ('She said "No!" And then she went.', ['She said "No!"', "And then she went."]),
        ("A version 3.5 of it is here now.", ["A version 3.5", "of it is here now."]),
        ("What was long, had a comma in it.", ["What was long,", "had a comma in it."]),
        ("No mark at all in these words", ["No mark at all", "in these words"]),
        ("One of them sang and all of us danced.", ["One of them sang", "and all of us danced."]),
        ("Yes. And what was long, had a comma.", ["Yes.", "And what was long,", "had a comma."]),
        ("a" * 30, ["a" * 24, "a" * 6]),
        (3 * CHINESE, [2 * CHINESE, CHINESE]),
    ],
)
def test_text_is_cut_at_the_politest_place_that_fits(text: str, pieces: list[str]) -> None:
    assert text_pieces(text, 24) == pieces


def test_a_long_sentence_is_cut_at_its_clauses_into_parts_of_similar_length() -> None:
    (sentence,) = text_pieces(LONG)
    assert text_pieces(LONG, 90) == [
        "The neighbors told us that the water will be turned off tomorrow morning,",
        "so we should fill a few bottles before we go to bed.",
    ]
    assert " ".join(text_pieces(LONG, 40)) == sentence
    for longest in (90, 60, 40):
        pieces = text_pieces(LONG, longest)
        assert len(pieces) <= -(-len(LONG) // longest) + 1
        assert min(map(len, pieces)) >= longest // 3
        assert not any(piece.endswith((" the", " a", " to", " and")) for piece in pieces)


def test_a_text_without_any_mark_is_cut_in_time() -> None:
    pieces = text_pieces("word and another " * 2_000 + "x" * 20_000, 90)
    assert max(map(len, pieces)) <= 90


def noise(seconds: float, seed: int = 0) -> Samples:
    samples = np.random.default_rng(seed).normal(0, 0.1, round(seconds * RATE))
    return samples.astype(np.float32)


@given(
    seconds=st.floats(0, 100),
    longest=st.floats(4, 30),
    pauses=st.lists(st.floats(0, 100), max_size=5),
)
def test_pieces_of_sound_are_the_sound_and_none_is_too_long(
    seconds: float, longest: float, pauses: list[float]
) -> None:
    samples = noise(seconds)
    for pause in pauses:
        samples[round(pause * RATE) : round((pause + 0.5) * RATE)] = 0
    pieces = sound_pieces(samples, RATE, longest)
    assert np.array_equal(np.concatenate(pieces), samples)
    assert max(map(len, pieces)) <= longest * RATE
    if len(pieces) > 1:
        assert min(map(len, pieces[:-1])) >= (longest - 1) / 2 * RATE
        assert len(pieces[-1]) >= RATE


@given(pause=st.floats(10.5, 19))
def test_sound_is_cut_within_its_pause(pause: float) -> None:
    samples = noise(30)
    samples[round(pause * RATE) : round((pause + 0.4) * RATE)] *= 0.05
    first, second = sound_pieces(samples, RATE, 20)
    assert pause <= len(first) / RATE <= pause + 0.4
    assert len(first) + len(second) == len(samples)


def test_sound_that_fits_is_left_whole() -> None:
    samples = noise(30)
    (piece,) = sound_pieces(samples, RATE, 30)
    assert piece is samples


@given(seconds=st.floats(0, 100), longest=st.floats(4, 30), block=st.floats(2, 50))
def test_sound_that_comes_in_blocks_is_cut_where_the_whole_is(
    seconds: float, longest: float, block: float
) -> None:
    samples, size = noise(seconds), int(block * RATE)
    blocks = (samples[start : start + size] for start in range(0, len(samples), size))
    pieces, whole = list(cut_blocks(blocks, RATE, longest)), sound_pieces(samples, RATE, longest)
    assert list(map(len, pieces)) == list(map(len, whole))
    assert np.array_equal(np.concatenate(pieces), samples)
