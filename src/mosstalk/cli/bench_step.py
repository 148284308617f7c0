"""``mosstalk bench step``: speed of the engine's steps, and of prompts."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesPage
from mosstalk.cli.options import option
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.bench.step import Measurement
    from mosstalk.plan.work import Load


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
        from mosstalk.bench.step import FORMAT, measure, open_model
        from mosstalk.cli.measured_output import measured_document, print_found
        from mosstalk.progress import progress_bar
        from mosstalk.reporting.html import tables_page

        asked = self._asked()
        with self.printing():
            model, ids = open_model(
                self.model, self.random_weights, self.device, self.dtype, self.precision
            )
            weights = "synthetic" if self.random_weights else model.config.weights_kind
            with progress_bar() as tell:
                found = measure(model, ids, asked, weights, tell)
            print_found(found.settings, found.tables)
        self.deliver_both(
            measured_document(FORMAT, found.settings, timed=found.timed, errors=found.errors),
            partial(tables_page, "mosstalk steps", found.settings, found.tables),
        )

    def _asked(self) -> "Measurement":
        from mosstalk.bench.step import Measurement
        from mosstalk.engine.engine_core import EngineOptions

        return Measurement(
            self.random_weights or str(self.model or "the default model's"),
            EngineOptions(graphs=self.graphs, batch_invariant=self.batch_invariant),
            self._loads(),
            self.runs if self.prefill else self.steps,
            self.prefill,
            tuple(self.baseline or ()),
            self.errors,
            self.precision == "fp8",
        )

    def _loads(self) -> "list[Load]":
        """What is measured: ``SESSIONSxROWS,...`` of steps, ``ROWS[+KEPT],...`` of prompts.

        Raises:
            OptionError: ``at`` or ``rows`` says something else, or there is no session or row.
        """
        from mosstalk.conversation import Mode
        from mosstalk.plan.work import Load

        option, words, pattern, example = "--at", self.at, r"(\d+)x(\d+)", "1x512,64x1000"
        if self.prefill:
            option, words = "--rows", self.rows
            pattern, example = r"(\d+)(?:\+(\d+))?", "512,6+1000"
        found = [re.fullmatch(pattern, part, re.ASCII) for part in words.split(",")]
        pairs = [(int(each[1]), int(each[2] or 0)) for each in found if each]
        if len(pairs) < len(found):
            raise OptionError(f"{option} {words}: give something like {example}")
        if min(first for first, _ in pairs) < 1:
            raise OptionError(f"{option} {words}: there must be at least one")
        mode = Mode.AUDIO if self.mode == "audio" else Mode.TEXT
        if self.prefill:
            return [Load(1, kept, new, mode) for new, kept in pairs]
        return [Load(sessions, rows, mode=mode) for sessions, rows in pairs]
