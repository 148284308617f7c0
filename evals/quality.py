"""The quality bench: how well a checkpoint speaks and listens, beside the voice it learned from.

Every figure stands beside the same judge's on the teacher's own recordings and on noise alone,
so that a judge that is deaf or forgiving shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from evals import intervals
from evals.answers import Answers, Asker, answers_headline
from evals.intervals import Estimate, Spread, spread
from evals.judges import Panel, SpeechRow, Verdict, naturalness_difference, speech_row
from evals.kokoro_voices import AMERICAN, BRITISH
from evals.questions import Question
from evals.readings import (
    OLDER,
    TEACHER,
    UNSEEN,
    Reading,
    SyntheticVoice,
    asset_recordings,
    librivox_clips,
    noise_like,
    read_aloud,
    read_naturally,
    read_recordings,
    telephone_prompts,
)
from evals.sound_scores import CodecRow, aligned, codec_rows, log_spectral_distance, seam_jumps
from evals.takes import (
    READ_ALOUD,
    READ_ALOUD_LONG,
    Streamed,
    Way,
    read_texts,
    resynthesise,
    write_down,
)
from evals.words import Errors, word_errors
from mosstalk.audio.sound import Samples
from mosstalk.errors import BenchError, MosstalkError
from mosstalk.progress import Progress

TEACHER_NAME = "teacher"
TEACHER_LONG = "teacher, long sentences"
_LENGTHS = ((1, 8), (9, 14), (15, 23), (24, 28), (29, 33))
"""Words of sentences that are counted together, from and to."""
_Counted: TypeAlias = tuple[str, Errors]
_UNSEEN_GROUP = f"unseen synthetic voice, {UNSEEN.name}"
_NATURAL_GROUPS = {
    f"held-out natural voices, {where}": voices
    for where, voices in (("American", AMERICAN), ("British", BRITISH))
}
FORMAT = "mosstalk-quality-1"


@dataclass(frozen=True)
class TranscriptRow:
    """Word error rate of the checkpoint's transcripts of one group, and the judge's of it."""

    group: str
    n: int
    seconds: float
    own: Estimate
    judge: Estimate
    over_judge: Estimate
    lines: tuple["TranscriptLine", ...]


@dataclass(frozen=True)
class TranscriptLine:
    """What was said, and what the checkpoint and the judge wrote down."""

    said: str
    own: str
    judge: str


@dataclass(frozen=True)
class LengthRow:
    """Word error rates of sentences of about one length, as the checkpoint and the teacher read
    them; None without the teacher.
    """

    words: str
    n: int
    own: Estimate
    teacher: Estimate | None
    over_teacher: Estimate | None


@dataclass(frozen=True)
class StreamingRow:
    """Resynthesis hop by hop less resynthesis at once, from the same codes.

    ``seams`` and ``same_places`` are jumps at hop borders and, of the sound made at once, at
    the same samples; see ``seam_jumps``.
    """

    words: Estimate
    naturalness: Estimate | None
    lsd_db: Spread
    seams: Spread
    same_places: Spread


@dataclass(frozen=True)
class SpeedRow:
    """Of text read aloud: milliseconds to the first sound, and compute over sound."""

    first_audio_ms: Spread
    real_time_factor: Spread


@dataclass
class Quality:
    """Everything a run found; ``skipped`` says what was not measured, and why."""

    settings: dict[str, Any] = field(default_factory=dict)
    speech: list[SpeechRow] = field(default_factory=list)
    transcripts: list[TranscriptRow] = field(default_factory=list)
    lengths: list[LengthRow] = field(default_factory=list)
    codec: list[CodecRow] = field(default_factory=list)
    streaming: StreamingRow | None = None
    speed: SpeedRow | None = None
    skipped: list[str] = field(default_factory=list)
    answers: Answers | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    long_verdicts: list[Verdict] = field(default_factory=list)
    answer_sounds: list[Samples] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """Words wrong in what the checkpoint reads aloud, short and long, and questions that it
        answers right; empty without both.
        """
        asked = answers_headline(self.answers) if self.answers else ""
        return "; ".join(filter(None, [self._read_aloud, asked]))

    @property
    def _read_aloud(self) -> str:
        parts = [
            f"{100 * row.words.value:.1f} % "
            f"[{100 * row.words.low:.1f}, {100 * row.words.high:.1f}] of "
            f"{row.n} sentence{'s'[: row.n != 1]} of "
            f"{_words(verdict.reading.texts)} words"
            for verdict in (*self.verdicts, *self.long_verdicts)
            for row in self.speech
            if row.name == verdict.reading.name and row.name in (READ_ALOUD, READ_ALOUD_LONG)
        ]
        return f"words wrong, read aloud: {'; '.join(parts)}" if parts else ""


def _words(texts: Sequence[str]) -> str:
    """From how many words to how many the texts have."""
    counts = {len(text.split()) for text in texts}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"


@dataclass
class QualityBench:
    """What to measure, and what is found: readings are made, judged, and kept for the page.

    ``sentences`` are read by all, ``long_sentences`` by the checkpoint and the teacher alone. The
    teacher's ``recordings``, more ``people`` to write down: folders; ``beside``: other voices.
    """

    panel: Panel
    tell: Progress
    sentences: tuple[str, ...]
    long_sentences: tuple[str, ...] = ()
    recordings: Path | None = None
    people: Path | None = None
    beside: tuple[SyntheticVoice, ...] = ()

    def __post_init__(self) -> None:
        self.quality = Quality(skipped=list(self.panel.skipped))

    def measure_voices(self) -> Quality:
        """Judge the teacher, noise alone and other voices: what the judges' figures are worth.

        Raises:
            BenchError: the teacher can neither be run nor read from recordings.
        """
        self._beside(self._judge(self._teacher()))
        return self.quality

    def measure_checkpoint(self, way: Way) -> Quality:
        """Judge what a checkpoint reads aloud, resynthesises and writes down.

        Without the teacher's recordings, all that is compared with them is skipped by name.
        """
        teacher = self._try("whatever needs the teacher's recordings", self._teacher)
        spoken = read_texts(way, self.sentences, self.tell)
        if teacher is None:
            self._judge(spoken.reading)
        else:
            self._compare(way, teacher, spoken)
        if spoken.first_audio_ms:
            self.quality.speed = SpeedRow(
                spread(spoken.first_audio_ms), spread(spoken.real_time_factors)
            )
        if self.long_sentences:
            self._read_long(way, self.long_sentences)
        self.quality.lengths = lengths_of(self.quality)
        self._listen(way, teacher)
        return self.quality

    def measure_answers(self, way: Way, questions: Sequence[Question]) -> Quality:
        """Ask a checkpoint questions, typed and spoken, and judge what it writes and says."""
        asker = Asker(way, self.panel.whisper, self.tell)
        self.quality.answers, self.quality.answer_sounds = asker.ask(questions)
        self.quality.skipped += asker.skipped
        return self.quality

    def _read_long(self, way: Way, sentences: Sequence[str]) -> None:
        """Long sentences, as the checkpoint and the teacher read them."""
        spoken = read_texts(way, sentences, self.tell, READ_ALOUD_LONG).reading
        verdicts = self.quality.long_verdicts
        recordings = self._try(
            TEACHER_LONG, lambda: read_aloud(TEACHER, sentences).called(TEACHER_LONG)
        )
        teacher = self._judge(recordings, None, verdicts) if recordings else None
        self._judge(spoken, teacher, verdicts)

    def _teacher(self) -> Reading:
        self.tell("preparing the teacher's recordings", 0, 1)
        if self.recordings:
            found = read_recordings(self.recordings, TEACHER_NAME)
            return found.only(self.sentences)
        try:
            return read_aloud(TEACHER, self.sentences).called(TEACHER_NAME)
        except BenchError as error:
            raise BenchError(f"{error}, or give its recordings with --recordings DIR") from None

    def _compare(self, way: Way, recordings: Reading, spoken: Streamed) -> None:
        teacher = self._judge(recordings)
        self._judge(spoken.reading, teacher)
        offline, streamed = resynthesise(way, recordings, self.tell)
        at_once = self._judge(offline, teacher)
        by_hops = self._judge(streamed.reading, teacher)
        self.quality.streaming = _streaming(at_once, by_hops, streamed.seams)
        noise = self._beside(teacher)
        self.quality.codec, missing = codec_rows(
            recordings, (offline, streamed.reading, noise), self.tell
        )
        self.quality.skipped += missing

    def _beside(self, teacher: Verdict) -> Reading:
        for voice in self.beside:
            reading = self._read(voice, self.sentences)
            if reading:
                self._judge(reading, teacher)
        noise = noise_like(teacher.reading)
        self._judge(noise, teacher)
        return noise

    def _judge(
        self,
        reading: Reading,
        teacher: Verdict | None = None,
        verdicts: list[Verdict] | None = None,
    ) -> Verdict:
        verdict = self.panel.judge(reading, self.tell)
        (self.quality.verdicts if verdicts is None else verdicts).append(verdict)
        self.quality.speech.append(speech_row(verdict, teacher or verdict))
        return verdict

    def _listen(self, way: Way, teacher: Reading | None) -> None:
        """The checkpoint's transcripts, group by group."""
        for reading in self._groups(teacher):
            written = write_down(way, reading, self.tell)
            self.quality.transcripts.append(_transcript_row(reading, written, self._heard(reading)))

    def _heard(self, reading: Reading) -> Sequence[str]:
        """The judge's transcripts, those of before where there are any."""
        for verdict in self.quality.verdicts:
            if verdict.reading is reading:
                return verdict.transcripts
        return self.panel.words_of(reading, self.tell)

    def _groups(self, teacher: Reading | None) -> Iterator[Reading]:
        sentences = self.sentences
        makers: Iterable[tuple[str, Callable[[], Reading]]] = (
            (_UNSEEN_GROUP, lambda: read_aloud(UNSEEN, sentences).called(_UNSEEN_GROUP)),
            *(
                (name, partial(read_naturally, name, voices, sentences))
                for name, voices in _NATURAL_GROUPS.items()
            ),
            ("people: assets/", asset_recordings),
            ("people: LibriVox clips", librivox_clips),
            ("people: telephone prompts", lambda: telephone_prompts(len(sentences))),
        )
        if teacher:
            yield teacher
        yield from self._other_voices(sentences)
        for name, make in makers:
            reading = self._try(f"transcripts of {name}", make)
            if reading:
                yield reading
        if self.people:
            yield read_recordings(self.people, f"people: {self.people.name}")

    def _other_voices(self, sentences: Sequence[str]) -> Iterator[Reading]:
        """One reading in which the voices of older programs take turns."""
        parts = []
        for place, voice in enumerate(OLDER):
            turn = sentences[place :: len(OLDER)]
            part = self._read(voice, turn) if turn else None
            parts += [part] if part else []
        if parts:
            yield Reading(
                f"{len(parts)} voices of older programs",
                tuple(text for part in parts for text in part.texts),
                tuple(sound for part in parts for sound in part.sounds),
            )

    def _read(self, voice: SyntheticVoice, sentences: Sequence[str]) -> Reading | None:
        return self._try(voice.name, lambda: read_aloud(voice, sentences))

    def _try(self, what: str, make: Callable[[], Reading]) -> Reading | None:
        """Make a reading, or say what was skipped and why."""
        try:
            return make()
        except MosstalkError as error:
            self.quality.skipped.append(f"{what}: {error}")
            return None


def lengths_of(quality: Quality) -> list[LengthRow]:
    """Read aloud, long sentences included, in groups of sentences of as many words."""
    own, teacher = list[_Counted](), dict[str, Errors]()
    for verdict in (*quality.verdicts, *quality.long_verdicts):
        counted = list(zip(verdict.reading.texts, verdict.words, strict=True))
        if verdict.reading.name in (READ_ALOUD, READ_ALOUD_LONG):
            own += counted
        elif verdict.reading.name in (TEACHER_NAME, TEACHER_LONG):
            teacher |= counted
    rows = [_length_row(own, teacher, *group) for group in _LENGTHS]
    return [row for row in rows if row]


def _length_row(
    own: Sequence[_Counted], teacher: Mapping[str, Errors], fewest: int, most: int
) -> LengthRow | None:
    chosen = [
        (words, teacher.get(text)) for text, words in own if fewest <= len(text.split()) <= most
    ]
    if not chosen:
        return None
    ours = [words for words, _ in chosen]
    theirs = [words for _, words in chosen if words is not None]
    whole = len(theirs) == len(ours)
    return LengthRow(
        f"{fewest} to {most} words",
        len(chosen),
        intervals.rate(ours),
        intervals.rate(theirs) if whole else None,
        intervals.rate_difference(ours, theirs) if whole else None,
    )


def _transcript_row(
    reading: Reading, written: Sequence[str], heard: Sequence[str]
) -> TranscriptRow:
    own, judge = word_errors(reading.texts, written), word_errors(reading.texts, heard)
    return TranscriptRow(
        reading.name,
        len(reading),
        reading.seconds,
        intervals.rate(own),
        intervals.rate(judge),
        intervals.rate_difference(own, judge),
        tuple(TranscriptLine(*three) for three in zip(reading.texts, written, heard, strict=True)),
    )


def _streaming(at_once: Verdict, by_hops: Verdict, seams: Sequence[Sequence[int]]) -> StreamingRow:
    whole, hops = at_once.reading.sounds, by_hops.reading.sounds
    both = list(zip(whole, hops, strict=True))
    return StreamingRow(
        intervals.rate_difference(by_hops.words, at_once.words),
        naturalness_difference(by_hops, at_once),
        spread([log_spectral_distance(*aligned(first, second)) for first, second in both]),
        _seams(hops, seams),
        _seams(whole, seams),
    )


def _seams(sounds: Sequence[Any], seams: Sequence[Sequence[int]]) -> Spread:
    both = zip(sounds, seams, strict=True)
    return spread([jump for sound, places in both for jump in seam_jumps(sound, places)])


def document_of(quality: Quality) -> dict[str, Any]:
    """The document as plain values; rates are fractions, intervals have ``low`` and ``high``."""
    rows = asdict(replace(quality, verdicts=[], long_verdicts=[], answer_sounds=[]))
    for name in ("verdicts", "long_verdicts", "answer_sounds"):
        del rows[name]
    return {
        "format": FORMAT,
        **rows,
        "sentences": _sentences(quality.verdicts),
        "long_sentences": _sentences(quality.long_verdicts),
    }


def _sentences(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Each text with what the judge heard in every reading of it."""
    if not verdicts:
        return []
    return [
        {
            "text": text,
            "heard": {each.reading.name: each.transcripts[place] for each in verdicts},
            "edits": {each.reading.name: each.words[place].edits for each in verdicts},
        }
        for place, text in enumerate(verdicts[0].reading.texts)
    ]
