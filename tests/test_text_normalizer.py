"""Text that is read aloud: in words, with a note of what is left out, or refused in one line."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosstalk.errors import TextError
from mosstalk.offline.text_normalizer import TextRules, readable

ENGLISH = TextRules(90, ("en",), normalize=True)
CHINESE = TextRules(90, ("zh",), normalize=True)
BOTH = TextRules(90, ("en", "zh"), normalize=True)
SPOKEN = [
    ("I have 3 cats and 21 dogs.", "I have three cats and twenty one dogs."),
    ("It costs $3.50 today.", "It costs three dollars and fifty cents today."),
    ("€12, £1.01 and $0.99", "twelve euros, one pound and one penny and ninety nine cents"),
    ("$1,000 or $5 million", "one thousand dollars or five million dollars"),
    ("Meet me at 3:45 pm.", "Meet me at three forty five pee em."),
    ("Is it 7 p.m.?", "Is it seven pee em?"),
    ("at 3:00 and 15:30", "at three o'clock and fifteen thirty"),
    ("Run 5 km at 20 °C.", "Run five kilometers at twenty degrees Celsius."),
    ("5 kg, 2.5 l and 10 m", "five kilograms, two point five liters and ten meters"),
    ("50% off, ½ price", "fifty percent off, one half price"),
    ("In 1995 and the 1990s", "In nineteen ninety five and the nineteen nineties"),
    ("the 3rd of May", "the third of May"),
    ("10\u201315 people", "ten to fifteen people"),
    ("Call 555-1234.", "Call five five five, one two three four."),
    ("Version 2.0.1", "Version two point zero point one"),
    ("The U.S.A. won.", "The you ess ay won."),
    ("J. K. Rowling wrote it.", "Jay kay Rowling wrote it."),
    ("The CEO flew on a B-52.", "The see ee oh flew on a bee-fifty two."),
    ("Do NOT touch the TVs.", "Do not touch the tee vees."),
    ("STOP IT NOW!", "Stop it now!"),
    ("Dr. Smith and Mrs. Brown", "Doctor Smith and Missus Brown"),
    ("fruit, e.g. apples, etc.", "fruit, for example apples, et cetera."),
    ("St. John, 10th Ave.", "Saint John, tenth avenue."),
    ("AT&T, #1 and C++", "Ay tee and tee, number one and see plus plus"),
    ("She said No. It is 3 µm, or 2π?", "She said no. It is three micrometers, or two pi?"),
    ("No. 5 and № 6", "Number five and number six"),
    ("joe@example.com", "joe at example dot com"),
    ("Café naïve Straße", "Cafe naive Strasse"),
    ("It was his; right: so (they) said...", "It was his, right, so, they, said."),
    ("“Really?!!” — yes", "Really? yes"),
    ("Ｆｕｌｌ　ｗｉｄｔｈ", "Full width"),  # noqa: RUF001
]


@pytest.mark.parametrize(("written", "spoken"), SPOKEN)
def test_what_is_written_is_spelled_as_it_is_said(written: str, spoken: str) -> None:
    found = readable(written, ENGLISH)
    assert (found.text, found.left_out) == (spoken, ())


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("今天是2024年5月12日，气温20°C。", "今天是二零二四年五月十二日，气温二十摄氏度。"),  # noqa: RUF001
        ("下午3:45，价格是3.50元。", "下午三点四十五分，价格是三点五零元。"),  # noqa: RUF001
        ("跑5km，打5折，涨了3.5%。", "跑五公里，打五折，涨了百分之三点五。"),  # noqa: RUF001
        ("联系A4。", "联系A四。"),
    ],
)
def test_chinese_is_spelled_as_it_is_said(written: str, spoken: str) -> None:
    assert readable(written, CHINESE).text == spoken


def test_each_sentence_of_two_languages_is_spelled_in_its_own() -> None:
    assert readable("他有3只猫。 It costs $5.", BOTH).text == "他有三只猫。 It costs five dollars."


@pytest.mark.parametrize(
    ("written", "spoken", "left_out"),
    [
        ("Hi 😀 there 🎉🎉!", "Hi there!", ("😀", "🎉🎉")),
        ("A 👨‍👩‍👧 and a 👍🏽.", "A and a.", ("👨‍👩‍👧", "👍🏽")),
        ("**Bold** and # more", "Bold and more", ("**", "#")),
        ("★ one ★", "one", ("★",)),
    ],
)
def test_signs_without_words_are_left_out_with_a_note(
    written: str, spoken: str, left_out: tuple[str, ...]
) -> None:
    found = readable(written, ENGLISH)
    assert (found.text, found.left_out) == (spoken, left_out)
    assert found.note == f"left out, having no words: {' '.join(left_out)}"


@pytest.mark.parametrize(
    ("written", "rules", "complaint"),
    [
        ("Привет", ENGLISH, "reads English alone, and 'Привет' is written in Cyrillic"),
        ("Say Привет, please.", ENGLISH, "'Привет,' is written in Cyrillic"),
        ("你好", ENGLISH, "'你好' is written in Chinese; give English text"),
        ("Καλημέρα", BOTH, "reads English and Chinese alone, and 'Καλημέρα' is written in Greek"),
        ("こんにちは", CHINESE, "is written in Hiragana"),
        ("!!!", ENGLISH, "no word to read aloud in '!!!'"),
        ("😀 🎉", ENGLISH, "no word to read aloud in '😀 🎉'"),
        ("……", CHINESE, "no word to read aloud"),
        ("Привет", TextRules(languages=("en",)), "is written in Cyrillic"),
        ("!!!", TextRules(languages=("en",)), "no word to read aloud"),
        (" \n", ENGLISH, "the text is empty"),
        (" \n", TextRules(), "the text is empty"),
    ],
)
def test_what_a_checkpoint_cannot_read_is_refused_in_one_line(
    written: str, rules: TextRules, complaint: str
) -> None:
    with pytest.raises(TextError, match=re.escape(complaint)) as refused:
        readable(written, rules)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["It costs $3.50 😀", "Привет", "!!!", "Dr. Who,\nat 3:45 pm\n\n…"]
)
def test_where_the_checkpoint_asks_for_nothing_text_stays_as_it_is(text: str) -> None:
    assert readable(text, TextRules()).text == text


def test_words_stay_as_they_are_and_paragraphs_apart() -> None:
    text = "Good morning, how are you? I'm well-rested.\n\nThe train is late."
    found = readable(f"\n\n{text}\n\n😀\n", ENGLISH)
    assert (found.text, found.left_out) == (text, ("😀",))


def test_words_alone_need_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wetext", None)
    assert readable("We ran out of milk. Stop!", ENGLISH).text == "We ran out of milk. Stop!"
    with pytest.raises(ImportError):
        readable("We ran out of 3 things.", ENGLISH)


def test_pieces_are_counted_in_the_characters_that_are_spoken() -> None:
    found = readable(
        "It costs $1,234.56 and that is all that there is to say of it today.", ENGLISH
    )
    assert len(found.pieces) == 2
    assert max(map(len, found.pieces)) <= 90
    assert " ".join(found.pieces) == found.text


WRITTEN = st.text(
    alphabet=st.one_of(
        st.sampled_from("0123456789.,:;$€£%&@+=#/()'\"-\u2013\u2014\u2026 \n"),
        st.sampled_from("abcdefgmpstxyzABCDEIKMPSTUéüßø"),
        st.sampled_from("😀★½²°№™①٣"),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(text=WRITTEN)
def test_whatever_is_written_comes_out_in_plain_words(text: str) -> None:
    try:
        found = readable(text, ENGLISH)
    except TextError:
        assert not re.search(r"[a-zA-Z0-9]", text)
        return
    assert re.fullmatch(r"[a-zA-Z' ,.?!\n-]*[a-zA-Z][a-zA-Z' ,.?!\n-]*", found.text)
    assert not re.search(r"^[,.?!]|[.?!]{2}| [,.?!]|  ", found.text)
