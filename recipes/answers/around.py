"""What is said before and after a question: "Quick question, ...", "..., do you know?"."""

import random
from functools import cache
from pathlib import Path

from recipes.answers.facts import read_sections
from recipes.answers.wordings import is_of_the_bench

_ASKS, _VERBS = "words that ask", "verbs of requests"
_BEFORE = 0.6
"""Share of what is said around that is said before; the rest, and some of these, after."""
_BOTH = 0.25
_OF_ITS_OWN = 0.5
"""Share of sentences of their own among it."""


def surrounded(text: str, draw: random.Random) -> str:
    """``text``, a pattern or a question, with something before or after it, or both.

    It stays as it is where that would make a wording of the bench, or say "please" twice.
    """
    before = draw.random() < _BEFORE
    after = not before or draw.random() < _BOTH
    found = _after(text, draw) if after else text
    found = _before(found, draw) if before else found
    is_twice = found.lower().count("please") > 1
    return text if is_twice or is_of_the_bench(found) else found


def _before(text: str, draw: random.Random) -> str:
    sections = _sections()
    first, rest = (*text.split(" ", 1), "")[:2]
    sorts = (_ASKS, _VERBS, "words that lose their capital within a sentence")
    small = any(first.lower().rstrip(",") in _words(sort) for sort in sorts)
    if not small or draw.random() < _OF_ITS_OWN:
        return f"{draw.choice(sections['before as a sentence'])} {_capital(text)}"
    return f"{draw.choice(sections['before with a comma'])} {first.lower()} {rest}".strip()


def _after(text: str, draw: random.Random) -> str:
    sections, tags = _sections(), _tags(text)
    if tags and draw.random() > _OF_ITS_OWN:
        return text[:-1] + draw.choice(sections[f"after {tags}, in place of its mark"])
    return f"{text} {draw.choice(sections['after as a sentence'])}"


def _tags(text: str) -> str | None:
    """The sort of what may stand in place of a sentence's mark; None where nothing may."""
    if any(mark in text[:-1] for mark in ".?!:"):
        return None
    first = text.split(" ", 1)[0].lower()
    if text.endswith("?"):
        return "a question" if first in _words(_ASKS) else "a polite question"
    return "a request" if text.endswith(".") and first in _words(_VERBS) else None


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def _sections() -> dict[str, list[str]]:
    return read_sections(Path(__file__).with_name("around.txt"))


@cache
def _words(section: str) -> frozenset[str]:
    return frozenset(" ".join(_sections()[section]).split())
