"""What a noun means, in one short sentence: WordNet's glosses, shortened by rules.

Nouns are ranked by how often WordNet's tagged texts have them, and how often its own glosses use
them. The first sense alone counts. Definitions in ``glosses.txt``, our own, go before WordNet's.
WordNet 3.0 (Princeton) allows any use with its notice kept.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.answers.facts import sentence_case, with_article

WORDNET = Path("/usr/share/wordnet")
MOST_WORDS = 14
"""Of the whole sentence."""
_FEWEST_OF_GLOSS = 3
_OURS = Path(__file__).with_name("glosses.txt")
_LEMMA = re.compile(r"[a-z]{3,12}")
_ASIDE = re.compile(r"\([^)]*\)")
_PLAIN = re.compile(r"[a-z][a-z' ,-]*")
_TAG_WORTH = 3
_RARE_COUNT = 1
"""A noun that WordNet's glosses have at most so often, and its tagged texts never, is rare."""
_RARE_LETTERS = 6
_COUNTED = {"05", "06", "15", "17", "18", "20", "25", "28"}
"""Kinds of nouns (WordNet's lexicographer files) that have a plural: animals, things made,
places, objects, people, plants, shapes, times."""
_MASS = {"27"}
"""Substances: no article."""
_BY_GLOSS = {"04", "07", "08", "09", "10", "11", "12", "13", "14", "19", "21", "22", "26"}
"""Acts, qualities, food, feelings and the like: with an article if the gloss begins with one."""
_MASS_ENDINGS = re.compile(
    r"(ness|ity|ism|ing|ment|ance|ence|ion|th|ure|ship|hood|cy|dom|ology|ics|phy|try|ery|age)$"
)
_TAXONOMIC = re.compile(
    r"\b(genus|genera|famil(y|ies)|order|phylum|suborder|subfamily|taxonomic|kingdom|class|"
    r"species|linguistics|unit of|equal to|atomic|deceased|slang|offensive|ethnic|slur)\b"
)
_UNWANTED = re.compile(
    r"\b(sex\w*|peni(s|le)|vagina\w*|genital\w*|anus|anal|feces|faeces|excrement\w*|urin\w*|"
    r"breasts?|testi\w+|scrotum|ovar\w+|semen|prostitut\w*|whore|naked|nud\w+|erotic\w*|rapis?t?|"
    r"coitus|copulat\w*|masturbat\w*|orgasm|lesbian|homosexual\w*|negro\w*|jew\w*|nazi\w*|gypsy|"
    r"obscene|buttocks|pubic|womb|uter\w+|abortion|suicid\w*|tortur\w*|lust\w*|disparag\w*|drug|"
    r"narcotic|cocaine|heroin|menstru\w*|defecat\w*|vulgar|slave\w*|murder\w*|bastard|bitch)\b"
)
_STARTS = re.compile(
    r"(a|an|the|any|one|each|someone|something|anything|anyone|somebody|everything|either|"
    r"what|when|where|how|all|your|two|three|four|several|part|that)\b"
)
_NO_ENDS = (
    "a an the of or and in on at to for from by with is are was that which who as into its their "
    "your his her than very more most not such any some other same usually especially"
)
_BAD_ENDS = frozenset(_NO_ENDS.split())
_FIRST_CUTS = re.compile(
    r",? (?=(?:that|which|who|used|having|usually|especially|with|where)\b)|, "
)
_LATER_CUTS = re.compile(r" (?=(?:and|or|for|in|by|from|on|to|as|at|during|when|while|of)\b)")
_BRITISH = {
    r"\b(\w*)color": r"\1colour",
    r"\bodor": "odour",
    r"\bflavor": "flavour",
    r"\bharbor": "harbour",
    r"\blabor\b": "labour",
    r"\bhumor\b": "humour",
    r"\bhonor\b": "honour",
    r"\bbehavior": "behaviour",
    r"\bneighbor": "neighbour",
    r"\bvapor\b": "vapour",
    r"\bfiber": "fibre",
    r"\bcenter": "centre",
    r"\btheater": "theatre",
    r"\bliter\b": "litre",
    r"\bmeter\b": "metre",
    r"\bgray": "grey",
    r"\bmolds?\b": "mould",
    r"\bplow": "plough",
    r"\bjewelry\b": "jewellery",
    r"\bdefense\b": "defence",
    r"\borganiz": "organis",
}


@dataclass(frozen=True)
class Gloss:
    """A noun, how it stands in a question ("a heron", "water"), and the sentence that says it."""

    word: str
    thing: str
    sentence: str


@dataclass(frozen=True)
class Glosses:
    """Nouns that are explained, commonest first, and rare ones that are not."""

    known: tuple[Gloss, ...]
    rare: tuple[str, ...]


@dataclass(frozen=True)
class _Noun:
    lemma: str
    kind: str
    gloss: str
    proper: bool


@cache
def load_glosses(count: int, wordnet: Path = WORDNET) -> Glosses:
    """``count`` definitions: ours, then those of WordNet's commonest nouns.

    Raises:
        FileNotFoundError: ``wordnet`` has no files of WordNet (Debian: ``wordnet-base``).
    """
    if not (wordnet / "data.noun").exists():
        raise FileNotFoundError(
            f"{wordnet}: no data.noun of WordNet; see recipes/answers/README.md"
        )
    known = {gloss.word: gloss for gloss in _ours()}
    tags = _tags(wordnet)
    nouns, used = _nouns(wordnet)
    lemmas = {noun.lemma for noun in nouns}

    def commonness(noun: _Noun) -> int:
        return _TAG_WORTH * tags["1"][noun.lemma] + used[noun.lemma]

    rare = []
    for noun in sorted(nouns, key=commonness, reverse=True):
        word = noun.lemma
        if noun.proper or (word.endswith("s") and not word.endswith("ss")):
            continue
        if commonness(noun) <= _RARE_COUNT:
            if len(word) >= _RARE_LETTERS and noun.kind in _COUNTED and not _unwanted(noun):
                rare.append(with_article(word))
            continue
        elsewhere = max(tags[kind][word] for kind in "2345")
        if len(known) < count and word not in known and tags["1"][word] >= elsewhere:
            gloss = shortened(word, noun.kind, noun.gloss, lemmas)
            known |= {word: gloss} if gloss and not _unwanted(noun) else {}
    return Glosses(tuple(known.values()), tuple(rare))


def _unwanted(noun: _Noun) -> bool:
    return bool(_UNWANTED.search(f"{noun.lemma} {noun.gloss}") or _TAXONOMIC.search(noun.gloss))


def _ours() -> Iterator[Gloss]:
    """Lines ``a heron = a grey bird``; a noun without an article has no plural."""
    for line in _OURS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            thing, gloss = line.split(" = ")
            word = re.sub(r"^(an?|the) ", "", thing)
            yield Gloss(word, thing, f"{sentence_case(thing)} is {gloss}.")


def _tags(wordnet: Path) -> dict[str, Counter[str]]:
    """How often a lemma was tagged, by part of speech: 1 noun, 2 verb, 3 and 5 adjective, 4."""
    counts = defaultdict[str, Counter[str]](Counter)
    for line in (wordnet / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        key, _, count = line.split()
        lemma, _, rest = key.rpartition("%")
        counts[rest[0]][lemma] += int(count)
    return counts


def _nouns(wordnet: Path) -> tuple[list[_Noun], Counter[str]]:
    """Single words with their first sense, and how often glosses use each word."""
    senses = dict[str, tuple[str, str, bool]]()
    used = Counter[str]()
    for line in (wordnet / "data.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            fields, gloss = line.split(" | ", 1)
            senses[line[:8]] = (line[9:11], gloss, " @i " in fields)
            used.update(re.findall(r"[a-z]+", gloss))
    nouns = []
    for line in (wordnet / "index.noun").read_text(encoding="latin-1").splitlines():
        fields_of_index = line.split()
        if not line.startswith(" ") and _LEMMA.fullmatch(fields_of_index[0]):
            first = fields_of_index[-int(fields_of_index[2])]
            nouns.append(_Noun(fields_of_index[0], *senses[first]))
    return nouns, used


def shortened(word: str, kind: str, gloss: str, nouns: set[str]) -> Gloss | None:
    """One sentence of at most ``MOST_WORDS`` words; None if rules cannot make a good one.

    ``kind`` is the number of WordNet's lexicographer file. Asides, examples and further clauses
    go. What is still too long ends before a clause, or before "and" or a preposition. A gloss
    that has the word itself, or ends in no noun of ``nouns``, is none.
    """
    text = _ASIDE.sub(" ", gloss)
    text = re.split(r"[;:\"]| - ", text.replace("`", "'"))[0]
    text = " ".join(text.split()).replace(" ,", ",").strip(" ,")
    text = re.sub(r"^any of (numerous|various|several|many|the)", r"one of \1", text)
    text = re.sub(r"^one of (numerous|various)", "one of many", text)
    text = text.replace("a person who", "someone who")
    if not _PLAIN.fullmatch(text) or re.search(rf"\b{word}(s|es)?\b", text):
        return None
    thing = _thing(word, kind, text)
    if thing is None:
        return None
    if not _STARTS.match(text) and thing != word:
        head = text.split()[0]
        if head.endswith("s") and not head.endswith(("ss", "us", "ous")):
            return None
        text = with_article(text)
    for pattern, spelling in _BRITISH.items():
        text = re.sub(pattern, spelling, text)
    cut = _cut(text, MOST_WORDS - len(thing.split()) - 1, nouns)
    return Gloss(word, thing, f"{sentence_case(thing)} is {cut}.") if cut else None


def _thing(word: str, kind: str, gloss: str) -> str | None:
    """``word`` as it is asked about: with an article if it has a plural; None if unsure."""
    if kind in _COUNTED:
        return with_article(word)
    if kind in _MASS:
        return word
    if kind not in _BY_GLOSS:
        return None
    if _MASS_ENDINGS.search(word):
        return None if re.match(r"an? ", gloss) and kind != "12" else word
    if kind in ("12", "07", "26"):
        return word
    return with_article(word) if re.match(r"(an?|one of|someone) ", gloss) else None


def _cut(text: str, most: int, nouns: set[str]) -> str | None:
    """``text`` of at most ``most`` words, cut where a clause begins; None if that fails."""
    words = text.split()
    if len(words) <= most:
        whole = len(words) >= _FEWEST_OF_GLOSS and words[-1] not in _BAD_ENDS
        return text if whole else None
    for cuts in (_FIRST_CUTS, _LATER_CUTS):
        for place in sorted((found.start() for found in cuts.finditer(text)), reverse=True):
            kept = text[:place].strip(" ,")
            words = kept.split()
            if _FEWEST_OF_GLOSS < len(words) <= most and _is_noun(words[-1], nouns):
                return kept
    return None


def _is_noun(word: str, nouns: set[str]) -> bool:
    """Whether a phrase may end with ``word``: a noun of ours, or its plural."""
    if word in _BAD_ENDS or word.endswith(("ous", "ive", "al", "ful", "ed", "ing", "ly")):
        return False
    return any(form in nouns for form in (word, word[:-1], word[:-2], f"{word[:-3]}y"))
