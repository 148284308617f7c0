"""Numbers as English says them: what a recogniser writes in digits becomes words."""

import re

_UNDER_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TIMES_TEN = "twenty thirty forty fifty sixty seventy eighty ninety"
_ONES = _UNDER_TWENTY.split()
_TENS = ["", "", *_TIMES_TEN.split()]
_GROUPS = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_MONEY = {"$": "dollar", "£": "pound", "€": "euro"}
_LONGEST_DIGITS = 12
"""Longer ones are read digit by digit, as people read them."""

_DIGITS = r"\d+(?:,\d{3})+|\d+"
_SPOKEN = re.compile(
    rf"(?P<sign>[$£€])?(?P<whole>{_DIGITS})"
    r"(?::(?P<minutes>[0-5]\d)\b|\.(?P<decimals>\d+))?"
    r"(?P<after>(?:st|nd|rd|th|s)(?![a-z])|%)?"
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
