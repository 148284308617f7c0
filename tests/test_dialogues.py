"""What a small model learns to answer from: how evenly facts come, and in which words."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest

from recipes.answers import wordings
from recipes.answers.around import surrounded
from recipes.answers.decks import Dealer, Deck, little_words
from recipes.answers.dialogues import MIXED, Dialogues, Turn
from recipes.answers.facts import load_tables, read_sections
from recipes.answers.glosses import Gloss, Glosses
from recipes.answers.kinds import DO_NOT_KNOW, NUMBERS, Fact, World, is_held_out, is_learned
from recipes.answers.unknown import Unknown, read_lookalikes, read_unknown
from recipes.answers.wordings import (
    HELD_OUT_WORDINGS,
    framed,
    not_the_bench,
    plain,
    read_phrases,
    read_wordings,
    slots_of,
)

FOLDER = Path(wordings.__file__).parent
NEW_TEXTS = ("around.txt", "lookalikes.txt", "phrases.txt", "unknown_more.txt")
DEALT_ONE_BY_ONE = (
    "name", "day.after", "day.later", "month.nth", "clock.after", "clock.before", "counting.up",
    "counting.down", "opposite", "plural", "colour", "animal.young", "capital", "country",
    "continent", "currency", "language", "unit",
)  # fmt: skip


@pytest.fixture
def dealer() -> Dealer:
    known = tuple(Gloss(word, f"a {word}", f"A {word} is a thing.") for word in ("heron", "lamp"))
    tables, draw = load_tables(), random.Random(0)
    sentences = cycle(["We waited for the bus.", "My brother paints the door."])
    little = little_words(tables)
    glosses = Glosses(known, ("a gnomon", "a quern"))
    return Dealer(World(tables, glosses, sentences, draw, ("lantern",)), little)


# Facts.


def told(fact: Fact) -> tuple[str, ...]:
    """What makes a fact: what is asked, and the answer."""
    return (fact.kind, *fact.slots.values(), fact.answer)


def test_a_deck_deals_all_before_any_again() -> None:
    deck = Deck(([n] for n in range(20)), random.Random(0))
    rounds = [[deck.deal() for _ in range(20)] for _ in range(3)]
    assert all(sorted(each) == list(range(20)) for each in rounds)
    assert rounds[0] != rounds[1]


def test_a_deck_deals_one_of_each_group_and_then_the_next() -> None:
    groups = [(n, -n) for n in range(1, 10)]
    deck = Deck([*groups, ()], random.Random(0))
    first, second = ([deck.deal() for _ in groups] for _ in range(2))
    assert sorted(map(abs, first)) == sorted(map(abs, second)) == list(range(1, 10))
    assert {-n for n in first} == set(second)
    assert len(deck) == 18


@pytest.mark.parametrize("kind", DEALT_ONE_BY_ONE)
def test_each_fact_of_a_kind_comes_equally_often(dealer: Dealer, kind: str) -> None:
    facts = dealer.facts(kind)
    asked = Counter(told(dealer.ask(kind)) for _ in range(3 * len(facts)))
    assert set(asked.values()) == {3}
    assert set(asked) == set(map(told, facts))


@pytest.mark.parametrize("kind", ["plus", "minus", "times", "divided"])
def test_no_two_numbers_are_rare_in_sums(dealer: Dealer, kind: str) -> None:
    """As many as 60,000 dialogues ask have each two numbers, in one order or the other."""
    drawn = {"plus": 5000, "minus": 5000, "times": 2900, "divided": 2900}[kind]
    asked = Counter(numbers(dealer.ask(f"arithmetic.{kind}")) for _ in range(drawn))
    every = {numbers(fact) for fact in dealer.facts(f"arithmetic.{kind}")}
    assert set(asked) == every
    by_itself = World(dealer.tables, dealer.glosses, dealer.sentences, random.Random(1))
    others = {numbers(by_itself.ask(f"arithmetic.{kind}")) for _ in range(drawn)}
    assert len(others & every) < len(every)


def numbers(fact: Fact) -> frozenset[int]:
    """The two numbers that ``fact`` is learned by, whichever stands first."""
    a, b = (NUMBERS[fact.slots[name]] for name in "ab")
    if fact.kind in ("arithmetic.minus", "arithmetic.divided"):
        return frozenset((b, a - b if fact.kind == "arithmetic.minus" else a // b))
    return frozenset((a, b))


def test_facts_that_are_dealt_are_those_that_are_drawn(dealer: Dealer) -> None:
    drawn = World(dealer.tables, dealer.glosses, dealer.sentences, random.Random(2), ("lantern",))
    for kind in drawn.kinds:
        if facts := dealer.facts(kind):
            ours = [drawn.ask(kind) for _ in range(500)]
            learned = {told(fact) for fact in ours if is_learned(fact)}
            assert learned <= set(map(told, facts)), kind
            assert all(map(is_learned, facts)), kind
    assert not all(is_learned(drawn.ask("spelling")) for _ in range(200))


def test_a_table_is_learned_whole_and_a_sum_may_be_held_out(dealer: Dealer) -> None:
    assert is_held_out(dealer.times(2, 2))
    assert is_learned(dealer.times(2, 2))
    assert dealer.times(2, 2).answer in {fact.answer for fact in dealer.facts("arithmetic.times")}
    sums = [dealer.plus(a, b) for a in range(40) for b in range(40)]
    assert 20 < sum(not is_learned(fact) for fact in sums) < 120


def test_words_to_spell_are_little_ones_too(dealer: Dealer) -> None:
    asked = Counter(dealer.ask("spelling").slots["word"] in dealer.little for _ in range(2000))
    assert 0.25 < asked[True] / 2000 < 0.6
    assert {"one", "no", "down", "which", "Tuesday", "August", "third", "Peter"} <= set(
        dealer.little
    )
    assert all(word.isalpha() for word in dealer.little)


# Dialogues.


def unknown(turn: Turn) -> bool:
    return turn.answer in DO_NOT_KNOW


def test_what_is_known_often_follows_what_is_not(dealer: Dealer) -> None:
    drawn = list(islice(Dialogues(dealer), 4000))
    sorts = ["".join("u" if unknown(turn) else "k" for turn in turns) for turns in drawn]
    assert sum("uk" in each for each in sorts) / len(sorts) > MIXED
    assert sum("uuk" in each for each in sorts) / len(sorts) > MIXED / 4
    assert sum("kuk" in each for each in sorts) / len(sorts) > MIXED / 4
    turns = Counter("".join(sorts))
    assert 0.1 < turns["u"] / turns.total() < 0.2
    assert max(map(len, drawn)) == 5


def test_a_mixed_dialogue_ends_with_an_answer(dealer: Dealer) -> None:
    made = Dialogues(dealer)
    for _ in range(200):
        turns = made.mixed()
        assert not unknown(turns[-1])
        assert any(map(unknown, turns))


def test_one_may_go_astray_and_come_back(dealer: Dealer) -> None:
    """As in: the capital of Spain, and of Texas, and of Peru."""
    back = 0
    for turns in chains(dealer, "capital"):
        for first, astray, last in zip(turns, turns[1:], turns[2:], strict=False):
            if unknown(astray) and not unknown(first):
                back += 1
                assert last.kind.startswith("then.")
    assert back > 5


def chains(dealer: Dealer, kind: str) -> Iterator[list[Turn]]:
    made = Dialogues(dealer)
    for _ in range(400):
        yield made.dialogue(kind)


def test_each_turn_goes_on_from_the_one_before(dealer: Dealer) -> None:
    lengths = Counter[int]()
    for turns in chains(dealer, "arithmetic.plus"):
        lengths[len(turns)] += 1
        for before, turn in pairwise(turns):
            if turn.kind == "then.again":
                assert turn.answer == before.answer
            else:
                made = before.answer.rstrip(".").split(" is ")[1]
                assert turn.answer.lower().startswith(f"{made} ")
    assert lengths[3] > 10


def test_counting_is_asked_backwards(dealer: Dealer) -> None:
    found = 0
    for turns in chains(dealer, "counting.up"):
        for before, turn in pairwise(turns):
            if turn.kind == "then.backwards":
                said, back = (re.findall(r"[a-z-]+", t.answer.lower()) for t in (before, turn))
                assert back == said[::-1]
                found += 1
    assert found > 10


def test_another_question_about_a_country_is_about_that_country(dealer: Dealer) -> None:
    found = Counter[str]()
    for turns in chains(dealer, "capital"):
        for before, turn in pairwise(turns):
            if turn.kind.startswith("then.its_"):
                names = [country(turn.answer) for turn in (before, turn)]
                assert names[0] == names[1] != ""
                found[turn.kind] += 1
    assert {"then.its_continent", "then.its_currency", "then.its_language"} <= set(found)


def country(answer: str) -> str:
    """The longest name of a country in ``answer``, "" where there is none."""
    names = [each.name for each in load_tables().countries]
    return max((name for name in names if name.lower() in answer.lower()), key=len, default="")


# Words.


def test_each_wording_has_the_slots_of_its_kind(dealer: Dealer) -> None:
    slots = dict[str, set[str]]()
    for kind in dealer.kinds:
        for _ in range(300):
            fact: Fact | None = dealer.ask(kind)
            asked = fact
            while fact is not None and asked is not None:
                slots.setdefault(asked.kind, set(asked.slots)).intersection_update(asked.slots)
                asked = dealer.then(fact)
                fact = None if asked is None else dealer.goes_on(asked)
            if asked is not None:
                slots.setdefault(asked.kind, set(asked.slots)).intersection_update(asked.slots)
    written = read_wordings()
    assert set(slots) - {"then.again"} <= set(written)
    assert {kind for kind in written if kind.startswith("then.")} <= set(slots)
    for kind, each in written.items():
        ours = slots_of((*each.patterns, *read_phrases().get(kind, ())))
        assert ours <= slots.get(kind, set()), kind
        assert len(set(each.patterns)) == len(each.patterns), kind
    for kind, rows in read_lookalikes().items():
        assert all(set(row) == slots[kind] for row in rows), kind


def test_each_slot_of_the_unknown_has_words() -> None:
    words, patterns = read_unknown()
    assert slots_of((*patterns, *read_phrases()["unknown"])) == set(words)
    assert all(len(set(each)) == len(each) for each in words.values())


def test_no_phrase_in_a_frame_is_a_wording_of_the_bench() -> None:
    held_out = read_sections(HELD_OUT_WORDINGS)
    bench = [plain(wording) for each in held_out.values() for wording in each]
    ours = [plain(pattern) for each in read_phrases().values() for pattern in each]
    assert len(ours) > 50_000
    assert not set(ours) & set(bench)
    whole = "\n".join(f" {each} " for each in ours if len(each.split()) > 2)
    theirs = "\n".join(f" {each} " for each in bench if len(each.split()) > 2)
    assert not [each for each in bench if len(each.split()) > 2 and f" {each} " in whole]
    assert not [each for each in ours if len(each.split()) > 2 and f" {each} " in theirs]


def test_wordings_of_the_bench_are_left_out() -> None:
    held_out = read_sections(HELD_OUT_WORDINGS)
    bench = [wording for each in held_out.values() for wording in each]
    longest = max(bench, key=len)
    assert not_the_bench(tuple(bench)) == ()
    within = (f"Now then. {longest}", longest.rsplit(" ", 2)[0], "A word of ours, {word}.")
    assert not_the_bench(within) == within[2:]


def test_what_looks_like_the_known_is_in_no_table(dealer: Dealer) -> None:
    for kind, rows in read_lookalikes().items():
        known = {tuple(fact.slots.items()) for fact in dealer.facts(kind)}
        assert not known & {tuple(row.items()) for row in rows}, kind
        assert len(rows) == len({tuple(row.items()) for row in rows})
        assert Unknown(dealer).like(kind)


def test_texts_have_the_signs_that_are_read() -> None:
    for name in NEW_TEXTS:
        for line in (FOLDER / name).read_text().splitlines():
            if not line.startswith(("#", "[")):
                assert re.fullmatch(r"[A-Za-z ,.?!':|={}_]*", line), (name, line)
    patterns = [pattern for each in read_wordings().values() for pattern in each.patterns]
    found = {sign for pattern in patterns for sign in re.sub(r"\{\w+\}", "", pattern)}
    assert not {sign for sign in found if not re.fullmatch(r"[A-Za-z ,.;?!':-]", sign)}


def test_a_phrase_begins_a_sentence_where_its_frame_ends_one() -> None:
    assert framed("A test. {}?", "what is it") == "A test. What is it?"
    assert framed("So, {}?", "what is it") == "So, what is it?"


def test_what_is_said_around_a_question_leaves_its_words() -> None:
    draw = random.Random(0)
    said = [surrounded("How is {word} spelled?", draw) for _ in range(300)]
    assert len(set(said)) > 100
    assert all("ow is {word} spelled" in text for text in said)
    assert {text[0] for text in said}.isdisjoint("abcdefghijklmnopqrstuvwxyz")
    kept = "Peter's word is {word}."
    assert all(kept in surrounded(kept, draw) for _ in range(300))


def test_nothing_around_a_question_makes_a_wording_of_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recipes.answers.around.is_of_the_bench", lambda _: True)
    assert surrounded("Spell {word}.", random.Random(0)) == "Spell {word}."


def test_questions_are_asked_in_many_words(dealer: Dealer) -> None:
    monotonous = dict[str, int]()
    made = Dialogues(dealer)
    for kind in dealer.kinds:
        if not kind.startswith(("repeat", "joke", "story", "name")):
            asked = {made.dialogue(kind)[0].user for _ in range(300)}
            monotonous |= {kind: len(asked)} if len(asked) < 250 else {}
    assert not monotonous
