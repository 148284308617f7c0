"""What commands that make replies leave behind: sound files, figures, documents and traces."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mosstalk.audio.sound import AudioWriter, Samples
from mosstalk.constants import OUTPUT_RATE
from mosstalk.conversation import FinishReason
from mosstalk.diagnostics.figures import stage_figures
from mosstalk.diagnostics.trace import write_trace
from mosstalk.files import as_text, human_text_on_stderr, require_target
from mosstalk.offline.pipeline import Answer, Pipeline
from mosstalk.runtime.timing import TurnTimings, peak_memory_mib
from mosstalk.script import Script


@dataclass
class Record:
    """What a run leaves for its document and its trace.

    ``about`` says what computed it and how, and is empty until the model is loaded. ``stdout``
    is where results go when text for people goes elsewhere.
    """

    stdout: TextIO
    about: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    timings: list[TurnTimings] = field(default_factory=list)
    interrupted: bool = False


@contextmanager
def recorded(
    trace: Path | None, *, as_json: bool, text_on_stderr: bool | None = None
) -> Iterator[Record]:
    """Yield a record; at the end print its document and write its trace.

    Both are also left when the user interrupts; of other errors the trace alone. What is
    printed in the block goes to stderr with ``text_on_stderr``, by default with ``as_json``:
    stdout is kept for one document.
    """
    if trace:
        require_target(trace)
    aside = as_json if text_on_stderr is None else text_on_stderr
    record = Record(sys.stdout)
    try:
        with human_text_on_stderr(aside):
            yield record
    except KeyboardInterrupt:
        record.interrupted = True
        _print_document(record, as_json)
        raise
    else:
        _print_document(record, as_json)
    finally:
        if trace and record.about:
            write_trace(trace, record.timings, record.about)
            with human_text_on_stderr(aside):
                count = len(record.timings)
                print(f"\ntrace of {count} turn{'s'[: count != 1]} -> {trace}")


def _print_document(record: Record, as_json: bool) -> None:
    if as_json and record.about:
        ended = {"interrupted": record.interrupted}
        print(as_text(record.about | ended | record.results), end="", flush=True)


class Sound:
    """A sound file that begins to exist with its first samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: AudioWriter | None = None
        self.written: Path | None = None

    def write(self, samples: Samples) -> None:
        """Append samples (n,) at 24 kHz."""
        if self.writer is None:
            self.writer = AudioWriter(self.path, OUTPUT_RATE)
        self.writer.write(samples)


@contextmanager
def sound_file(sound: Sound) -> Iterator[None]:
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


def ended(answer: Answer) -> str:
    """How a reply ended, and what to do where that was too soon."""
    line = f"{answer.reply.finish_reason} after {answer.steps} steps"
    if answer.reply.finish_reason is FinishReason.LENGTH:
        return f"{line} (cut off; --max-rows N gives it more)"
    return line


def scripted(script: Script | None) -> str:
    """What to add to a line about a reply whose length was forced."""
    return f"; scripted {script}: mode changes and length forced" if script else ""


def print_stages(timings: TurnTimings) -> None:
    """Print rows, steps, and the time of every stage with its share."""
    stages = stage_figures(timings)
    print(f"  rows prefilled {timings.rows_prefilled}, steps {stages['step']['count']}")
    for name, stage in stages.items():
        if stage["count"]:
            print(
                f"  {name:8} {stage['total_ms']:9.1f} ms  {stage['share']:5.1%}  "
                f"{stage['count']:4} x {stage['mean_ms']:8.2f} ms"
            )
    if timings.first_audio_ms is not None:
        print(f"  commit to first audio {timings.first_audio_ms:.1f} ms")


def print_speed(timings: TurnTimings, audio_s: float, of: str = "") -> None:
    """Print the real-time factor for ``audio_s`` seconds of sound, if there were any."""
    factor = timings.real_time_factor(audio_s)
    if factor is not None:
        print(f"  real-time factor {factor:.3f} {of}(all stages {timings.total_ms:.0f} ms)")


def print_machine(pipeline: Pipeline, about: dict[str, Any]) -> None:
    """Print the peak memory, how ids were drawn, and what computed all this."""
    model = pipeline.model
    peaks = ", ".join(
        f"{size:.0f} MiB {where}" for where, size in peak_memory_mib(model.device).items()
    )
    drawn = ", ".join(f"{name} {value}" for name, value in about["sampling"].items())
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"  peak memory {peaks}")
    print(f"  drawn with {drawn.replace('_', ' ')}, seed {about['seed']}")
    print(
        f"  weights {about['weights']}; model {dtype}, codec float32 on {model.device}; "
        f"{about['path']} path"
    )
