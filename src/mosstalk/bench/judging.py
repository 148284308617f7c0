"""Readings before the judges: words, phonemes and naturalness of every sound."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mosstalk.bench import intervals
from mosstalk.bench.align import Errors, align, count_errors
from mosstalk.bench.artefacts import KINDS, Artefact, find_artefacts
from mosstalk.bench.intervals import Estimate
from mosstalk.bench.judges import NaturalnessJudge, PhonemeJudge, WhisperJudge
from mosstalk.bench.readings import Reading
from mosstalk.bench.words import word_errors
from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.progress import Progress

_J = TypeVar("_J")


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

    Raises:
        BenchError: the judge of words is not installed; nothing is worth measuring without.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.whisper = WhisperJudge()
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
