"""Text that is read aloud, as a checkpoint can read it: in words of its languages.

A checkpoint asks for this in its ``generation_config.json`` (see ``TextRules``); one that asks for
nothing gets every text as it was written. Numbers, amounts, times and units become words by
wetext (https://github.com/pengzhendong/wetext), grammars for English and Chinese. The tables and
patterns below hold what these lack for English.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mosstalk.errors import TextError
from mosstalk.offline.pieces import LONGEST_TEXT, paragraphs, text_pieces

LANGUAGES = {"en": "English", "zh": "Chinese"}
_SCRIPTS = {"en": frozenset({"LATIN"}), "zh": frozenset({"CJK", "LATIN"})}
"""Of each language, as the names of Unicode's letters begin. Chinese text holds Latin words."""
_SCRIPT_NAMES = {"CJK": "Chinese"}
_UNITS = frozenset("\u03bc\u03a9\u03c0")
"""Greek letters that stand for micro, ohm and pi in any language."""
_AT_ONCE = 300
"""Characters that are normalised together: wetext's time grows faster than the text."""
_LONGEST_SHOWN = 40
_HAN = re.compile(r"[\u4e00-\u9fff]")
_SENTENCE_END = re.compile(r"(?<=[。！？])\s*|(?<=[.!?])\s+")  # noqa: RUF001
_BLANK_LINE = "\n\n"
_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bc\u2032`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2212", "-"),
        **dict.fromkeys("\u2013\u2014\u2015", " - "),
        "½": " 1/2",
        "¼": " 1/4",
        "¾": " 3/4",
        "\u2026": "...",
        "\u2103": "\u00b0C",
        "\u2109": "\u00b0F",
        "\u2116": " No. ",
        "\u03a9": " ohm",
        "\u03c0": " pi",
    }
)
_RANGE = re.compile(r"(?<=\d)\s?[\u2013\u2014]\s?(?=\d)")
_SIGNS = frozenset(r""" !"#$%&'()+,-./:;=?@[]°€£¥×÷±²³""")  # noqa: RUF001
"""Signs that mark a pause or have words, beside letters, digits and Chinese punctuation."""
_CHINESE_MARKS = frozenset("。，！？、；：“”‘’（）《》「」『』")  # noqa: RUF001
_ENGLISH_ONES = "zero one two three four five six seven eight nine"
_ONES = {"en": _ENGLISH_ONES.split(), "zh": list("零一二三四五六七八九")}
_PLAIN = re.compile(r"(?:[a-z' ,?!-]|[A-Z](?![A-Z.])|(?<=[a-z]{4})\.)*")
"""English in words already."""
_ABBREVIATIONS = {
    "e.g": "for example", "i.e": "that is", "etc": "et cetera", "vs": "versus",
    "approx": "approximately", "a.k.a": "also known as", "inc": "incorporated",
    "corp": "corporation", "dept": "department", "ave": "avenue", "blvd": "boulevard",
}  # fmt: skip
_BEFORE_NAMES = {"Mrs": "Missus", "Ms": "Miz", "Prof": "Professor", "Sen": "Senator",
                 "Rep": "Representative", "Hon": "Honorable", "St": "Saint"}  # fmt: skip
_BEFORE_NUMBERS = {"no": "number", "p": "page", "pp": "pages", "fig": "figure", "vol": "volume",
                   "ch": "chapter", "apt": "apartment", "ca": "about"}  # fmt: skip


def _any_of(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


_ABBREVIATION = re.compile(
    rf"\b({_any_of(_ABBREVIATIONS)})\.(\s*$|(?=\s+(?-i:[A-Z])))?(?!\w)", re.I
)
_TITLE = re.compile(rf"\b({_any_of(_BEFORE_NAMES)})\.(?=\s+[A-Z])")
_COUNTED = re.compile(rf"\b({_any_of(_BEFORE_NUMBERS)})\. ?(?=\d)", re.I)
_MONEY = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny")}
_AMOUNT = re.compile(
    r"([$€£])\s?(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d\d))?(?![\d,.]*\d|\s?[a-z]*illion)"
)
_THOUSAND = re.compile(r"(?<![\d.,])1,(\d{3})(?![\d,.]*\d)")
_BEFORE = (
    # Quotes have no sound, and wetext's own notation is written with them.
    (re.compile(r'"'), " "),
    (re.compile(r"https?://"), ""),
    (re.compile(r"\b([A-Z][a-z]+|\d+(?:st|nd|rd|th)) St\.(?=[^ ]| [a-z])"), r"\1 Street"),
    (re.compile(r"\b([A-Z][a-z]+|\d+(?:st|nd|rd|th)) St\.$"), r"\1 Street."),
    (re.compile(r"#"), "number "),
    (re.compile(r"~ ?(?=\d)"), "about "),
    (re.compile(r"(?<=\d)' ?(?=\d)"), " foot "),
    # The 1990s: wetext knows the nineties.
    (re.compile(r"'?\b(1\d|20)([1-9]0s)\b"), r"\1 \2"),
    (re.compile(r"'(?=\d0s\b)"), ""),
    (re.compile(r"(?<=\d) ?m\b(?!')"), " meters"),
    (re.compile(r"(?<=\d) ?[lL]\b"), " liters"),
    (re.compile(r"(?<=\d) ?hrs?\b"), " hours"),
    (re.compile(r"\b24/7\b"), "24 7"),
    # A version: wetext reads at most one point.
    (re.compile(r"(?<=\d)\.(?=\d+\.\d)|(?<=\d\.\d)\.(?=\d)"), " point "),
)
_PHONE = re.compile(
    r"(?<![\w.,])(?!\d{4}-\d\d-\d\d\b)\+?\(?\d{1,4}\)?(?:[ -]\d{2,4}){2,}\b|\b\d{3}-\d{4}\b"
)
_CAPITALS = re.compile(r"\b([A-Z]{2,5}|[B-HJ-Z])('?s)?\b")
_LETTER_NAMES = (
    "ay bee see dee ee eff jee aitch eye jay kay ell em en oh pee cue are ess tee you vee "
    "double-you ex why zee"
)
_NAMES = dict(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", _LETTER_NAMES.split(), strict=True))
_SHORT_WORDS = (
    "AND ANY ARE BUT CAN DID DO FOR GET GO HAD HAS HE HER HIS HOW IF IN IS ME MY NO NOT NOW OF OFF "
    "ON ONE OR OUR OUT SEE SHE SO THE TO TOO TWO UP WAS WE WHO WHY YES YOU ALL"
)
_EMPHASISED = frozenset(_SHORT_WORDS.split())
"""What people write in capitals for emphasis; other capitals stand for letters."""
_VOWEL = re.compile(r"[AEIOUY]")
_SIGN_WORDS = (
    (re.compile(r"[\u00b5\u03bc]"), " micro "),
    (re.compile(r"²"), " squared "),
    (re.compile(r"³"), " cubed "),
    (re.compile(r"&"), " and "),
    (re.compile(r"\+"), " plus "),
    (re.compile(r"="), " equals "),
    (re.compile(r"@"), " at "),
    (re.compile(r"/"), " "),
)
"""What wetext leaves as signs, in words."""
_MARKS = (
    (re.compile(r"\s+-+\s+|--+|[;:()\[\]]"), ", "),
    (re.compile(r"(?<![a-zA-Z])['-]+|['-]+(?![a-zA-Z])"), " "),
)
"""The marks of other pauses as commas."""
_TIDY = (
    (re.compile(r"\s+"), " "),
    (re.compile(r" (?=[,.?!])"), ""),
    (re.compile(r"\.+(?=[?!])"), ""),
    (re.compile(r"([.?!])[.?!,]+"), r"\1"),
    (re.compile(r",[, ]*(?=[,.?!])"), ""),
    (re.compile(r"^[,.?! ]+"), ""),
)
_LETTERS = str.maketrans(
    {"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l",
     "Ł": "L", "đ": "d", "Đ": "D", "ð": "th", "Ð": "Th", "þ": "th", "Þ": "Th", "\u0131": "i"}
)  # fmt: skip


@dataclass(frozen=True)
class TextRules:
    """What a checkpoint asks of text that it reads aloud.

    ``max_chars``: characters of one reply; longer text is cut. ``languages``: those it reads,
    of ``LANGUAGES``; text in the letters of others is refused, and so is text without a word.
    None: nothing is refused. ``normalize``: all is spelled in words of these languages.
    """

    max_chars: int = LONGEST_TEXT
    languages: tuple[str, ...] = ()
    normalize: bool = False


@dataclass(frozen=True)
class ReadableText:
    """Text as it is read aloud, and the signs of the original that have no words."""

    text: str
    max_chars: int = LONGEST_TEXT
    left_out: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[str]:
        """The text in parts of at most ``max_chars``, each to be one reply."""
        return text_pieces(self.text, self.max_chars)

    @property
    def note(self) -> str:
        """What to tell whoever gave the text; empty where nothing was left out."""
        if not self.left_out:
            return ""
        return f"left out, having no words: {' '.join(self.left_out)}"


def readable(text: str, rules: TextRules) -> ReadableText:
    """``text`` as a checkpoint with these rules can read it aloud.

    Blank lines stay; other blanks and line ends become single blanks if it is normalised.

    Raises:
        TextError: it has no word, or letters of a script that is of none of the languages.
    """
    if not text.strip():
        raise TextError("the text is empty; give something to read aloud")
    if rules.languages:
        _require_letters(text, rules.languages)
    words, left_out = _normalized(text, rules.languages) if rules.normalize else (text, ())
    if rules.languages and not any(map(str.isalnum, words)):
        raise TextError(f"there is no word to read aloud in {_short(text)!r}; give some")
    return ReadableText(words, rules.max_chars, left_out)


def _require_letters(text: str, languages: tuple[str, ...]) -> None:
    known = frozenset[str]().union(*(_SCRIPTS[language] for language in languages))
    names = " and ".join(LANGUAGES[language] for language in languages)
    for word in text.split():
        for letter in filter(str.isalpha, unicodedata.normalize("NFKC", word)):
            script = unicodedata.name(letter, "UNKNOWN").partition(" ")[0]
            if script not in known and letter not in _UNITS:
                raise TextError(
                    f"this model reads {names} alone, and {_short(word)!r} is written in "
                    f"{_SCRIPT_NAMES.get(script, script.capitalize())}; give {names} text"
                )


def _short(text: str) -> str:
    """The beginning of a text, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _normalized(text: str, languages: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """``text`` in words, and what is left out of it."""
    left_out, kept = list[str](), list[str]()
    for paragraph in paragraphs(text):
        known = _known_signs(paragraph, left_out)
        sentences = _SENTENCE_END.split(known) if len(languages) > 1 else [known]
        together = (chunk for each in sentences for chunk in text_pieces(each, _AT_ONCE))
        chunks = (_in_words(chunk, languages, left_out) for chunk in together)
        kept.append(" ".join(filter(None, chunks)))
    return _BLANK_LINE.join(filter(None, kept)), tuple(dict.fromkeys(left_out))


def _known_signs(text: str, left_out: list[str]) -> str:
    """``text`` in signs that can become words; runs of others are added to ``left_out``."""
    text = _RANGE.sub("-", unicodedata.normalize("NFC", text)).translate(_SAME)
    signs, run = list[str](), ""
    for sign, after in zip(text, f"{text[1:]} ", strict=False):
        known = None if sign == "#" and not after.isdigit() else _known(sign)
        if known is None and (run or unicodedata.category(sign) not in ("Mn", "Cf", "Cc")):
            run += sign
        if known is not None:
            if run:
                left_out.append(run)
                signs.append(" ")
            signs.append(known)
            run = ""
    left_out += [run] if run else []
    return "".join(signs)


def _known(sign: str) -> str | None:
    """A sign as the grammars know it; None for what has no words."""
    if sign.isspace():
        return " "
    if sign in _SIGNS or sign in _CHINESE_MARKS:
        return sign
    if unicodedata.category(sign) == "Nd":
        return str(unicodedata.decimal(sign))
    plain = unicodedata.normalize("NFKC", sign)
    if sign.isalpha() or plain in _SIGNS or (plain.isascii() and plain.isdigit()):
        return plain
    return None


def _in_words(chunk: str, languages: tuple[str, ...], left_out: list[str]) -> str:
    if "zh" in languages and ("en" not in languages or _HAN.search(chunk)):
        words = "".join(_spoken_signs(_spoken(chunk, "zh"), left_out))
    else:
        words = _english(_unaccented(chunk), left_out)
    return " ".join(words.split())


def _english(text: str, left_out: list[str]) -> str:
    words = text
    if not _PLAIN.fullmatch(text):
        words = _in_full(_replaced(text, _BEFORE))
        words = _AMOUNT.sub(_amount, _PHONE.sub(_digit_by_digit, words))
        words = _THOUSAND.sub(_thousand, words)
        words = _replaced(_spoken(words, "en"), _SIGN_WORDS)
    words = "".join(_spoken_signs(_replaced(words, _MARKS), left_out))
    words = _replaced(_letters(words), _TIDY).strip()
    words = words if text.endswith(",") else words.rstrip(" ,")
    return words[:1].upper() + words[1:] if text[:1].isupper() else words


def _replaced(text: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, words in rules:
        text = pattern.sub(words, text)
    return text


def _in_full(text: str) -> str:
    """``text`` with its abbreviations written out."""
    text = _TITLE.sub(lambda found: _BEFORE_NAMES[found[1]], text)
    text = _COUNTED.sub(lambda found: f"{_BEFORE_NUMBERS[found[1].lower()]} ", text)

    # wetext takes it for a number wherever it stands.
    text = re.sub(r"\bNo\.", "no.", text)

    def words(found: re.Match[str]) -> str:
        # The point stays where it also ends the sentence.
        return _ABBREVIATIONS[found[1].lower()] + ("" if found[2] is None else ".")

    return _ABBREVIATION.sub(words, text)


def _amount(found: re.Match[str]) -> str:
    """An amount with its smaller coins: wetext reads $3.50 as three point five dollars."""
    whole, coin = _MONEY[found[1]]
    many, few = int(found[2].replace(",", "")), int(found[3] or 0)
    coins = "pence" if coin == "penny" else f"{coin}s"
    parts = [f"{many:,} {whole}{'s' * (many != 1)}"] if many or not few else []
    parts += [f"{few} {coin if few == 1 else coins}"] if few else []
    return " and ".join(parts)


def _thousand(found: re.Match[str]) -> str:
    """1,000 to 1,999: wetext leaves out the one."""
    rest = int(found[1])
    return f"one thousand {rest}" if rest else "one thousand"


def _digit_by_digit(found: re.Match[str]) -> str:
    """A telephone number, with a pause between its groups."""
    groups = re.findall(r"\d+", found[0])
    spelled = ", ".join(" ".join(_ONES["en"][int(digit)] for digit in group) for group in groups)
    return f"plus {spelled}" if found[0].startswith("+") else spelled


def _letters(text: str) -> str:
    """Initials and other words in capitals, letter by letter or as the words that they are."""
    if not re.search(r"[a-z]", text) and re.search(r"[A-Z]{4}|[A-Z] [A-Z]{2}", text):
        return text.lower()
    text = re.sub(r"\bOK\b", "okay", text)
    return _CAPITALS.sub(lambda found: _letter_by_letter(*found.groups("")), text)


def _letter_by_letter(word: str, ending: str) -> str:
    if word in _EMPHASISED or (len(word) > 3 and _VOWEL.search(word)):
        return word.lower() + ending
    return " ".join(_NAMES[letter] for letter in word) + ending.strip("'")


def _spoken_signs(text: str, left_out: list[str]) -> Iterator[str]:
    for sign in text:
        if sign.isalpha() or sign in _CHINESE_MARKS or sign in " ,.?!'-":
            yield sign
        else:
            left_out.append(sign)
            yield " "


def _unaccented(text: str) -> str:
    """Latin letters without their accents; those of other scripts as they are."""
    plain = unicodedata.normalize("NFD", text.translate(_LETTERS))
    return "".join(sign for sign in plain if not "\u0300" <= sign <= "\u036f")


def _spoken(text: str, language: str) -> str:
    """``text`` with its numbers, amounts, times and units in words."""
    # Here, since its grammars take half a second to load.
    import wetext

    normalizer = wetext.Normalizer(lang=language, operator="tn")

    def tried(part: str) -> str | None:
        try:
            return str(normalizer.normalize(part)) if part else ""
        except AssertionError:  # The grammar has no way through this text.
            return None

    whole = tried(text)
    if whole is None:
        words = (tried(word) or word for word in text.split())
        whole = " ".join(words)
    return re.sub(r"\d", lambda digit: f" {_ONES[language][int(digit[0])]} ", whole)
