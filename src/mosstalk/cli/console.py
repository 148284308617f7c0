"""``mosstalk chat``: turns from the command line, answers to files, figures to the screen."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosstalk.audio.sound import Recording, output_format, read_audio
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
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import CODE_MS, INPUT_RATE
from mosstalk.conversation import Mode
from mosstalk.diagnostics.figures import answer_figures, model_facts
from mosstalk.errors import TextError
from mosstalk.offline.pipeline import Answer, Chat
from mosstalk.offline.replies import Step
from mosstalk.progress import status_line
from mosstalk.script import Script


@dataclass(frozen=True)
class Outputs:
    """Where answers and their figures go, and what is shown of them."""

    out: Path
    trace: Path | None
    as_json: bool
    show_rows: bool


@dataclass(frozen=True)
class ChatRequest:
    """Everything ``mosstalk chat`` was asked for; ``turns`` are (speech, file) or (text, text)."""

    turns: tuple[tuple[str, str], ...]
    reply: str
    to: Outputs
    voice: str
    system: str | None
    model: ModelRequest
    sampling: SamplingRequest
    channel: int | None


def run_chat(request: ChatRequest) -> None:
    """Answer every turn in order, printing figures and writing spoken answers.

    With ``as_json`` one document is all that goes to stdout. It and the trace are also
    written when the user interrupts.
    """
    output_format(request.to.out)
    with recorded(request.to.trace, as_json=request.to.as_json) as record:
        _converse(request, record)


def _converse(request: ChatRequest, record: Record) -> None:
    chosen = ChosenModel.of(request.model)
    chosen.announce(request.reply)
    recordings = _read_all(request, chosen.config)
    pipeline = chosen.load()
    drawing = Drawing.of(request.sampling, pipeline, "chat", request.reply)
    record.about = model_facts(pipeline) | {"reply": request.reply} | drawing.facts()
    turns = record.results["turns"] = list[dict[str, Any]]()
    speech = request.reply == "speech"
    chat = pipeline.chat(voice=request.voice, system=request.system, speech=speech)
    for index, turn in enumerate(request.turns):
        print(f"\nturn {index + 1}")
        turns.append({"input": _take_turn(chat, turn, recordings.get(index))})
        out = _numbered(request.to.out, index, len(request.turns))
        rows = _print_row if request.to.show_rows else None
        answer = chat.answer(
            speech=speech,
            options=drawing.options,
            limits=drawing.limits,
            script=drawing.script,
            on_step=rows,
        )
        _answer(answer, Sound(out), request, record)
        _print_answer(answer, record, drawing.script)


def _read_all(request: ChatRequest, config: LanguageModelConfig) -> dict[int, Recording]:
    """Read every input before the model is loaded, so that a wrong one is told at once."""
    if not request.turns:
        raise TextError("nothing to answer; say something with --speech FILE or --text TEXT")
    longest_s = config.max_position_embeddings * CODE_MS / 1000
    return {
        index: read_audio(Path(value), INPUT_RATE, channel=request.channel, longest_s=longest_s)
        for index, (kind, value) in enumerate(request.turns)
        if kind == "speech"
    }


def _numbered(out: Path, index: int, count: int) -> Path:
    return out if count == 1 else out.with_stem(f"{out.stem}-{index + 1}")


def _take_turn(chat: Chat, turn: tuple[str, str], recording: Recording | None) -> dict[str, Any]:
    """Put a turn before the model; return what it was."""
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


def _answer(answer: Answer, sound: Sound, request: ChatRequest, record: Record) -> None:
    record.timings.append(answer.timings)
    try:
        with sound_file(sound), status_line("reading the conversation") as status:
            for samples in answer:
                sound.write(samples)
                spoken = f"{answer.audio_s:.1f} s of sound"
                status.update(f"speaking: {spoken} after {answer.steps} steps")
    finally:
        record.results["turns"][-1] |= _said(answer, sound, request.to.show_rows)


def _said(answer: Answer, sound: Sound, rows: bool) -> dict[str, Any]:
    """An answer and its figures; ``rows`` adds (mode, text id, audio id) of every row."""
    out: dict[str, Any] = {
        "codes": answer.codes,
        "text": answer.text,
        "out": str(sound.written) if sound.written else None,
    }
    if rows:
        grid = zip(answer.reply.modes, answer.reply.rows, strict=True)
        out["rows"] = [[mode.name.lower(), *row] for mode, row in grid]
    return out | answer_figures(answer)


def _print_row(step: Step) -> None:
    mode = "audio" if step.mode is Mode.AUDIO else "text"
    print(f"  row {step.index:5} {mode:5} {step.row[0]:7} {step.row[1]:6}")


def _print_answer(answer: Answer, record: Record, script: Script | None) -> None:
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
