"""The bench's questions: what they are, how they were drawn, and how answers are judged."""

import json
import random
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest
from conftest import lacking
from typer.testing import CliRunner

from evals.questions import (
    UNKNOWN,
    Question,
    judge,
    line_of,
    numbers_in,
    rates,
    read_questions,
)
from mosstalk.errors import BenchError
from mosstalk.reporting.sentences import read_sentences
from recipes.answers.__main__ import WORDNET, app
from recipes.answers.dialogues import Dialogues
from recipes.answers.facts import load_tables, read_sections
from recipes.answers.glosses import Gloss, Glosses
from recipes.answers.kinds import Fact, World, is_learned
from recipes.answers.questions import Questions, families
from recipes.answers.unknown import read_unknown
from recipes.answers.wordings import HELD_OUT_WORDINGS, plain, read_wordings, worded

NO = "I don't know that."


@pytest.fixture(scope="module")
def every() -> tuple[Question, ...]:
    return read_questions()


@pytest.fixture
def wordnet() -> None:
    if not (WORDNET / "data.noun").exists():
        lacking("needs Debian's wordnet-base; install what scripts/system-packages.txt names")


def world(seed: int = 0) -> World:
    known = tuple(
        Gloss(word, f"a {word}", f"A {word} is {gloss}.")
        for word, gloss in (("heron", "a grey bird"), ("lamp", "a thing that gives light"))
    )
    sentences = cycle(["We waited for the bus.", "My brother paints the door."])
    draw = random.Random(seed)
    return World(load_tables(), Glosses(known, ("a gnomon",)), sentences, draw, ("lantern",))


def test_there_are_enough_of_each_sort(every: tuple[Question, ...]) -> None:
    single = [question for question in every if len(question.turns) == 1]
    assert sum(question.group != UNKNOWN for question in single) == 300
    assert Counter(q.novelty for q in single if q.group == UNKNOWN) == {"known": 30, "new": 30}
    assert len(every) - len(single) == 44
    assert len({question.turns for question in every}) == len(every)


def test_every_wording_is_asked(every: tuple[Question, ...]) -> None:
    asked = Counter(plain(turn) for question in every for turn in question.turns)
    for kind, wordings in read_sections(HELD_OUT_WORDINGS).items():
        found = {wording: asked_with(wording, asked) for wording in wordings}
        assert all(found.values()), (kind, found)


def asked_with(wording: str, asked: Counter[str]) -> int:
    """How many questions have the words of ``wording`` around its slots."""
    parts = [part.strip() for part in plain(wording).split("_")]
    return sum(
        count
        for text, count in asked.items()
        if all(part in text for part in parts)
        and text.startswith(parts[0])
        and text.endswith(parts[-1])
    )


def test_kinds_with_rules_ask_new_facts_alone(every: tuple[Question, ...]) -> None:
    ruled = {"arithmetic", "spelling", "counting", "clock", "repeat"}
    for question in (each for each in every if each.group in ruled):
        table = any(word in question.answers[-1] for word in (" times ", " divided by "))
        assert question.new is not table, line_of(question)
    held_out = set(read_sentences())
    repeated = [question.right[0] for question in every if question.group == "repeat"]
    assert set(repeated) <= held_out
    assert all(4 <= len(sentence.split()) <= 9 for sentence in repeated)


def test_each_answer_of_ours_is_right_and_not_knowing_is_not(every: tuple[Question, ...]) -> None:
    for question in every:
        assert judge(question, question.answers[-1]), line_of(question)
        assert judge(question, NO) is (question.group == UNKNOWN), line_of(question)


def test_the_answer_to_another_question_of_the_group_is_wrong(every: tuple[Question, ...]) -> None:
    for question in every:
        for other in every:
            # Two countries may have one currency, and every joke is one.
            alike = {*other.right, *other.answers[-1:]} & {*question.right, *question.answers[-1:]}
            kinds = {(each.group, each.judged) for each in (question, other)}
            if len(kinds) == 1 and not alike:
                assert not judge(question, other.answers[-1]), (question, other.answers)


def test_no_question_is_answered_by_its_own_words(every: tuple[Question, ...]) -> None:
    """As a model does that repeats what it is told."""
    for question in every:
        assert not judge(question, question.turns[-1]), question


def one(group: str, question: str, answer: str, every: tuple[Question, ...]) -> Question:
    """A question of ``group`` with the family that ``questions.txt`` has for it."""
    like = next(q for q in every if q.group == group and q.judged != "number")
    right = answer.rstrip(".").split()[-1]
    return Question(group, "known", like.judged, (question,), (right,), (answer,), like.family)


@pytest.mark.parametrize(
    ("right", "heard"),
    [
        ("forty-three", "Forty plus three is 43."),
        ("eight", "15-7 is 8"),
        ("four", "20/5 is 4."),
        ("five six seven", "5, 6, 7."),
        ("five six seven", "567"),
        ("forty-two", "It is 4t2."),
        ("twelve", "Nine hours after three it is 12:00."),
        ("three hundred sixty-five", "A year has 365 days."),
    ],
)
def test_numbers_are_right_in_digits_too(right: str, heard: str) -> None:
    turns = ("What is forty and three, fifteen less seven, twenty by five, nine after three?",)
    question = Question("arithmetic", "new", "number", turns, (right,), ("",))
    assert judge(question, heard)
    assert not judge(question, f"{heard} And 99.")
    assert not judge(question, "Two.")


def test_numbers_are_found_among_signs() -> None:
    assert numbers_in("7\u00d78 is 56, 20 / 5 is a hundred and four") == [7, 8, 56, 20, 5, 104]


@pytest.mark.parametrize(
    "heard",
    [
        "Cat is spelled C, A, T.",
        "Cat is spelled C-A-T",
        "CAT is spelt C.A.T.",
        "c-a-t",
        "Cat a spelt C A T",
    ],
)
def test_letters_are_right_however_they_are_parted(heard: str) -> None:
    cat = Question("spelling", "new", "letters", ("Spell cat.",), ("cat",), ("",))
    assert judge(cat, heard)
    assert not judge(cat, heard.replace("T", "D").replace("t", "d").replace("Cad", "Cat"))
    assert not judge(cat, "Cat is spelled cat.")


@pytest.mark.parametrize(
    ("group", "asked", "answer", "heard", "is_right"),
    [
        ("capital", "Burkina Faso", "Ouagadougou", "Wagadugu", True),
        ("capital", "Burkina Faso", "Ouagadougou", "Waga Dugu", True),
        ("capital", "Burkina Faso", "Ouagadougou", "Bamako", False),
        ("capital", "Burkina Faso", "Ouagadougou", "water", False),
        ("capital", "Kyrgyzstan", "Bishkek", "Bishkeck", True),
        ("capital", "Kazakhstan", "Astana", "Bishkeck", False),
        ("capital", "Norway", "Oslo", "Aslo", True),
        ("capital", "Norway", "Oslo", "Also Rome", False),
        ("country", "Tbilisi", "Georgia", "Jorja", False),
        ("country", "Niamey", "Niger", "Nigeria", False),
        ("currency", "Bhutan", "ngultrum", "gultrum", True),
        ("name", "I am Rachel.", "Rachel", "Rachael", True),
        ("colour", "snow", "white", "wight", False),
        ("opposite", "sell", "buy", "by", True),
    ],
)
def test_a_name_may_be_spelled_otherwise_but_not_be_another(
    every: tuple[Question, ...], group: str, asked: str, answer: str, heard: str, is_right: bool
) -> None:
    question = one(group, f"What is it of {asked}?", f"It is {answer}.", every)
    assert judge(question, f"That of {asked} is {answer}.")
    assert judge(question, f"That of {asked} is {heard}.") is is_right


def test_a_word_that_was_said_before_is_right_in_the_last_place_alone() -> None:
    family = frozenset((("hot",), ("cold",), ("big",)))
    turns = ("Turn hot around.", "And the other way round?")
    answers = ("The opposite of hot is cold.", "The opposite of cold is hot.")
    back = Question("opposite", "known", "word", turns, ("hot",), answers, family)
    assert judge(back, answers[1])
    assert not judge(back, answers[0])
    assert not judge(back, "The opposite of big is hot.")


def test_rates_are_counted_by_group_and_apart() -> None:
    def asked(group: str, novelty: str, turns: int) -> Question:
        return Question(group, novelty, "word", ("?",) * turns, ("a",), ("a",) * turns)

    found = {
        rate.group: (rate.rate.value, rate.rate.n)
        for rate in rates(
            [
                (asked("day", "known", 1), True), (asked("clock", "new", 1), False),
                (asked("day", "known", 2), True), (asked(UNKNOWN, "new", 1), True),
            ]
        )
    }  # fmt: skip
    assert found == {
        "clock": (0.0, 1), "day": (1.0, 1), "all inside the domain": (0.5, 2),
        "of them with new facts": (0.0, 1), "second turn": (1.0, 1), "outside the domain": (1.0, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["day | known | word | a? | b", "day | old | word | a? | b | b", "day | new | word | a | b | "
     "c >> d", "day | new | guess | a | b | b"],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.txt"
    path.write_text(f"# none\n{line}\n")
    with pytest.raises(BenchError, match="line 2 is no question"):
        read_questions(path)


def test_a_question_is_read_as_it_was_written(every: tuple[Question, ...], tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(map(line_of, every)))
    bare = [Question(**(vars(q) | {"family": frozenset()})) for q in every]
    assert list(read_questions(path)) == bare


# Training and bench apart.


def test_no_wording_of_the_training_is_one_of_the_bench() -> None:
    """Neither holds the other, but for one or two words such as "And {thing}?" and "Go on."."""
    held_out = read_sections(HELD_OUT_WORDINGS)
    bench = [plain(wording) for wordings in held_out.values() for wording in wordings]
    training = [pattern for each in read_wordings().values() for pattern in each.patterns]
    for pattern in (*training, *read_unknown()[1]):
        ours = plain(pattern)
        for theirs in bench:
            assert ours != theirs, pattern
            if min(len(ours.split()), len(theirs.split())) > 2:
                assert f" {ours} " not in f" {theirs} ", (pattern, theirs)
                assert f" {theirs} " not in f" {ours} ", (pattern, theirs)


def test_dialogues_to_learn_from_have_no_fact_or_question_of_the_bench(
    every: tuple[Question, ...],
) -> None:
    facts = world()
    drawn = list[Fact | None]()
    ask, then = facts.ask, facts.then

    def asked(kind: str) -> Fact:
        fact = ask(kind)
        drawn.append(fact)
        return fact

    def followed(first: Fact) -> Fact | None:
        drawn.append(then(first))
        return drawn[-1]

    facts.ask, facts.then = asked, followed  # type: ignore[method-assign]
    turns = [turn for some in islice(Dialogues(facts), 5000) for turn in some]
    held_out = {fact.answer for fact in drawn if fact and not is_learned(fact)}
    assert len(held_out) > 20
    assert not held_out & {turn.answer for turn in turns}
    bench = {plain(turn) for question in every for turn in question.turns}
    assert not bench & {plain(turn.user) for turn in turns}


def test_questions_are_drawn_alike_each_time() -> None:
    first, second = (Questions(world(seed)) for seed in (1, 2))
    texts = [[line_of(q) for q in islice(drawn.singles(), 60)] for drawn in (first, second)]
    assert texts[0] == texts[1]


def test_families_hold_every_right_word() -> None:
    found = families(load_tables())
    assert "Oslo" in found["capital"]
    assert {"moo", "cow", "calf"} <= set(found["animal"])
    assert "Netherlands" in found["country"]


def test_a_wording_is_filled_and_begins_with_a_capital() -> None:
    assert worded("{thing}: what is it?", {"thing": "a heron"}) == "A heron: what is it?"


@pytest.mark.system
@pytest.mark.usefixtures("wordnet")
def test_the_shipped_questions_are_what_the_command_draws(tmp_path: Path) -> None:
    out = tmp_path / "questions.txt"
    run = CliRunner().invoke(app, ["questions", str(out)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "404 questions" in run.output
    assert out.read_text() == (HELD_OUT_WORDINGS.with_name("questions.txt")).read_text()


@pytest.mark.system
@pytest.mark.usefixtures("wordnet")
def test_dialogues_are_written_a_line_each(tmp_path: Path) -> None:
    out = tmp_path / "dialogues.jsonl"
    words = ["dialogues", str(out), "--count", "12", "--definitions", "50"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    assert {key for row in rows for turn in row["turns"] for key in turn} == {
        "user", "answer", "kind",
    }  # fmt: skip
