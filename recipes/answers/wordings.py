"""How each kind is asked: wordings as they are written, and those of two parts.

No wording of the bench (``evals/held_out_wordings.txt``) is among them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.answers.facts import read_sections, sentence_case

HELD_OUT_WORDINGS = Path(__file__).parents[2] / "evals" / "held_out_wordings.txt"
_FOLDER = Path(__file__).parent
_TRAINING = tuple(
    _FOLDER / name for name in ("wordings.txt", "wordings_more.txt", "wordings_others.txt")
)
_FRAMES_OF = {
    "noun": ("noun", "is"), "nouns": ("noun",), "how": ("how",), "ask": ("ask",), "do": ("do",),
    "more": ("more",),
}  # fmt: skip
"""By the part that says what is asked, the frames that it fits in."""
_PLACE = "{}"
_SLOT = re.compile(r"\{(\w+)\}")
_ONE_OF_MANY = re.compile(r"\b([Oo]ne (?:more )?)(\w+)\b(?! (?:comes|is|goes|makes|gives)\b)")
_IRREGULAR = {"children": "child", "people": "person", "shelves": "shelf", "times": "times"}
_SHORT = 2
"""Words of a wording that may stand within another, as "Go on." does."""


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
def read_phrases() -> dict[str, tuple[str, ...]]:
    """Wordings by kind that are a phrase of ``phrases.txt`` within a frame; none of the bench's."""
    sections = read_sections(_FOLDER / "phrases.txt")
    found = dict[str, list[str]]()
    for name, phrases in sections.items():
        part, kind = name.split(" ")
        if part != "frames":
            frames = [frame for of in _FRAMES_OF[part] for frame in sections[f"frames {of}"]]
            found.setdefault(kind, []).extend(
                framed(frame, phrase) for phrase in phrases for frame in frames
            )
    return {kind: not_the_bench(tuple(dict.fromkeys(made))) for kind, made in found.items()}


def framed(frame: str, phrase: str) -> str:
    """``frame`` with ``phrase`` in its place, which begins a sentence where the frame has ended
    one."""
    before, after = frame.split(_PLACE)
    return before + (sentence_case(phrase) if before.endswith((". ", "? ")) else phrase) + after


def not_the_bench(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Those that neither are a wording of the bench, nor hold one, nor are held by one."""
    ours = [f" {plain(pattern)} " for pattern in patterns]
    theirs, together = _held_out(), "\n".join(ours)
    long = {each for each in theirs if len(each.split()) > _SHORT}
    within = [each for each in long if each in together]
    whole = "\n".join(sorted(long))

    def is_apart(text: str) -> bool:
        if text in theirs:
            return False
        if len(text.split()) <= _SHORT:
            return True
        return text not in whole and not any(each in text for each in within)

    return tuple(p for p, text in zip(patterns, ours, strict=True) if is_apart(text))


def is_of_the_bench(pattern: str) -> bool:
    """Whether the bench asks in these words."""
    return f" {plain(pattern)} " in _held_out()


@cache
def _held_out() -> frozenset[str]:
    sections = read_sections(HELD_OUT_WORDINGS).values()
    return frozenset(f" {plain(wording)} " for wordings in sections for wording in wordings)


def slots_of(patterns: Iterable[str]) -> set[str]:
    """Names of the slots of all ``patterns``."""
    return {name for pattern in patterns for name in _SLOT.findall(pattern)}


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


def plain(text: str) -> str:
    """A wording as it is compared: lower-case words, slots alike."""
    return " ".join(re.findall(r"[a-z']+|_", _SLOT.sub("_", text.lower())))
