"""The sentences that are read: those that come with the package, or a file of one's own."""

from pathlib import Path

from mosstalk.errors import BenchError

HELD_OUT = Path(__file__).with_name("sentences.txt")
"""A hundred everyday sentences of 5 to 14 words, written for `mosstalk bench quality`; the small
model was not trained with them."""
HELD_OUT_LONG = Path(__file__).with_name("long_sentences.txt")
"""Two dozen of 24 to 32 words: more than mosstalk-pocket reads as one reply."""


def read_sentences(path: Path = HELD_OUT) -> tuple[str, ...]:
    """The sentences of a text file, one a line; blank lines and a byte order mark are left out.

    Raises:
        BenchError: the file cannot be read, holds no sentence, or a letter that the programs
            that read aloud do not know (anything beyond ASCII; curly quotes become straight).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read as text ({error})") from None
    text = text.translate(str.maketrans("\u2018\u2019\u201c\u201d", "''\"\""))
    sentences = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            raise BenchError(f"{path}: line {number} has letters beyond ASCII; write them plainly")
        if line.strip():
            sentences.append(line.strip())
    if not sentences:
        raise BenchError(f"{path}: holds no sentence; write one on each line")
    return tuple(sentences)
