"""Long text and long recordings cut into pieces that one turn can take, at polite places."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from mosstalk.audio.sound import Samples

LONGEST_TEXT = 200
"""Characters of text that are read aloud as one reply, where the checkpoint names no other limit:
some 15 s of speech."""
LONGEST_S = 30.0
"""Seconds of sound that are heard as one turn: what the speech tokenizer hears at once."""
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s|[。！？]+[」』”’]*")  # noqa: RUF001
"""The end of a sentence, its quotes and brackets included."""
_CLAUSE_END = re.compile(r"[,;:–—]\s|[，；：、]")  # noqa: RUF001
_WORD = re.compile(r"\S+")
_JOINING_WORDS = (
    "and but or so because while when which who that where if before after until since although "
    "though unless as than"
)
_JOINING = frozenset(_JOINING_WORDS.split())
"""Words that begin a clause: a pause before them is natural."""
_LEANING_WORDS = (
    "a an the this that these those my your his her its our their of to in on at by for from with "
    "into onto over under through about between near behind past along is are was were be not and "
    "but or so if because no very some any every each two three four five six seven eight nine ten "
    "eleven twelve twenty thirty forty fifty sixty seventy eighty ninety hundred thousand point"
)
_LEANING = frozenset(_LEANING_WORDS.split())
"""Words that are said in one breath with the next."""
_JOINING_COST, _WORD_COST, _LEANING_COST, _ANYWHERE_COST = 0.15, 0.4, 0.8, 2.0
"""What a cut costs beside one after a comma, in pieces."""
_PARAGRAPH = re.compile(r"\n\s*\n")
_FRAME_MS = 20
_PAUSE_FRAMES = 10
"""A pause is looked for as the quietest 200 ms."""
_SHORTEST_REST_S = 1.0


def text_pieces(text: str, longest: int = LONGEST_TEXT) -> list[str]:
    """Pieces of at most ``longest`` characters, blanks and line ends made single blanks.

    Each holds as many whole sentences as fit. A sentence that is longer is cut into as few parts
    as will do, of similar length: after a comma, semicolon, colon or dash, else before a word
    such as "and", else between words, else anywhere. A blank line always cuts.
    """
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs(text))
    return [piece for line in lines for piece in _cut(line, longest)]


def paragraphs(text: str) -> list[str]:
    """The parts of ``text`` between blank lines."""
    return _PARAGRAPH.split(text)


def _cut(line: str, longest: int) -> Iterator[str]:
    """Whole sentences together as long as they fit; one that never fits in parts of its own."""
    piece = ""
    for sentence in _split(line, [found.end() for found in _SENTENCE_END.finditer(line)]):
        if len((piece + sentence).rstrip()) > longest and piece:
            yield piece.rstrip()
            piece = ""
        if len(sentence.rstrip()) > longest:
            yield from _cut_sentence(sentence, longest)
        else:
            piece = (piece + sentence).lstrip()
    if piece:
        yield piece.rstrip()


def _split(text: str, places: list[int]) -> list[str]:
    """The parts of ``text`` between ``places``; none is empty."""
    both = zip([0, *places], [*places, len(text)], strict=True)
    return [text[start:end] for start, end in both if text[start:end].strip()]


def _cut_sentence(sentence: str, longest: int) -> list[str]:
    """Parts of at most ``longest`` characters at the least cost of all ways to cut.

    A part costs something, more if it is shorter than might be, and so does each place.
    """
    best = {0: (0.0, 0)}
    """The least cost up to a place, and the place before it."""
    for place, cost in _places(sentence, longest):
        found = (math.inf, 0)
        for start in reversed(best):
            length = len(sentence[start:place].strip())
            if length > longest:
                break
            uneven = (1 - length / longest) ** 2
            found = min(found, (best[start][0] + cost + 1 + uneven, start))
        best[place] = found
    cuts, place = list[int](), len(sentence)
    while place:
        place = best[place][1]
        cuts.append(place)
    return [part.strip() for part in _split(sentence, cuts[-2::-1])]


def _places(sentence: str, longest: int) -> list[tuple[int, float]]:
    """Where a sentence may be cut, in order, and what each costs; its end is the last."""
    words = pairwise(_WORD.finditer(sentence))
    costs = {after.start(): _word_cost(before[0], after[0]) for before, after in words}
    costs |= {found.end(): 0.0 for found in _CLAUSE_END.finditer(sentence)}
    costs[len(sentence)] = 0.0
    start = 0
    for place in sorted(costs):
        forced = range(start + longest, place, longest)
        if len(sentence[start:place].strip()) > longest:
            costs |= dict.fromkeys(forced, _ANYWHERE_COST)
        start = place
    return sorted(costs.items())


def _word_cost(before: str, after: str) -> float:
    """What it costs to cut between two words."""
    if before.lower() in _LEANING:
        return _LEANING_COST
    return _JOINING_COST if after.lower() in _JOINING else _WORD_COST


def sound_pieces(samples: Samples, rate: int, longest_s: float = LONGEST_S) -> list[Samples]:
    """Pieces of samples (n,) at ``rate`` Hz, in order, of at most ``longest_s`` and nothing lost.

    Each cut is the middle of the quietest 200 ms in the later half of what one piece may hold,
    and at least 1 s before the end.
    """
    longest, pieces = int(longest_s * rate), list[Samples]()
    while len(samples) > longest:
        last = min(longest, len(samples) - int(_SHORTEST_REST_S * rate))
        place = _quietest(samples, rate, last // 2, last)
        pieces.append(samples[:place])
        samples = samples[place:]
    return [*pieces, samples]


def cut_blocks(
    blocks: Iterable[Samples], rate: int, longest_s: float = LONGEST_S
) -> Iterator[Samples]:
    """``sound_pieces`` of the sound that all blocks (n,) are together, each as soon as it is known.

    Little more than a piece and a block is held at a time.
    """
    enough = int(longest_s * rate) + int(_SHORTEST_REST_S * rate)
    kept = np.zeros(0, np.float32)
    for block in blocks:
        kept = np.concatenate([kept, block])
        while len(kept) > enough:
            piece = sound_pieces(kept, rate, longest_s)[0]
            yield piece
            kept = kept[len(piece) :]
    yield from sound_pieces(kept, rate, longest_s)


def _quietest(samples: Samples, rate: int, first: int, last: int) -> int:
    """Middle of the quietest stretch of ``_PAUSE_FRAMES`` that lies in ``samples[first:last]``."""
    size = rate * _FRAME_MS // 1000
    frames = samples[first:last][: (last - first) // size * size].reshape(-1, size)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    stretch = min(_PAUSE_FRAMES, len(power))
    levels = np.convolve(power, np.ones(stretch), mode="valid")
    return first + (int(levels.argmin()) + stretch // 2) * size
