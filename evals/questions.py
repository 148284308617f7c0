"""Questions that a model answers in speech: the held-out set, and how answers are judged.

``questions.txt`` holds the set. No training of ours has its wordings, and of those marked ``new``
not even the facts (numbers, words to spell, sentences to repeat). What a recogniser heard of an
answer is judged right if the right words are there and no other of the same family: "Oslo" for
Norway, and no other capital. Names that a recogniser may spell otherwise need only be nearer to
the right one than to any other.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from evals import intervals
from evals.intervals import Estimate
from evals.words import align, cardinal, compared, count_errors, normalised
from mosstalk.errors import BenchError

HELD_OUT = Path(__file__).with_name("questions.txt")
"""300 questions inside the domain, 60 outside it, and 44 dialogues of two turns."""
UNKNOWN = "unknown"
"""The group of questions outside the domain; right is to say that one does not know."""
INSIDE, OUTSIDE = "all inside the domain", "outside the domain"
"""What ``rates`` calls them."""
_DO_NOT_KNOW = ("do", "not", "know")
_TURNS = " >> "
_LARGEST = 1000
_NUMBERS = {tuple(cardinal(number).split()): number for number in range(_LARGEST + 1)}
_LONGEST_NUMBER = max(map(len, _NUMBERS))
_SAME_ERRORS = 0.2
"""Share of words that may be heard differently where a sentence was to be repeated."""
_GIST = 0.6
"""Share of a definition's content words that have to be there."""
_EMPTY = frozenset(
    normalised(
        "a an the of or and in on at to for from by with is are was be it its as that which who "
        "used something someone"
    )
)
_SIGN = re.compile(r"(?<=\d)\s*[-/\u00f7\u00d7x*]\s*(?=\d)")
"""Between numbers; with nothing in its place, "20/5" would be "twenty five"."""
_TY = re.compile(r"(?<=\b[2-9])[tTgG](?=[1-9]\b)")
"""Of some voices Whisper writes "forty-two" as "4t2"."""
_PARTED = re.compile(r"\band\b")
_LISTED = 3
"""So many numbers in a row may be written without blanks: "567"."""
_SAME_SOUND = (
    "buy/by/bye sell/cell weak/week right/write sun/son hear/here new/knew no/know deer/dear "
    "bear/bare hare/hair night/knight high/hi whole/hole meet/meat flower/flour baa/bah neigh/nay "
    "ewe/yew feet/feat peace/piece heel/heal sea/see tail/tale stare/stair wear/where poor/pour"
)
_AS_FIRST = {
    other: first
    for first, *others in (group.split("/") for group in _SAME_SOUND.split())
    for other in others
}
_IN_ORDER = frozenset(("day", "month"))
"""Groups where "the day before Tuesday is Monday" does not answer what comes after Monday."""
_NAMED = frozenset(("capital", "country", "currency", "language", "name"))
"""Groups whose answers are names that a recogniser may spell otherwise."""
_NAME_EDITS = 0.35
"""Share of a name's letters that may be heard differently."""
_FEWEST_NAME_LETTERS = 4
_MOST_NAME_WORDS = 4
_ALIKE = ((r"ph", "f"), (r"ou|oo|w", "u"), (r"ck|c|q", "k"), (r"z", "s"), (r"ee|ea|ie|y", "i"))
"""Letters that sound alike in names, after which h and doubled letters are dropped."""

Words = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """What is asked in one or two turns, the last of which is judged.

    ``judged`` names the way: ``word``, ``number``, ``letters``, ``gist`` or ``same``. ``right``
    has alternatives, ``answers`` a whole sentence for each turn, ``family`` the answers of like
    questions.
    """

    group: str
    novelty: str
    judged: str
    turns: tuple[str, ...]
    right: tuple[str, ...]
    answers: tuple[str, ...]
    family: frozenset[Words] = frozenset()

    @property
    def new(self) -> bool:
        """Whether training had neither these words nor this fact."""
        return self.novelty == "new"

    @property
    def told(self) -> tuple[str, ...]:
        """What was said before the last answer, which may say it again: turns, earlier answers."""
        return (*self.turns, *self.answers[:-1])


@dataclass(frozen=True)
class GroupRate:
    """How many of a group's questions were answered right, with its 95% interval."""

    group: str
    rate: Estimate


def read_questions(path: Path = HELD_OUT) -> tuple[Question, ...]:
    """The questions of a file, in order.

    ``family GROUP = A; B`` lists the answers of a group. Every other line has six columns with
    ``|`` between them: group, ``known`` or ``new``, how it is judged, the turns with ``>>``
    between them, the right words with ``;`` between them, an answer to each turn with ``>>``.

    Raises:
        BenchError: a line has another form, or names a way of judging that there is not.
    """
    families = dict[str, frozenset[Words]]()
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("family "):
            group, members = line.removeprefix("family ").split(" = ")
            families[group] = frozenset(_by_sound(name) for name in members.split("; "))
            continue
        question = _question(line.split(" | "), families)
        if question is None:
            raise BenchError(f"{path}: line {number} is no question")
        questions.append(question)
    return tuple(questions)


def _question(columns: Sequence[str], families: Mapping[str, frozenset[Words]]) -> Question | None:
    if len(columns) != 6 or columns[1] not in ("known", "new") or columns[2] not in _WAYS:
        return None
    group, novelty, judged, turns, right, answers = columns
    family = families.get(group, frozenset()) if judged == "word" else frozenset()
    asked, answered = tuple(turns.split(_TURNS)), tuple(answers.split(_TURNS))
    if len(asked) != len(answered):
        return None
    return Question(group, novelty, judged, asked, tuple(right.split("; ")), answered, family)


def line_of(question: Question) -> str:
    """The line by which ``read_questions`` reads ``question``, its family apart."""
    turns, right = _TURNS.join(question.turns), "; ".join(question.right)
    answers = _TURNS.join(question.answers)
    return " | ".join([question.group, question.novelty, question.judged, turns, right, answers])


def judge(question: Question, heard: str) -> bool:
    """Whether ``heard``, the written form of an answer, answers ``question``.

    To say the question again is no answer, unless that was asked for.
    """
    words = normalised(heard)
    if question.group != UNKNOWN and _has(words, _DO_NOT_KNOW):
        return False
    if question.judged != "same" and _is_said_again(question.turns[-1], heard):
        return False
    return _WAYS[question.judged](question, heard)


def numbers_in(text: str) -> list[int]:
    """All whole numbers to a thousand in ``text``, digits and words alike, in order."""
    text = _SIGN.sub(" by ", _TY.sub("", text))
    words = list(_without_and(_one_hundred(normalised(text))))
    found, place = [], 0
    while place < len(words):
        for length in range(_LONGEST_NUMBER, 0, -1):
            number = _NUMBERS.get(tuple(words[place : place + length]))
            if number is not None:
                found.append(number)
                place += length
                break
        else:
            place += 1
    return found


def _without_and(words: Sequence[str]) -> Iterator[str]:
    """``words`` without the "and" of "a hundred and one"; "two and three" are two numbers."""
    before = ""
    for word in words:
        if word != "and" or before not in ("hundred", "thousand"):
            yield word
        before = word


def _one_hundred(words: list[str]) -> list[str]:
    """``words`` with "a hundred" as "one hundred"."""
    after = [*words, ""][1:]
    return [
        "one" if word == "a" and next_word in ("hundred", "thousand") else word
        for word, next_word in zip(words, after, strict=True)
    ]


def rates(outcomes: Iterable[tuple[Question, bool]]) -> list[GroupRate]:
    """Rates by group, then of all inside the domain, of new facts, of second turns, and outside.

    Single questions alone count for a group and for all; what has no question is left out.
    """
    every = list(outcomes)
    single = [(q, right) for q, right in every if len(q.turns) == 1]
    inside = [(q, right) for q, right in single if q.group != UNKNOWN]
    by_group = sorted(inside, key=lambda outcome: outcome[0].group)
    parts = [(name, list(some)) for name, some in groupby(by_group, lambda one: one[0].group)]
    parts += [
        (INSIDE, inside),
        ("of them with new facts", [(q, right) for q, right in inside if q.new]),
        ("second turn", [(q, right) for q, right in every if len(q.turns) > 1]),
        (OUTSIDE, [(q, right) for q, right in single if q.group == UNKNOWN]),
    ]
    return [
        GroupRate(name, intervals.mean([float(right) for _, right in some]))
        for name, some in parts
        if some
    ]


def _has(words: Sequence[str], phrase: Words) -> bool:
    """Whether ``phrase`` stands in ``words``."""
    size = len(phrase)
    return any(tuple(words[i : i + size]) == phrase for i in range(len(words) - size + 1))


def _members(words: Sequence[str], family: frozenset[Words]) -> list[Words]:
    """Members of ``family`` in ``words``, in order; where one holds another, the longer alone."""
    longest = max(map(len, family), default=0)
    found, place = list[Words](), 0
    while place < len(words):
        for length in range(longest, 0, -1):
            phrase = tuple(words[place : place + length])
            if len(phrase) == length and phrase in family:
                found.append(phrase)
                place += length
                break
        else:
            place += 1
    return found


def _word_is_right(question: Question, heard: str) -> bool:
    """A right word is there, and no other of the family but those that were said before.

    Where the right word itself was said before, it has to be the last one: "the opposite of cold
    is hot" answers "and the other way round?" after "what is the opposite of hot?". So it has
    where one thing comes before another.
    """
    right = frozenset(map(_by_sound, question.right))
    family = question.family | right
    told = {each for text in question.told for each in _members(_by_sound(text), family)}
    found = _members(_by_sound(heard), family)
    if any(each not in right and each not in told for each in found):
        return False
    if right & set(found):
        last_counts = question.group in _IN_ORDER or right & told
        return not last_counts or found[-1] in right
    return question.group in _NAMED and _name_is_near(question, heard, right)


def _by_sound(text: str) -> Words:
    """The words of ``text``; of those that sound alike the same one: no ear tells them apart."""
    return tuple(_AS_FIRST.get(word, word) for word in normalised(text))


def _name_is_near(question: Question, heard: str, right: frozenset[Words]) -> bool:
    """Whether some of what was heard is nearer to a right name than to the others, and near."""
    told = {word for text in question.told for word in normalised(text)}
    words = [word for word in normalised(heard) if word not in told]
    others = [_sounded(each) for each in question.family - right]
    for name in map(_sounded, right):
        most = int(_NAME_EDITS * len(name))
        if len(name) < _FEWEST_NAME_LETTERS:
            continue
        for size in range(1, _MOST_NAME_WORDS + 1):
            for start in range(len(words) - size + 1):
                some = _sounded(words[start : start + size])
                edits = _edits(name, some)
                if edits <= most and all(_edits(other, some) > edits for other in others):
                    return True
    return False


def _sounded(words: Sequence[str]) -> str:
    """Words as one, with one letter for those that sound alike: "uagadugu" of Ouagadougou."""
    text = "".join(words)
    for letters, letter in _ALIKE:
        text = re.sub(letters, letter, text)
    return re.sub(r"(.)\1", r"\1", text.replace("h", ""))


def _edits(name: str, other: str) -> int:
    """Letters put in, left out or changed between two words (Levenshtein 1966)."""
    return count_errors(align(name, other)).edits


def _number_is_right(question: Question, heard: str) -> bool:
    """The last numbers are the right ones; before them stand only those that were said before."""
    found = numbers_in(heard)
    told = {number for text in question.told for number in numbers_in(text)}
    told |= {number for text in question.told for number in numbers_in(_PARTED.sub(", or ", text))}
    return any(_ends_in(found, numbers_in(right), told) for right in question.right)


def _ends_in(found: list[int], right: list[int], told: set[int]) -> bool:
    if len(right) >= _LISTED and "".join(map(str, found)) == "".join(map(str, right)):
        return True
    before = found[: -len(right)]
    return found[-len(right) :] == right and set(before) <= {*told, *right}


def _letters_are_right(question: Question, heard: str) -> bool:
    """Letters that stand alone, or in capitals, spell the word; "double" is not understood.

    The word itself may stand in capitals before them; a small "a" is none of them where others
    are large.
    """
    pieces = "".join(letter if letter.isalpha() else " " for letter in heard).split()
    spelled = [piece for piece in pieces if len(piece) == 1 or piece.isupper()]
    if any(piece.isupper() for piece in spelled):
        spelled = [piece for piece in spelled if piece != "a"]
    found = "".join(spelled).lower()
    return any(found in (word.lower(), 2 * word.lower()) for word in question.right)


def _gist_is_right(question: Question, heard: str) -> bool:
    """Most content words of one of the right answers are there, in whatever order."""
    said = set(normalised(heard))
    for right in question.right:
        wanted = set(normalised(right)) - _EMPTY
        if len(wanted & said) >= _GIST * len(wanted):
            return True
    return False


def _same_is_right(question: Question, heard: str) -> bool:
    """The sentence is there, but for a word in five; "say after me" is no part of it."""
    return _is_said_again(question.right[0], heard)


def _is_said_again(text: str, heard: str) -> bool:
    errors = count_errors(compared(text, heard))
    return errors.edits <= _SAME_ERRORS * errors.length


_WAYS: Mapping[str, Callable[[Question, str], bool]] = {
    "word": _word_is_right,
    "number": _number_is_right,
    "letters": _letters_are_right,
    "gist": _gist_is_right,
    "same": _same_is_right,
}
