"""Long text and long recordings cut into pieces that one turn can take, at polite places."""

import re
from collections.abc import Iterator

import numpy as np

from mosstalk.codec.audio import Samples

LONGEST_TEXT = 200
"""Characters of text that are read aloud as one reply: some 15 s of speech."""
LONGEST_S = 30.0
"""Seconds of sound that are heard as one turn: what the speech tokenizer hears at once."""
_CUTS = (
    # After a sentence, its quotes and brackets included; after a clause; between words.
    re.compile(r"[.!?…]+[\"'”’»)\]]*\s|[。！？]+[」』”’]*"),  # noqa: RUF001
    re.compile(r"[,;:–—]\s|[，；：、]"),  # noqa: RUF001
    re.compile(r"\s"),
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_FRAME_MS = 20
_PAUSE_FRAMES = 10
"""A pause is looked for as the quietest 200 ms."""
_SHORTEST_REST_S = 1.0


def text_pieces(text: str, longest: int = LONGEST_TEXT) -> list[str]:
    """Pieces of at most ``longest`` characters, blanks and line ends made single blanks.

    Each is cut after the last sentence that fits; failing that after a comma, semicolon, colon
    or dash, then between words, then anywhere. A blank line always cuts.
    """
    lines = (" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(text))
    return [piece for line in lines for piece in _cut(line, longest)]


def _cut(line: str, longest: int) -> Iterator[str]:
    while len(line) > longest:
        place = _last_place(line[: longest + 1], longest)
        yield line[:place].rstrip()
        line = line[place:].lstrip()
    if line:
        yield line


def _last_place(head: str, longest: int) -> int:
    """Where to cut, given one character more than may stay: it may be a blank that goes."""
    for mark in _CUTS:
        places = [found.end() for found in mark.finditer(head)]
        kept = [place for place in places if len(head[:place].rstrip()) <= longest]
        if kept:
            return kept[-1]
    return longest


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


def _quietest(samples: Samples, rate: int, first: int, last: int) -> int:
    """Middle of the quietest stretch of ``_PAUSE_FRAMES`` that lies in ``samples[first:last]``."""
    size = rate * _FRAME_MS // 1000
    frames = samples[first:last][: (last - first) // size * size].reshape(-1, size)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    stretch = min(_PAUSE_FRAMES, len(power))
    levels = np.convolve(power, np.ones(stretch), mode="valid")
    return first + (int(levels.argmin()) + stretch // 2) * size
