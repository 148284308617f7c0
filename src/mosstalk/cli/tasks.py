"""``mosstalk speak`` and ``mosstalk transcribe``: text to one sound file, recordings to text."""

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mosstalk.cli import options as opt
from mosstalk.cli.command import STANDARD
from mosstalk.cli.options import argument, option
from mosstalk.cli.replies import DrawsReplies, SpeaksReplies
from mosstalk.errors import OptionError, TextError

if TYPE_CHECKING:
    from mosstalk.audio.sound import Recording, Samples
    from mosstalk.cli.reply_run import ReplyRun, Sound
    from mosstalk.models.voices import Voice

Entry: TypeAlias = dict[str, Any]
"""A file or a piece of one, in a document."""


@dataclass(frozen=True, eq=False, repr=False)
class Speak(SpeaksReplies):
    """Read text aloud into one sound file.

    mosstalk speak "Good morning." --out morning.wav

    mosstalk speak --file chapter.txt --out chapter.flac

    echo "The train is late." | mosstalk speak - --out - | aplay

    Long text is cut at sentence ends, else commas: each piece is one reply, one
    after the other in OUT. It grows in OUT.part, which is renamed at the end.

    The model says what it can read. For mosstalk-pocket numbers, units and
    abbreviations become words, emoji are left out with a note, and text that
    is not English is refused.

    Exit code 1: the model ended its replies without a sound. 2: wrong input.
    """

    text: str | None = argument("What to read aloud; - reads standard input.", default=None)
    file: Path | None = option(None, "Read this text file (UTF-8) aloud instead.")
    usual_out: ClassVar[Path] = Path("spoken.wav")

    def run(self) -> int:
        """Read a text aloud; return 1 where the model made no sound at all.

        The document, the trace and the part of the sound are also left when the user interrupts.
        """
        from mosstalk.cli.reply_run import Sound, reply_run
        from mosstalk.offline.defaults import read_defaults
        from mosstalk.offline.text_normalizer import readable
        from mosstalk.prepared.default_models import chosen_model

        (out,) = self.sounds()
        text = read_text(self.text, self.file)
        with reply_run(self) as run:
            rules = read_defaults(chosen_model(self.model, self.codec)[0]).text
            found = readable(text, rules)
            pipeline = run.load("speak", "speech", {"task": "speak", "voice": self.voice})
            voice = pipeline.codec.voice(self.voice)
            left_out = found.left_out
            run.results |= {"out": None, "audio_s": 0.0, "left_out": left_out, "pieces": []}
            if found.note:
                run.note(f"note: {found.note}")
            sound, pieces = Sound(run, out), found.pieces
            try:
                with sound:
                    for number, piece in enumerate(pieces, 1):
                        place = f"piece {number} of {len(pieces)}"
                        self._read(run, voice, piece, place, sound)
            finally:
                run.results["out"] = sound.name
            self._conclude(run)
        return 0 if run.results["out"] else 1

    def _read(
        self, run: "ReplyRun", voice: "Voice", piece: str, place: str, sound: "Sound"
    ) -> None:
        from mosstalk.diagnostics.figures import answer_figures
        from mosstalk.offline.pipeline import speak

        answer = speak(
            run.pipeline, piece, voice=voice, system=self.system, as_written=True, **run.drawn
        )
        try:
            run.play(answer, place, sound)
        finally:
            said = {"text": piece, "codes": answer.codes}
            run.results["pieces"].append(said | answer_figures(answer))
            run.results["audio_s"] += answer.audio_s
        shown = shorten(piece, 60, placeholder=" ...")
        ended = f"{answer.reply.finish_reason} after {answer.steps} steps"
        run.stat(f"  read     {shown!r}: {answer.audio_s:.2f} s, {ended}")

    def _conclude(self, run: "ReplyRun") -> None:
        """Show where the sound is, or that there is none, and the figures of all pieces."""
        from mosstalk.runtime.timing import TurnTimings

        audio_s, out = run.results["audio_s"], run.results["out"]
        if out:
            name = "standard output" if out == STANDARD else out
            run.note(f"{name}: {audio_s:.2f} s of sound{run.label}")
        else:
            run.note(
                "NOTHING was spoken: the model ended its replies without a sound, no file was "
                f"written; try another --seed{run.label}"
            )
        run.show_profile(TurnTimings.together(run.timings), audio_s)


def read_text(text: str | None, file: Path | None) -> str:
    """The text that was given as words, as ``-`` on standard input, or as a file.

    Raises:
        OptionError: none or several were given.
        TextError: the file cannot be read, or is no UTF-8.
    """
    if (text is None) is (file is None):
        raise OptionError("say what to read aloud: TEXT, - for standard input, or --file FILE")
    if text is not None and text != STANDARD:
        # What was no UTF-8 on a command line stands in its words escaped.
        if any("\ud800" <= sign <= "\udfff" for sign in text):
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

        with reply_run(self) as run:
            recordings = [read_sound(path, self.channel) for path in self.files]
            run.load("transcribe", "text", {"task": "transcribe"})
            files = run.results["files"] = list[Entry]()
            for path, recording in zip(self.files, recordings, strict=True):
                files.append({"file": str(path), **about(recording), "text": "", "pieces": []})
                self._write_down(run, recording, files[-1])
            if run.timings:
                from mosstalk.runtime.timing import TurnTimings

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
        from mosstalk.offline.pipeline import transcribe
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
