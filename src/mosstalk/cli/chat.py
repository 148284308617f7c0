"""``mosstalk chat``: turns from the command line, answers to files, figures to the screen."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from mosstalk.cli import options as opt
from mosstalk.cli.common import SpeaksReplies, one_of

if TYPE_CHECKING:
    from mosstalk.audio.sound import Recording
    from mosstalk.cli.opening import SamplingRequest
    from mosstalk.cli.output import Record, Sound
    from mosstalk.config import LanguageModelConfig
    from mosstalk.offline.pipeline import Answer, Chat
    from mosstalk.offline.replies import Step
    from mosstalk.script import Script


class OrderedTurns(TyperCommand):
    """A command that remembers in which order --speech and --text were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; ``ctx.meta['turns']`` becomes the names of the turns in order."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta["turns"] = [p.name for p in order if p.name in ("speech", "text")]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, eq=False, repr=False)
class ChatCommand(SpeaksReplies):
    """Answer spoken or typed turns, in the order given, with speech or text.

    mosstalk chat --speech question.wav --out answer.wav

    mosstalk chat --text "Good morning" --speech question.wav --reply text

    The answer grows hop by hop in OUT.part, which is renamed at the end.
    Printed are the input's length, rows, steps, the time of every stage with
    its share, the time from the end of the turn to the first sound, the
    real-time factor and the peak memory; with --json one document has them,
    alone on stdout, and the text goes to stderr.
    """

    context: typer.Context
    speech: opt.Speech = None
    text: opt.Text = None
    reply: opt.ReplyKind = "speech"
    out: opt.Out = Path("answer.wav")
    model: opt.Model = None
    codec: opt.Codec = None
    voice: opt.VoiceName = "default"
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None
    system: opt.System = None
    temperature: opt.Temperature = None
    top_k: opt.TopK = None
    top_p: opt.TopP = None
    repetition_penalty: opt.RepetitionPenalty = None
    seed: opt.Seed = 0
    max_rows: opt.MaxRows = None
    script: opt.ReplyScript = None
    show_rows: opt.ShowRows = False
    channel: opt.Channel = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    trace: opt.TraceFile = None
    json: opt.AsJson = False

    def run(self) -> None:
        """Answer every turn in order, printing figures and writing spoken answers.

        With --json one document is all that goes to stdout. It and the trace are also written
        when the user interrupts.
        """
        from mosstalk.audio.sound import output_format
        from mosstalk.cli.output import recorded

        one_of("--reply", self.reply, "speech", "text")
        sampling = self._sampling()
        output_format(self.out)
        with recorded(self.trace, as_json=self.json) as record:
            self._converse(sampling, record)

    def _converse(self, sampling: "SamplingRequest", record: "Record") -> None:
        from mosstalk.cli.opening import ChosenModel, Drawing
        from mosstalk.cli.output import Sound
        from mosstalk.diagnostics.figures import model_facts

        chosen = ChosenModel.of(self._model())
        chosen.announce(self.reply)
        recordings = self._read_all(chosen.config)
        pipeline = chosen.load()
        drawing = Drawing.of(sampling, pipeline, "chat", self.reply)
        record.about = model_facts(pipeline) | {"reply": self.reply} | drawing.facts()
        turns = record.results["turns"] = list[dict[str, Any]]()
        speech = self.reply == "speech"
        chat = pipeline.chat(voice=self.voice, system=self.system, speech=speech)
        for index, turn in enumerate(self.turns()):
            print(f"\nturn {index + 1}")
            turns.append({"input": _take_turn(chat, turn, recordings.get(index))})
            out = _numbered(self.out, index, len(self.turns()))
            rows = _print_row if self.show_rows else None
            answer = chat.answer(
                speech=speech,
                options=drawing.options,
                limits=drawing.limits,
                script=drawing.script,
                on_step=rows,
            )
            _answer(answer, Sound(out), self.show_rows, record)
            _print_answer(answer, record, drawing.script)

    def _read_all(self, config: "LanguageModelConfig") -> "dict[int, Recording]":
        """Read every input before the model is loaded, so that a wrong one is told at once."""
        from mosstalk.audio.sound import read_audio
        from mosstalk.constants import CODE_MS, INPUT_RATE
        from mosstalk.errors import TextError

        if not self.turns():
            raise TextError("nothing to answer; say something with --speech FILE or --text TEXT")
        longest_s = config.max_position_embeddings * CODE_MS / 1000
        return {
            index: read_audio(Path(value), INPUT_RATE, channel=self.channel, longest_s=longest_s)
            for index, (kind, value) in enumerate(self.turns())
            if kind == "speech"
        }

    def turns(self) -> list[tuple[str, str]]:
        """Pairs (speech, file) and (text, words), in the order their options were given."""
        queues = {"speech": iter(map(str, self.speech or [])), "text": iter(self.text or [])}
        return [(kind, next(queues[kind])) for kind in self.context.meta["turns"]]


def _numbered(out: Path, index: int, count: int) -> Path:
    return out if count == 1 else out.with_stem(f"{out.stem}-{index + 1}")


def _take_turn(
    chat: "Chat", turn: tuple[str, str], recording: "Recording | None"
) -> dict[str, Any]:
    """Put a turn before the model; return what it was."""
    from mosstalk.progress import status_line

    if recording is None:
        chat.read(turn[1])
        print(f"  read     {turn[1]!r}")
        return {"kind": "text", "text": turn[1]}
    with status_line("listening"):
        codes = chat.hear(recording.samples)
    print(
        f"  heard    {turn[1]}: {recording.seconds:.2f} s ({recording.source_rate} Hz, "
        f"{recording.source_channels} ch) = {len(codes)} codes"
    )
    return {
        "kind": "speech",
        "file": turn[1],
        "seconds": recording.seconds,
        "source_rate": recording.source_rate,
        "channels": recording.source_channels,
        "codes": codes,
    }


def _answer(answer: "Answer", sound: "Sound", show_rows: bool, record: "Record") -> None:
    from mosstalk.cli.output import sound_file
    from mosstalk.progress import status_line

    record.timings.append(answer.timings)
    try:
        with sound_file(sound), status_line("reading the conversation") as status:
            for samples in answer:
                sound.write(samples)
                spoken = f"{answer.audio_s:.1f} s of sound"
                status.update(f"speaking: {spoken} after {answer.steps} steps")
    finally:
        record.results["turns"][-1] |= _said(answer, sound, show_rows)


def _said(answer: "Answer", sound: "Sound", rows: bool) -> dict[str, Any]:
    """An answer and its figures; ``rows`` adds (mode, text id, audio id) of every row."""
    from mosstalk.diagnostics.figures import answer_figures

    out: dict[str, Any] = {
        "codes": answer.codes,
        "text": answer.text,
        "out": str(sound.written) if sound.written else None,
    }
    if rows:
        grid = zip(answer.reply.modes, answer.reply.rows, strict=True)
        out["rows"] = [[mode.name.lower(), *row] for mode, row in grid]
    return out | answer_figures(answer)


def _print_row(step: "Step") -> None:
    from mosstalk.conversation import Mode

    mode = "audio" if step.mode is Mode.AUDIO else "text"
    print(f"  row {step.index:5} {mode:5} {step.row[0]:7} {step.row[1]:6}")


def _print_answer(answer: "Answer", record: "Record", script: "Script | None") -> None:
    from mosstalk.cli.output import ended, print_machine, print_speed, print_stages, scripted

    if answer.text:
        print(f"  wrote    {answer.text!r}")
    written = record.results["turns"][-1]["out"]
    if written:
        spoken = f"{answer.audio_s:.2f} s of sound = {len(answer.codes)} codes"
        print(f"  spoke    {spoken} -> {written}")
    print(f"  ended    {ended(answer)}{scripted(script)}")
    print_stages(answer.timings)
    print_speed(answer.timings, answer.audio_s)
    print_machine(answer.chat.pipeline, record.about)
