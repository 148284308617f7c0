"""Words as they are scored: one spelling for both sides, aligned with the fewest edits.

A recogniser is free to write "I'm", "7:30", "ice-cream" or "colour" where the sentence has "I
am", "seven thirty", "ice cream" or "color": the speech was right in each case. Both sides are
brought to one spelling before words are counted. Alignment is Levenshtein's (1966).
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_EDIT = 2**20
_SUBSTITUTION = _EDIT + 1
"""Dearer by so little that it only decides between ways with equally many edits."""
_UNDER_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TIMES_TEN = "twenty thirty forty fifty sixty seventy eighty ninety"
_ONES = _UNDER_TWENTY.split()
_TENS = ["", "", *_TIMES_TEN.split()]
_GROUPS = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_IRREGULAR = "one/first two/second three/third five/fifth eight/eighth nine/ninth twelve/twelfth"
_ORDINALS = dict(pair.split("/") for pair in _IRREGULAR.split())
_MONEY = {"$": "dollar", "£": "pound", "€": "euro"}
_LONGEST_DIGITS = 12
"""Longer ones are read digit by digit, as people read them."""
_DIGITS = r"\d+(?:,\d{3})+|\d+"
_SPOKEN = re.compile(
    rf"(?P<sign>[$£€])?(?P<whole>{_DIGITS})"
    r"(?::(?P<minutes>[0-5]\d)\b|\.(?P<decimals>\d+))?"
    r"(?P<after>(?:st|nd|rd|th|s)(?![a-z])|%)?"
)
_WRITTEN_OUT = (
    "can't/can not, cannot/can not, won't/will not, shan't/shall not, let's/let us, "
    "o'clock/oclock, ma'am/madam, gonna/going to, wanna/want to, gotta/got to, gimme/give me, "
    "lemme/let me, kinda/kind of, ok/okay, alright/all right, mr/mister, mrs/missus, dr/doctor, "
    "vs/versus, etc/et cetera"
)
_WHOLE = dict(pair.split("/") for pair in _WRITTEN_OUT.split(", "))
_ENDINGS = (("n't", " not"), ("'re", " are"), ("'ve", " have"), ("'ll", " will"), ("'m", " am"))
_AMBIGUOUS = {"'s": " is", "'d": " would"}
"""Either could be "has" or "had"; both sides get the same."""
_TAKE_IS = "i you he she it we they that this there here what where who when why how"
_PRONOUNS = frozenset(_TAKE_IS.split())
_SPELLINGS = (
    "analyse/analyze apologise/apologize behaviour/behavior cancelled/canceled "
    "cancelling/canceling catalogue/catalog centre/center centres/centers cheque/check "
    "colour/color coloured/colored colours/colors cosy/cozy defence/defense favour/favor "
    "favourite/favorite favourites/favorites flavour/flavor flavours/flavors grey/gray "
    "harbour/harbor honour/honor humour/humor jewellery/jewelry kerb/curb labour/labor "
    "licence/license litre/liter litres/liters metre/meter metres/meters mould/mold "
    "neighbour/neighbor neighbours/neighbors neighbourhood/neighborhood offence/offense "
    "organise/organize organised/organized plough/plow practise/practice "
    "programme/program programmes/programs pyjamas/pajamas realise/realize "
    "realised/realized recognise/recognize recognised/recognized rumour/rumor "
    "sceptical/skeptical theatre/theater towards/toward travelled/traveled "
    "traveller/traveler travelling/traveling tyre/tire tyres/tires whisky/whiskey"
)
_AMERICAN = dict(pair.split("/") for pair in _SPELLINGS.split())
_APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'"})
_SYMBOLS = {"&": " and ", "@": " at ", "+": " plus "}
_NO_WORD = re.compile(r"[^a-z' ]+")


class Pair(NamedTuple):
    """One step of an alignment; None where the other side has something of its own."""

    reference: str | None
    hypothesis: str | None

    @property
    def kind(self) -> str:
        """``match``, ``substitution``, ``deletion`` (left out) or ``insertion`` (added)."""
        if self.reference is None:
            return "insertion"
        if self.hypothesis is None:
            return "deletion"
        return "match" if self.reference == self.hypothesis else "substitution"


@dataclass(frozen=True)
class Errors:
    """Edits of one hypothesis, and the length of its reference."""

    substitutions: int
    deletions: int
    insertions: int
    length: int

    @property
    def edits(self) -> int:
        """Substitutions, deletions and insertions together."""
        return self.substitutions + self.deletions + self.insertions


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Pair]:
    """The pairs, in order, that turn ``reference`` into ``hypothesis`` with the fewest edits.

    Of equally short ways one that leaves most items as they are is taken.
    """
    costs = _costs(reference, hypothesis)
    pairs, i, j = list[Pair](), len(reference), len(hypothesis)
    while i or j:
        if i and j:
            edit = _SUBSTITUTION if reference[i - 1] != hypothesis[j - 1] else 0
            if costs[i][j] == costs[i - 1][j - 1] + edit:
                i, j = i - 1, j - 1
                pairs.append(Pair(reference[i], hypothesis[j]))
                continue
        if i and costs[i][j] == costs[i - 1][j] + _EDIT:
            i -= 1
            pairs.append(Pair(reference[i], None))
        else:
            j -= 1
            pairs.append(Pair(None, hypothesis[j]))
    return pairs[::-1]


def _costs(reference: Sequence[str], hypothesis: Sequence[str]) -> list[list[int]]:
    """``costs[i][j]``: least cost from the first i of one to the first j of the other."""
    costs = [[j * _EDIT for j in range(len(hypothesis) + 1)]]
    for i, wanted in enumerate(reference, 1):
        row, above = [i * _EDIT], costs[-1]
        for j, found in enumerate(hypothesis, 1):
            changed = above[j - 1] + (_SUBSTITUTION if wanted != found else 0)
            row.append(min(changed, above[j] + _EDIT, row[-1] + _EDIT))
        costs.append(row)
    return costs


def count_errors(pairs: Sequence[Pair]) -> Errors:
    """What the edits of an alignment count."""
    kinds = [pair.kind for pair in pairs]
    return Errors(
        kinds.count("substitution"),
        kinds.count("deletion"),
        kinds.count("insertion"),
        len(kinds) - kinds.count("insertion"),
    )


def cardinal(number: int) -> str:
    """``number`` in words, without "and": 1205 is "one thousand two hundred five"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        ten, rest = divmod(number, 10)
        return _TENS[ten] + (f" {_ONES[rest]}" if rest else "")
    size, name = next(group for group in _GROUPS if number >= group[0])
    count, rest = divmod(number, size)
    return f"{cardinal(count)} {name}" + (f" {cardinal(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """``number`` as a rank: 21 is "twenty first"."""
    *start, last = cardinal(number).split()
    if last in _ORDINALS:
        rank = _ORDINALS[last]
    else:
        rank = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return " ".join((*start, rank))


def year(number: int) -> str:
    """A year from 1100 to 2099 as people say it: 1995 is "nineteen ninety five"."""
    century, rest = divmod(number, 100)
    if century == 20 and rest < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def spell_numbers(text: str) -> str:
    """Replace every number in lower-case ``text`` by words.

    Knows plain and grouped numbers, ranks (2nd), decimals, clock times (7:30), percent, decades
    (90s), money ($2.50) and years, which are four digits from 1100 to 2099 without a comma.
    """
    return _SPOKEN.sub(lambda found: f" {_in_words(found)} ", text)


def _in_words(found: re.Match[str]) -> str:
    digits, after = found["whole"].replace(",", ""), found["after"]
    if len(digits) > _LONGEST_DIGITS:
        return " ".join(_ONES[int(digit)] for digit in digits)
    number = int(digits)
    if found["sign"]:
        return _money(found["sign"], number, found["decimals"])
    if found["minutes"]:
        return _clock(number, int(found["minutes"]))
    if found["decimals"]:
        point = " ".join(_ONES[int(digit)] for digit in found["decimals"])
        words = f"{cardinal(number)} point {point}"
    elif after in ("st", "nd", "rd", "th"):
        return ordinal(number)
    elif len(digits) == 4 and digits == found["whole"] and 1100 <= number < 2100:
        words = year(number)
    else:
        words = cardinal(number)
    if after == "s":
        return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"
    return f"{words} percent" if after == "%" else words


def _money(sign: str, whole: int, decimals: str | None) -> str:
    words = f"{cardinal(whole)} {_MONEY[sign]}{'s' * (whole != 1)}"
    return f"{words} {cardinal(int(decimals))}" if decimals and int(decimals) else words


def _clock(hour: int, minute: int) -> str:
    if minute == 0:
        return f"{cardinal(hour)} o'clock"
    return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"


def normalised(text: str) -> list[str]:
    """The words of ``text`` in one spelling: lower case, no punctuation, no digits.

    Contractions are written out, British spellings become American, accents go; a possessive's
    apostrophe goes too.
    """
    plain = unicodedata.normalize("NFKD", text.translate(_APOSTROPHES)).lower()
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    plain = re.sub(r"\b([ap])\.m\.?(?=\W|$)", r"\1m", plain)
    plain = spell_numbers(plain)
    for symbol, word in _SYMBOLS.items():
        plain = plain.replace(symbol, word)
    written_out = (_written_out(word.strip("'")) for word in _NO_WORD.sub(" ", plain).split())
    words = " ".join(written_out).replace("'", "").split()
    return [_AMERICAN.get(word, word) for word in words]


def _written_out(word: str) -> str:
    if word in _WHOLE:
        return _WHOLE[word]
    for ending, words in _ENDINGS:
        if word.endswith(ending):
            return word.removesuffix(ending) + words
    for ending, words in _AMBIGUOUS.items():
        if word.endswith(ending) and word.removesuffix(ending) in _PRONOUNS:
            return word.removesuffix(ending) + words
    return word


def with_blanks_of(reference: Sequence[str], hypothesis: Sequence[str]) -> list[str]:
    """``hypothesis`` with compounds written as in ``reference``: "icecream" as "ice cream".

    Only two words that lie side by side and sound the same when joined are taken for one; the
    reference's own count of words never changes.
    """
    split = {first + second: (first, second) for first, second in pairwise(reference)}
    whole = set(reference)
    words, rest = list[str](), list(hypothesis)
    while rest:
        word = rest.pop(0)
        if rest and word + rest[0] in whole and (word, rest[0]) not in split.values():
            words.append(word + rest.pop(0))
        elif word in split and word not in whole:
            words += split[word]
        else:
            words.append(word)
    return words


def compared(reference: str, hypothesis: str) -> list[Pair]:
    """The words of two texts, normalised and aligned."""
    wanted = normalised(reference)
    return align(wanted, with_blanks_of(wanted, normalised(hypothesis)))


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> list[Errors]:
    """Edits of each hypothesis against the reference in the same place."""
    both = zip(references, hypotheses, strict=True)
    return [count_errors(compared(reference, hypothesis)) for reference, hypothesis in both]


def error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Word error rate of all texts together: edits over words of the references.

    0 is perfect; words that were added can take it above 1.

    Raises:
        ValueError: the lists differ in length, or no reference holds a word.
    """
    errors = word_errors(references, hypotheses)
    words = sum(each.length for each in errors)
    if words == 0:
        raise ValueError("no reference holds a word")
    return sum(each.edits for each in errors) / words
