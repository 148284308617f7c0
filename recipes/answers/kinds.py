"""What can be asked, kind by kind: facts, the sentence that answers, and how the bench knows it.

A kind is a section of ``wordings.txt``. ``World.ask`` draws a fact of it, ``World.then`` one that
refers to the fact before it. Of kinds with rules a share of the facts is drawn for the bench alone
(``is_held_out``), and of those that are no tables no training has them (``is_learned``).
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from recipes.answers.facts import (
    DAYS,
    MONTH_DAYS,
    MONTHS,
    Country,
    Tables,
    Unit,
    in_words,
    sentence_case,
    with_article,
)
from recipes.answers.glosses import Glosses

T = TypeVar("T")
_RANKS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
RANKS = _RANKS.split()
DO_NOT_KNOW = ("I don't know that.", "Sorry, I don't know that.")
_HELD_OUT_ONE_IN = 25
_LARGEST = 100
MOST_COUNTED = 10
LAST_COUNTED = 40
_TABLES = ("arithmetic.times", "arithmetic.divided", "then.times", "day.later")
"""Kinds with rules that people learn by heart, too. Of two times two, in no training, a model said
that it is zero: from the rest of so small a table nothing else follows."""
_AGAIN = 0.08
"""Share of the second turns that ask to hear the first answer again."""


@dataclass(frozen=True)
class Fact:
    """One thing that can be asked.

    ``slots`` fill a wording of ``kind``; ``judged`` and ``right`` are those of
    ``evals.questions.Question``; ``key`` is the same for the same fact in another form.
    """

    kind: str
    slots: dict[str, str]
    answer: str
    judged: str
    right: tuple[str, ...]
    key: str = ""

    @property
    def group(self) -> str:
        """The kind's family: "month" of "month.after"."""
        return self.kind.split(".")[0]


def is_held_out(fact: Fact) -> bool:
    """Whether the bench asks for this fact rather than for others of its kind, which has rules."""
    return bool(fact.key) and zlib.crc32(fact.key.encode()) % _HELD_OUT_ONE_IN == 0


def is_learned(fact: Fact) -> bool:
    """Whether training may have this fact."""
    return fact.kind in _TABLES or not is_held_out(fact)


def letters(word: str) -> str:
    """A word's letters, as they are read one by one: "C, A, T"."""
    return ", ".join(word.upper())


def listed(words: list[str]) -> str:
    """Words with commas between, as a sentence."""
    return sentence_case(", ".join(words)) + "."


class World:
    """Draws facts by ``draw`` from the tables, definitions, words to spell, and sentences."""

    def __init__(
        self,
        tables: Tables,
        glosses: Glosses,
        sentences: Iterator[str],
        draw: random.Random,
        words: tuple[str, ...] = (),
    ) -> None:
        self.tables, self.glosses, self.sentences, self.draw = tables, glosses, sentences, draw
        self.to_spell = tuple(dict.fromkeys([*tables.to_spell, *words]))
        self._kinds: dict[str, Callable[[], Fact]] = {
            "name": lambda: self.name(self._one(tables.names)),
            "arithmetic.plus": lambda: self.plus(*self._below(0, _LARGEST)),
            "arithmetic.minus": lambda: self.minus(*self._apart()),
            "arithmetic.times": lambda: self.times(*self._factors()),
            "arithmetic.divided": self._divided,
            "day.after": lambda: self.day("after", self._one(DAYS)),
            "day.before": lambda: self.day("before", self._one(DAYS)),
            "day.later": self._day_later,
            "month.after": lambda: self.month("after", self._one(MONTHS)),
            "month.before": lambda: self.month("before", self._one(MONTHS)),
            "month.days": lambda: self.month_days(self._one(MONTHS)),
            "month.nth": lambda: self.month_nth(self._up_to_12()),
            "clock.after": lambda: self.clock("after", self._up_to_12(), self._up_to_12()),
            "clock.before": lambda: self.clock("before", self._up_to_12(), self._up_to_12()),
            "spelling": lambda: self.spelling(self._one(self.to_spell)),
            "counting.up": lambda: self.counting(*self._stretch()),
            "counting.down": lambda: self.counting(*reversed(self._stretch())),
            "opposite": lambda: self.opposite(self._one(tuple(tables.opposites))),
            "plural": lambda: self.plural(self._one(tuple(tables.plurals))),
            "colour": lambda: self.colour(self._one(tuple(tables.colours))),
            "animal.sound": lambda: self.sound(self._one(tuple(tables.sounds))),
            "animal.which": lambda: self.which_animal(self._one(tuple(tables.sounds))),
            "animal.young": lambda: self.young(self._one(tuple(tables.young))),
            "capital": lambda: self.capital(self._country("capital")),
            "country": lambda: self.of_capital(self._country("capital")),
            "continent": lambda: self.continent(self._country("continent")),
            "currency": lambda: self.currency(self._country("currency")),
            "language": lambda: self.language(self._country("language")),
            "gloss": self._gloss,
            "unit": lambda: self.unit(self._one(tables.units)),
            "joke": lambda: self._told("joke", tables.jokes),
            "story": lambda: self._told("story", tables.stories),
            "repeat.say": lambda: self._repeat("repeat.say"),
            "repeat.read": lambda: self._repeat("repeat.read"),
        }  # fmt: skip

    def ask(self, kind: str) -> Fact:
        """A fact of a kind, whether held out or not. KeyError where ``kind`` has fixed answers."""
        return self._kinds[kind]()

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that have facts."""
        return tuple(self._kinds)

    # Numbers.

    def plus(self, a: int, b: int) -> Fact:
        """``a`` and ``b`` to add."""
        return self._sum("plus", a, b, a + b, f"{min(a, b)}+{max(a, b)}")

    def minus(self, a: int, b: int) -> Fact:
        """``b``, which is not the larger, to take from ``a``."""
        return self._sum("minus", a, b, a - b, f"{a}-{b}")

    def times(self, a: int, b: int) -> Fact:
        """``a`` and ``b`` to multiply."""
        return self._sum("times", a, b, a * b, f"{min(a, b)}*{max(a, b)}")

    def _divided(self) -> Fact:
        a, b = self._factors()
        return self.divided(a, max(b, 1))

    def divided(self, a: int, b: int) -> Fact:
        """``a`` times ``b`` to divide by ``b``, which is at least 1."""
        return self._sum("divided", a * b, b, a, f"{a * b}/{b}")

    def _sum(self, name: str, a: int, b: int, made: int, key: str) -> Fact:
        said = {"divided": "divided by"}.get(name, name)
        answer = f"{sentence_case(in_words(a))} {said} {in_words(b)} is {in_words(made)}."
        slots = {"a": in_words(a), "b": in_words(b)}
        return Fact(f"arithmetic.{name}", slots, answer, "number", (in_words(made),), key)

    def _below(self, low: int, most: int) -> tuple[int, int]:
        """Two numbers whose sum is at most ``most``; small ones are as likely as large ones."""
        top = self._one((20, 50, most))
        total = self.draw.randint(low, top)
        a = self.draw.randint(low, total)
        return a, total - a

    def _apart(self) -> tuple[int, int]:
        a, b = self._below(0, _LARGEST)
        return a + b, b

    def _factors(self) -> tuple[int, int]:
        a = self.draw.randint(0, 12) if self.draw.random() < 0.9 else self.draw.randint(13, 25)
        most = min(12, _LARGEST // a) if a else 12
        b = self.draw.randint(1, max(most, 1))
        return (a, b) if self.draw.random() < 0.5 else (b, a)

    def counting(self, a: int, b: int) -> Fact:
        """The numbers from ``a`` to ``b``, up or down."""
        step = 1 if b > a else -1
        numbers = [in_words(number) for number in range(a, b + step, step)]
        kind = "counting.up" if step > 0 else "counting.down"
        slots = {"a": in_words(a), "b": in_words(b)}
        return Fact(kind, slots, listed(numbers), "number", (" ".join(numbers),), f"{a}..{b}")

    def _stretch(self) -> tuple[int, int]:
        a = self.draw.randint(1, LAST_COUNTED)
        return a, a + self.draw.randint(2, MOST_COUNTED - 1)

    # Time.

    def day(self, way: str, day: str, *, step: int = 1) -> Fact:
        """The day after or before ``day``."""
        found = DAYS[(DAYS.index(day) + (step if way == "after" else -step)) % 7]
        answer = f"The day {way} {day} is {found}."
        return Fact(f"day.{way}", {"day": day}, answer, "word", (found,))

    def _day_later(self) -> Fact:
        return self.day_later(self._one(DAYS), self.draw.randint(2, 10))

    def day_later(self, day: str, n: int) -> Fact:
        """The day ``n`` days after ``day``."""
        found = DAYS[(DAYS.index(day) + n) % 7]
        answer = f"{sentence_case(in_words(n))} days after {day} it is {found}."
        slots = {"day": day, "n": in_words(n)}
        return Fact("day.later", slots, answer, "word", (found,), f"{day}+{n}")

    def month(self, way: str, month: str) -> Fact:
        """The month after or before ``month``."""
        found = MONTHS[(MONTHS.index(month) + (1 if way == "after" else -1)) % 12]
        answer = f"The month {way} {month} is {found}."
        return Fact(f"month.{way}", {"month": month}, answer, "word", (found,))

    def month_days(self, month: str) -> Fact:
        """How long ``month`` is."""
        days = in_words(MONTH_DAYS[month])
        leap = f", or {in_words(29)} in a leap year" if month == "February" else ""
        right = f"{days} {in_words(29)}" if leap else days
        return Fact(
            "month.days", {"month": month}, f"{month} has {days} days{leap}.", "number", (right,)
        )

    def month_nth(self, n: int) -> Fact:
        """The ``n``-th month, from 1."""
        slots = {"rank": RANKS[n - 1], "n": in_words(n)}
        answer = f"The {RANKS[n - 1]} month is {MONTHS[n - 1]}."
        return Fact("month.nth", slots, answer, "word", (MONTHS[n - 1],))

    def clock(self, way: str, hour: int, n: int) -> Fact:
        """The time ``n`` hours after or before ``hour``, on a dial of twelve."""
        found = in_words((hour - 1 + (n if way == "after" else -n)) % 12 + 1)
        hours = "hour" if n == 1 else "hours"
        said = f"{sentence_case(in_words(n))} {hours} {way} {in_words(hour)} it is {found} o'clock."
        slots = {"hour": in_words(hour), "n": in_words(n)}
        return Fact(f"clock.{way}", slots, said, "number", (found,), f"{hour} {way} {n}")

    # Words.

    def spelling(self, word: str) -> Fact:
        """The letters of ``word``."""
        answer = f"{sentence_case(word)} is spelled {letters(word)}."
        return Fact("spelling", {"word": word}, answer, "letters", (word,), f"spell {word}")

    def opposite(self, word: str) -> Fact:
        """The opposite of ``word``."""
        other = self.tables.opposites[word]
        answer = f"The opposite of {word} is {other}."
        return Fact("opposite", {"word": word}, answer, "word", (other,))

    def plural(self, word: str) -> Fact:
        """The plural of ``word``."""
        many = self.tables.plurals[word]
        return Fact("plural", {"word": word}, f"The plural of {word} is {many}.", "word", (many,))

    def colour(self, thing: str) -> Fact:
        """The colour of ``thing``."""
        colour = self.tables.colours[thing]
        return Fact(
            "colour", {"thing": thing}, f"{sentence_case(thing)} is {colour}.", "word", (colour,)
        )

    def gloss(self, number: int) -> Fact:
        """A definition."""
        found = self.glosses.known[number]
        slots = {"thing": found.thing, "word": found.word}
        return Fact("gloss", slots, found.sentence, "gist", (found.sentence.split(" is ", 1)[1],))

    def _gloss(self) -> Fact:
        """Common nouns are asked about more."""
        return self.gloss(int(self.draw.random() ** 1.5 * len(self.glosses.known)))

    # Animals.

    def sound(self, animal: str) -> Fact:
        """What ``animal`` says."""
        sound = self.tables.sounds[animal]
        answer = f"{sentence_case(animal)} says {sound}."
        return Fact("animal.sound", {"animal": animal}, answer, "word", (sound,))

    def which_animal(self, animal: str) -> Fact:
        """Which animal says what ``animal`` says."""
        sound = self.tables.sounds[animal]
        bare = animal.split(" ", 1)[1]
        answer = f"{sentence_case(animal)} says {sound}."
        return Fact("animal.which", {"sound": sound}, answer, "word", (bare,))

    def young(self, animal: str) -> Fact:
        """What the young of ``animal`` are called."""
        young = self.tables.young[animal]
        slots = {"animal": animal, "animal_a": with_article(animal)}
        answer = f"A baby {animal} is called {with_article(young)}."
        return Fact("animal.young", slots, answer, "word", (young,))

    # Countries.

    def capital(self, country: Country) -> Fact:
        """The capital of a country."""
        return self._of_country("capital", country, "The capital of {country} is {right}.")

    def continent(self, country: Country) -> Fact:
        """Where a country is."""
        return self._of_country("continent", country, "{Country} is in {right}.")

    def currency(self, country: Country) -> Fact:
        """What one pays with."""
        return self._of_country("currency", country, "The currency of {country} is the {right}.")

    def language(self, country: Country) -> Fact:
        """What is spoken."""
        return self._of_country("language", country, "In {country} people speak {right}.")

    def _of_country(self, kind: str, country: Country, pattern: str) -> Fact:
        right = getattr(country, kind)
        assert right is not None
        answer = pattern.format(
            country=country.name, Country=sentence_case(country.name), right=right
        )
        return Fact(kind, {"country": country.name}, answer, "word", (right,))

    def of_capital(self, country: Country) -> Fact:
        """Which country a capital is of."""
        assert country.capital is not None
        answer = f"{country.capital} is the capital of {country.name}."
        bare = country.name.removeprefix("the ")
        return Fact("country", {"capital": country.capital}, answer, "word", (bare,))

    def _country(self, column: str) -> Country:
        return self._one([c for c in self._countries if getattr(c, column) is not None])

    @cached_property
    def _countries(self) -> list[Country]:
        return list(self.tables.countries)

    # The rest.

    def name(self, name: str) -> Fact:
        """What ``name`` is answered who introduces themselves."""
        answer = f"Nice to meet you, {name}."
        return Fact("name", {"name": name}, answer, "word", (name,))

    def unit(self, unit: Unit) -> Fact:
        """How many of the small make the big."""
        count = in_words(unit.count)
        answer = f"{sentence_case(unit.big)} has {count} {unit.small}."
        slots = {"small": unit.small, "big": unit.big}
        return Fact("unit", slots, answer, "number", (count,))

    def _told(self, kind: str, texts: tuple[str, ...]) -> Fact:
        return Fact(kind, {}, self._one(texts), "gist", texts)

    def _repeat(self, kind: str) -> Fact:
        sentence = next(self.sentences)
        return Fact(kind, {"sentence": sentence}, sentence, "same", (sentence,))

    # Second turns.

    def then(self, first: Fact) -> Fact | None:
        """A fact that is asked by referring to ``first``; None where none of ours does."""
        if self.draw.random() < _AGAIN or first.kind in ("unit", "joke", "story"):
            return replace(first, kind="then.again", slots={}, key="")
        again = {
            "capital": self.capital, "continent": self.continent,
            "currency": self.currency, "language": self.language,
        }  # fmt: skip
        if first.kind in again:
            country = self._country(first.kind)
            return replace(again[first.kind](country), kind=f"then.{first.kind}")
        if first.kind in ("opposite", "plural", "colour", "animal.sound", "gloss"):
            if first.kind == "opposite" and self.draw.random() < 0.3:
                back = self.tables.opposites.get(first.right[0])
                if back is not None:
                    return replace(self.opposite(first.right[0]), kind="then.back", slots={})
            if first.kind in ("opposite", "plural", "gloss") and self.draw.random() < 0.3:
                return self._spelled(first)
            return replace(self.ask(first.kind), kind=f"then.{first.kind.removeprefix('animal.')}")
        if first.group == "arithmetic":
            return self._on(first)
        return self._further(first)

    def _spelled(self, first: Fact) -> Fact:
        word = first.slots["word"] if first.kind == "gloss" else first.right[0]
        return replace(self.spelling(word), kind="then.spell", slots={})

    def _on(self, first: Fact) -> Fact | None:
        made = NUMBERS[first.right[0]]
        n = self.draw.randint(1, 10)
        ways = []
        if made + n <= _LARGEST:
            ways.append(("plus", self.plus))
        if made >= n:
            ways.append(("minus", self.minus))
        if 0 < made * n <= _LARGEST:
            ways.append(("times", self.times))
        if not ways:
            return None
        name, make = self._one(ways)
        return replace(make(made, n), kind=f"then.{name}", slots={"n": in_words(n)})

    def _further(self, first: Fact) -> Fact | None:
        if first.kind == "day.after":
            return replace(self.day("after", first.right[0]), kind="then.day", slots={})
        if first.kind == "month.after":
            return replace(self.month("after", first.right[0]), kind="then.month", slots={})
        if first.kind == "clock.after":
            n = self._up_to_12()
            found = self.clock("after", NUMBERS[first.right[0]], n)
            return replace(found, kind="then.hour", slots={"n": in_words(n)})
        if first.kind == "counting.up":
            last = NUMBERS[first.slots["b"]]
            return replace(self.counting(last + 1, last + 3), kind="then.more", slots={})
        if first.kind == "name":
            name = first.slots["name"]
            return Fact("then.name", {}, f"Your name is {name}.", "word", (name,))
        return None

    def _one(self, several: Sequence[T]) -> T:
        return several[self.draw.randrange(len(several))]

    def _up_to_12(self) -> int:
        return self.draw.randint(1, 12)


NUMBERS = {in_words(number): number for number in range(1001)}
