"""``mosstalk chat``: turns from the command line, answers to files, figures to the screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mosstalk.codec.audio import AudioWriter, Recording, Samples, output_format, read_audio
from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import Mode
from mosstalk.default_model import default_model
from mosstalk.device import pick_device, pick_dtype
from mosstalk.documents import as_text, human_text_on_stderr, require_target
from mosstalk.errors import ConfigError, TextError
from mosstalk.figures import answer_figures, model_facts, stage_figures
from mosstalk.model.generate import Limits, Step
from mosstalk.model.sampling import SamplingOptions
from mosstalk.pipeline import Answer, Chat, Pipeline
from mosstalk.progress import loading, status_line
from mosstalk.script import Script
from mosstalk.timing import TurnTimings, peak_memory_mib
from mosstalk.trace import write_trace
from mosstalk.units import CODE_MS, INPUT_RATE, OUTPUT_RATE

RANDOM_WEIGHTS = (
    "The weights of this model are random: what you will hear is noise, not speech. The real "
    "MOSS-Speech needs its checkpoint (17 GiB), its codec and a GPU that holds both; name their "
    "folders with --model and --codec."
)
DEFAULT_SCRIPTS = {"speech": "speech:75", "text": "text:40"}
"""Scripts for the default model while its weights are random: it would never end by itself."""


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
    model: Path | None
    codec: Path | None
    voice: str
    system: str | None
    options: SamplingOptions
    limits: Limits
    script: Script | None
    device: str
    dtype: str | None
    channel: int | None


@dataclass
class _Record:
    """What a chat leaves for a trace and a document; ``model`` is empty until it is loaded."""

    model: dict[str, Any] = field(default_factory=dict)
    script: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    timings: list[TurnTimings] = field(default_factory=list)
    interrupted: bool = False


def run_chat(request: ChatRequest) -> None:
    """Answer every turn in order, printing figures and writing spoken answers.

    With ``as_json`` one document is all that goes to stdout. It and the trace are also
    written when the user interrupts.
    """
    output_format(request.to.out)
    if request.to.trace:
        require_target(request.to.trace)
    record = _Record()
    try:
        with human_text_on_stderr(request.to.as_json):
            _converse(request, record)
    except KeyboardInterrupt:
        record.interrupted = True
        _print_document(request, record)
        raise
    else:
        _print_document(request, record)
    finally:
        _write_trace(request, record)


def _print_document(request: ChatRequest, record: _Record) -> None:
    if not request.to.as_json or not record.model:
        return
    chosen = {"reply": request.reply, "seed": request.options.seed, "script": record.script}
    ended = {"interrupted": record.interrupted, "turns": record.turns}
    print(as_text(record.model | chosen | ended), end="", flush=True)


def _write_trace(request: ChatRequest, record: _Record) -> None:
    if not request.to.trace or not record.model:
        return
    write_trace(request.to.trace, record.timings, record.model | {"script": record.script})
    with human_text_on_stderr(request.to.as_json):
        count = len(record.timings)
        print(f"\ntrace of {count} turn{'s'[: count != 1]} -> {request.to.trace}")


def _converse(request: ChatRequest, record: _Record) -> None:
    folders, script = _folders(request)
    record.script = str(script) if script else None
    config = LanguageModelConfig.from_folder(folders[0])
    if config.weights_kind == "synthetic":
        print(RANDOM_WEIGHTS)
    recordings = _read_all(request, config)
    device = pick_device(request.device)
    dtype = pick_dtype(request.dtype) if request.dtype else None
    if dtype is None and device.type == "cpu":
        dtype = pick_dtype("float32")
    with loading() as (_, tell):
        pipeline = Pipeline.load(*folders, device=device, dtype=dtype, progress=tell)
    record.model = model_facts(pipeline)
    speech = request.reply == "speech"
    chat = pipeline.chat(voice=request.voice, system=request.system, speech=speech)
    for index, turn in enumerate(request.turns):
        print(f"\nturn {index + 1}")
        heard = _take_turn(chat, turn, recordings.get(index))
        record.turns.append({"input": heard})
        out = _numbered(request.to.out, index, len(request.turns))
        _answer(chat, request, script, out, record)


def _folders(request: ChatRequest) -> tuple[tuple[Path, Path], Script | None]:
    if (request.model is None) is not (request.codec is None):
        raise ConfigError("--model and --codec belong together: give both folders, or neither")
    if request.model and request.codec:
        return (request.model, request.codec), request.script
    fallback = Script.parse(DEFAULT_SCRIPTS[request.reply])
    return default_model(), request.script or fallback


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


def _answer(
    chat: Chat, request: ChatRequest, script: Script | None, out: Path, record: _Record
) -> None:
    answer = chat.answer(
        speech=request.reply == "speech",
        options=request.options,
        limits=request.limits,
        script=script,
        on_step=_print_row if request.to.show_rows else None,
    )
    record.timings.append(answer.timings)
    sound = _Sound(out)
    try:
        with _sound_file(sound), status_line("reading the conversation") as status:
            for samples in answer:
                sound.write(samples)
                spoken = f"{answer.audio_s:.1f} s of sound"
                status.update(f"speaking: {spoken} after {answer.steps} steps")
    finally:
        record.turns[-1] |= _said(answer, sound, request.to.show_rows)
    _print_answer(answer, sound.written, script)
    _print_figures(answer, record.model["weights"])


def _said(answer: Answer, sound: "_Sound", rows: bool) -> dict[str, Any]:
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


def _print_answer(answer: Answer, written: Path | None, script: Script | None) -> None:
    if answer.text:
        print(f"  wrote    {answer.text!r}")
    codes = len(answer.codes)
    if written:
        print(f"  spoke    {answer.audio_s:.2f} s of sound = {codes} codes -> {written}")
    scripted = f"; scripted {script}: mode changes and length forced" if script else ""
    print(f"  ended    {answer.reply.finish_reason} after {answer.steps} steps{scripted}")


def _print_figures(answer: Answer, weights: str) -> None:
    timings = answer.timings
    print(f"  rows prefilled {timings.rows_prefilled}, steps {answer.steps}")
    for name, stage in stage_figures(timings).items():
        if stage["count"]:
            print(
                f"  {name:8} {stage['total_ms']:9.1f} ms  {stage['share']:5.1%}  "
                f"{stage['count']:4} x {stage['mean_ms']:8.2f} ms"
            )
    if timings.first_audio_ms is not None:
        print(f"  commit to first audio {timings.first_audio_ms:.1f} ms")
    factor = timings.real_time_factor(answer.audio_s)
    if factor is not None:
        print(f"  real-time factor {factor:.3f} (all stages {timings.total_ms:.0f} ms)")
    model = answer.chat.pipeline.model
    peaks = ", ".join(
        f"{size:.0f} MiB {where}" for where, size in peak_memory_mib(model.device).items()
    )
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"  peak memory {peaks}")
    print(f"  weights {weights}; model {dtype}, codec float32 on {model.device}; reference path")


class _Sound:
    """A sound file that begins to exist with its first samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: AudioWriter | None = None
        self.written: Path | None = None

    def write(self, samples: Samples) -> None:
        if self.writer is None:
            self.writer = AudioWriter(self.path, OUTPUT_RATE)
        self.writer.write(samples)


@contextmanager
def _sound_file(sound: _Sound) -> Iterator[None]:
    """Rename a sound file at the end, keep its part on Ctrl-C, else delete that."""
    try:
        yield
    except KeyboardInterrupt:
        if sound.writer:
            sound.written = sound.writer.abandon()
            print(f"\ninterrupted: what was spoken so far is in {sound.written}")
        raise
    except BaseException:
        if sound.writer:
            sound.writer.discard()
        raise
    if sound.writer:
        sound.writer.close()
        sound.written = sound.path
