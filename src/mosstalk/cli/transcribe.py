"""``mosstalk transcribe``: recordings in, lines of text out, figures aside."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import DrawsReplies

if TYPE_CHECKING:
    from mosstalk.audio.sound import Recording, Samples
    from mosstalk.cli.opening import ChosenModel, Drawing, SamplingRequest
    from mosstalk.cli.output import Record
    from mosstalk.offline.pipeline import Answer, Pipeline


@dataclass(frozen=True, eq=False, repr=False)
class Transcribe(DrawsReplies):
    """Write down what is said in recordings.

    mosstalk transcribe meeting.wav > meeting.txt

    mosstalk transcribe monday.flac tuesday.flac

    The text alone goes to stdout, a line for each piece as soon as it is there,
    behind the file's name where there are several files; figures go to stderr.
    What is longer than 30 s is cut at pauses. A file that was cut short is written
    down as far as it goes, with a warning on stderr.

    How much of it is right depends on the model: see its card.
    """

    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Sound files that libsndfile reads.")
    ]
    model: opt.Model = None
    codec: opt.Codec = None
    system: opt.TaskSystem = None
    temperature: opt.Temperature = None
    top_k: opt.TopK = None
    top_p: opt.TopP = None
    repetition_penalty: opt.RepetitionPenalty = None
    seed: opt.Seed = 0
    max_rows: opt.MaxRows = None
    script: opt.ReplyScript = None
    channel: opt.Channel = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    trace: opt.TraceFile = None
    json: opt.AsJson = False

    def run(self) -> None:
        """Write down what is said in every file, in order; its text alone goes to stdout.

        With --json one document does instead; it and the trace are also left when the user
        interrupts. Every file is read before the model is, so that a wrong one is told at once.
        """
        from mosstalk.audio.sound import read_audio
        from mosstalk.cli.opening import ChosenModel, ModelRequest
        from mosstalk.cli.output import recorded
        from mosstalk.constants import INPUT_RATE

        sampling = self._sampling()
        with recorded(self.trace, as_json=self.json, text_on_stderr=True) as record:
            recordings = [read_audio(path, INPUT_RATE, channel=self.channel) for path in self.files]
            chosen = ChosenModel.of(ModelRequest(self.model, self.codec, self.device, self.dtype))
            writing = self._prepare(chosen, sampling, record)
            chosen.announce("text")
            files = record.results["files"] = list[dict[str, Any]]()
            for path, recording in zip(self.files, recordings, strict=True):
                files.append(_about(path, recording))
                _write_down(writing, recording, record)
            if record.timings:
                _print_figures(writing, sum(file["seconds"] for file in files), record)

    def _prepare(
        self, chosen: "ChosenModel", sampling: "SamplingRequest", record: "Record"
    ) -> "_Writing":
        from mosstalk.cli.opening import Drawing
        from mosstalk.diagnostics.figures import model_facts

        pipeline = chosen.load()
        drawing = Drawing.of(sampling, pipeline, "transcribe", "text")
        record.about = model_facts(pipeline) | {"task": "transcribe"} | drawing.facts()
        several = len(self.files) > 1
        return _Writing(pipeline, self.system, drawing, several, self.json)


@dataclass(frozen=True, eq=False, repr=False)
class _Writing:
    """How every piece is written down, and where its line goes."""

    pipeline: "Pipeline"
    system: str | None
    drawing: "Drawing"
    with_names: bool
    as_json: bool

    def begin(self, samples: "Samples") -> "Answer":
        from mosstalk.offline.tasks import transcribe

        return transcribe(
            self.pipeline,
            samples,
            system=self.system,
            options=self.drawing.options,
            limits=self.drawing.limits,
            script=self.drawing.script,
        )


def _about(path: Path, recording: "Recording") -> dict[str, Any]:
    return {
        "file": str(path),
        "seconds": recording.seconds,
        "source_rate": recording.source_rate,
        "channels": recording.source_channels,
        "text": "",
        "pieces": [],
    }


def _write_down(writing: _Writing, recording: "Recording", record: "Record") -> None:
    import numpy as np

    from mosstalk.audio.sound import SILENCE_PEAK
    from mosstalk.offline.pieces import LONGEST_S, sound_pieces

    file = record.results["files"][-1]
    print(
        f"\n{file['file']}: {recording.seconds:.2f} s ({recording.source_rate} Hz, "
        f"{recording.source_channels} ch)"
    )
    pieces = sound_pieces(recording.samples, recording.rate)
    if len(pieces) > 1:
        print(f"  heard as {len(pieces)} pieces of at most {LONGEST_S:.0f} s, cut at pauses")
    start = 0.0
    for number, piece in enumerate(pieces, 1):
        end = start + len(piece) / recording.rate
        where = {"start_s": start, "end_s": end}
        if np.abs(piece).max() < SILENCE_PEAK:
            print(f"  {_span(where)}  silent, left out")
        else:
            place = f"{file['file']}: piece {number} of {len(pieces)}"
            _write_piece(writing, piece, place, where, record)
        start = end


def _write_piece(
    writing: _Writing, piece: "Samples", place: str, where: dict[str, float], record: "Record"
) -> None:
    from mosstalk.cli.output import ended
    from mosstalk.diagnostics.figures import answer_figures
    from mosstalk.progress import status_line

    file = record.results["files"][-1]
    with status_line(place) as status:
        answer = writing.begin(piece)
        record.timings.append(answer.timings)
        try:
            for _ in answer:  # a reply that speaks after all: its sound is not wanted
                status.update(f"{place}: the reply is spoken")
        finally:
            text = answer.text
            file["pieces"].append(where | {"text": text} | answer_figures(answer))
            file["text"] = f"{file['text']} {_line(text)}".strip()
    print(f"  {_span(where)}  {ended(answer)}{'' if _line(text) else ', no words'}")
    if not writing.as_json:
        name = f"{file['file']}: " if writing.with_names else ""
        print(f"{name}{_line(text)}", file=record.stdout, flush=True)


def _line(text: str) -> str:
    """A text on one line, without what would steer a terminal."""
    return " ".join("".join(sign if category(sign) != "Cc" else " " for sign in text).split())


def _span(where: dict[str, float]) -> str:
    return f"{where['start_s']:7.2f} to {where['end_s']:7.2f} s"


def _print_figures(writing: _Writing, heard_s: float, record: "Record") -> None:
    from mosstalk.cli.output import print_machine, print_speed, print_stages, scripted
    from mosstalk.runtime.timing import TurnTimings

    whole = TurnTimings.together(record.timings)
    print(f"\nwrote down {heard_s:.2f} s of sound{scripted(writing.drawing.script)}")
    print_stages(whole)
    print_speed(whole, heard_s, "of what was heard ")
    print_machine(writing.pipeline, record.about)
