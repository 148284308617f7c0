"""Readings: sentences and their sound, from a folder of recordings or made as a control."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mosstalk.audio.sound import Samples, read_audio
from mosstalk.bench.words import normalised
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import BenchError

TRANSCRIPTS = "transcripts.txt"
"""File of a recordings folder: on each line a file's name, a tab, and what is said in it."""
_NOISE_SEED = 0


@dataclass(frozen=True)
class Reading:
    """Who reads, what, and the sound of each text: (n,) float32 at 24 kHz."""

    name: str
    texts: tuple[str, ...]
    sounds: tuple[Samples, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def only(self, texts: Sequence[str]) -> "Reading":
        """The reading of these texts, in their order.

        Raises:
            BenchError: one of them is not read.
        """
        places = {" ".join(normalised(text)): place for place, text in enumerate(self.texts)}
        sounds = []
        for text in texts:
            place = places.get(" ".join(normalised(text)))
            if place is None:
                raise BenchError(f"there is no recording of {text!r}")
            sounds.append(self.sounds[place])
        return Reading(self.name, tuple(texts), tuple(sounds))

    @property
    def seconds(self) -> float:
        """Length of all sounds together."""
        return sum(map(len, self.sounds)) / OUTPUT_RATE


def read_recordings(folder: Path, name: str) -> Reading:
    """Recordings of a folder in the order of its ``transcripts.txt``, brought to 24 kHz.

    Raises:
        BenchError: there is no such file, or a line of it cannot be read.
        AudioError: a recording is missing or holds nothing to hear.
    """
    lines = list(_transcripts(folder / TRANSCRIPTS))
    sounds = tuple(read_audio(folder / file, OUTPUT_RATE).samples for file, _ in lines)
    return Reading(name, tuple(text for _, text in lines), sounds)


def _transcripts(path: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(
            f"{path}: cannot be read ({error}); a folder of recordings needs a {TRANSCRIPTS} with "
            "a file's name, a tab and the words on each line"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file, tab, text = line.partition("\t")
        if not tab or not text.strip():
            raise BenchError(f"{path}: line {number} is not a file's name, a tab and the words")
        yield file.strip(), text.strip()


def noise_like(reading: Reading) -> Reading:
    """White noise, as long and as loud as each sound: what a judge must hear no words in."""
    draw = np.random.default_rng(_NOISE_SEED)
    sounds = tuple(
        (draw.standard_normal(len(sound)) * np.sqrt(np.square(sound).mean())).astype(np.float32)
        for sound in reading.sounds
    )
    return Reading("noise alone", reading.texts, sounds)
