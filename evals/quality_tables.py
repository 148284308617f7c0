"""What the quality bench found, as tables: the same for the terminal and for the page."""

from collections.abc import Sequence

from evals.artefacts import KINDS
from evals.intervals import Estimate, Spread
from evals.judges import SpeechRow
from evals.quality import LengthRow, Quality, SpeedRow, StreamingRow, TranscriptRow
from evals.sound_scores import CodecRow
from mosstalk.reporting.tables import NONE, Table, figure

_INTERVALS = "In brackets 95% intervals."


def tables_of(quality: Quality) -> list[Table]:
    """All tables that a run has figures for."""
    tables = (
        _words(quality.speech),
        _lengths(quality.lengths),
        _naturalness(quality.speech),
        _transcripts(quality.transcripts),
        _codec(quality.codec),
        *([_streaming(quality.streaming)] if quality.streaming else ()),
        *([_speed(quality.speed)] if quality.speed else ()),
        _artefacts(quality.speech),
    )
    return [table for table in tables if table.rows]


def _words(speech: Sequence[SpeechRow]) -> Table:
    return Table(
        "Speech: words and phonemes that judges hear",
        "WER: word error rate in %, and points over the teacher's. PER: phonemes in % unlike "
        f"those heard in the teacher's recording. {_INTERVALS}",
        ("", "n", "s", "WER %", "over teacher", "PER %"),
        [
            (
                *(row.name, str(row.n), f"{row.seconds:.0f}"),
                *(percent(row.words), points(row.words_over_teacher), percent(row.phonemes)),
            )
            for row in speech
        ],
    )


def _lengths(lengths: Sequence[LengthRow]) -> Table:
    return Table(
        "Read aloud: words wrong, by length of the sentence",
        "Word error rates in %, the teacher's of the same sentences, and the difference in "
        f"points. {_INTERVALS}",
        ("", "n", "read aloud", "teacher", "over teacher"),
        [
            (
                *(row.words, str(row.n), percent(row.own)),
                *(percent(row.teacher), points(row.over_teacher)),
            )
            for row in lengths
        ],
    )


def _naturalness(speech: Sequence[SpeechRow]) -> Table:
    return Table(
        "Speech: naturalness, guessed",
        "From 1 to 5, by a model that guesses listeners' scores; no listening test. In "
        "brackets 95% intervals.",
        ("", "n", "score", "over teacher"),
        [
            (
                *(row.name, str(row.n), _score(row.naturalness)),
                _score(row.naturalness_over_teacher, signed=True),
            )
            for row in speech
            if row.naturalness
        ],
    )


def _transcripts(transcripts: Sequence[TranscriptRow]) -> Table:
    return Table(
        "Speech, written down by the checkpoint",
        "Word error rates in %, the checkpoint's and the judge's of the same sounds, and the "
        f"difference in points. {_INTERVALS}",
        ("", "n", "s", "checkpoint", "judge", "over judge"),
        [
            (
                *(row.group, str(row.n), f"{row.seconds:.0f}"),
                *(percent(row.own), percent(row.judge), points(row.over_judge)),
            )
            for row in transcripts
        ],
    )


def _codec(codec: Sequence[CodecRow]) -> Table:
    return Table(
        "Resynthesis against the teacher's recording, aligned",
        "PESQ: wide band, 1.0 to 4.6. STOI: 0 to 1. LSD: log-spectral distance in dB, 0 is equal.",
        ("", "PESQ", "worst", "STOI", "worst", "LSD dB", "worst"),
        [
            (
                row.name,
                *_cells(row.pesq, "mean", "lowest", 2),
                *_cells(row.stoi, "mean", "lowest", 3),
                *_cells(row.lsd_db, "mean", "highest", 1),
            )
            for row in codec
        ],
    )


def _streaming(row: StreamingRow) -> Table:
    return Table(
        "Resynthesis hop by hop against at once, from the same codes",
        "Seam jump: step between neighbouring samples at a hop's border over the 99.9th "
        "percentile of all steps of that sound; beside it the same places in the sound made at "
        "once.",
        ("", "mean", "worst"),
        (
            ("WER, points", points(row.words), NONE),
            ("naturalness", _score(row.naturalness, signed=True), NONE),
            ("LSD from one another, dB", *_cells(row.lsd_db, "mean", "highest", 1)),
            (f"seam jump, {row.seams.n} seams", *_cells(row.seams, "mean", "highest", 2)),
            ("same places, at once", *_cells(row.same_places, "mean", "highest", 2)),
        ),
    )


def _speed(row: SpeedRow) -> Table:
    return Table(
        "Speed of reading aloud, on this machine",
        f"Of {row.first_audio_ms.n} replies, one at a time. Real-time factor: time in all stages "
        "over length of sound; below 1 keeps up.",
        ("", "median", "max"),
        (
            ("first audio, ms", *_cells(row.first_audio_ms, "median", "highest", 0)),
            ("real-time factor", *_cells(row.real_time_factor, "median", "highest", 3)),
        ),
    )


def _artefacts(speech: Sequence[SpeechRow]) -> Table:
    return Table(
        "Sounds with a fault that a program can name",
        "The teacher's row holds false alarms. Limits are in evals.artefacts.",
        ("", "n", *KINDS),
        [(row.name, str(row.n), *(str(row.artefacts[kind]) for kind in KINDS)) for row in speech],
    )


def percent(rate: Estimate | None) -> str:
    """A rate, a fraction, in percent, with the ends of its interval."""
    return _with_ends(rate, 100, 1, signed=False)


def points(rate: Estimate | None) -> str:
    """A difference of rates in points of percent, with its sign and its interval."""
    return _with_ends(rate, 100, 1, signed=True)


def _score(score: Estimate | None, *, signed: bool = False) -> str:
    return _with_ends(score, 1, 2, signed=signed)


def _with_ends(estimate: Estimate | None, unit: int, digits: int, *, signed: bool) -> str:
    if estimate is None:
        return NONE
    value, low, high = (
        figure(each, digits, unit, signed=signed)
        for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def _cells(values: Spread | None, first: str, second: str, digits: int) -> tuple[str, str]:
    return figure(getattr(values, first, None), digits), figure(
        getattr(values, second, None), digits
    )
