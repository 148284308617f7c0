"""Facts in tables, and numbers, days and months in words.

``countries.txt`` and ``tables.txt`` are ours, written by hand; the README says what they were
compared with. Definitions come from WordNet (``recipes.answers.glosses``).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evals.words import cardinal

_FOLDER = Path(__file__).parent
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_MONTHS = "January February March April May June July August September October November December"
DAYS, MONTHS = _DAYS.split(), _MONTHS.split()
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
"""Of an ordinary year."""
_NOT_ASKED = "-"
_TENS = re.compile(r"\b(\w+ty) (one|two|three|four|five|six|seven|eight|nine)\b")


@dataclass(frozen=True)
class Country:
    """A country, named as inside a sentence ("the Netherlands"); None where it is not asked."""

    name: str
    capital: str | None
    continent: str | None
    currency: str | None
    language: str | None


@dataclass(frozen=True)
class Unit:
    """There are ``count`` of ``small`` (plural) in ``big`` (with its article)."""

    small: str
    big: str
    count: int


@dataclass(frozen=True)
class Tables:
    """What is known besides definitions; a column's words stand as inside a sentence."""

    countries: tuple[Country, ...]
    opposites: dict[str, str]
    plurals: dict[str, str]
    colours: dict[str, str]
    sounds: dict[str, str]
    young: dict[str, str]
    units: tuple[Unit, ...]
    names: tuple[str, ...]
    to_spell: tuple[str, ...]
    jokes: tuple[str, ...]
    stories: tuple[str, ...]


@cache
def load_tables() -> Tables:
    """Both table files, read once.

    Raises:
        ValueError: a line has too few or too many columns, or a word stands in a table twice.
    """
    sections = read_sections(_FOLDER / "tables.txt")
    plurals, young = _pairs(sections["plural"]), _pairs(sections["young"])
    # Every word that can be an answer may be spelled, and one that has a sound of its own.
    words = {*_words(sections["spelling"]), *plurals, *plurals.values(), *young.values()}
    return Tables(
        countries=tuple(_countries()),
        opposites=_opposites(sections["opposite"]),
        plurals=plurals,
        colours=_pairs(sections["colour"]),
        sounds=_pairs(sections["sound"]),
        young=young,
        units=tuple(_units(sections["unit"])),
        names=_words(sections["names"]),
        to_spell=tuple(sorted(words)),
        jokes=tuple(sections["joke"]),
        stories=tuple(sections["story"]),
    )


def read_sections(path: Path) -> dict[str, list[str]]:
    """Lines by the section ``[name]`` that they stand in; blank lines and comments are left out."""
    sections = dict[str, list[str]]()
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line[1 : line.index("]")]
            sections[name] = []
        elif line.strip() and not line.startswith("#"):
            sections[name].append(line.strip())
    return sections


def _countries() -> Iterator[Country]:
    for line in (_FOLDER / "countries.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, *rest = line.split(" | ")
            capital, continent, currency, language = (
                None if column == _NOT_ASKED else column for column in rest
            )
            yield Country(name, capital, continent, currency, language)


def _units(lines: list[str]) -> Iterator[Unit]:
    for line in lines:
        small, big, count = line.split(" | ")
        yield Unit(small, big, int(count))


def _pairs(lines: list[str]) -> dict[str, str]:
    """Two columns; a word stands in the first one once."""
    pairs = [line.split(" | ") for line in lines]
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a word stands twice in the table that begins with {lines[0]!r}")
    return found


def _opposites(lines: list[str]) -> dict[str, str]:
    """Both ways, but for lines with ``->``."""
    both = [line.split(" | ") for line in lines if " | " in line]
    one_way = [line.split(" -> ") for line in lines if " -> " in line]
    pairs = [*both, *([second, first] for first, second in both), *one_way]
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a word stands twice in the table of opposites")
    return found


def _words(lines: list[str]) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line.split(" | "))


def in_words(number: int) -> str:
    """``number`` as it is written and read aloud: 21 is "twenty-one", 365 has an "and"."""
    words = _TENS.sub(r"\1-\2", cardinal(number))
    return re.sub(r"hundred (?=\w)", "hundred and ", words)


def sentence_case(text: str) -> str:
    """``text`` with a capital at its start."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """``noun`` after "a" or "an", by how it is said: "an hour", "a unit"."""
    vowel = re.match(r"[aeiou]|hour|heir|honou?r|honest", noun)
    consonant = re.match(r"uni|use|usu|uter|eu|one|ew|ubiq|uto|ura", noun)
    return f"{'an' if vowel and not consonant else 'a'} {noun}"
