"""Words as they are scored: what two spellings of one utterance must not count as an error.

A recogniser is free to write "I'm", "7:30", "ice-cream" or "colour" where the sentence has "I
am", "seven thirty", "ice cream" or "color": the speech was right in each case. Both sides are
brought to one spelling before words are counted.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from mosstalk.bench.align import Errors, Pair, align, count_errors
from mosstalk.bench.numbers import spell_numbers

_WHOLE = {
    "can't": "can not",
    "cannot": "can not",
    "won't": "will not",
    "shan't": "shall not",
    "let's": "let us",
    "o'clock": "oclock",
    "ma'am": "madam",
    "gonna": "going to",
    "wanna": "want to",
    "gotta": "got to",
    "gimme": "give me",
    "lemme": "let me",
    "kinda": "kind of",
    "ok": "okay",
    "alright": "all right",
    "mr": "mister",
    "mrs": "missus",
    "dr": "doctor",
    "vs": "versus",
    "etc": "et cetera",
}
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
