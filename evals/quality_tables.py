"""What the quality bench found, as tables: the same for the terminal and for the page."""

from collections.abc import Iterator, Sequence

from evals.artefacts import KINDS
from evals.intervals import Estimate, Spread
from evals.quality import Quality
from mosstalk.reporting.tables import NONE, Table


def tables_of(quality: Quality) -> list[Table]:
    """All tables that a run has figures for."""
    makers = (_words, _lengths, _naturalness, _transcripts, _codec, _streaming, _speed, _artefacts)
    return [table for make in makers for table in make(quality)]


def _words(quality: Quality) -> Iterator[Table]:
    rows = [
        (
            *(row.name, str(row.n), f"{row.seconds:.0f}"),
            *(percent(row.words), points(row.words_over_teacher), percent(row.phonemes)),
        )
        for row in quality.speech
    ]
    yield Table(
        "Speech: words and phonemes that judges hear",
        "WER: word error rate in %, and points over the teacher's. PER: phonemes in % unlike "
        "those heard in the teacher's recording. In brackets 95% intervals.",
        ("", "n", "s", "WER %", "over teacher", "PER %"),
        tuple(rows),
    )


def _lengths(quality: Quality) -> Iterator[Table]:
    if quality.lengths:
        yield Table(
            "Read aloud: words wrong, by length of the sentence",
            "Word error rates in %, the teacher's of the same sentences, and the difference in "
            "points. In brackets 95% intervals.",
            ("", "n", "read aloud", "teacher", "over teacher"),
            tuple(
                (
                    *(row.words, str(row.n), percent(row.own)),
                    *(percent(row.teacher), points(row.over_teacher)),
                )
                for row in quality.lengths
            ),
        )


def _naturalness(quality: Quality) -> Iterator[Table]:
    rows = [
        (
            *(row.name, str(row.n), _score(row.naturalness)),
            _score(row.naturalness_over_teacher, signed=True),
        )
        for row in quality.speech
        if row.naturalness
    ]
    if rows:
        yield Table(
            "Speech: naturalness, guessed",
            "From 1 to 5, by a model that guesses listeners' scores; no listening test. In "
            "brackets 95% intervals.",
            ("", "n", "score", "over teacher"),
            tuple(rows),
        )


def _transcripts(quality: Quality) -> Iterator[Table]:
    if not quality.transcripts:
        return
    rows = [
        (
            row.group,
            str(row.n),
            f"{row.seconds:.0f}",
            percent(row.own),
            percent(row.judge),
            points(row.over_judge),
        )
        for row in quality.transcripts
    ]
    yield Table(
        "Speech, written down by the checkpoint",
        "Word error rates in %, the checkpoint's and the judge's of the same sounds, and the "
        "difference in points. In brackets 95% intervals.",
        ("", "n", "s", "checkpoint", "judge", "over judge"),
        tuple(rows),
    )


def _codec(quality: Quality) -> Iterator[Table]:
    if not quality.codec:
        return
    rows = [
        (
            row.name,
            *_mean_and(row.pesq, "lowest", 2),
            *_mean_and(row.stoi, "lowest", 3),
            *_mean_and(row.lsd_db, "highest", 1),
        )
        for row in quality.codec
    ]
    yield Table(
        "Resynthesis against the teacher's recording, aligned",
        "PESQ: wide band, 1.0 to 4.6. STOI: 0 to 1. LSD: log-spectral distance in dB, 0 is equal.",
        ("", "PESQ", "worst", "STOI", "worst", "LSD dB", "worst"),
        tuple(rows),
    )


def _streaming(quality: Quality) -> Iterator[Table]:
    row = quality.streaming
    if row is None:
        return
    yield Table(
        "Resynthesis hop by hop against at once, from the same codes",
        "Seam jump: step between neighbouring samples at a hop's border over the 99.9th "
        "percentile of all steps of that sound; beside it the same places in the sound made at "
        "once.",
        ("", "mean", "worst"),
        (
            ("WER, points", points(row.words), NONE),
            ("naturalness", _score(row.naturalness, signed=True), NONE),
            ("LSD from one another, dB", *_mean_and(row.lsd_db, "highest", 1)),
            (f"seam jump, {row.seams.n} seams", *_mean_and(row.seams, "highest", 2)),
            ("same places, at once", *_mean_and(row.same_places, "highest", 2)),
        ),
    )


def _speed(quality: Quality) -> Iterator[Table]:
    row = quality.speed
    if row is None:
        return
    yield Table(
        "Speed of reading aloud, on this machine",
        f"Of {row.first_audio_ms.n} replies, one at a time. Real-time factor: time in all stages "
        "over length of sound; below 1 keeps up.",
        ("", "median", "max"),
        (
            ("first audio, ms", *_median_and_max(row.first_audio_ms, 0)),
            ("real-time factor", *_median_and_max(row.real_time_factor, 3)),
        ),
    )


def _artefacts(quality: Quality) -> Iterator[Table]:
    rows = [
        (row.name, str(row.n), *(str(row.artefacts[kind]) for kind in KINDS))
        for row in quality.speech
    ]
    yield Table(
        "Sounds with a fault that a program can name",
        "The teacher's row holds false alarms. Limits are in evals.artefacts.",
        ("", "n", *KINDS),
        tuple(rows),
    )


def percent(rate: Estimate | None) -> str:
    """A rate, a fraction, in percent, with the ends of its interval."""
    return _with_ends(rate, 100, 1, signed=False)


def points(rate: Estimate | None) -> str:
    """A difference of rates in points of percent, with its sign and its interval."""
    return _with_ends(rate, 100, 1, signed=True)


def _score(score: Estimate | None, *, signed: bool = False) -> str:
    return _with_ends(score, 1, 2, signed=signed)


def _with_ends(figure: Estimate | None, unit: int, digits: int, *, signed: bool) -> str:
    if figure is None:
        return NONE
    sign = "+" if signed else ""
    value, low, high = (
        f"{unit * each:{sign}.{digits}f}" for each in (figure.value, figure.low, figure.high)
    )
    return f"{value} [{low}, {high}]"


def _mean_and(values: Spread | None, end: str, digits: int) -> tuple[str, str]:
    return _cells(values, ("mean", end), digits)


def _median_and_max(values: Spread, digits: int) -> tuple[str, str]:
    return _cells(values, ("median", "highest"), digits)


def _cells(values: Spread | None, names: Sequence[str], digits: int) -> tuple[str, str]:
    found = (getattr(values, name, None) for name in names)
    first, second = (NONE if each is None else f"{each:.{digits}f}" for each in found)
    return first, second
