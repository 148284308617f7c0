"""``mosstalk bench step``: speed of the engine's steps, and of prompts."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import one_of
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.bench.step import Measurement
    from mosstalk.plan.work import Load


@dataclass(frozen=True, eq=False, repr=False)
class BenchStep:
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

    model: opt.ModelAlone = None
    random_weights: Annotated[
        str | None,
        typer.Option(
            "--random-weights",
            metavar="full|tiny",
            help="Random weights of the published (full) or of tiny sizes, made on the device, in "
            "place of --model.",
        ),
    ] = None
    at: Annotated[
        str,
        typer.Option(metavar="NxROWS,...", help="So many sessions, each with so many rows."),
    ] = "1x512,8x512"
    mode: Annotated[
        str, typer.Option(metavar="audio|text", help="Whether replies are speech or text.")
    ] = "audio"
    steps: Annotated[int, typer.Option(help="Time N steps.", metavar="N", min=2)] = 50
    prefill: Annotated[
        bool,
        typer.Option("--prefill", help="Measure prompts, --rows and --runs, in place of steps."),
    ] = False
    rows: Annotated[
        str,
        typer.Option(
            metavar="ROWS[+KEPT],...",
            help="With --prefill: new rows, and after how many that have been read before.",
        ),
    ] = "512,6+1000"
    runs: Annotated[
        int, typer.Option(help="With --prefill: time each N times.", metavar="N", min=2)
    ] = 10
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="NAME",
            help="Measure the same work by other means too: graph (plain torch operations in a "
            "CUDA graph), compile (torch.compile over a cache that lies still) or "
            "transformers (its Qwen3 layers, one operation after another). May be repeated.",
        ),
    ] = None
    errors: Annotated[
        int,
        typer.Option(
            "--errors",
            metavar="ROWS",
            min=0,
            help="Also compare the logits of a conversation of so many rows with float32's, beside "
            "plain torch's. Takes a copy of the model in float32.",
        ),
    ] = 0
    batch_invariant: opt.BatchInvariant = False
    graphs: opt.Graphs = True
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp8",
            help="fp8: quantise the shared block first, as mosstalk checkpoint quantize does. "
            "Default: as the model is.",
        ),
    ] = None
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    json: opt.JsonFile = None
    html: opt.HtmlFile = None

    def __post_init__(self) -> None:
        """Refuse what can be refused before anything heavy is imported."""
        if self.mode not in ("audio", "text"):
            raise OptionError(f"--mode {self.mode}: choose of audio, text")
        one_of("--precision", self.precision or "bf16", "bf16", "fp8")
        if self.prefill and self.errors:
            raise OptionError("--errors compares steps; leave it or --prefill out")

    def run(self) -> None:
        """Measure, print tables, write the document and the page.

        Raises:
            OptionError: an option that means nothing.
            BenchError: a run whose rows were not right; no time is printed.
        """
        from mosstalk.bench.step import FORMAT, measure, open_model
        from mosstalk.cli.measured_output import Outputs, measured_document, print_found
        from mosstalk.progress import progress_bar
        from mosstalk.reporting.html import tables_page

        asked = self._asked()
        to = Outputs(self.json, self.html)
        to.require()
        with to.text_for_people():
            model, ids = open_model(
                self.model, self.random_weights, self.device, self.dtype, self.precision
            )
            weights = "synthetic" if self.random_weights else model.config.weights_kind
            with progress_bar() as tell:
                found = measure(model, ids, asked, weights, tell)
            print_found(found.settings, found.tables)
        to.write(
            measured_document(FORMAT, found.settings, timed=found.timed, errors=found.errors),
            partial(tables_page, "mosstalk steps", found.settings, found.tables),
        )

    def _asked(self) -> "Measurement":
        from mosstalk.bench.step import Measurement
        from mosstalk.engine.engine_core import EngineOptions

        return Measurement(
            self.random_weights or str(self.model or "the default model's"),
            EngineOptions(graphs=self.graphs, batch_invariant=self.batch_invariant),
            self._prompts() if self.prefill else self._steps(),
            self.runs if self.prefill else self.steps,
            self.prefill,
            tuple(self.baseline or ()),
            self.errors,
            self.precision == "fp8",
        )

    def _steps(self) -> "list[Load]":
        """``SESSIONS x ROWS``: ``1x512,64x1000``."""
        from mosstalk.conversation import Mode
        from mosstalk.plan.work import Load

        mode = Mode.AUDIO if self.mode == "audio" else Mode.TEXT
        pairs = _pairs("--at", self.at, self.at, "x", "1x512,64x1000")
        return [Load(*pair, mode=mode) for pair in pairs]

    def _prompts(self) -> "list[Load]":
        """``ROWS[+KEPT]``: ``512,6+1000``."""
        from mosstalk.conversation import Mode
        from mosstalk.plan.work import Load

        mode = Mode.AUDIO if self.mode == "audio" else Mode.TEXT
        whole = ",".join(part if "+" in part else f"{part}+0" for part in self.rows.split(","))
        pairs = _pairs("--rows", self.rows, whole, "+", "512,6+1000")
        return [Load(1, kept, new, mode) for new, kept in pairs]


def _pairs(
    option: str, given: str, words: str, between: str, example: str
) -> list[tuple[int, int]]:
    """The pairs of numbers in ``words``, which ``option`` was ``given`` as.

    Raises:
        OptionError: there are others.
    """
    parts = [part.split(between) for part in words.split(",")]
    if not all(len(part) == 2 and all(word.isdecimal() for word in part) for part in parts):
        raise OptionError(f"{option} {given}: give something like {example}")
    pairs = [(int(first), int(second)) for first, second in parts]
    if min(first for first, _ in pairs) < 1:
        raise OptionError(f"{option} {given}: there must be at least one")
    return pairs
