"""The page of a run: it needs nothing but itself, and shows what the judges heard."""

import base64
import io
import json
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile
from conftest import QUESTION

from evals.intervals import rate
from evals.judges import Verdict, speech_row
from evals.media import encode_sound, spectrogram_png
from evals.quality import (
    TEACHER_LONG,
    Quality,
    TranscriptLine,
    TranscriptRow,
    document_of,
    lengths_of,
)
from evals.quality_page import marked, pick_examples, quality_page, tables_of
from evals.readings import Reading, noise_like
from evals.takes import READ_ALOUD, READ_ALOUD_LONG
from evals.words import align, word_errors
from mosstalk.audio.sound import Samples, read_audio
from mosstalk.constants import OUTPUT_RATE
from mosstalk.files import as_text

TEXTS = ("Salt & pepper, <please>.", "Call me back.")


def verdict(reading: Reading, *heard: str) -> Verdict:
    errors = tuple(word_errors(reading.texts, heard))
    return Verdict(reading, heard, errors, None, tuple(3.0 + place for place in range(len(heard))))


@pytest.fixture(scope="module")
def sound() -> Samples:
    return read_audio(QUESTION, OUTPUT_RATE).samples


@pytest.fixture(scope="module")
def quality(sound: Samples) -> Quality:
    recordings = Reading("teacher", TEXTS, (sound, sound))
    teacher = verdict(recordings, "salt and pepper please", "call me back")
    spoken = Reading(READ_ALOUD, TEXTS, noise_like(recordings).sounds)
    aloud = verdict(spoken, "salt and paper <please>", "")
    rows = [speech_row(each, teacher) for each in (teacher, aloud)]
    heard = (TranscriptLine(TEXTS[1], "call him <back>", "call me back"),)
    counted = rate(word_errors(TEXTS[1:], [heard[0].own]))
    group = TranscriptRow("someone & co", 1, 2.9, counted, counted, counted, heard)
    settings = {"checkpoint": "a <b> & c", "weights": "synthetic"}
    return Quality(
        settings,
        speech=rows,
        transcripts=[group],
        skipped=["judge <x>"],
        verdicts=[teacher, aloud],
    )


class Page(HTMLParser):
    """Counts elements, and checks that each is closed in its order."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for seen, attrs in self.seen if seen == tag]


def test_the_page_is_well_formed_and_asks_for_nothing(quality: Quality) -> None:
    page = Page(quality_page(quality))
    assert page.open == []
    targets = [
        attrs[key] or "" for _, attrs in page.seen for key in ("src", "href") if key in attrs
    ]
    assert len(targets) == 8
    assert all(target.startswith("data:") for target in targets)
    assert not re.search(r"url\(|@import|https?://", quality_page(quality))


def test_the_page_fits_a_phone_and_the_dark(quality: Quality) -> None:
    text = quality_page(quality)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    page = Page(text)
    assert len(page.all("table")) == len(tables_of(quality))


def test_what_others_wrote_is_text_and_never_markup(quality: Quality) -> None:
    text = quality_page(quality)
    assert "a &lt;b&gt; &amp; c" in text
    assert "judge &lt;x&gt;" in text
    assert "someone &amp; co, first 1 of 1" in text
    assert "call <del>me</del> <ins>him</ins> back" in text
    assert "<please>" not in text
    assert "<x>" not in text


def test_the_sounds_on_the_page_can_be_played(quality: Quality, sound: Samples) -> None:
    players = Page(quality_page(quality)).all("audio")
    assert len(players) == 4
    kind, _, content = str(players[0]["src"]).partition(";base64,")
    assert kind in ("data:audio/mpeg", "data:audio/wav")
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(content)), dtype="float32")
    assert len(samples) / rate == pytest.approx(len(sound) / OUTPUT_RATE, abs=0.1)


def test_an_encoded_sound_is_small_and_sounds_alike(sound: Samples) -> None:
    kind, content = encode_sound(sound)
    assert len(content) < len(sound) * (0.5 if kind == "audio/mpeg" else 1.5)
    samples, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    assert samples.std() == pytest.approx(sound.std(), rel=0.05)


def test_errors_are_marked_where_they_are() -> None:
    pairs = align(["call", "me", "back", "now"], ["ball", "me", "now", "please"])
    assert marked(pairs) == (
        "<del>call</del> <ins>ball</ins> me <del>back</del> now <ins>please</ins>"
    )
    assert marked(align(["fish"], ["<b>"])) == "<del>fish</del> <ins>&lt;b&gt;</ins>"


def test_examples_are_the_worst_and_an_even_spread_of_the_rest() -> None:
    texts = tuple(f"sentence {letter} is here" for letter in "abcdefghijklmnopqrstuvwxyz")
    heard = [text if place % 3 else "nothing" for place, text in enumerate(texts)]
    reading = Reading(READ_ALOUD, texts, (np.zeros(1, np.float32),) * len(texts))
    places, worst = pick_examples(verdict(reading, *heard))
    assert (len(places), worst) == (10, 5)
    assert places == sorted(set(places))
    assert [place for place in places if place % 3 == 0][:5] == [0, 3, 6, 9, 12]
    assert max(places) > 18


def test_the_document_is_strict_json_with_every_transcript(quality: Quality) -> None:
    document = json.loads(as_text(document_of(quality)))
    assert [row["name"] for row in document["speech"]] == ["teacher", READ_ALOUD]
    assert document["sentences"][1] == {
        "text": TEXTS[1],
        "heard": {"teacher": "call me back", READ_ALOUD: ""},
        "edits": {"teacher": 0, READ_ALOUD: 3},
    }


def test_a_table_names_what_is_worse_than_the_teacher(quality: Quality) -> None:
    words = tables_of(quality)[0]
    assert [row[0] for row in words.rows] == ["teacher", READ_ALOUD]
    assert words.rows[1][3].startswith("57.1 [")
    assert words.rows[1][4].startswith("+57.1 [")
    assert all(
        len(line) <= 100 for table in tables_of(quality) for line in table.as_text().split("\n")
    )


def test_the_headline_and_a_table_tell_short_from_long_sentences(quality: Quality) -> None:
    text = "We waited " + "and waited " * 12 + "for you."
    teacher, aloud = (
        verdict(
            replace(each.reading, name=name, texts=(text,), sounds=each.reading.sounds[:1]), said
        )
        for each, name, said in zip(
            quality.verdicts, (TEACHER_LONG, READ_ALOUD_LONG), (text, "We waited."), strict=True
        )
    )
    both = replace(
        quality,
        speech=[*quality.speech, speech_row(teacher, teacher), speech_row(aloud, teacher)],
        long_verdicts=[teacher, aloud],
    )
    assert quality.headline == (
        "words wrong, read aloud: 57.1 % [25.0, 100.0] of 2 sentences of 3 to 4 words"
    )
    assert both.headline == (f"{quality.headline}; 92.9 % [92.9, 92.9] of 1 sentence of 28 words")
    both.lengths = lengths_of(both)
    (table,) = [table for table in tables_of(both) if "by length" in table.title]
    assert [row[:2] for row in table.rows] == [("1 to 8 words", "2"), ("24 to 28 words", "1")]
    assert [row[3] for row in table.rows] == ["0.0 [0.0, 0.0]"] * 2
    assert table.rows[1][4].startswith("+92.9 [")
    assert both.headline in quality_page(both)


def test_a_spectrogram_is_a_png_of_the_sounds_length(sound: Samples) -> None:
    png = spectrogram_png(sound)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        chunks[kind] = content
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert (width, height) == (2 * (len(sound) // 480), 160)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert rows[:, 0].max() == 0
    assert rows.max() == len(chunks[b"PLTE"]) // 3 - 1
    # Speech is loudest below 2 kHz, which is the lower part of the picture.
    assert rows[height // 2 :].mean() > 1.5 * rows[: height // 2].mean()
