"""Questions outside the domain, which are answered that the model does not know.

Their wordings are those of ``unknown.txt`` and ``unknown_more.txt``, and phrases in the frames in
which the known is asked too. Some ask in a kind's own wordings for what its table has not
(``lookalikes.txt``), so that a model attends to what is asked and not to how.
"""

import re
from functools import cache
from pathlib import Path

from recipes.answers.decks import NEXT_OF, Deck
from recipes.answers.facts import read_sections, sentence_case
from recipes.answers.kinds import World
from recipes.answers.wordings import read_phrases, read_wordings, worded

_FOLDER = Path(__file__).parent
_FILES = (_FOLDER / "unknown.txt", _FOLDER / "unknown_more.txt")
_RARE_NOUN, _NO_QUESTION, _LOOK_ALIKE, _PHRASE = 0.08, 0.1, 0.17, 0.2
"""Of what the model does not know, rare nouns that it is asked to explain, statements, what looks
like a kind that is known, and phrases in the frames of the known; the rest is of the lists."""
_SLOT = re.compile(r"\{(\w+)\}")
_IN_A_FRAME = 0.5
"""Share of the look-alikes and rare nouns that are asked for by phrases."""
_KNOWN_STARTS = ("good ", "hello", "hi ", "thank", "my name", "how are", "what is", "sorry")
"""Sentences that begin so may be answered."""


@cache
def read_unknown() -> tuple[dict[str, list[str]], list[str]]:
    """Words by slot, and the patterns of questions outside the domain."""
    lines = [line for path in _FILES for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    slots = dict(line.split(" = ") for line in lines if " = " in line)
    return (
        {name: words.split("|") for name, words in slots.items()},
        list(dict.fromkeys(line for line in lines if " = " not in line)),
    )


@cache
def read_lookalikes() -> dict[str, list[dict[str, str]]]:
    """By kind, what fills the slots of its wordings and is in no table."""
    found = dict[str, list[dict[str, str]]]()
    for kind, lines in read_sections(_FOLDER / "lookalikes.txt").items():
        names = [name.strip() for name in lines[0].split("|")]
        rows = [[cell.strip() for cell in line.split("|")] for line in lines[1:]]
        found[kind] = [dict(zip(names, row, strict=True)) for row in rows]
    return found


class Unknown:
    """Draws questions that the model cannot answer; ``world`` has rare nouns and sentences."""

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.draw
        self.words, patterns = read_unknown()
        self._patterns = Deck(([pattern] for pattern in patterns), self.draw)
        self._alike = {
            kind: Deck(([slots] for slots in rows), self.draw)
            for kind, rows in read_lookalikes().items()
        }
        self._rare = Deck(([thing] for thing in world.glosses.rare), self.draw)

    @property
    def alike(self) -> tuple[str, ...]:
        """The kinds that ``like`` may be asked for."""
        return tuple(self._alike)

    def text(self) -> str:
        """What a user says."""
        sorts = {
            self.rare: _RARE_NOUN, self.statement: _NO_QUESTION, self._like_any: _LOOK_ALIKE,
            self._phrase: _PHRASE,
        }  # fmt: skip
        (sort,) = self.draw.choices(
            [*sorts, self._listed], [*sorts.values(), 1 - sum(sorts.values())]
        )
        return sort()

    def like(self, kind: str) -> str:
        """A question in the wordings of ``kind`` for what is in no table."""
        return worded(self._pattern(kind), self._alike[kind].deal())

    def next_like(self, kind: str) -> str:
        """A second turn after one of ``kind``, for what is in no table: "And of Texas?"."""
        return worded(self._pattern(NEXT_OF[kind]), self._alike[kind].deal())

    def rare(self) -> str:
        """A rare noun to explain, in the wordings of those that are explained."""
        thing = self._rare.deal()
        slots = {"thing": thing, "word": thing.split(" ", 1)[1]}
        return worded(self._pattern("gloss"), slots)

    def statement(self) -> str:
        """A sentence that asks nothing."""
        while True:
            text = next(self.world.sentences)
            if text.endswith(".") and not text.lower().startswith(_KNOWN_STARTS):
                return text

    def _like_any(self) -> str:
        return self.like(self.draw.choice(self.alike))

    def _listed(self) -> str:
        return self._filled(self._patterns.deal())

    def _phrase(self) -> str:
        return self._filled(self.draw.choice(read_phrases()["unknown"]))

    def _filled(self, pattern: str) -> str:
        return sentence_case(_SLOT.sub(lambda slot: self.draw.choice(self.words[slot[1]]), pattern))

    def _pattern(self, kind: str) -> str:
        phrases = read_phrases().get(kind, ())
        if phrases and self.draw.random() < _IN_A_FRAME:
            return self.draw.choice(phrases)
        return self.draw.choice(read_wordings()[kind].patterns)
