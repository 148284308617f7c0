"""What the voices read: text, and its sounds in the International Phonetic Alphabet.

The text is the pocket recipe's (WordNet's lines, everyday sentences, walks) with small talk from
the package ``chatterbot-corpus`` (BSD), joined now and then up to 30 words. espeak-ng makes the
sounds; Kokoro was trained on a like alphabet.
"""

import ctypes
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from recipes.pocket.corpus import Sources, load_sources, normalised, sentences
from recipes.pocket.corpus import texts as pocket_texts

BENCH = Path(__file__).parents[2] / "src/mosstalk/reporting/sentences.txt"
ACCENTS = {"a": b"en-us", "b": b"en"}
"""espeak-ng's voice for American and for British English, by the first letter of Kokoro's."""
_BRITISH_SHARE = 0.3
_SMALL_TALK_SHARE = 0.06
_JOINED_SHARE = 0.25
_MOST_WORDS = 30
_MARKS = re.compile(r"([,.?!;:]+)")
_LETTERS = (("ʲ", "j"), ("r", "ɹ"), ("x", "k"), ("ɬ", "l"), ("\u0361", ""), ("_", ""))
_SPEAKABLE = re.compile(r"[A-Za-z][A-Za-z' ,-]*[.?!]?")
_RETRIEVE, _UTF8, _IPA = 1, 1, 2


@dataclass(frozen=True)
class Line:
    """One text to read: ``sounds`` as the ``accent`` has them; ``kind`` train or bench."""

    text: str
    accent: str
    sounds: str
    kind: str


class Phonetics:
    """espeak-ng's own reading of English, through its library.

    Raises:
        FileNotFoundError: the library is not installed (Debian: ``libespeak-ng1``).
    """

    def __init__(self) -> None:
        name = find_library("espeak-ng")
        if name is None:
            raise FileNotFoundError("espeak-ng is not installed: apt install espeak-ng")
        self._library = ctypes.CDLL(name)
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_Initialize(_RETRIEVE, 0, None, 0)
        self._accent = ""

    def sounds(self, text: str, accent: str) -> str:
        """The sounds of ``text``, its punctuation kept where it was."""
        if accent != self._accent:
            if self._library.espeak_SetVoiceByName(ACCENTS[accent]):
                raise FileNotFoundError(f"espeak-ng has no voice {ACCENTS[accent].decode()}")
            self._accent = accent
        parts = _MARKS.split(text)
        spoken = [
            part if place % 2 else self._of(part)
            for place, part in enumerate(parts)
            if part.strip()
        ]
        joined = " ".join(spoken)
        joined = re.sub(r" +([,.?!;:])", r"\1", joined)
        for old, new in _LETTERS:
            joined = joined.replace(old, new)
        return joined.strip()

    def _of(self, text: str) -> str:
        place = ctypes.c_char_p(text.encode())
        pointer = ctypes.pointer(place)
        found = []
        while place.value is not None:
            found.append(self._library.espeak_TextToPhonemes(pointer, _UTF8, _IPA).decode())
        return " ".join(piece.strip() for piece in found)


def small_talk(folder: Path) -> list[str]:
    """Short English lines of the package ``chatterbot-corpus``; none where it is not installed."""
    lines = []
    for path in sorted(folder.glob("*.yml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.strip().lstrip("- ").strip("\"'").strip()
            if _SPEAKABLE.fullmatch(text) and 3 <= len(text.split()) <= 16:
                lines.append(text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else "."))
    return sorted(set(lines))


def drawn(sources: Sources, talk: list[str], seed: int) -> Iterator[str]:
    """Endless text: none of it, and no sentence in it, is in the bench."""
    draw = random.Random(seed)
    pocket = pocket_texts(sources, seed)
    talked = cycle(draw.sample(talk, len(talk))) if talk else pocket
    while True:
        text = next(talked) if draw.random() < _SMALL_TALK_SHARE else next(pocket)
        if draw.random() < _JOINED_SHARE:
            text = f"{text} {next(pocket)}"
        if len(text.split()) <= _MOST_WORDS and not sentences(text) & sources.held_out:
            yield text


def make_lines(wordnet: Path, talk: Path, count: int, seed: int) -> list[Line]:
    """``count`` texts to learn from, then the quality bench's sentences in both accents."""
    sources, phonetics = load_sources(wordnet), Phonetics()
    draw, lines = random.Random(seed), []
    for _, text in zip(range(count), drawn(sources, small_talk(talk), seed), strict=False):
        accent = "b" if draw.random() < _BRITISH_SHARE else "a"
        lines.append((text, accent, "train"))
    bench = BENCH.read_text(encoding="utf-8").splitlines()
    lines += [(text, accent, "bench") for accent in ACCENTS for text in bench if text.strip()]
    lines.sort(key=lambda line: line[1])
    made = [Line(text, accent, phonetics.sounds(text, accent), k) for text, accent, k in lines]
    return sorted(made, key=lambda line: normalised(line.text)[::-1])


def write_lines(lines: Iterable[Line], path: Path) -> None:
    """One json object a line, compressed."""
    rows = "\n".join(json.dumps(asdict(line), ensure_ascii=False) for line in lines)
    path.write_bytes(lzma.compress(rows.encode()))


def read_lines(path: Path) -> list[Line]:
    """What ``write_lines`` wrote."""
    rows = lzma.decompress(path.read_bytes()).decode().splitlines()
    return [Line(**json.loads(row)) for row in rows]
