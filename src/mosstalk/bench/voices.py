"""Voices of other programs, run as real processes: the teacher, and those listened to.

festival (https://www.cstr.ed.ac.uk/projects/festival), flite (http://www.festvox.org/flite)
and espeak-ng (https://github.com/espeak-ng/espeak-ng), from Debian packages of these names.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mosstalk.audio.sound import read_audio
from mosstalk.bench.readings import Reading
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import AudioError, BenchError, OptionError

_PATIENCE_S = 600
_Wavs = list[Path]


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
        return f"apt install {self.packages}"


def _festival(name: str, known_as: str, package: str) -> SyntheticVoice:
    return SyntheticVoice(name, "festival", known_as, f"festival {package}")


TEACHER = _festival("festival-slt-hts", "cmu_us_slt_arctic_hts", "festvox-us-slt-hts")
"""The voice that mosstalk-pocket learned to speak with."""
UNSEEN = _festival("festival-ked", "ked_diphone", "festvox-kdlpc16k")
"""A voice that no training of mosstalk-pocket hears."""
LISTENED = (
    *(
        SyntheticVoice(f"flite-{name}", "flite", name, "flite")
        for name in ("slt", "rms", "awb", "kal16")
    ),
    _festival("festival-kal", "kal_diphone", "festvox-kallpc16k"),
    SyntheticVoice("espeak-us", "espeak-ng", "en-us", "espeak-ng"),
    SyntheticVoice("espeak-gb", "espeak-ng", "en-gb", "espeak-ng"),
)
"""Voices that mosstalk-pocket learned to understand, at other speeds and pitches too."""
VOICES = {voice.name: voice for voice in (TEACHER, *LISTENED, UNSEEN)}


def find_synthetic_voice(name: str) -> SyntheticVoice:
    """The voice called ``name``; raise OptionError naming those there are."""
    if name not in VOICES:
        raise OptionError(f"unknown synthetic voice {name!r}; choose from {', '.join(VOICES)}")
    return VOICES[name]


def read_aloud(voice: SyntheticVoice, sentences: Sequence[str]) -> Reading:
    """Have the program read every sentence; sounds are float32 at 24 kHz.

    Raises:
        BenchError: the program or its voice is not installed, or it did not read a sentence.
    """
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


def _by_flite(voice: SyntheticVoice, sentences: Sequence[str], folder: Path) -> _Wavs:
    return [
        _one(voice, sentence, folder / f"{place}.wav", "-voice", voice.known_as, "-o")
        for place, sentence in enumerate(sentences)
    ]


def _by_espeak(voice: SyntheticVoice, sentences: Sequence[str], folder: Path) -> _Wavs:
    return [
        _one(voice, sentence, folder / f"{place}.wav", "-v", voice.known_as, "-w")
        for place, sentence in enumerate(sentences)
    ]


def _one(voice: SyntheticVoice, sentence: str, wav: Path, *options: str) -> Path:
    """One sentence by a program that reads a text file (-f); the last option takes ``wav``."""
    text = wav.with_suffix(".txt")
    text.write_text(sentence + "\n")
    _run(voice, *options, str(wav), "-f", str(text))
    return wav


def _run(voice: SyntheticVoice, *options: str) -> None:
    done = subprocess.run(
        [voice.program, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise BenchError(f"{voice.program} has no voice {voice.known_as} ({said}); {voice.install}")


_PROGRAMS: dict[str, Callable[[SyntheticVoice, Sequence[str], Path], _Wavs]] = {
    "festival": _by_festival,
    "flite": _by_flite,
    "espeak-ng": _by_espeak,
}
