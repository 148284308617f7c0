"""One run of a command that has a model reply: loading it, and what the run leaves behind.

Torch is imported where a model is loaded, so that what can be refused before is refused at once.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO
from unicodedata import category

from mosstalk.audio.sound import (
    AudioWriter,
    Recording,
    Samples,
    WavStream,
    output_format,
    read_audio,
)
from mosstalk.cli.command import STANDARD
from mosstalk.cli.replies import STDOUT, DrawsReplies
from mosstalk.config import LanguageModelConfig
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.conversation import FinishReason
from mosstalk.offline.defaults import Choices
from mosstalk.prepared.default_models import chosen_model
from mosstalk.progress import loading, status_line
from mosstalk.reply_options import Script, SoundRequest

if TYPE_CHECKING:
    from mosstalk.offline.pipeline import Answer, Pipeline
    from mosstalk.runtime.timing import TurnTimings

_REAL = "For MOSS-Speech itself, 17 GiB on a GPU, name its folders with --model and --codec."
NOTICES = {
    ("synthetic", "speech"): "The weights of this model are random: what you will hear is noise, "
    f"not speech. {_REAL}",
    ("synthetic", "text"): "The weights of this model are random: what it writes is noise, not "
    f"words. {_REAL}",
    ("pocket", "speech"): "The weights are mosstalk-pocket's, a small model that ships with "
    f"mosstalk: expect plain speech and mistakes. {_REAL}",
    ("pocket", "text"): "The weights are mosstalk-pocket's, a small model that ships with "
    f"mosstalk: expect plain words and mistakes. {_REAL}",
    ("pocket", "chat"): "The weights are mosstalk-pocket's, a small model that ships with "
    "mosstalk. Ask it for a capital, a sum, an opposite or a joke, in English; expect mistakes. "
    f"{_REAL}",
}
"""What is said before anything else, by the kind of weights and of task, else of reply."""
DEFAULT_SCRIPTS = {"speech": "speech:75", "text": "text:40"}
"""Scripts for random weights, by the kind of reply: they would never end one by themselves."""


def load_pipeline(
    model: Path | None, codec: Path | None, device_name: str, dtype_name: str | None,
    sound: SoundRequest,
) -> "Pipeline":  # fmt: skip
    """Load what ``--model`` and ``--codec`` stand for.

    Without ``dtype_name`` the language model is float32 on a CPU and as stored on a GPU.

    Raises:
        As ``chosen_model`` and ``Pipeline.load``.
    """
    folders = chosen_model(model, codec)
    LanguageModelConfig.from_folder(folders[0])  # here, since what follows imports torch
    from mosstalk.offline.pipeline import Pipeline
    from mosstalk.prepared.start import take_kernels
    from mosstalk.runtime.device import fit_threads, pick_device, pick_dtype

    device = pick_device(device_name)
    built = take_kernels(model, device)
    with loading() as (_, tell):
        pipeline = Pipeline.load(
            *folders, device=device, dtype=pick_dtype(dtype_name) if dtype_name else "auto",
            progress=tell, sound=sound, embeddings=built.embeddings if built else "device",
        )  # fmt: skip
    parts = pipeline.codec
    fit_threads(device, (pipeline.model, parts.tokenizer, parts.flow, parts.vocoder))
    return pipeline


def read_sound(path: Path, channel: int | None, longest_s: float = inf) -> Recording:
    """A recording at 16 kHz from a file, or from standard input for ``-``."""
    content = None
    if path == STDOUT:
        path, content = Path("standard input"), sys.stdin.buffer.read()
    return read_audio(path, INPUT_RATE, channel=channel, longest_s=longest_s, content=content)


@dataclass
class ReplyRun:
    """What a run draws with, and what it leaves for its document, its trace and people.

    ``about`` says what computed it and how, and is empty until the model is loaded. ``stdout`` is
    where sound goes that is asked for there. ``drawn``: how answers are drawn, as
    arguments; ``pipeline``: with what, once it is loaded.
    """

    asked: DrawsReplies
    choices: Choices
    script: Script | None
    stdout: TextIO
    about: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    timings: "list[TurnTimings]" = field(default_factory=list)
    drawn: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    pipeline: "Pipeline" = field(init=False)
    _notice: str = ""

    def load(self, task: str, reply: str, about: dict[str, Any]) -> "Pipeline":
        """Load the model, and decide how its replies are drawn.

        What was asked for counts, then what the checkpoint chose for this task. Random weights
        never end a reply: without a script they get one.
        """
        asked = self.asked
        self.pipeline = pipeline = load_pipeline(
            asked.model, asked.codec, asked.device, asked.dtype, asked.sound_request()
        )
        kind = pipeline.model.config.weights_kind
        self._notice = NOTICES.get((kind, task)) or NOTICES.get((kind, reply), "")
        choices = self.choices.over(pipeline.defaults.of(task))
        if self.script is None and kind == "synthetic":
            self.script = Script.parse(DEFAULT_SCRIPTS[reply])
        options = choices.options(asked.seed)
        self.drawn = {"options": options, "limits": choices.limits(), "script": self.script}
        values = {name: value for name, value in vars(options).items() if name != "seed"}
        script = str(self.script) if self.script else None
        drawing = {"seed": asked.seed, "sampling": values, "script": script}
        from mosstalk.diagnostics.figures import model_facts

        self.about = model_facts(pipeline) | about | drawing
        return pipeline

    def play(self, answer: "Answer", what: str, sound: "Sound | None" = None) -> None:
        """Draw an answer to its end, its sound to ``sound``; ``what`` names it to people."""
        self.timings.append(answer.timings)
        with status_line(what) as status:
            for samples in answer:
                self.note()
                if sound:
                    sound.write(samples)
                spoken = f"{answer.audio_s:.1f} s of sound"
                status.update(f"{what}: {spoken} after {answer.steps} steps")
        self.note()
        if answer.reply.finish_reason is FinishReason.LENGTH:
            self.note(f"note: {what} was cut off; --max-rows N gives it more")

    def note(self, line: str = "") -> None:
        """Tell people something on stderr; first of all what these weights are."""
        for each in filter(None, (self._notice, line)):
            print(each, file=sys.stderr, flush=True)
        self._notice = ""

    def stat(self, line: str) -> None:
        """Tell people who asked for figures."""
        if self.asked.stats:
            self.note(line)

    @property
    def label(self) -> str:
        """What to add to a line about a reply whose length was forced."""
        return f"; scripted {self.script}: mode changes and length forced" if self.script else ""

    def show_profile(self, timings: "TurnTimings", audio_s: float, of: str = "") -> None:
        """Show the time of every stage with its share, the speed, the memory, and what computed.

        ``audio_s``: seconds of sound that the real-time factor is of, and ``of`` names.
        """
        from mosstalk.diagnostics.figures import stage_figures
        from mosstalk.runtime.timing import peak_memory_mib

        stages = stage_figures(timings)
        self.stat(f"  rows prefilled {timings.rows_prefilled}, steps {stages['step']['count']}")
        for name, stage in stages.items():
            if stage["count"]:
                self.stat(
                    f"  {name:8} {stage['total_ms']:9.1f} ms  {stage['share']:5.1%}  "
                    f"{stage['count']:4} x {stage['mean_ms']:8.2f} ms"
                )
        if timings.first_audio_ms is not None:
            self.stat(f"  commit to first audio {timings.first_audio_ms:.1f} ms")
        factor = timings.real_time_factor(audio_s)
        if factor is not None:
            self.stat(f"  real-time factor {factor:.3f} {of}(all stages {timings.total_ms:.0f} ms)")
        model, about = self.pipeline.model, self.about
        peaks = [f"{size:.0f} MiB {where}" for where, size in peak_memory_mib(model.device).items()]
        drawn = ", ".join(f"{name} {value}" for name, value in about["sampling"].items())
        self.stat(f"  peak memory {', '.join(peaks)}")
        self.stat(f"  drawn with {drawn.replace('_', ' ')}, seed {about['seed']}")
        self.stat(
            f"  weights {about['weights']}; model {about['dtype']}, codec {about['codec_dtype']} "
            f"on {model.device}; {about['path']} path"
        )

    def deliver(self) -> None:
        """Write the document, if a model was loaded."""
        if self.about:
            self.asked.deliver(self.about | {"interrupted": self.interrupted} | self.results)


@contextmanager
def reply_run(asked: DrawsReplies) -> Iterator[ReplyRun]:
    """A run whose document is delivered and whose trace is written at the end.

    Both are also left when the user interrupts; of other errors the trace alone.

    Raises:
        OptionError, ScriptError: how replies shall be drawn means nothing.
        OutputError: a file cannot be written, or exists.
    """
    choices = Choices(
        asked.temperature, asked.top_k, asked.top_p, asked.repetition_penalty, asked.max_rows
    )
    script = Script.parse(asked.script) if asked.script is not None else None
    run = ReplyRun(asked, choices, script, sys.stdout)
    try:
        with asked.printing():
            yield run
    except KeyboardInterrupt:
        run.interrupted = True
        run.deliver()
        raise
    else:
        run.deliver()
    finally:
        if asked.trace and run.about:
            from mosstalk.diagnostics.figures import write_trace

            write_trace(asked.trace, run.timings, run.about)
            count = len(run.timings)
            run.note(f"trace of {count} turn{'s'[: count != 1]} -> {asked.trace}")


class Sound:
    """Where a reply's sound goes: stdout, or a file that begins to exist with its first samples.

    As a context it renames the file at the end, keeps its part on Ctrl-C, else deletes that.
    ``name`` is that of what there is then, None for nothing.
    """

    def __init__(self, run: ReplyRun, path: Path) -> None:
        self.run, self.path = run, path
        self.writer: AudioWriter | WavStream | None = None
        self.name: str | None = None

    def write(self, samples: Samples) -> None:
        """Append samples (n,) at 24 kHz.

        Raises:
            OutputError: the file exists, and shall not be replaced; or the disk is full.
        """
        if self.writer is None:
            if self.path == STDOUT:
                self.writer = WavStream(self.run.stdout.buffer, OUTPUT_RATE)
            else:
                output_format(self.path, replace=self.run.asked.force)
                self.writer = AudioWriter(self.path, OUTPUT_RATE)
        self.writer.write(samples)

    def __enter__(self) -> "Sound":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if isinstance(self.writer, AudioWriter):
            if kind is None:
                self.writer.close()
                self.name = str(self.path)
            elif kind is KeyboardInterrupt:
                self.name = str(self.writer.abandon())
                self.run.note(f"interrupted: what was spoken so far is in {self.name}")
            else:
                self.writer.discard()
        elif self.writer:
            self.name = STANDARD


def plain_line(text: str) -> str:
    """A text on one line, without what would steer a terminal."""
    return " ".join("".join(sign if category(sign) != "Cc" else " " for sign in text).split())
