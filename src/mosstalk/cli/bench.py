"""``mosstalk bench``: every number that the project publishes."""

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.bench_codec import BenchCodec
from mosstalk.cli.bench_serve import BenchServe
from mosstalk.cli.command import (
    STANDARD,
    WritesDocument,
    WritesPage,
    add_command,
    add_moved,
    from_evals,
    measured_document,
    print_found,
)
from mosstalk.cli.options import argument, option
from mosstalk.errors import OptionError
from mosstalk.files import require_target, write_whole

if TYPE_CHECKING:
    from mosstalk.bench.documents import Document
    from mosstalk.plan.limits import Load


@dataclass(frozen=True, eq=False, repr=False)
class BenchStep(WritesPage):
    """Measure the engine's steps: one row of every session, drawn and read back.

    mosstalk bench step --at 1x512,8x512

    mosstalk bench step --random-weights full --at 1x512,64x1000 --baseline graph

    mosstalk bench step --prefill --rows 512,6+1000

    Steps follow one another as they do when the engine runs, all included:
    planning, network, draws. Beside each the time that its bytes or its
    operations take at rates measured in the same run. The rows must be those
    of an untimed run: else no time is printed and the exit code is 1.

    --prefill measures how long prompts take: from asking for a reply to its
    first row. Each prompt is new to the engine, but for the rows that were
    kept.
    """

    model: Path | None = option(
        None,
        "Folder of the language model, or pocket or synthetic. Default: the default model's.",
        autocompletion=opt.offered_models,
    )
    random_weights: opt.RandomWeights = None
    at: str = option(
        "1x512,8x512", "So many sessions, each with so many rows.", metavar="NxROWS,..."
    )
    mode: str = option("audio", "Whether replies are speech or text.", metavar="audio|text")
    steps: int = option(50, "Time N steps.", metavar="N", min=2)
    prefill: bool = option(False, "Measure prompts, --rows and --runs, in place of steps.")
    rows: str = option(
        "512,6+1000",
        "With --prefill: new rows, and after how many that have been read before.",
        metavar="ROWS[+KEPT],...",
    )
    runs: int = option(10, "With --prefill: time each N times.", metavar="N", min=2)
    baseline: list[str] | None = option(
        None,
        "Measure the same work by other means too: graph (plain torch operations in a "
        "CUDA graph), compile (torch.compile over a cache that lies still) or "
        "transformers (its Qwen3 layers, one operation after another). May be repeated.",
        metavar="NAME",
        autocompletion=opt.offered("graph", "compile", "transformers"),
    )
    errors: int = option(
        0,
        "Also compare the logits of a conversation of so many rows with float32's, beside "
        "plain torch's. Takes a copy of the model in float32.",
        metavar="ROWS",
        min=0,
    )
    batch_invariant: opt.BatchInvariant = False
    graphs: opt.Graphs = True
    precision: str | None = option(
        None,
        "fp8: quantise the shared block first, as mosstalk checkpoint quantize does. "
        "Default: as the model is.",
        metavar="bf16|fp8",
    )
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None

    def __post_init__(self) -> None:
        """Refuse what can be refused before anything heavy is imported."""
        if self.prefill and self.errors:
            raise OptionError("--errors compares steps; leave it or --prefill out")

    def run(self) -> None:
        """Measure, print tables, write the document and the page.

        Raises:
            OptionError: an option that means nothing.
            BenchError: a run whose rows were not right; no time is printed.
        """
        from mosstalk.bench.documents import STEP
        from mosstalk.bench.step import StepBench, open_model
        from mosstalk.engine.engine_core import EngineOptions
        from mosstalk.progress import progress_bar
        from mosstalk.reporting.html import tables_page

        loads = self._loads()
        with self.printing():
            model, ids = open_model(
                self.model, self.random_weights, self.device, self.dtype, self.precision
            )
            found = StepBench(
                self.random_weights or str(self.model or "the default model's"),
                "synthetic" if self.random_weights else model.config.weights_kind,
                model,
                ids,
                EngineOptions(graphs=self.graphs, batch_invariant=self.batch_invariant),
                loads,
                self.runs if self.prefill else self.steps,
                self.prefill,
                tuple(self.baseline or ()),
                self.errors,
                self.precision == "fp8",
            )
            with progress_bar() as tell:
                found.measure(tell)
            print_found(found.settings, found.tables)
        self.deliver_both(
            measured_document(STEP, found.settings, timed=found.timed, errors=found.errors),
            partial(tables_page, "mosstalk steps", found.settings, found.tables),
        )

    def _loads(self) -> "list[Load]":
        """What is measured: ``SESSIONSxROWS,...`` of steps, ``ROWS[+KEPT],...`` of prompts.

        Raises:
            OptionError: ``at`` or ``rows`` says something else, or there is no session or row.
        """
        from mosstalk.conversation import Mode
        from mosstalk.plan.limits import Load

        option, words, pattern, example = "--at", self.at, r"(\d+)x(\d+)", "1x512,64x1000"
        if self.prefill:
            option, words = "--rows", self.rows
            pattern, example = r"(\d+)(?:\+(\d+))?", "512,6+1000"
        found = [re.fullmatch(pattern, part, re.ASCII) for part in words.split(",")]
        pairs = [(int(each[1]), int(each[2] or 0)) for each in found if each]
        if len(pairs) < len(found):
            raise OptionError(f"{option} {words}: give something like {example}")
        if min(new if self.prefill else min(new, after) for new, after in pairs) < 1:
            raise OptionError(f"{option} {words}: there must be at least one")
        mode = Mode.AUDIO if self.mode == "audio" else Mode.TEXT
        if self.prefill:
            return [Load(1, kept, new, mode) for new, kept in pairs]
        return [Load(sessions, rows, mode=mode) for sessions, rows in pairs]


@dataclass(frozen=True, eq=False, repr=False)
class BenchStart(WritesDocument):
    """Measure how long a built folder takes from nothing to the first sound.

    mosstalk bench start engine

    Each start is a process of its own that does what serve does, then asks
    once. Before the first one the system is asked to forget the files, and
    how much of them it holds nevertheless is printed, with the rate at which
    the disk gave them.
    """

    folder: Path = argument("A folder that mosstalk build made.", metavar="DIR")
    runs: int = option(2, "Start N times.", metavar="N", min=1)
    device: opt.Device = "auto"

    def run(self) -> None:
        """Measure, print a table, write the document.

        Raises:
            CheckpointError: the folder is none that ``mosstalk build`` made.
            BenchError: a start failed.
        """
        from mosstalk.bench.documents import STARTS
        from mosstalk.bench.start import measure_starts
        from mosstalk.prepared.default_models import BuiltEngine
        from mosstalk.prepared.machine import machine_facts
        from mosstalk.progress import progress_bar
        from mosstalk.runtime.device import pick_device

        with self.printing():
            engine = BuiltEngine.read(self.folder)
            settings = machine_facts(pick_device(self.device), str(engine.values["weights"]))
            settings |= {"precision": str(engine.values["precision"])}
            with progress_bar() as tell:
                found = measure_starts(engine, self.device, self.runs, tell)
            print_found(settings, [found.table()], width=10)
        self.deliver(
            measured_document(
                STARTS,
                settings,
                weight_bytes=found.weight_bytes,
                disk=vars(found.disk) | {"gb_s": found.disk.gb_s},
                starts=found.starts,
            )
        )


@dataclass(frozen=True, eq=False, repr=False)
class BenchReport:
    """Write a page of figures, and its pictures, from measured documents.

    mosstalk bench report step.json prefill.json codec.json --out docs/from-the-reports.md

    mosstalk bench report docs/figures/*.json docs/figures/beside/*.json --plots docs/img
    --out docs/measurements.md

    Without --plots it answers the source reports: what they planned, claimed
    and timed, beside our limits and figures. With --plots each claim of speed
    is a picture, a table and its commands. No figure of ours is typed by
    hand. A document with a run that was not valid is refused.
    """

    documents: list[Path] | None = argument(
        "What bench step, step --prefill, codec, serve and start wrote with --json.",
        metavar="[DOCUMENT.json]...",
        default=None,
    )
    plots: Path | None = option(
        None,
        "Write the page of measurements, and its pictures into this folder. Where several "
        "documents of a machine have a row, the first one's counts.",
        metavar="DIR",
    )
    out: str = option(STANDARD, "The page to write; - is stdout.", "--out", "-o", metavar="FILE|-")
    force: opt.Force = False

    def run(self) -> None:
        """Write the page of the documents, and the pictures.

        Raises:
            OptionError: a document that has no row on the page, or lacks one that it needs.
            OutputError: a file exists and there is no ``--force``, or cannot be written.
        """
        from mosstalk.bench.documents import read_document
        from mosstalk.bench.report import report_page

        if self.out != STANDARD:
            require_target(Path(self.out), replace=self.force)
        documents = [read_document(path) for path in self.documents or ()]
        page = self._measurements(documents) if self.plots else report_page(documents)
        if self.out == STANDARD:
            print(page, end="")
        else:
            write_whole(Path(self.out), page.encode())

    def _measurements(self, documents: "list[Document]") -> str:
        from mosstalk.bench.measurements import CLAIMS, measurements_page
        from mosstalk.bench.plots import draw_pictures

        assert self.plots
        for claim in CLAIMS:
            require_target(self.plots / claim.picture, replace=self.force)
        folder = Path.cwd() if self.out == STANDARD else Path(self.out).parent
        page = measurements_page(documents, os.path.relpath(self.plots, folder))
        draw_pictures(documents, self.plots)
        return page


_COMMANDS = {
    "report": BenchReport,
    "serve": BenchServe,
    "start": BenchStart,
    "step": BenchStep,
    "codec": BenchCodec,
} | (from_evals("commands", "COMMANDS") or {})

app = typer.Typer(help="Measure what the project publishes.", no_args_is_help=True)
for _name, _command in _COMMANDS.items():
    add_command(app, _name, _command)
add_moved(app, "bench prefill", "bench step --prefill")
add_moved(app, "bench judges", "bench quality --judges")
