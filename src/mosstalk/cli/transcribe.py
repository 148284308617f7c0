"""``mosstalk transcribe``: recordings in, lines of text out, figures aside."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mosstalk.cli import options as opt
from mosstalk.cli.options import argument
from mosstalk.cli.replies import DrawsReplies

if TYPE_CHECKING:
    from mosstalk.audio.sound import Recording, Samples
    from mosstalk.cli.reply_run import ReplyRun

Entry: TypeAlias = dict[str, Any]
"""A file or a piece of one, in a document."""


@dataclass(frozen=True, eq=False, repr=False)
class Transcribe(DrawsReplies):
    """Write down what is said in recordings.

    mosstalk transcribe meeting.wav > meeting.txt

    mosstalk transcribe monday.flac tuesday.flac

    arecord -d 5 -f cd | mosstalk transcribe -

    The text alone goes to stdout, a line for each piece as soon as it is there,
    behind the file's name where there are several files. What is longer than
    30 s is cut at pauses. A file that was cut short is written down as far as
    it goes, with a warning on stderr.

    How much of it is right depends on the model: see its card.
    """

    files: list[Path] = argument(
        "Sound files that libsndfile reads; - is standard input.", metavar="FILE..."
    )
    channel: opt.Channel = None

    def run(self) -> None:
        """Write down what is said in every file, in order; its text alone goes to stdout.

        Every file is read before the model is, so that a wrong one is told at once.
        """
        from mosstalk.cli.reply_run import read_sound, reply_run
        from mosstalk.runtime.timing import TurnTimings

        with reply_run(self) as run:
            recordings = [read_sound(path, self.channel) for path in self.files]
            run.load("transcribe", "text", {"task": "transcribe"})
            files = run.results["files"] = list[Entry]()
            for path, recording in zip(self.files, recordings, strict=True):
                files.append({"file": str(path), **about(recording), "text": "", "pieces": []})
                self._write_down(run, recording, files[-1])
            if run.timings:
                heard_s = sum(file["seconds"] for file in files)
                run.stat(f"\nwrote down {heard_s:.2f} s of sound{run.label}")
                whole = TurnTimings.together(run.timings)
                run.show_profile(whole, heard_s, "of what was heard ")

    def _write_down(self, run: "ReplyRun", recording: "Recording", file: Entry) -> None:
        import numpy as np

        from mosstalk.audio.sound import SILENCE_PEAK
        from mosstalk.offline.pieces import LONGEST_S, sound_pieces

        run.stat(
            f"\n{file['file']}: {recording.seconds:.2f} s ({recording.source_rate} Hz, "
            f"{recording.source_channels} ch)"
        )
        pieces = sound_pieces(recording.samples, recording.rate)
        if len(pieces) > 1:
            run.stat(f"  heard as {len(pieces)} pieces of at most {LONGEST_S:.0f} s, cut at pauses")
        start = 0.0
        for number, piece in enumerate(pieces, 1):
            end = start + len(piece) / recording.rate
            span = f"{start:7.2f} to {end:7.2f} s"
            if np.abs(piece).max() < SILENCE_PEAK:
                run.stat(f"  {span}  silent, left out")
            else:
                part = {"start_s": start, "end_s": end}
                place = f"{file['file']}: piece {number} of {len(pieces)}"
                how = self._write_piece(run, piece, place, file, part)
                run.stat(f"  {span}  {how}")
            start = end

    def _write_piece(
        self, run: "ReplyRun", piece: "Samples", place: str, file: Entry, part: Entry
    ) -> str:
        """Print the text of a piece, and add ``part`` of the document; how its reply ended."""
        from mosstalk.cli.reply_run import plain_line
        from mosstalk.diagnostics.figures import answer_figures
        from mosstalk.offline.tasks import transcribe
        from mosstalk.progress import status_line

        with status_line(place):
            answer = transcribe(run.pipeline, piece, system=self.system, **run.drawn)
        try:
            run.play(answer, place)  # the sound of a reply that speaks after all is not wanted
        finally:
            line = plain_line(answer.text)
            file["pieces"].append(part | {"text": answer.text} | answer_figures(answer))
            file["text"] = f"{file['text']} {line}".strip()
        if not self.takes_stdout():
            name = f"{file['file']}: " if len(self.files) > 1 else ""
            print(f"{name}{line}", flush=True)
        ended = f"{answer.reply.finish_reason} after {answer.steps} steps"
        return ended if line else f"{ended}, no words"


def about(recording: "Recording") -> Entry:
    """What a recording was, for documents."""
    return {
        "seconds": recording.seconds,
        "source_rate": recording.source_rate,
        "channels": recording.source_channels,
    }
