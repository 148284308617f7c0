"""What the voices read: text, and its sounds in the International Phonetic Alphabet.

The text is the pocket recipe's (WordNet's lines, everyday sentences, walks) with small talk from
the package ``chatterbot-corpus`` (BSD), joined now and then up to 30 words. espeak-ng makes the
sounds; Kokoro was trained on a like alphabet.
"""

import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from evals.phonetics import ACCENTS, Phonetics
from recipes.pocket.corpus import Sources, load_sources, normalised, sentences
from recipes.pocket.corpus import texts as pocket_texts

BENCH = Path(__file__).parents[2] / "src/mosstalk/reporting/sentences.txt"
_BRITISH_SHARE = 0.3
_SMALL_TALK_SHARE = 0.06
_TEACHER_SHARE = 0.84
"""Of general texts those that the teacher reads."""
TEACHER_KIND, ANSWER_KIND, TEACHER_ACCENT = "teacher", "answer", "a"
"""``Line.kind`` of general texts that the teacher reads and of answers, and her accent."""
_USES_PER_READING, _MOST_READINGS = 10, 4
"""An answer is read once more for so many of its uses in dialogues, and so often at most: a model
that hears one reading a hundred times learns it by heart and not how to read."""
_SPELLED, _SPELLED_READINGS = re.compile(r"\b[A-Z], [A-Z]\b"), 2
"""Letters of a spelled word, which is read so often at least: each is used once or twice."""
_JOINED_SHARE = 0.25
_MOST_WORDS = 30
_SPEAKABLE = re.compile(r"[A-Za-z][A-Za-z' ,-]*[.?!]?")


@dataclass(frozen=True)
class Line:
    """One text to read: ``sounds`` as the ``accent`` has them.

    ``kind`` is train or bench, of other voices; teacher or answer, of the teacher's.
    """

    text: str
    accent: str
    sounds: str
    kind: str


def is_spelled(text: str) -> bool:
    """Whether a word is spelled in ``text``: "Cat is spelled C, A, T."."""
    return bool(_SPELLED.search(text))


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
        lines.append((text, _accent(draw), "train"))
    bench = BENCH.read_text(encoding="utf-8").splitlines()
    lines += [(text, accent, "bench") for accent in ACCENTS for text in bench if text.strip()]
    lines.sort(key=lambda line: line[1])
    made = [Line(text, accent, phonetics.sounds(text, accent), k) for text, accent, k in lines]
    return sorted(made, key=lambda line: normalised(line.text)[::-1])


def talk_lines(
    asked: Iterable[str],
    answers: Mapping[str, int],
    general: Iterable[str],
    seed: int,
    times: int = 1,
) -> list[Line]:
    """What a small model that answers learns from: every one of ``answers`` is read by the
    teacher, more often the more uses it has, every question ``times`` by others, and of
    ``general`` texts each by one or the other.
    """
    draw, phonetics = random.Random(seed), Phonetics()
    drawn = list[tuple[str, str, str]]()
    for text, uses in answers.items():
        least = _SPELLED_READINGS if is_spelled(text) else 1
        readings = max(least, min(1 + uses // _USES_PER_READING, _MOST_READINGS))
        drawn += [(text, TEACHER_ACCENT, ANSWER_KIND)] * readings
    for text in (text for text in asked for _ in range(times)):
        drawn.append((text, _accent(draw), "train"))
    for text in general:
        if draw.random() < _TEACHER_SHARE:
            drawn.append((text, TEACHER_ACCENT, TEACHER_KIND))
        else:
            drawn.append((text, _accent(draw), "train"))
    drawn.sort(key=lambda line: line[1])  # espeak-ng changes its accent once
    return [
        Line(text, accent, phonetics.sounds(text, accent), kind) for text, accent, kind in drawn
    ]


def _accent(draw: random.Random) -> str:
    return "b" if draw.random() < _BRITISH_SHARE else "a"


def write_lines(lines: Iterable[Line], path: Path) -> None:
    """One json object a line, compressed."""
    rows = "\n".join(json.dumps(asdict(line), ensure_ascii=False) for line in lines)
    path.write_bytes(lzma.compress(rows.encode()))


def read_lines(path: Path) -> list[Line]:
    """What ``write_lines`` wrote."""
    rows = lzma.decompress(path.read_bytes()).decode().splitlines()
    return [Line(**json.loads(row)) for row in rows]
