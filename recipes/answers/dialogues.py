"""Dialogues to learn from: facts asked in wordings of the training, and what refers to them.

No wording of the bench (``evals/held_out_wordings.txt``) is used, and no fact that is held out.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from recipes.answers.around import surrounded
from recipes.answers.decks import NEXT_OF, Dealer, Deck
from recipes.answers.kinds import DO_NOT_KNOW, Fact, World, is_learned
from recipes.answers.unknown import Unknown
from recipes.answers.wordings import is_of_the_bench, read_phrases, read_wordings, worded

WEIGHTS = {
    "arithmetic.plus": 10, "arithmetic.minus": 10, "arithmetic.times": 6, "arithmetic.divided": 6,
    "capital": 8, "country": 4, "continent": 4, "currency": 4, "language": 4, "gloss": 16,
    "spelling": 10, "repeat.say": 4, "repeat.read": 3, "opposite": 4, "plural": 4, "colour": 3,
    "day.later": 2, "clock.after": 3, "clock.before": 3, "counting.up": 4, "counting.down": 4,
    "unit": 3, "animal.young": 1.5, "name": 1.5, "unknown": 24,
}  # fmt: skip
"""How often each kind is asked; those that are not named once."""
_SECOND_TURN, _THIRD_TURN = 0.35, 0.4
"""Share of the facts that another turn refers to, and of those turns that a further one does."""
_ASTRAY = 0.06
"""Share of the facts after which a turn asks the same of what is in no table, and then of what is:
"And of Texas?", "And of Peru?"."""
_GOES_ON = 0.3
"""Share of dialogues that go on with something else."""
MIXED = 0.08
"""Share of dialogues in which the known follows the unknown, or both take turns."""
_ALIKE = 0.5
"""Share of the known in them that is asked for just after what looks like it."""
_RUNS = ("uk", "uuk", "uuuk", "kuk", "ukuk", "kuuk", "ukk", "kkuk", "ukuuk", "uuukk")
"""How known and unknown take turns in them."""
_MOST_TURNS = 5
_PHRASE = 0.45
"""Share of the questions that are a phrase in a frame, where their kind has such."""
_SLOPPY = 0.12
_WORD_LOST = 0.25
"""Share of the sloppy questions, and of their words besides slots that are left out."""
_SURROUNDED = 0.22
"""Share of the questions with something said around them."""
_DRAWS = 50
_SENTENCE = re.compile(r"(?<!\.)[.!?] [a-z]")
"""A sentence within a question that begins with a small letter: its first word filled a slot."""


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the kind of both."""

    user: str
    answer: str
    kind: str


class Dialogues:
    """Draws dialogues; ``world`` draws their facts."""

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.draw
        self.wordings, self.phrases = read_wordings(), read_phrases()
        self.unknown = Unknown(world)
        kinds = [kind for kind in self.wordings if not kind.startswith("then.")]
        self._known = kinds
        self._kinds = [*kinds, "unknown"]
        self._weights = [WEIGHTS.get(kind, 1) for kind in self._kinds]
        self._patterns = {
            kind: Deck(([pattern] for pattern in each.patterns), self.draw)
            for kind, each in self.wordings.items()
        }

    def __iter__(self) -> Iterator[list[Turn]]:
        """Endless dialogues of at most ``_MOST_TURNS`` turns."""
        while True:
            if self.draw.random() < MIXED:
                yield self.mixed()
                continue
            turns = self._about_something()
            while len(turns) < _MOST_TURNS - 1 and self.draw.random() < _GOES_ON:
                turns += self._about_something()
            yield turns[:_MOST_TURNS]

    def mixed(self) -> list[Turn]:
        """A dialogue in which known and unknown take turns, often in the same wordings."""
        turns, like = list[Turn](), None
        for sort in self.draw.choice(_RUNS):
            if sort == "u":
                like = self.draw.choice(self.unknown.alike) if self._is(_ALIKE) else None
                text = self.unknown.like(like) if like else self.unknown.text()
                turns.append(self._unknown(text))
            else:
                (kind,) = self.draw.choices(self._known, self._weights[:-1])
                turns.append(self.dialogue(like or kind)[0])
                like = None
        return turns

    def _about_something(self) -> list[Turn]:
        (kind,) = self.draw.choices(self._kinds, self._weights)
        return self.dialogue(kind)

    def dialogue(self, kind: str) -> list[Turn]:
        """A turn of ``kind``, and often more of which each refers to the one before."""
        if kind == "unknown":
            return [self._unknown(self.unknown.text())]
        if self.wordings[kind].answers:
            answer = self.draw.choice(self.wordings[kind].answers)
            return [Turn(self._patterns[kind].deal(), answer, kind)]
        fact = self._learned(lambda: self.world.ask(kind))
        assert fact is not None
        turns = [self._turn(fact)]
        if isinstance(self.world, Dealer) and kind in NEXT_OF and self._is(_ASTRAY):
            turns += self._astray(self.world, kind)
        elif self._is(_SECOND_TURN):
            turns += self._following(fact)
        return turns

    def _astray(self, world: Dealer, kind: str) -> list[Turn]:
        """Of a kind that looks like others, one that is not known and one that is."""
        if kind not in self.unknown.alike:
            return []
        astray = self._unknown(self.unknown.next_like(kind))
        return [astray, self._turn(world.another(kind))]

    def _following(self, first: Fact) -> list[Turn]:
        """One or more turns of which each refers to the one before."""
        turns, fact = list[Turn](), first
        while len(turns) < _MOST_TURNS - 2:
            second = self._learned(partial(self.world.then, fact))
            if second is None:
                break
            turns.append(self._turn(second))
            on = self.world.goes_on(second) if isinstance(self.world, Dealer) else None
            if on is None or not self._is(_THIRD_TURN):
                break
            fact = on
        return turns

    def _turn(self, fact: Fact) -> Turn:
        pattern = self._pattern(fact.kind)
        if self._is(_SLOPPY) and fact.slots:
            kept = [w for w in pattern.split() if "{" in w or not self._is(_WORD_LOST)]
            sloppy = " ".join(kept)
            pattern = pattern if is_of_the_bench(sloppy) else sloppy
        if fact.group == "repeat":
            return Turn(worded(pattern, fact.slots), fact.answer, fact.kind)
        if self._is(_SURROUNDED):
            pattern = surrounded(pattern, self.draw)
        user = _SENTENCE.sub(lambda start: start[0].upper(), worded(pattern, fact.slots))
        return Turn(user, fact.answer, fact.kind)

    def _pattern(self, kind: str) -> str:
        phrases = self.phrases.get(kind, ())
        if phrases and self._is(_PHRASE):
            return self.draw.choice(phrases)
        return self._patterns[kind].deal()

    def _learned(self, draw: Callable[[], Fact | None]) -> Fact | None:
        for _ in range(_DRAWS):
            fact = draw()
            if fact is None or is_learned(fact):
                return fact
        return None

    def _unknown(self, text: str) -> Turn:
        """``text``, which asks for what the model does not know."""
        if self._is(_SURROUNDED):
            text = surrounded(text, self.draw)
        return Turn(text, self.draw.choice(DO_NOT_KNOW), "unknown")

    def _is(self, share: float) -> bool:
        return self.draw.random() < share
