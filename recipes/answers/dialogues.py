"""Dialogues to learn from: facts asked in the wordings of ``wordings.txt``, one or two turns.

No wording of the bench (``evals/held_out_wordings.txt``) is used, and no fact that is held out.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.answers.facts import read_sections, sentence_case
from recipes.answers.kinds import DO_NOT_KNOW, Fact, World, is_held_out

HELD_OUT_WORDINGS = Path(__file__).parents[2] / "evals" / "held_out_wordings.txt"
_FOLDER = Path(__file__).parent
_TRAINING = (_FOLDER / "wordings.txt", _FOLDER / "wordings_more.txt")
WEIGHTS = {
    "arithmetic.plus": 8, "arithmetic.minus": 6, "arithmetic.times": 4, "arithmetic.divided": 4,
    "capital": 8, "country": 4, "continent": 4, "currency": 4, "language": 4, "gloss": 16,
    "spelling": 5, "repeat.say": 4, "repeat.read": 3, "opposite": 4, "plural": 4, "colour": 3,
    "day.later": 2, "clock.after": 3, "clock.before": 3, "counting.up": 2, "counting.down": 2,
    "unit": 3, "animal.young": 1.5, "name": 1.5, "unknown": 22,
}  # fmt: skip
"""How often each kind is asked; those that are not named once."""
_SECOND_TURN = 0.35
_GOES_ON = 0.3
"""Share of dialogues that go on with something else."""
_MOST_TURNS = 5
_SLOPPY = 0.12
_WORD_LOST = 0.25
"""Share of the sloppy questions, and of their words besides slots that are left out."""
_FRAMED = 0.12
_FRAMES = (
    "Hey. {}", "So. {}", "Well. {}", "Okay. {}", "Um. {}", "Hello! {}", "Hi. {}", "Tell me: {}",
    "I have a question: {}", "One more question: {}", "Quick question. {}", "{} Please.",
    "{} Thanks.", "{} Thank you.", "Excuse me. {}", "Listen. {}", "Right. {}", "Another one. {}",
)  # fmt: skip
"""What people say around a question, which does not change it."""
_RARE_NOUN = 0.1
_NO_QUESTION = 0.12
"""Of what the model does not know, rare nouns that it is asked to explain, and statements."""
_DRAWS = 50
_SLOT = re.compile(r"\{(\w+)\}")
_ONE_OF_MANY = re.compile(r"\b([Oo]ne (?:more )?)(\w+)\b(?! (?:comes|is|goes|makes|gives)\b)")
_IRREGULAR = {"children": "child", "people": "person", "shelves": "shelf", "times": "times"}
_KNOWN_STARTS = ("good ", "hello", "hi ", "thank", "my name", "how are", "what is", "sorry")
"""Sentences that begin so may be answered."""


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the kind of both."""

    user: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Wordings:
    """How one kind is asked: patterns; where answers are fixed, they and the bench's keywords."""

    patterns: tuple[str, ...]
    answers: tuple[str, ...]
    keywords: tuple[str, ...]


@cache
def read_wordings(*paths: Path) -> dict[str, Wordings]:
    """Wordings by kind, of the files together; without any, those of the training."""
    sections: dict[str, list[str]] = {}
    for path in paths or _TRAINING:
        for kind, lines in read_sections(path).items():
            sections.setdefault(kind, []).extend(lines)
    found = {}
    for kind, lines in sections.items():
        keywords = [line[2:].split("; ") for line in lines if line.startswith("? ")]
        found[kind] = Wordings(
            tuple(line for line in lines if line[:2] not in ("= ", "? ")),
            tuple(line[2:] for line in lines if line.startswith("= ")),
            tuple(word for words in keywords for word in words),
        )
    return found


@cache
def read_unknown() -> tuple[dict[str, list[str]], list[str]]:
    """Words by slot, and the patterns of questions outside the domain."""
    lines = (_FOLDER / "unknown.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    slots = dict(line.split(" = ") for line in lines if " = " in line)
    return (
        {name: words.split("|") for name, words in slots.items()},
        [line for line in lines if " = " not in line],
    )


def worded(pattern: str, slots: dict[str, str]) -> str:
    """``pattern`` with slots filled, a capital at its start, and "one hour" for "one hours"."""
    text = _SLOT.sub(lambda slot: slots[slot[1]], pattern)
    if "one" in slots.values():
        text = _ONE_OF_MANY.sub(lambda found: found[1] + _singular(found[2]), text)
    return sentence_case(text)


def _singular(noun: str) -> str:
    """``noun`` as it is after "one"; what is no plural stays."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("xes", "ches", "shes", "sses")):
        return noun[:-2]
    regular = noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
    return noun[:-1] if regular else noun


class Dialogues:
    """Draws dialogues; ``world`` draws their facts."""

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.draw
        self.wordings = read_wordings()
        kinds = [kind for kind in self.wordings if not kind.startswith("then.")] + ["unknown"]
        self._kinds, self._weights = kinds, [WEIGHTS.get(kind, 1) for kind in kinds]

    def __iter__(self) -> Iterator[list[Turn]]:
        """Endless dialogues of at most ``_MOST_TURNS`` turns."""
        while True:
            turns = self._about_something()
            while len(turns) < _MOST_TURNS - 1 and self.draw.random() < _GOES_ON:
                turns += self._about_something()
            yield turns

    def _about_something(self) -> list[Turn]:
        (kind,) = self.draw.choices(self._kinds, self._weights)
        return self.dialogue(kind)

    def dialogue(self, kind: str) -> list[Turn]:
        """A turn of ``kind``, and often a second one that refers to it."""
        if kind == "unknown":
            return [self._unknown()]
        if self.wordings[kind].answers:
            answer = self.draw.choice(self.wordings[kind].answers)
            return [Turn(self.draw.choice(self.wordings[kind].patterns), answer, kind)]
        fact = self._learned(lambda: self.world.ask(kind))
        assert fact is not None
        turns = [self._turn(fact)]
        if self.draw.random() < _SECOND_TURN:
            second = self._learned(lambda: self.world.then(fact))
            turns += [] if second is None else [self._turn(second)]
        return turns

    def _turn(self, fact: Fact) -> Turn:
        pattern = self.draw.choice(self.wordings[fact.kind].patterns)
        if self.draw.random() < _SLOPPY and fact.slots:
            kept = [w for w in pattern.split() if "{" in w or self.draw.random() >= _WORD_LOST]
            pattern = " ".join(kept)
        user = worded(pattern, fact.slots)
        if self.draw.random() < _FRAMED and fact.group != "repeat":
            user = self.draw.choice(_FRAMES).format(user)
        return Turn(user, fact.answer, fact.kind)

    def _learned(self, draw: Callable[[], Fact | None]) -> Fact | None:
        for _ in range(_DRAWS):
            fact = draw()
            if fact is None or not is_held_out(fact):
                return fact
        return None

    def _unknown(self) -> Turn:
        answer, chance = self.draw.choice(DO_NOT_KNOW), self.draw.random()
        if chance < _RARE_NOUN:
            thing = self.draw.choice(self.world.glosses.rare)
            slots = {"thing": thing, "word": thing.split(" ", 1)[1]}
            pattern = self.draw.choice(self.wordings["gloss"].patterns)
            return Turn(worded(pattern, slots), answer, "unknown")
        if chance < _RARE_NOUN + _NO_QUESTION:
            return Turn(self._statement(), answer, "unknown")
        words, patterns = read_unknown()
        text = _SLOT.sub(lambda slot: self.draw.choice(words[slot[1]]), self.draw.choice(patterns))
        return Turn(sentence_case(text), answer, "unknown")

    def _statement(self) -> str:
        """A sentence that asks nothing."""
        while True:
            text = next(self.world.sentences)
            if text.endswith(".") and not text.lower().startswith(_KNOWN_STARTS):
                return text


def plain(text: str) -> str:
    """A wording as it is compared: lower-case words, slots alike."""
    return " ".join(re.findall(r"[a-z']+|_", _SLOT.sub("_", text.lower())))
