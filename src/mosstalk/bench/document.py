"""A run as one json document: every figure, every transcript, every setting; no sound."""

from dataclasses import asdict
from typing import Any

from mosstalk.bench.judging import Verdict
from mosstalk.bench.quality import Quality

FORMAT = "mosstalk-quality-1"


def document_of(quality: Quality) -> dict[str, Any]:
    """The document as plain values; rates are fractions, intervals have ``low`` and ``high``."""
    return {
        "format": FORMAT,
        "settings": quality.settings,
        "speech": [asdict(row) for row in quality.speech],
        "transcripts": [asdict(row) for row in quality.transcripts],
        "lengths": [asdict(row) for row in quality.lengths],
        "codec": [asdict(row) for row in quality.codec],
        "streaming": asdict(quality.streaming) if quality.streaming else None,
        "speed": asdict(quality.speed) if quality.speed else None,
        "skipped": quality.skipped,
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
