"""Real people, where their recordings are at hand: for what a checkpoint writes down."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mosstalk.audio.sound import Samples, read_audio, resample
from mosstalk.bench.extras import extra
from mosstalk.bench.readings import TRANSCRIPTS, Reading, read_recordings
from mosstalk.bench.words import normalised
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError

ASSETS = Path(__file__).resolve().parents[3] / "assets"
"""Recordings of a source checkout; a package that was installed without one has none."""
ROOT = Path("/")
_CLIPS = "usr/share/pocketsphinx/test/data/librivox"
_PROMPTS = "usr/share/asterisk/sounds/en_US_f_Allison"
_PROMPT_TEXTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
_FEWEST_WORDS, _MOST_WORDS = 4, 16
_SENTENCE = re.compile(r"<s>(.*)</s>\s*\((.*)\)")


def asset_recordings() -> Reading:
    """The recordings in the checkout's ``assets`` folder.

    Raises:
        BenchError: there is no checkout.
    """
    if not (ASSETS / TRANSCRIPTS).is_file():
        raise BenchError("the recordings in assets/ come with a source checkout alone")
    return read_recordings(ASSETS, "people: assets/")


def librivox_clips(root: Path = ROOT) -> Reading:
    """Clips of an audiobook from Debian's ``pocketsphinx-testdata``.

    Raises:
        BenchError: the package is not installed.
    """
    folder = root / _CLIPS
    if not (folder / "transcription").is_file():
        raise BenchError("LibriVox clips are not installed; apt install pocketsphinx-testdata")
    lines = (folder / "transcription").read_text(encoding="utf-8").splitlines()
    found = [match for match in map(_SENTENCE.search, lines) if match]
    sounds = [read_audio(folder / f"{match[2]}.wav", OUTPUT_RATE).samples for match in found]
    texts = tuple(match[1].strip() for match in found)
    return Reading("people: LibriVox clips", texts, tuple(sounds))


def telephone_prompts(count: int, root: Path = ROOT) -> Reading:
    """Prompts of 4 to 16 words from Debian's ``asterisk-core-sounds-en-g722``, spread evenly.

    Raises:
        BenchError: the packages are not installed, or PyAV, which decodes G.722, is not.
    """
    if not (root / _PROMPTS).is_dir() or not (root / _PROMPT_TEXTS).is_file():
        raise BenchError(
            "telephone prompts are not installed; "
            "apt install asterisk-core-sounds-en asterisk-core-sounds-en-g722"
        )
    prompts = list(_spoken_prompts(root))
    step = max(len(prompts) // count, 1)
    chosen = prompts[::step][:count]
    sounds = tuple(_decode_g722(path) for path, _ in chosen)
    return Reading("people: telephone prompts", tuple(text for _, text in chosen), sounds)


def _spoken_prompts(root: Path) -> Iterator[tuple[Path, str]]:
    """Files and texts of prompts that are words and nothing else."""
    lines = gzip.decompress((root / _PROMPT_TEXTS).read_bytes()).decode("utf-8", "replace")
    for line in lines.splitlines():
        name, colon, text = line.partition(":")
        path = root / _PROMPTS / f"{name.strip()}.g722"
        plain = colon and not line.startswith(";") and not re.search(r"[\[\]<>(*#0-9]", text)
        if plain and path.is_file() and _FEWEST_WORDS <= len(normalised(text)) <= _MOST_WORDS:
            yield path, " ".join(text.split())


def _decode_g722(path: Path) -> Samples:
    """ITU-T G.722 has no header: raw 64 kbit/s of 16 kHz sound."""
    with extra("av").open(str(path), format="g722") as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    samples = np.asarray(np.concatenate(frames) / 2**15, np.float32)
    return resample(samples, INPUT_RATE, OUTPUT_RATE)
