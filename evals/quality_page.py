"""What the quality bench found: tables for the terminal, and one page with examples to hear."""

from collections.abc import Iterator, Sequence
from html import escape

from evals.answers import answers_html, answers_tables
from evals.artefacts import KINDS, find_artefacts
from evals.intervals import Spread, percent, points, score
from evals.judges import SpeechRow, Verdict
from evals.media import picture, player
from evals.quality import TEACHER_NAME, LengthRow, Quality, SpeedRow, StreamingRow, TranscriptRow
from evals.sound_scores import CodecRow
from evals.takes import READ_ALOUD, RESYNTHESISED, STREAMED
from evals.words import Pair, compared
from mosstalk.audio.sound import Samples
from mosstalk.reporting.html import page, skipped_html, table_html
from mosstalk.reporting.tables import NONE, Table, figure

_INTERVALS = "In brackets 95% intervals."
SHOWN = (TEACHER_NAME, RESYNTHESISED, STREAMED, READ_ALOUD)
EXAMPLES = 10
WRITTEN = 5
_LABELS = ("weights", "replies", "sentences", "machine")


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
        *(answers_tables(quality.answers) if quality.answers else ()),
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
                *(row.name, str(row.n), score(row.naturalness)),
                score(row.naturalness_over_teacher, signed=True),
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
            ("naturalness", score(row.naturalness, signed=True), NONE),
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


def _cells(values: Spread | None, first: str, second: str, digits: int) -> tuple[str, str]:
    return figure(getattr(values, first, None), digits), figure(
        getattr(values, second, None), digits
    )


def quality_page(quality: Quality) -> str:
    """The page as HTML: tables, then examples with sound, spectrogram and transcript."""
    labels = [f"{key}: {quality.settings[key]}" for key in _LABELS if key in quality.settings]
    return page(
        f"mosstalk quality: {quality.settings.get('checkpoint', 'voices')}",
        ". ".join([*filter(None, [quality.headline]), *labels]),
        quality.settings,
        *map(table_html, tables_of(quality)),
        skipped_html(quality.skipped),
        *_examples(quality),
        *_written(quality),
        *(answers_html(quality.answers, quality.answer_sounds) if quality.answers else ()),
    )


def _examples(quality: Quality) -> Iterator[str]:
    named = {verdict.reading.name: verdict for verdict in quality.verdicts}
    if READ_ALOUD in named:
        shown = [named[name] for name in SHOWN if name in named]
    else:
        shown = list(named.values())
    if not shown:
        return
    places, worst = pick_examples(shown[-1])
    yield "<h2>Examples</h2>"
    yield (
        f'<p class="note">{worst} in which the judge heard most words of "'
        f'{escape(shown[-1].reading.name)}" wrong, and {len(places) - worst} spread evenly over '
        "the others. Words left out or heard otherwise are <del>struck through</del>, words heard "
        "in their place or added are <ins>underlined</ins>.</p>"
    )
    for place in places:
        yield _example(place, shown)


def pick_examples(verdict: Verdict) -> tuple[list[int], int]:
    """Places of up to ten sentences, in order, and how many of them were picked as the worst."""
    count = len(verdict.reading)
    by_errors = sorted(range(count), key=lambda place: -verdict.words[place].edits)
    worst = [place for place in by_errors if verdict.words[place].edits][: EXAMPLES // 2]
    others = [place for place in range(count) if place not in worst]
    wanted = min(EXAMPLES - len(worst), len(others))
    spread = [others[index * len(others) // wanted] for index in range(wanted)]
    return sorted(worst + spread), len(worst)


def _written(quality: Quality) -> Iterator[str]:
    """The first transcripts of each group, the checkpoint's own, with errors marked."""
    if quality.transcripts:
        yield "<h2>Written down by the checkpoint</h2>"
    for row in quality.transcripts:
        lines = row.lines[:WRITTEN]
        items = "\n".join(f"<li>{marked(compared(line.said, line.own))}</li>" for line in lines)
        yield f"<h3>{escape(row.group)}, first {len(lines)} of {row.n}</h3>\n<ul>\n{items}\n</ul>"


def _example(place: int, verdicts: list[Verdict]) -> str:
    text = verdicts[0].reading.texts[place]
    teacher = verdicts[0].reading.sounds[place]
    longest = max(len(verdict.reading.sounds[place]) for verdict in verdicts)
    takes = "\n".join(_take(verdict, place, teacher, longest) for verdict in verdicts)
    return (
        f'<section class="example"><h3>{place + 1}. {escape(text)}</h3>\n'
        f'<div class="takes">\n{takes}\n</div></section>'
    )


def _take(verdict: Verdict, place: int, teacher: Samples, longest: int) -> str:
    name, samples = verdict.reading.name, verdict.reading.sounds[place]
    pairs = compared(verdict.reading.texts[place], verdict.transcripts[place])
    faults = "".join(
        f'<p class="fault">{escape(fault.kind)}: {escape(fault.detail)}</p>'
        for fault in find_artefacts(samples, teacher)
    )
    return (
        f"<div><h4>{escape(name)}</h4>\n{player(samples)}\n{picture(samples, name, longest)}"
        f"<p>{marked(pairs)}</p>{faults}</div>"
    )


def marked(pairs: list[Pair]) -> str:
    """An alignment as HTML: what was not heard in ``del``, what was heard instead in ``ins``."""
    words = []
    for pair in pairs:
        if pair.kind == "match":
            words.append(escape(pair.reference or ""))
            continue
        words += [f"<del>{escape(pair.reference)}</del>"] if pair.reference else []
        words += [f"<ins>{escape(pair.hypothesis)}</ins>"] if pair.hypothesis else []
    return " ".join(words)
