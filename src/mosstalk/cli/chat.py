"""``mosstalk chat``: turns from the command line, answers to files, text to stdout."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.options import option
from mosstalk.cli.replies import STDOUT, SpeaksReplies
from mosstalk.errors import TextError

if TYPE_CHECKING:
    from mosstalk.audio.sound import Recording
    from mosstalk.cli.reply_run import ReplyRun
    from mosstalk.offline.pipeline import Answer, Chat
    from mosstalk.offline.replies import Step


@dataclass(frozen=True, eq=False, repr=False)
class ChatCommand(SpeaksReplies):
    """Answer spoken or typed turns, in the order given, with speech or text.

    mosstalk chat --speech question.wav --out answer.wav

    mosstalk chat --text "Good morning" --speech question.wav --reply text

    A written answer is printed. A spoken one grows in OUT.part, which is
    renamed at the end.
    """

    context: typer.Context
    speech: list[Path] | None = option(
        None,
        "A spoken turn: any sound file that libsndfile reads; - is standard input. May be "
        "repeated.",
    )
    text: list[str] | None = option(None, "A typed turn. May be repeated and mixed with speech.")
    reply: str = option("speech", "Whether answers are spoken or written.", metavar="speech|text")
    show_rows: bool = option(False, "Print step, mode, text token and audio token of every row.")
    channel: opt.Channel = None
    usual_out: ClassVar[Path] = Path("answer.wav")

    def run(self) -> None:
        """Answer every turn in order.

        The document, the trace and the part of the sound are also left when the user interrupts.
        """
        from mosstalk.cli.reply_run import reply_run

        # A written answer leaves no sound, unless the model speaks after all.
        outs = self.sounds(len(self.turns()) or 1, replace=self.reply == "text")
        with reply_run(self) as run:
            recordings = self._read_all()
            pipeline = run.load("chat", self.reply, {"reply": self.reply})
            run.results["turns"] = list[dict[str, Any]]()
            speech = self.reply == "speech"
            chat = pipeline.chat(voice=self.voice, system=self.system, speech=speech)
            on_step = _print_row if self.show_rows else None
            for (kind, value), out in zip(self.turns(), outs, strict=True):
                run.stat(f"\nturn {len(run.results['turns']) + 1}")
                turn = _take_turn(run, chat, kind, value, recordings)
                run.results["turns"].append({"input": turn})
                answer = chat.answer(speech=speech, on_step=on_step, **run.drawn)
                self._answer(run, answer, out)

    def _read_all(self) -> "list[Recording]":
        """Read every recording before the model is loaded, so that a wrong one is told at once."""
        from mosstalk.cli.reply_run import read_sound
        from mosstalk.config import LanguageModelConfig
        from mosstalk.constants import CODE_MS
        from mosstalk.prepared.default_models import chosen_model

        if not self.turns():
            raise TextError("nothing to answer; say something with --speech FILE or --text TEXT")
        config = LanguageModelConfig.from_folder(chosen_model(self.model, self.codec)[0])
        longest_s = config.max_position_embeddings * CODE_MS / 1000
        return [read_sound(path, self.channel, longest_s) for path in self.speech or []]

    def turns(self) -> list[tuple[str, str]]:
        """Pairs (speech, file) and (text, words), in the order their options were given."""
        queues = {"speech": iter(map(str, self.speech or [])), "text": iter(self.text or [])}
        order = self.context.meta["order"]
        return [(kind, next(queues[kind])) for kind in order if kind in queues]

    def _answer(self, run: "ReplyRun", answer: "Answer", out: Path) -> None:
        """Draw an answer; leave its sound, its text and what is said of it."""
        from mosstalk.cli.reply_run import Sound, plain_line
        from mosstalk.diagnostics.figures import answer_figures

        turns = run.results["turns"]
        sound = Sound(run, out)
        try:
            with sound:
                what = "the answer" if len(self.turns()) == 1 else f"answer {len(turns)}"
                run.play(answer, what, sound)
        finally:
            turns[-1] |= {"codes": answer.codes, "text": answer.text, "out": sound.name}
            if self.show_rows:
                grid = zip(answer.reply.modes, answer.reply.rows, strict=True)
                turns[-1]["rows"] = [[mode.name.lower(), *row] for mode, row in grid]
            turns[-1] |= answer_figures(answer)
        if answer.text:
            print(plain_line(answer.text), flush=True)
        if sound.name:
            name = "standard output" if out == STDOUT else sound.name
            run.note(f"{name}: {answer.audio_s:.2f} s of sound{run.label}")
        ended = f"{answer.reply.finish_reason} after {answer.steps} steps"
        run.stat(f"  ended    {ended}{run.label}")
        run.show_profile(answer.timings, answer.audio_s)


def _take_turn(
    run: "ReplyRun", chat: "Chat", kind: str, value: str, recordings: "list[Recording]"
) -> dict[str, Any]:
    """Put a turn before the model, a spoken one the first of ``recordings``; what it was."""
    from mosstalk.cli.tasks import about
    from mosstalk.progress import status_line

    if kind == "text":
        chat.read(value)
        run.stat(f"  read     {value!r}")
        return {"kind": "text", "text": value}
    recording = recordings.pop(0)
    with status_line("listening"):
        codes = chat.hear(recording.samples)
    run.stat(
        f"  heard    {value}: {recording.seconds:.2f} s ({recording.source_rate} Hz, "
        f"{recording.source_channels} ch) = {len(codes)} codes"
    )
    return {"kind": "speech", "file": value, **about(recording), "codes": codes}


def _print_row(step: "Step") -> None:
    from mosstalk.conversation import Mode

    mode = "audio" if step.mode is Mode.AUDIO else "text"
    print(f"  row {step.index:5} {mode:5} {step.row[0]:7} {step.row[1]:6}")
