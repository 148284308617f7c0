"""``mosstalk speak``: text in, one sound file out, piece by piece."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.audio.sound import output_format
from mosstalk.cli.opening import ChosenModel, Drawing, ModelRequest, SamplingRequest
from mosstalk.cli.output import (
    Record,
    Sound,
    ended,
    print_machine,
    print_speed,
    print_stages,
    recorded,
    scripted,
    sound_file,
)
from mosstalk.constants import CODE_MS
from mosstalk.diagnostics.figures import answer_figures, model_facts
from mosstalk.errors import OptionError, TextError
from mosstalk.models.voices import Voice
from mosstalk.offline.defaults import read_defaults
from mosstalk.offline.pipeline import Answer, Pipeline
from mosstalk.offline.tasks import speak
from mosstalk.offline.text_normalizer import ReadableText, readable
from mosstalk.progress import status_line
from mosstalk.runtime.timing import TurnTimings

STDIN = "-"
_SHOWN = 60
"""Characters of a piece that are shown beside its figures."""


@dataclass(frozen=True)
class SpeakRequest:
    """Everything ``mosstalk speak`` was asked for."""

    text: str | None
    file: Path | None
    out: Path
    voice: str
    system: str | None
    model: ModelRequest
    sampling: SamplingRequest
    trace: Path | None
    as_json: bool


@dataclass(frozen=True)
class _Reading:
    """How every piece is read aloud."""

    pipeline: Pipeline
    voice: Voice
    system: str | None
    drawing: Drawing

    def begin(self, piece: str) -> Answer:
        return speak(
            self.pipeline,
            piece,
            voice=self.voice,
            system=self.system,
            options=self.drawing.options,
            limits=self.drawing.limits,
            script=self.drawing.script,
            as_written=True,
        )


def run_speak(request: SpeakRequest) -> int:
    """Read a text aloud, printing figures; return 1 where the model made no sound at all.

    With ``as_json`` one document is all that goes to stdout. It, the trace and the part of the
    sound are also left when the user interrupts.
    """
    output_format(request.out)
    text = read_text(request.text, request.file)
    with recorded(request.trace, as_json=request.as_json) as record:
        chosen = ChosenModel.of(request.model)
        found = readable(text, read_defaults(chosen.folders[0]).text)
        chosen.announce("speech")
        reading = _prepare(request, chosen, record)
        record.results |= {"out": None, "audio_s": 0.0, "left_out": found.left_out, "pieces": []}
        _read_aloud(reading, found, request.out, record)
    return 0 if record.results["out"] else 1


def read_text(text: str | None, file: Path | None) -> str:
    """The text that was given as words, as ``-`` on standard input, or as a file.

    Raises:
        OptionError: none or several were given.
        TextError: the file cannot be read, or is no UTF-8.
    """
    if (text is None) is (file is None):
        raise OptionError("say what to read aloud: TEXT, - for standard input, or --file FILE")
    if text is not None and text != STDIN:
        if not _is_unicode(text):
            raise TextError("this text is not valid unicode; retype it")
        return text
    where = str(file) if file else "standard input"
    try:
        content = file.read_bytes() if file else sys.stdin.buffer.read()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise TextError(f"{where}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{where}: is no UTF-8 text ({error}); save it as UTF-8") from None


def _is_unicode(text: str) -> bool:
    """Whether the words of a command line were UTF-8: what was not stands in them escaped."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _prepare(request: SpeakRequest, chosen: ChosenModel, record: Record) -> _Reading:
    pipeline = chosen.load()
    drawing = Drawing.of(request.sampling, pipeline, "speak", "speech")
    voice = pipeline.codec.voice(request.voice)
    record.about = model_facts(pipeline) | {"task": "speak", "voice": request.voice}
    record.about |= drawing.facts()
    return _Reading(pipeline, voice, request.system, drawing)


def _read_aloud(reading: _Reading, found: ReadableText, out: Path, record: Record) -> None:
    pieces = found.pieces
    if found.note:
        print(f"  note     {found.note}")
    if len(pieces) > 1:
        print(f"  the text is read as {len(pieces)} pieces, each a reply of its own")
    sound = Sound(out)
    try:
        with sound_file(sound):
            for number, piece in enumerate(pieces, 1):
                _read_piece(reading, piece, f"{number} of {len(pieces)}", sound, record)
    finally:
        record.results["out"] = str(sound.written) if sound.written else None
    _print_figures(reading, sound, record)


def _read_piece(reading: _Reading, piece: str, place: str, sound: Sound, record: Record) -> None:
    answer = reading.begin(piece)
    record.timings.append(answer.timings)
    before = record.results["audio_s"]
    try:
        with status_line(f"piece {place}") as status:
            for samples in answer:
                sound.write(samples)
                status.update(f"piece {place}: {before + answer.audio_s:.1f} s of sound in all")
    finally:
        said = {"text": piece, "codes": answer.codes}
        record.results["pieces"].append(said | answer_figures(answer))
        record.results["audio_s"] = before + answer.audio_s
    print(f"  read     {_shown(piece)!r}: {answer.audio_s:.2f} s, {ended(answer)}")


def _shown(piece: str) -> str:
    return piece if len(piece) <= _SHOWN else f"{piece[: _SHOWN - 3]}..."


def _print_figures(reading: _Reading, sound: Sound, record: Record) -> None:
    results: dict[str, Any] = record.results
    if sound.written:
        codes = round(1000 * results["audio_s"] / CODE_MS)
        what = f"{results['audio_s']:.2f} s of sound = {codes} codes"
        print(f"  spoke    {what} -> {sound.written}{scripted(reading.drawing.script)}")
    else:
        print(
            "  spoke    NOTHING: the model ended its replies without a sound, no file was "
            f"written; try another --seed{scripted(reading.drawing.script)}"
        )
    whole = TurnTimings.together(record.timings)
    print_stages(whole)
    print_speed(whole, results["audio_s"])
    print_machine(reading.pipeline, record.about)
