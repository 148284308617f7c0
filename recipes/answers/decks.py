"""Facts to learn from, dealt evenly: none is asked again before all others of its kind were.

``World`` draws each fact by itself, which leaves some out of any number of dialogues; a model then
answers those with its guess. ``Dealer`` has the same facts but for those held out, and more second
turns.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from recipes.answers.facts import DAYS, MONTHS, Country, Tables, in_words
from recipes.answers.kinds import (
    LAST_COUNTED,
    MOST_COUNTED,
    NUMBERS,
    RANKS,
    Fact,
    World,
    is_learned,
)

T = TypeVar("T")
_Shares = list[tuple[float, list[list[Fact]]]]
LARGEST_SUM, LARGEST_FACTOR, LARGEST_OF_TWO = 100, 12, 25
"""Sums are at most the first; one factor is at most the second, the other the third."""
_SMALL, _MIDDLE = 20, 50
_SUMS = ((0.25, 0, _SMALL), (0.3, _SMALL + 1, _MIDDLE), (0.45, _MIDDLE + 1, LARGEST_SUM))
"""Shares of the sums by their totals. There are 121, 555 and 1925 pairs of numbers in them."""
_LARGE_FACTOR = 0.15
_COMMON_NOUNS = 0.25
"""Share of the definitions that are asked twice as often as the others, the commonest first."""
_LITTLE_WORDS = 0.3
"""Share of the words to spell that are little words, numbers, names and the like."""
_SAME_AGAIN, _OF_THE_SAME = 0.6, 0.25
"""Shares of the second turns that name another thing or turn the answer around, where a kind has
such, and of those about a country that ask for something else of it."""
_NAMED = {
    name: name for name in (
        "capital", "continent", "currency", "language", "opposite", "plural", "colour", "gloss",
        "spelling", "country", "unit",
    )
} | {
    "sound": "animal.sound", "young": "animal.young", "which": "animal.which",
    "days": "month.days", "nth": "month.nth",
}  # fmt: skip
NEXT_OF = {kind: f"then.{name}" for name, kind in _NAMED.items()}
"""By kind, that of the second turn which names another thing of the same sort."""
_MORE_OF = (
    "spelling", "country", "unit", "animal.young", "animal.which", "month.days", "month.nth",
)  # fmt: skip
"""Those of them that no world has."""
_GO_ON = _NAMED | {
    "plus": "arithmetic.plus", "minus": "arithmetic.minus", "times": "arithmetic.times",
    "day": "day.after", "month": "month.after", "hour": "clock.after",
    "day_before": "day.before", "month_before": "month.before", "earlier": "clock.before",
    "its_capital": "capital", "its_continent": "continent", "its_currency": "currency",
    "its_language": "language",
}  # fmt: skip
"""The kind of a second turn's fact, where it was asked by its own."""
_COLUMNS = ("capital", "continent", "currency", "language")


class Deck(Generic[T]):
    """Deals one card of each group in a drawn order, then the next card of each, and so on."""

    def __init__(self, groups: Iterable[Sequence[T]], draw: random.Random) -> None:
        self._groups = [list(group) for group in groups if group]
        self._draw, self._round, self._left = draw, -1, list[int]()
        for group in self._groups:
            draw.shuffle(group)

    def deal(self) -> T:
        """The next card."""
        if not self._left:
            self._left = list(range(len(self._groups)))
            self._draw.shuffle(self._left)
            self._round += 1
        group = self._groups[self._left.pop()]
        return group[self._round % len(group)]

    def __len__(self) -> int:
        return sum(map(len, self._groups))


class Dealer(World):
    """A ``world`` whose facts to learn from are dealt; none of them is held out.

    ``little`` are words to spell besides its own: three in ten spelled words are of these.
    """

    def __init__(self, world: World, little: tuple[str, ...] = ()) -> None:
        super().__init__(world.tables, world.glosses, world.sentences, world.draw, world.to_spell)
        self.little = little
        self._decks = dict[str, list[tuple[float, Deck[Fact]]]]()

    def ask(self, kind: str) -> Fact:
        """A fact of a kind that is not held out; jokes, stories and sentences are drawn."""
        if kind not in self._decks:
            groups = self._groups[kind]() if kind in self._groups else []
            self._decks[kind] = [
                (share, Deck(map(_learned, cards), self.draw)) for share, cards in groups
            ]
        decks = [(share, deck) for share, deck in self._decks[kind] if len(deck)]
        if not decks:
            return super().ask(kind)
        (deck,) = self.draw.choices([each for _, each in decks], [share for share, _ in decks])
        return deck.deal()

    def facts(self, kind: str) -> list[Fact]:
        """All facts that ``ask`` deals of a kind, some twice; none where they are drawn."""
        shares = self._groups[kind]() if kind in self._groups else []
        return [fact for _, groups in shares for group in groups for fact in _learned(group)]

    @cached_property
    def _groups(self) -> dict[str, Callable[[], _Shares]]:
        """By kind, groups of facts that one learns from each other, and their shares."""
        tables, clock = self.tables, [(h, n) for h in range(1, 13) for n in range(1, 13)]
        return {
            "name": lambda: _single(self.name(name) for name in tables.names),
            "arithmetic.plus": lambda: self._sums(lambda a, b: self.plus(a, b)),
            "arithmetic.minus": lambda: self._sums(lambda a, b: self.minus(a + b, b)),
            "arithmetic.times": lambda: self._products(self.times, least=0),
            "arithmetic.divided": lambda: self._products(self.divided, least=1),
            "day.after": lambda: _single(self.day("after", day) for day in DAYS),
            "day.before": lambda: _single(self.day("before", day) for day in DAYS),
            "day.later": lambda: _single(
                self.day_later(day, n) for day in DAYS for n in range(2, 11)
            ),
            "month.after": lambda: _single(self.month("after", month) for month in MONTHS),
            "month.before": lambda: _single(self.month("before", month) for month in MONTHS),
            "month.days": lambda: _single(map(self.month_days, MONTHS)),
            "month.nth": lambda: _single(map(self.month_nth, range(1, 13))),
            "clock.after": lambda: _single(self.clock("after", *at) for at in clock),
            "clock.before": lambda: _single(self.clock("before", *at) for at in clock),
            "spelling": self._spellings,
            "counting.up": lambda: _single(self.counting(a, b) for a, b in _stretches()),
            "counting.down": lambda: _single(self.counting(b, a) for a, b in _stretches()),
            "opposite": lambda: _single(map(self.opposite, tables.opposites)),
            "plural": lambda: _single(map(self.plural, tables.plurals)),
            "colour": lambda: _single(map(self.colour, tables.colours)),
            "animal.sound": lambda: _single(map(self.sound, tables.sounds)),
            "animal.which": lambda: _single(map(self.which_animal, tables.sounds)),
            "animal.young": lambda: _single(map(self.young, tables.young)),
            "capital": lambda: _single(map(self.capital, self._that_have("capital"))),
            "country": lambda: _single(map(self.of_capital, self._that_have("capital"))),
            "continent": lambda: _single(map(self.continent, self._that_have("continent"))),
            "currency": lambda: _single(map(self.currency, self._that_have("currency"))),
            "language": lambda: _single(map(self.language, self._that_have("language"))),
            "gloss": self._definitions,
            "unit": lambda: _single(map(self.unit, tables.units)),
        }  # fmt: skip

    def _sums(self, make: Callable[[int, int], Fact]) -> _Shares:
        """Two numbers, either first, by their total."""
        return [
            (share, [
                [make(a, total - a), make(total - a, a)][: 2 if 2 * a < total else 1]
                for total in range(low, high + 1) for a in range(total // 2 + 1)
            ])
            for share, low, high in _SUMS
        ]  # fmt: skip

    def _products(self, make: Callable[[int, int], Fact], least: int) -> _Shares:
        """Two factors, either first; the second is at least ``least``."""
        small = [(a, b) for b in range(1, LARGEST_FACTOR + 1) for a in range(b + 1)]
        large = [
            (a, b) for b in range(LARGEST_FACTOR + 1, LARGEST_OF_TWO + 1)
            for a in range(1, LARGEST_SUM // b + 1)
        ]  # fmt: skip
        return [
            (share, [
                [make(a, b)] + ([make(b, a)] if least <= a < b else []) for a, b in factors
            ])
            for share, factors in ((1 - _LARGE_FACTOR, small), (_LARGE_FACTOR, large))
        ]  # fmt: skip

    def _spellings(self) -> _Shares:
        groups = [
            [[self.spelling(word)] for word in words] for words in (self.to_spell, self.little)
        ]
        return [(1 - _LITTLE_WORDS, groups[0]), (_LITTLE_WORDS, groups[1])]

    def _definitions(self) -> _Shares:
        facts = [[self.gloss(number)] for number in range(len(self.glosses.known))]
        common = facts[: int(_COMMON_NOUNS * len(facts))]
        return [(1, [*facts, *common])]

    def _that_have(self, column: str) -> list[Country]:
        return [each for each in self.tables.countries if getattr(each, column) is not None]

    # Second turns.

    def then(self, first: Fact) -> Fact | None:
        """Of more kinds than a world's: the next word to spell, the numbers backwards."""
        if first.kind in _MORE_OF and self.draw.random() < _SAME_AGAIN:
            return self.another(first.kind)
        about_country = first.kind in _COLUMNS or first.kind == "country"
        if about_country and self.draw.random() < _OF_THE_SAME:
            return self._of_the_same(first)
        made = self._other_way(first) if self.draw.random() < _SAME_AGAIN else None
        return made or super().then(first)

    def another(self, kind: str) -> Fact:
        """A fact of ``kind``, one of ``NEXT_OF``, as a second turn names it: "And of Peru?"."""
        return replace(self.ask(kind), kind=NEXT_OF[kind])

    def goes_on(self, second: Fact) -> Fact | None:
        """``second`` as a third turn may refer to it; None where none does."""
        name = second.kind.removeprefix("then.")
        if name not in _GO_ON:
            return None
        kind = _GO_ON[name]
        if kind in _COLUMNS and "country" not in second.slots:
            return None
        return replace(second, kind=kind)

    def _of_the_same(self, first: Fact) -> Fact | None:
        """Another fact of the country that was asked about: "And what do they speak there?"."""
        if first.kind == "country":
            found = [
                each for each in self.tables.countries if each.capital == first.slots["capital"]
            ]
        else:
            found = [each for each in self.tables.countries if each.name == first.slots["country"]]
        have = [
            column for column in _COLUMNS
            if found and column != first.kind and getattr(found[0], column) is not None
            and (first.kind, column) != ("country", "capital")
        ]  # fmt: skip
        if not have:
            return None
        column = self._one(have)
        fact: Fact = getattr(self, column)(found[0])
        return replace(fact, kind=f"then.its_{column}")

    def _other_way(self, first: Fact) -> Fact | None:
        if first.kind in ("counting.up", "counting.down") and first.slots:
            a, b = (NUMBERS[first.slots[name]] for name in "ba")
            return replace(self.counting(a, b), kind="then.backwards", slots={})
        if first.kind in ("day.before", "month.before"):
            group = first.group
            back = self.day if group == "day" else self.month
            return replace(back("before", first.right[0]), kind=f"then.{group}_before", slots={})
        if first.kind == "clock.before":
            n = self._up_to_12()
            found = self.clock("before", NUMBERS[first.right[0]], n)
            return replace(found, kind="then.earlier", slots={"n": found.slots["n"]})
        return None


def little_words(tables: Tables) -> tuple[str, ...]:
    """Words to spell that are short, or numbers, ranks, days, months, names and colours."""
    lines = Path(__file__).with_name("little_words.txt").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    numbers = [in_words(number) for number in (*range(21), *range(30, 100, 10))]
    countries = [country.name for country in tables.countries if country.name.isalpha()]
    colours = tables.colours.values()
    every = (*words, *numbers, *RANKS, *DAYS, *MONTHS, *tables.names, *colours, *countries)
    return tuple(dict.fromkeys(every))


def _single(facts: Iterable[Fact]) -> _Shares:
    """Each fact in a group of its own."""
    return [(1, [[fact] for fact in facts])]


def _learned(facts: Iterable[Fact]) -> list[Fact]:
    return [fact for fact in facts if is_learned(fact)]


def _stretches() -> Iterator[tuple[int, int]]:
    """First and last numbers of all stretches that are counted."""
    for a in range(1, LAST_COUNTED + 1):
        for b in range(a + 2, a + MOST_COUNTED):
            yield a, b
