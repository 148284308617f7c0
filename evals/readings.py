"""Sentences and their sound: recordings of people, voices of other programs, noise as a control.

The programs are festival (https://www.cstr.ed.ac.uk/projects/festival), flite
(http://www.festvox.org/flite) and espeak-ng (https://github.com/espeak-ng/espeak-ng), from Debian
packages of these names, run as real processes; and Kokoro, run by ``evals.kokoro_voices``.
"""

import gzip
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from evals import kokoro_voices
from evals.extras import extra
from evals.words import normalised
from mosstalk.audio.sound import Samples, read_audio, resample
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import AudioError, BenchError, DetectorError, OptionError

TRANSCRIPTS = "transcripts.txt"
"""File of a recordings folder: on each line a file's name, a tab, and what is said in it."""
_NOISE_SEED = 0
ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""Recordings of a source checkout; a package that was installed without one has none."""
ROOT = Path("/")
_CLIPS = "usr/share/pocketsphinx/test/data/librivox"
_PROMPTS = "usr/share/asterisk/sounds/en_US_f_Allison"
_PROMPT_TEXTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
_FEWEST_WORDS, _MOST_WORDS = 4, 16
_SENTENCE = re.compile(r"<s>(.*)</s>\s*\((.*)\)")
_PATIENCE_S = 600
_KOKORO = "kokoro"
_Wavs = list[Path]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Reading:
    """Who reads, what, and the sound of each text: (n,) float32 at 24 kHz."""

    name: str
    texts: tuple[str, ...]
    sounds: tuple[Samples, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def called(self, name: str) -> "Reading":
        """The same under another name."""
        return replace(self, name=name)

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
    def heard(self) -> Iterator[Samples]:
        """The sounds (n,) at 16 kHz, as models hear them."""
        return (resample(sound, OUTPUT_RATE, INPUT_RATE) for sound in self.sounds)

    @property
    def seconds(self) -> float:
        """Length of all sounds together."""
        return sum(map(len, self.sounds)) / OUTPUT_RATE


def at_hand(makers: Iterable[Callable[[], _T]]) -> tuple[list[_T], list[str]]:
    """What can be had here, and what is missing of the rest."""
    found, missing = list[_T](), list[str]()
    for make in makers:
        try:
            found.append(make())
        except (BenchError, DetectorError) as error:
            missing.append(str(error))
    return found, missing


def speakers(
    prompts: int, sentences: Sequence[str], voices: Iterable["SyntheticVoice"]
) -> tuple[list[Reading], list[str]]:
    """People, ``prompts`` of telephones among them, and ``voices`` that read ``sentences``.

    The second list names what is missing.
    """
    read = (partial(read_aloud, voice, sentences) for voice in voices)
    return at_hand((asset_recordings, librivox_clips, partial(telephone_prompts, prompts), *read))


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


@dataclass(frozen=True)
class SyntheticVoice:
    """A voice that a program has: its name there, and the Debian packages that bring it."""

    name: str
    program: str
    known_as: str
    packages: str

    @property
    def install(self) -> str:
        """What brings the voice to a Debian machine."""
        return self.packages if self.program == _KOKORO else f"apt install {self.packages}"


def _festival(name: str, known_as: str, package: str) -> SyntheticVoice:
    return SyntheticVoice(name, "festival", known_as, f"festival {package}")


def _kokoro(name: str) -> SyntheticVoice:
    return SyntheticVoice(f"kokoro-{name}", _KOKORO, name, kokoro_voices.INSTALL)


SLT_HTS = _festival("festival-slt-hts", "cmu_us_slt_arctic_hts", "festvox-us-slt-hts")
NATURAL = {voice.name: voice for voice in map(_kokoro, kokoro_voices.NAMES)}
"""Kokoro's best voice, and those that no training of mosstalk-pocket hears."""
TEACHER = NATURAL[f"{_KOKORO}-{kokoro_voices.BEST}"]
"""The voice that mosstalk-pocket learned to speak with."""
UNSEEN = _festival("festival-ked", "ked_diphone", "festvox-kdlpc16k")
"""A voice that no training of mosstalk-pocket hears."""
OLDER = (
    *(
        SyntheticVoice(f"flite-{name}", "flite", name, "flite")
        for name in ("slt", "rms", "awb", "kal16")
    ),
    _festival("festival-kal", "kal_diphone", "festvox-kallpc16k"),
    SyntheticVoice("espeak-us", "espeak-ng", "en-us", "espeak-ng"),
    SyntheticVoice("espeak-gb", "espeak-ng", "en-gb", "espeak-ng"),
)
"""Voices of older programs, which the first mosstalk-pocket learned to understand."""
VOICES = {voice.name: voice for voice in (SLT_HTS, *OLDER, UNSEEN)}
"""Of Debian's programs."""


def find_synthetic_voice(name: str) -> SyntheticVoice:
    """The voice called ``name``; raise OptionError naming those there are."""
    known = VOICES | NATURAL
    if name not in known:
        raise OptionError(f"unknown synthetic voice {name!r}; choose from {', '.join(known)}")
    return known[name]


def read_naturally(name: str, voices: Sequence[str], sentences: Sequence[str]) -> Reading:
    """Kokoro's ``voices`` take turns; sounds are float32 at 24 kHz.

    Raises:
        BenchError: Kokoro is not installed, or a sentence is too long for it.
    """
    sounds = kokoro_voices.read_in_turn(voices, sentences)
    return Reading(name, tuple(sentences), tuple(sounds))


def read_aloud(voice: SyntheticVoice, sentences: Sequence[str]) -> Reading:
    """Have the program read every sentence; sounds are float32 at 24 kHz.

    Raises:
        BenchError: the program or its voice is not installed, or it did not read a sentence.
    """
    if voice.program == _KOKORO:
        return read_naturally(voice.name, (voice.known_as,), sentences)
    if shutil.which(voice.program) is None:
        raise BenchError(f"{voice.program} is not installed; {voice.install}")
    with tempfile.TemporaryDirectory(prefix="mosstalk-voices-") as folder:
        wavs = _PROGRAMS[voice.program](voice, sentences, Path(folder))
        try:
            sounds = [read_audio(wav, OUTPUT_RATE).samples for wav in wavs]
        except AudioError as error:
            raise BenchError(f"{voice.name} did not read every sentence ({error})") from None
    return Reading(voice.name, tuple(sentences), tuple(sounds))


def _by_festival(voice: SyntheticVoice, sentences: Sequence[str], folder: Path) -> _Wavs:
    """All sentences in one process, which is what makes it fast."""
    wavs = [folder / f"{place}.wav" for place in range(len(sentences))]
    lines = [f"(voice_{voice.known_as})"]
    for sentence, wav in zip(sentences, wavs, strict=True):
        words = sentence.replace("\\", " ").replace('"', " ")
        lines.append(
            f'(utt.save.wave (utt.synth (eval (list \'Utterance \'Text "{words}"))) "{wav}" \'riff)'
        )
    script = folder / "sentences.scm"
    script.write_text("\n".join(lines) + "\n")
    _run(voice, "-b", str(script))
    return wavs


def _one_by_one(
    voice: SyntheticVoice, sentences: Sequence[str], folder: Path, *, chosen: str, out: str
) -> _Wavs:
    """By a program that reads a text file (-f); ``chosen`` and ``out`` are its other options."""
    wavs = [folder / f"{place}.wav" for place in range(len(sentences))]
    for sentence, wav in zip(sentences, wavs, strict=True):
        text = wav.with_suffix(".txt")
        text.write_text(sentence + "\n")
        _run(voice, chosen, voice.known_as, out, str(wav), "-f", str(text))
    return wavs


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    """A program that speaks, once it has ended, with what it wrote."""
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PATIENCE_S,
        check=False,
    )


def _run(voice: SyntheticVoice, *options: str) -> None:
    done = run_program(voice.program, *options)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise BenchError(f"{voice.program} has no voice {voice.known_as} ({said}); {voice.install}")


_PROGRAMS: dict[str, Callable[[SyntheticVoice, Sequence[str], Path], _Wavs]] = {
    "festival": _by_festival,
    "flite": partial(_one_by_one, chosen="-voice", out="-o"),
    "espeak-ng": partial(_one_by_one, chosen="-v", out="-w"),
}
