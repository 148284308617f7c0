"""The figures of a run and examples to hear, as one page that needs nothing but itself."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from html import escape

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from evals.artefacts import find_artefacts
from evals.judges import Verdict
from evals.quality import TEACHER_NAME, Quality
from evals.quality_tables import tables_of
from evals.takes import READ_ALOUD, RESYNTHESISED, STREAMED
from evals.words import Pair, compared
from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import vocoder_mel
from mosstalk.reporting.html import END, head, settings_html, skipped_html, table_html

SHOWN = (TEACHER_NAME, RESYNTHESISED, STREAMED, READ_ALOUD)
EXAMPLES = 10
WRITTEN = 5
_LABELS = ("weights", "replies", "sentences", "machine")
_SHORTEST_PICTURE = 4 * MEL_FRAME_SAMPLES


def quality_page(quality: Quality) -> str:
    """The page as HTML: tables, then examples with sound, spectrogram and transcript."""
    parts = (
        head(_title(quality), _label(quality)),
        *map(table_html, tables_of(quality)),
        skipped_html(quality.skipped),
        *_examples(quality),
        *_written(quality),
        settings_html(quality.settings),
        END,
    )
    return "\n".join(part for part in parts if part)


def _title(quality: Quality) -> str:
    return f"mosstalk quality: {quality.settings.get('checkpoint', 'voices')}"


def _label(quality: Quality) -> str:
    labels = [f"{key}: {quality.settings[key]}" for key in _LABELS if key in quality.settings]
    return ". ".join([quality.headline, *labels] if quality.headline else labels)


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


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_TYPE = 3
_ANCHORS = (
    (0, 0, 4),
    (59, 15, 112),
    (140, 41, 129),
    (222, 73, 104),
    (254, 159, 109),
    (252, 253, 191),
)
"""Colours from quiet to loud, evenly spaced: dark violet over red to pale yellow."""
_COLOURS = 64
_RANGE_DB = 70.0
_DB_PER_NAT = 20 / np.log(10)
_SCALE = 2


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
    anchors = np.array(_ANCHORS, np.float64)
    at = np.linspace(0, len(anchors) - 1, _COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, place]) for place in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
