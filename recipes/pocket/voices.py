"""Voices to listen to: festival, flite and espeak-ng, run as processes over batches of text.

``TEACHER`` is the answering voice, one of Kokoro's, which ``recipes.listener`` has read, with all
others of Kokoro's. Every clip comes with its phones' end times where the program tells them.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from evals.readings import run_program
from mosstalk.constants import INPUT_RATE

Samples16 = NDArray[np.int16]
TEACHER, KOKORO = "af_heart", "kokoro"
"""The teacher, and all of Kokoro's other voices and their blends."""
FESTIVAL = {
    "slt_hts": "cmu_us_slt_arctic_hts",
    "kal_diphone": "kal_diphone",
    "ked_diphone": "ked_diphone",
}
ESPEAK = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-029")
ESPEAK_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m7", "f1", "f2", "f3", "f4", "f5")
UNSEEN = ("ked_diphone",)
"""Never trained on: what the bench reports as an unseen synthetic voice."""
LISTENED = (
    TEACHER, KOKORO, "slt_hts", "slt", "rms", "kal16", "awb", "kal_diphone", "espeak",
)  # fmt: skip
VOICES = (*LISTENED, *UNSEEN)
_PSDUR = re.compile(r"(\w+):([\d.]+)")
_PEAK = 0.5
_SILENCE_SHARE, _MOST_SILENCE_S = 0.3, 1.2
"""How many clips begin with silence, as recordings of people do, and with how much at most."""


@dataclass(frozen=True)
class Clip:
    """One text read by one voice.

    ``heard`` (n,) int16 at 16 kHz; ``spoken`` (1.5 n,) at 24 kHz, of the teacher alone;
    ``phones`` with their end in seconds, empty where the program tells none.
    """

    text: str
    voice: str
    heard: Samples16
    spoken: Samples16 | None = None
    phones: tuple[tuple[str, float], ...] = ()


class ProgramError(RuntimeError):
    """A program that speaks did not; the message has what it wrote to stderr."""


@dataclass(frozen=True)
class Programs:
    """Where the programs are: ``/`` once installed, else the root of an unpacked archive."""

    root: Path = Path("/")
    environment: tuple[str, ...] = ()

    @classmethod
    def under(cls, root: Path) -> "Programs":
        """Programs below ``root``, with their libraries and data."""
        if root == Path("/"):
            return cls()
        root = root.absolute()
        lib = root / "usr/lib/x86_64-linux-gnu"
        return cls(root, (f"LD_LIBRARY_PATH={lib}", f"ESPEAK_DATA_PATH={lib}"))

    def run(self, *command: str) -> str:
        """Run a program of the root and return what it printed; raise ProgramError on failure."""
        program = str(self.root / "usr/bin" / command[0])
        done = run_program("env", *self.environment, program, *command[1:])
        if done.returncode:
            said = done.stderr.strip() or "(it wrote nothing to stderr)"
            raise ProgramError(f"{program} ended with status {done.returncode}: {said}")
        return done.stdout

    def festival(self, script: Path) -> None:
        """Run a Scheme script in batch mode.

        Debian compiles ``/usr/share/festival`` in and lets no option change it, but a script
        can where ``-q`` keeps festival from loading its files first.
        """
        if self.root == Path("/"):
            self.run("festival", "-b", str(script))
            return
        data = self.root / "usr/share/festival"
        elsewhere = script.with_suffix(".root.scm")
        elsewhere.write_text(
            f'(set! datadir "{data}")\n'
            f'(set! system-voice-path \'("{data}/voices/"))\n'
            f'(set! system-language-path \'("{data}/languages/"))\n'
            f'(load "{data}/init.scm")\n(load "{script}")\n'
        )
        self.run("festival", "-q", "-b", str(elsewhere))


def speak(programs: Programs, voice: str, texts: list[str], folder: Path, seed: int) -> list[Clip]:
    """Read ``texts`` in ``voice``, whose speed and pitch vary by ``seed``.

    What the program cannot read is left out.
    """
    draw = random.Random(f"{voice} {seed}")
    if voice in FESTIVAL:
        read = _by_festival(programs, voice, texts, folder, draw)
    else:
        make = _by_espeak if voice == "espeak" else _by_flite
        clips = [make(programs, voice, text, folder / "clip.wav", draw) for text in texts]
        read = [clip for clip in clips if clip]
    return [after_silence(clip, draw) for clip in read]


def after_silence(clip: Clip, draw: random.Random) -> Clip:
    """The clip, now and then after some silence; its phones move along.

    Not for the teacher's, whose sound at 24 kHz stays as it is.
    """
    if draw.random() >= _SILENCE_SHARE:
        return clip
    silent = np.zeros(round(draw.uniform(0, _MOST_SILENCE_S) * INPUT_RATE), np.int16)
    seconds = len(silent) / INPUT_RATE
    phones = [(name, end + seconds) for name, end in clip.phones]
    first = [("pau", seconds)] if phones else []
    heard = np.concatenate([silent, clip.heard])
    return replace(clip, heard=heard, phones=(*first, *phones))


def _by_festival(
    programs: Programs, voice: str, texts: list[str], folder: Path, draw: random.Random
) -> list[Clip]:
    stretch = draw.uniform(0.85, 1.15)
    lines = [f"(voice_{FESTIVAL[voice]})", f"(Parameter.set 'Duration_Stretch {stretch:.3f})"]
    for place, text in enumerate(texts):
        quoted = text.replace("\\", "").replace('"', "")
        stem = folder / str(place)
        lines.append(
            f"(let ((utt (utt.synth (eval (list 'Utterance 'Text \"{quoted}\")))))"
            f' (utt.save.wave utt "{stem}.wav" \'riff) (utt.save.segs utt "{stem}.lab"))'
        )
    script = folder / "batch.scm"
    script.write_text("\n".join(lines))
    programs.festival(script)
    clips = []
    for place, text in enumerate(texts):
        stem = folder / str(place)
        labels = [line.split() for line in stem.with_suffix(".lab").read_text().splitlines()]
        phones = [(parts[2], float(parts[0])) for parts in labels if len(parts) == 3]
        clips.append(_clip(text, voice, stem.with_suffix(".wav"), phones, 1.0))
    return [clip for clip in clips if clip]


def _by_flite(
    programs: Programs, voice: str, text: str, wav: Path, draw: random.Random
) -> Clip | None:
    stretch = draw.uniform(0.8, 1.2)
    printed = programs.run(
        "flite", "-voice", voice, "--setf", f"duration_stretch={stretch:.3f}",
        "-psdur", "-t", text, "-o", str(wav),
    )  # fmt: skip
    phones = [(name, float(end)) for name, end in _PSDUR.findall(printed)]
    return _clip(text, voice, wav, phones, draw.uniform(0.9, 1.12))


def _by_espeak(
    programs: Programs, voice: str, text: str, wav: Path, draw: random.Random
) -> Clip | None:
    name = f"{draw.choice(ESPEAK)}+{draw.choice(ESPEAK_VARIANTS)}"
    speed, pitch = draw.randint(130, 200), draw.randint(25, 75)
    programs.run("espeak-ng", "-v", name, "-s", f"{speed}", "-p", f"{pitch}", "-w", str(wav), text)
    return _clip(text, voice, wav, [], draw.uniform(0.92, 1.08))


def _clip(
    text: str, voice: str, wav: Path, phones: list[tuple[str, float]], faster: float
) -> Clip | None:
    """Read a wav, change its speed and pitch together by ``faster``, bring it to our rates."""
    sound, rate = soundfile.read(wav, dtype="float32")
    wav.unlink()
    if sound.ndim != 1 or len(sound) < rate // 2 or not np.abs(sound).max() > 1e-3:
        return None
    sound = sound * (_PEAK / np.abs(sound).max())
    heard = soxr.resample(sound, rate * faster, INPUT_RATE)
    return Clip(
        text, voice, _int16(heard), phones=tuple((name, end / faster) for name, end in phones)
    )


def _int16(sound: NDArray[np.float32]) -> Samples16:
    return np.clip(np.round(sound * 32767), -32768, 32767).astype(np.int16)
