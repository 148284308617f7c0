"""Two spellings of one utterance count as no error; two utterances do."""

import pytest

from evals.words import (
    cardinal,
    compared,
    error_rate,
    normalised,
    ordinal,
    spell_numbers,
    word_errors,
    year,
)

SAME = [
    ("Please, call ME back!", "please call me back"),
    ("I'm sure we can't, and they won't.", "I am sure we can not and they will not"),
    ("It\u2019s what he\u2019d want", "it is what he would want"),
    ("Let's go, we've time", "let us go we have time"),
    ("The colour of the theatre is grey.", "the color of the theater is gray"),
    ("The next bus is at 7:30 p.m.", "the next bus is at seven thirty PM"),
    ("at 10am, 5km away", "at ten am five km away"),
    ("It leaves in 10 minutes", "It leaves in ten minutes."),
    ("That is $2.50 for 12 eggs", "That is two dollars fifty for twelve eggs"),
    (
        "on the 21st, 50% of 1,205",
        "on the twenty first fifty percent of one thousand two hundred five",
    ),
    ("back in 1995", "back in nineteen ninety five"),
    ("a twenty-five year old", "a 25-year-old"),
    ("They want ice cream every day.", "They want icecream everyday."),
    ("Is anyone at the cafe & bar?", "Is any one at the café and bar?"),
    ("OK, I'm gonna go", "okay I am going to go"),
    ("My sister's keys", "my sisters keys"),
]
OTHER = [
    ("I can do it", "I can't do it", 1),
    ("thirteen eggs", "thirty eggs", 1),
    ("at seven thirty", "at 7:13", 1),
    ("an ice cream", "a nice scream", 3),
    ("he is here", "she is here", 1),
    ("ten minutes", "", 2),
]


@pytest.mark.parametrize(("said", "written"), SAME)
def test_another_spelling_is_no_error(said: str, written: str) -> None:
    assert error_rate([said], [written]) == 0
    assert error_rate([written], [said]) == 0


@pytest.mark.parametrize(("said", "written", "edits"), OTHER)
def test_other_words_are_errors(said: str, written: str, edits: int) -> None:
    assert word_errors([said], [written])[0].edits == edits


def test_a_compound_never_changes_how_many_words_were_said() -> None:
    for said, words in (("ice cream", 2), ("icecream", 1)):
        for written in ("ice cream", "icecream", "ice", "the ice cream"):
            assert word_errors([said], [written])[0].length == words


def test_the_rate_is_over_all_words_together_not_a_mean_of_rates() -> None:
    said = ["yes", "one two three four five six seven eight nine"]
    assert error_rate(said, ["no", said[1]]) == pytest.approx(1 / 10)
    assert error_rate(["stop"], ["do not stop at all"]) == 4


def test_a_rate_over_no_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference"):
        error_rate(["..."], ["hello"])
    with pytest.raises(ValueError, match="shorter"):
        error_rate(["one", "two"], ["one"])


def test_words_are_compared_in_their_place() -> None:
    pairs = compared("Wash the old car today.", "Watch the car today, please!")
    edits = [pair.kind for pair in pairs]
    assert edits == ["substitution", "match", "deletion", "match", "match", "insertion"]


def test_nothing_but_letters_is_left() -> None:
    words = normalised("Wow -- 3.5% of 20,000 at 9:05? #1, 'quoted' naïve…")
    assert all(word.isalpha() and word.isascii() and word.islower() for word in words)
    assert words[:5] == ["wow", "three", "point", "five", "percent"]
    assert words[-2:] == ["quoted", "naive"]


def test_numbers_read_as_english_reads_them() -> None:
    assert cardinal(0) == "zero"
    assert cardinal(1_000_017) == "one million seventeen"
    assert cardinal(999_999) == ("nine hundred ninety nine thousand nine hundred ninety nine")
    assert [ordinal(n) for n in (1, 12, 20, 33)] == [
        "first",
        "twelfth",
        "twentieth",
        "thirty third",
    ]
    assert [year(n) for n in (1800, 1907, 2003, 2026)] == [
        "eighteen hundred",
        "nineteen oh seven",
        "two thousand three",
        "twenty twenty six",
    ]
    assert spell_numbers("the 90s").split() == ["the", "nineties"]
    assert spell_numbers("9:00").split() == ["nine", "o'clock"]
    assert spell_numbers("1234567890123").split()[:3] == ["one", "two", "three"]
