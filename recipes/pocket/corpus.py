"""The text that teachers read: WordNet's examples and glosses, everyday sentences, word walks.

WordNet 3.0 (Princeton; its licence allows any use with the notice kept) comes from Debian's
``wordnet-base``. Held-out sentences of the quality bench never appear.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

HELD_OUT = Path(__file__).parents[2] / "src/mosstalk/reporting/sentences.txt"
_EVERYDAY = Path(__file__).with_name("everyday.txt")
SHARES = {
    "everyday": 0.18,
    "example": 0.17,
    "gloss": 0.15,
    "pair": 0.10,
    "walk": 0.30,
    "words": 0.10,
}
"""How much of the text is of each kind. Little is from the grammar: a model that reads much of
it writes down the grammar's sentences whatever it hears. WordNet has some ninety thousand lines
that can be read, which several hundred hours repeat; walks and lists are without end."""
_EXAMPLE = re.compile(r'"([^"]+)"')
_ASIDE = re.compile(r"\([^)]*\)")
_SPEAKABLE = re.compile(r"[A-Za-z][a-z']*(?:[ ,]+[A-Za-z][a-z']*|-[a-z]+)*[.?!]?")
_MOST_WORDS = 14
_MOST_LETTERS = 90
_LIST_WORDS = (3, 7)
_WALK_WORDS = (4, 12)
_TWO_WORDS_BACK = 0.35
_WALKED_EVERYDAY = 20_000
_BARE = re.compile(r"^(the|a|an|a glass of|a cup of) ")
_SLOT = re.compile(r"\{(\w+)(?:#(\w+))?\}")
_FORMS = {
    "animal": ["sleeping", "waiting", "hiding", "running", "sitting", "jumping", "eating"],
    "more": [
        "better",
        "older",
        "newer",
        "smaller",
        "bigger",
        "heavier",
        "cheaper",
        "cleaner",
        "warmer",
    ],
    "they": ["I", "You", "We", "They", "He", "She"],
    "day": ["today", "tonight", "this morning", "this evening"],
}
"""What stands for a slot in this form, whatever its words are."""


@cache
def _grammar() -> tuple[dict[str, list[str]], list[str]]:
    """Words by the names of their slots, and patterns, from ``everyday.txt``."""
    lines = [line for line in _EVERYDAY.read_text().splitlines() if line and line[0] != "#"]
    slots = dict(line.split(" = ") for line in lines if " = " in line)
    patterns = [line for line in lines if " = " not in line]
    return {name: words.split("|") for name, words in slots.items()}, patterns


def everyday(draw: random.Random) -> str:
    """One of a few million sentences of the grammar, capitalised, with its closing mark."""
    slots, patterns = _grammar()

    def filled(slot: re.Match[str]) -> str:
        word = draw.choice(_FORMS.get(slot[2]) or slots[slot[1]])
        return _BARE.sub("", word) if slot[2] == "bare" else word

    text = _SLOT.sub(filled, draw.choice(patterns))
    text = re.sub(r"\ba ([aeio])", r"an \1", text)
    return text[0].upper() + text[1:]


def normalised(text: str) -> str:
    """Lower-case words alone: how sentences are compared."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def sentences(text: str) -> frozenset[str]:
    """A text and each of its sentences, normalised: none may be on both sides of a split."""
    return frozenset(map(normalised, [text, *re.split(r"(?<=[.?!]) ", text)]))


class Walks:
    """Sentences that were never written: each word has followed the one before it somewhere.

    A Markov chain over words (Shannon 1948) that now and then looks two words back. They sound
    like English for a few words and tell nothing of how they go on.
    """

    def __init__(self, lines: list[str]) -> None:
        self._after: dict[tuple[str, ...], list[str]] = {}
        for line in lines:
            words = ["", *re.sub(r"[.?!]$", "", line).split(), ""]
            words[1] = words[1] if words[1].startswith("I") else words[1].lower()
            for place in range(1, len(words)):
                for back in (1, 2):
                    before = tuple(words[max(0, place - back) : place])
                    self._after.setdefault(before, []).append(words[place])

    def draw(self, draw: random.Random) -> str:
        """One sentence; it ends where a source line did, or when it is long enough."""
        words, most = [""], draw.randint(*_WALK_WORDS)
        while len(words) <= most:
            back = 2 if draw.random() < _TWO_WORDS_BACK else 1
            word = draw.choice(self._after[tuple(words[-back:])])
            if word:
                words.append(word)
            elif len(words) > _WALK_WORDS[0]:
                break
            else:
                words = [""]
        text = " ".join(words[1:]).strip(" ,")
        return text[0].upper() + text[1:] + "."


@dataclass(frozen=True)
class Sources:
    """Where text is drawn from: WordNet's examples, glosses, frequent words, walks over them."""

    examples: list[str]
    glosses: list[str]
    words: list[str]
    walks: Walks
    held_out: frozenset[str]


def load_sources(wordnet: Path) -> Sources:
    """Read WordNet's ``data.*`` files in ``wordnet``; raise FileNotFoundError if there are none."""
    files = sorted(wordnet.glob("data.*"))
    if not files:
        raise FileNotFoundError(f"{wordnet}: no data.* of WordNet; see recipes/pocket/README.md")
    examples, glosses = dict[str, None](), dict[str, None]()
    counts: Counter[str] = Counter()
    for file in files:
        for line in file.read_text(encoding="latin-1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            gloss = line.split("|", 1)[1]
            counts.update(re.findall(r"\b[a-z]{2,12}\b", gloss))
            examples |= dict.fromkeys(filter(None, map(_tidy, _EXAMPLE.findall(gloss))))
            glosses |= dict.fromkeys(filter(None, [_definition(gloss)]))
    lines = HELD_OUT.read_text().splitlines() if HELD_OUT.exists() else []
    words = [word for word, count in counts.most_common() if count >= 3]
    draw = random.Random(0)
    drawn = [everyday(draw) for _ in range(_WALKED_EVERYDAY)]
    return Sources(
        list(examples),
        list(glosses),
        words,
        Walks([*examples, *glosses, *drawn]),
        frozenset(map(normalised, lines)),
    )


def _definition(gloss: str) -> str | None:
    """What a gloss says before its examples, as a sentence; None if it is not speakable."""
    return _tidy(_ASIDE.sub(" ", gloss).split(";")[0].split('"')[0])


def _tidy(text: str) -> str | None:
    """A sentence with a capital and a closing mark, or None for what no one would say."""
    text = " ".join(text.replace("`", "'").split()).strip(" ,;:")
    words = text.split()
    if not 3 <= len(words) <= _MOST_WORDS or len(text) > _MOST_LETTERS:
        return None
    if not _SPEAKABLE.fullmatch(text) or any(word.isupper() and word != "I" for word in words):
        return None
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def texts(sources: Sources, seed: int) -> Iterator[str]:
    """Endless text for one seed, its kinds in the shares of ``SHARES``; none is held out."""
    draw = random.Random(seed)
    examples, glosses = _endless(sources.examples, draw), _endless(sources.glosses, draw)
    kinds: dict[str, Callable[[], str]] = {
        "everyday": lambda: everyday(draw),
        "example": lambda: next(examples),
        "gloss": lambda: next(glosses),
        "pair": lambda: f"{next(examples)} {everyday(draw)}",
        "walk": lambda: sources.walks.draw(draw),
        "words": lambda: _word_list(sources.words, draw),
    }
    while True:
        (kind,) = draw.choices(list(SHARES), list(SHARES.values()))
        text = kinds[kind]()
        if len(text) <= _MOST_LETTERS and not sentences(text) & sources.held_out:
            yield text


def _endless(lines: list[str], draw: random.Random) -> Iterator[str]:
    """All lines in a drawn order, over and over."""
    return cycle(draw.sample(lines, len(lines)))


def _word_list(words: list[str], draw: random.Random) -> str:
    """Words without a sense, so that rarer ones are pronounced too."""
    count = draw.randint(*_LIST_WORDS)
    # A square favours frequent words, yet reaches all of them.
    chosen = [words[int(draw.random() ** 2 * len(words))] for _ in range(count)]
    return ", ".join(chosen).capitalize() + "."
