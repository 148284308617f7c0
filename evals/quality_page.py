"""What the quality bench found: tables for the terminal, and one page with examples to hear."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from evals.artefacts import KINDS, find_artefacts
from evals.intervals import Estimate, Spread
from evals.judges import SpeechRow, Verdict
from evals.quality import TEACHER_NAME, LengthRow, Quality, SpeedRow, StreamingRow, TranscriptRow
from evals.sound_scores import CodecRow
from evals.takes import READ_ALOUD, RESYNTHESISED, STREAMED
from evals.words import Pair, compared
from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import vocoder_mel
from mosstalk.reporting.html import page, skipped_html, table_html
from mosstalk.reporting.tables import NONE, Table, figure

_INTERVALS = "In brackets 95% intervals."
SHOWN = (TEACHER_NAME, RESYNTHESISED, STREAMED, READ_ALOUD)
EXAMPLES = 10
WRITTEN = 5
_LABELS = ("weights", "replies", "sentences", "machine")
_SHORTEST_PICTURE = 4 * MEL_FRAME_SAMPLES
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_TYPE = 3
_ANCHORS = bytes.fromhex("000004 3b0f70 8c2981 de4968 fe9f6d fcfdbf")
"""Colours from quiet to loud, evenly spaced: dark violet over red to pale yellow."""
_COLOURS = 64
_RANGE_DB = 70.0
_DB_PER_NAT = 20 / np.log(10)
_SCALE = 2


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
    )


def _examples(quality: Quality) -> Iterator[str]:
    named = {verdict.reading.name: verdict for verdict in quality.verdicts}
    if READ_ALOUD in named:
        shown = [named[name] for name in SHOWN if name in named]
    else:
        shown = list(named.values())
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
        f"<div><h4>{escape(name)}</h4>\n{_player(samples)}\n{_picture(samples, name, longest)}"
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


def _player(samples: Samples) -> str:
    if not len(samples):
        return '<p class="fault">no sound</p>'
    kind, content = encode_sound(samples)
    return f'<audio controls preload="metadata" src="{_data(kind, content)}"></audio>'


def encode_sound(samples: Samples) -> tuple[str, bytes]:
    """Sound (n,) at 24 kHz as a small file with its media type: mp3, or wav where it cannot be."""
    file = io.BytesIO()
    if "MP3" in soundfile.available_formats():
        soundfile.write(file, samples, OUTPUT_RATE, format="MP3")
        return "audio/mpeg", file.getvalue()
    smaller = resample(samples, OUTPUT_RATE, INPUT_RATE)
    soundfile.write(file, smaller, INPUT_RATE, format="WAV", subtype="PCM_16")
    return "audio/wav", file.getvalue()


def _picture(samples: Samples, name: str, longest: int) -> str:
    """The spectrogram; a second is as wide in all pictures of one sentence."""
    if len(samples) < _SHORTEST_PICTURE:
        return ""
    source = _data("image/png", spectrogram_png(samples))
    width = f"width: {len(samples) / longest:.1%}"
    return f'<img src="{source}" style="{width}" alt="mel spectrogram, {escape(name)}">\n'


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def spectrogram_png(samples: Samples) -> bytes:
    """Mel spectrogram of sound (n,) at 24 kHz as a PNG: 20 ms and one of 80 bands are 2 pixels.

    0 to 8 kHz from the bottom up; colours span the 70 dB below the loudest.
    """
    mel = vocoder_mel(torch.from_numpy(samples)).numpy().T[::-1] * _DB_PER_NAT
    level = np.clip((mel - mel.max()) / _RANGE_DB + 1, 0, 1)
    pixels = np.round(level * (_COLOURS - 1)).astype(np.uint8)
    return encode_png(pixels.repeat(_SCALE, 0).repeat(_SCALE, 1), _palette())


def encode_png(pixels: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8]) -> bytes:
    """A PNG (ISO/IEC 15948) of palette indices (height, width); ``palette`` is (colours, 3)."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _PALETTE_TYPE, 0, 0, 0)
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # each row begins with its filter: none
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def _palette() -> npt.NDArray[np.uint8]:
    anchors = np.frombuffer(_ANCHORS, np.uint8).reshape(-1, 3).astype(np.float64)
    at = np.linspace(0, len(anchors) - 1, _COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, place]) for place in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
