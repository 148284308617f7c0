"""The bench's questions, drawn once: held-out wordings, and of kinds with rules held-out facts.

``evals/questions.txt`` is what ``python -m recipes.answers questions`` writes. Each kind draws by
itself, so that a change of one leaves the others as they are.
"""

import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from evals.questions import UNKNOWN, Question, line_of
from mosstalk.reporting.sentences import read_sentences
from recipes.answers.facts import DAYS, MONTHS, Tables, read_sections
from recipes.answers.kinds import DO_NOT_KNOW, Fact, World, is_held_out, is_learned
from recipes.answers.wordings import HELD_OUT_WORDINGS, read_wordings, worded

_TIMES = {
    "gloss": 8, "capital": 5, "spelling": 5, "arithmetic.plus": 4, "arithmetic.minus": 4,
    "arithmetic.times": 3, "arithmetic.divided": 3, "country": 3, "continent": 3, "currency": 3,
    "language": 3, "opposite": 3, "plural": 3, "unit": 3, "repeat.say": 3, "repeat.read": 3,
    "joke": 1, "story": 1,
}  # fmt: skip
"""How often a wording of a kind is used, each time with another fact; once where answers are
fixed, else twice."""
_RULED = ("arithmetic", "spelling", "counting", "clock")
"""Groups of which only held-out facts are asked; besides ``day.later``."""
_FEWEST_WORDS, _MOST_WORDS = 4, 9
_DRAWS, _PAIR_DRAWS = 20_000, 400_000
_DULL = frozenset(("zero", "one"))
"""Numbers that no wording fits: "one apples", "cut it into one parts"."""
_FIRST = {
    "then.capital": "capital", "then.continent": "continent", "then.currency": "currency",
    "then.language": "language", "then.opposite": "opposite", "then.plural": "plural",
    "then.colour": "colour", "then.sound": "animal.sound", "then.gloss": "gloss",
    "then.plus": "arithmetic.minus", "then.minus": "arithmetic.plus",
    "then.times": "arithmetic.minus", "then.day": "day.after", "then.month": "month.after",
    "then.hour": "clock.after", "then.spell": "plural", "then.back": "opposite",
    "then.more": "counting.up", "then.name": "name", "then.again": "unit",
}  # fmt: skip
"""The kind that a second turn refers to."""
_ONCE_MORE = ("then.capital", "then.gloss", "then.plus", "then.opposite")
"""Kinds of second turns of which there is one dialogue for each of two more first wordings."""
_NO_ARTICLE = "the "


class Questions:
    """Draws the bench's questions; ``world`` has the facts, and its draws are set by ``seed``."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world, self.seed = world, seed
        self.wordings = read_sections(HELD_OUT_WORDINGS)
        lines = read_sentences()
        short = [s for s in lines if _FEWEST_WORDS <= len(s.split()) <= _MOST_WORDS]
        random.Random(f"{seed}/sentences").shuffle(short)
        world.sentences = cycle(short)

    def singles(self) -> Iterator[Question]:
        """Questions inside the domain, kind by kind, then those outside it."""
        for kind, patterns in self.wordings.items():
            if kind.startswith("unknown."):
                novelty = kind.removeprefix("unknown.")
                for text in patterns:
                    answers = (DO_NOT_KNOW[0],)
                    yield Question(UNKNOWN, novelty, "word", (text,), ("don't know",), answers)
            elif not kind.startswith("then."):
                yield from self._of_kind(kind, patterns)

    def _of_kind(self, kind: str, patterns: list[str]) -> Iterator[Question]:
        if kind not in self.world.kinds:
            fixed = read_wordings()[kind]
            for text in patterns:
                group, answers = kind.split(".")[0], fixed.answers[:1]
                yield Question(group, "known", "word", (text,), fixed.keywords, answers)
            return
        times = _TIMES.get(kind, 2)
        facts = self._pool(kind, times * len(patterns))
        for place, pattern in enumerate(patterns):
            for turn in range(times):
                fact = facts[(place * times + turn) % len(facts)]
                yield Question(
                    fact.group, _novelty(fact), fact.judged, (worded(pattern, fact.slots),),
                    _right(fact), (fact.answer,),
                )  # fmt: skip

    def _pool(self, kind: str, count: int) -> list[Fact]:
        """Up to ``count`` different facts, as many as there are."""
        self.world.draw = random.Random(f"{self.seed}/{kind}")
        ruled = kind.split(".")[0] in _RULED or kind == "day.later"
        found = dict[object, Fact]()
        for _ in range(_DRAWS):
            fact = self.world.ask(kind)
            if (is_held_out(fact) or not ruled) and not (ruled and _is_dull(fact)):
                found.setdefault(fact.key or tuple(fact.slots.items()), fact)
            if len(found) == count:
                break
        return list(found.values())

    def dialogues(self) -> Iterator[Question]:
        """Dialogues of two turns, the second of which refers to the first."""
        for kind, patterns in self.wordings.items():
            if not kind.startswith("then."):
                continue
            firsts = self.wordings[_FIRST[kind]]
            self.world.draw = random.Random(f"{self.seed}/{kind}")
            more = 1 if kind in _ONCE_MORE else 0
            for place, pattern in enumerate([*patterns, *patterns[:more]]):
                first, second = self._pair(kind)
                group = "spelling" if kind == "then.spell" else first.group
                turns = worded(firsts[place], first.slots), worded(pattern, second.slots)
                yield Question(
                    group, _novelty(second), second.judged, turns, _right(second),
                    (first.answer, second.answer),
                )  # fmt: skip

    def _pair(self, kind: str) -> tuple[Fact, Fact]:
        """A fact and one of ``kind`` that refers to it; with rules, the one asked is held out."""
        for _ in range(_PAIR_DRAWS):
            first = self.world.ask(_FIRST[kind])
            if _is_dull(first):
                continue
            second = self.world.then(first)
            if second is None or second.kind != kind or second.slots == first.slots:
                continue
            if kind == "then.back" and second.right != (first.slots["word"],):
                continue
            if (not second.key or is_held_out(second)) and not _is_dull(second):
                return first, second
        raise ValueError(f"no fact of {kind} is held out")


def _is_dull(fact: Fact) -> bool:
    return not _DULL.isdisjoint(fact.slots.values())


def _novelty(fact: Fact) -> str:
    return "known" if is_learned(fact) and fact.group != "repeat" else "new"


def _right(fact: Fact) -> tuple[str, ...]:
    """The fact's right words; February's ordinary year is enough."""
    if fact.kind == "month.days" and len(fact.right[0].split()) > 1:
        return (*fact.right, fact.right[0].split()[0])
    return fact.right


def families(tables: Tables) -> dict[str, tuple[str, ...]]:
    """By group, what its answers can be, each once."""
    columns = ("capital", "continent", "currency", "language")
    countries = tables.countries
    found = {name: [getattr(country, name) for country in countries] for name in columns}
    found["country"] = [country.name.removeprefix(_NO_ARTICLE) for country in countries]
    found["colour"] = list(tables.colours.values())
    found["opposite"] = [*tables.opposites, *tables.opposites.values()]
    found["plural"] = list(tables.plurals.values())
    animals = [animal.split(" ", 1)[1] for animal in tables.sounds]
    young = [*tables.young, *tables.young.values()]
    found["animal"] = [*tables.sounds.values(), *animals, *young]
    found |= {"day": DAYS, "month": MONTHS, "name": list(tables.names)}
    for kind in read_sections(HELD_OUT_WORDINGS):
        wordings = read_wordings().get(kind)
        if wordings and wordings.keywords:
            found.setdefault(kind.split(".")[0], []).extend(wordings.keywords)
    return {
        group: tuple(sorted({member for member in members if member}))
        for group, members in found.items()
    }


def write_questions(world: World, out: Path, seed: int) -> int:
    """Write all questions to ``out``; return how many there are."""
    drawn = Questions(world, seed)
    questions = [*drawn.singles(), *drawn.dialogues()]
    lines = [
        "# The bench's questions, made by `python -m recipes.answers questions`: group, known or",
        "# new, how it is judged, turns, right words, an answer to each turn. Not to learn from.",
        "",
    ]
    for group, members in sorted(families(world.tables).items()):
        lines.append(f"family {group} = {'; '.join(members)}")
    lines += ["", *map(line_of, questions)]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(questions)
