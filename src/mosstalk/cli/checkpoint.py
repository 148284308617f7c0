"""``mosstalk checkpoint``: commands that read and write checkpoint folders."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument, WritesPage, add_command, print_found
from mosstalk.cli.options import argument, option

if TYPE_CHECKING:
    from mosstalk.checkpoints.quantize import Found, Written
    from mosstalk.progress import Progress

Inspected: TypeAlias = tuple[dict[str, Any] | list[dict[str, Any]], str, bool]
"""A document, its text for people, and whether there are problems."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Quantize(WritesPage):
    """Write a checkpoint whose products are in 8 bits, and say what that costs.

    mosstalk checkpoint quantize MOSS-Speech MOSS-Speech-FP8 --html fp8.html

    Embeddings, norms and heads stay as stored, as do both modality blocks
    unless --blocks all. The model is run only to calibrate, and for --json
    and --html: errors of every product, and how far each head's distribution
    moves, on conversations that were not calibrated on. A tensor at a time is
    in memory while it writes; OUT is there whole or not at all.
    """

    folder: Path = argument(
        "A model folder, published or converted; one that holds model/ and codec/; or "
        "pocket or synthetic.",
        metavar="DIR",
        autocompletion=opt.offered_models,
    )
    out: Path = argument("A new folder for the quantised checkpoint.", metavar="OUT")
    scheme: str = option(
        "fp8", "fp8: E4M3, with a float32 scale for each output channel.", metavar="fp8"
    )
    blocks: str = option(
        "shared", "The shared block's products, or both modality blocks' too.", metavar="shared|all"
    )
    activations: str | None = option(
        None,
        "Scale a product's input row by row as it comes, or by one number found "
        "beforehand. Default: calibrated with --calibrate, else row.",
        metavar="row|calibrated",
    )
    calibrate: Path | None = option(
        None,
        "Conversations to calibrate and measure on, one a line; every tenth is measured "
        "on. Default, where any are needed: 600 made with the model itself.",
        metavar="PROMPTS.jsonl",
    )
    statistic: str = option(
        "largest",
        "What a calibrated scale is made of: the largest magnitude, or that of all but 1 "
        "in 10,000.",
        metavar="largest|p99.99",
    )
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    json: str | None = option(
        None, "Measure, and write every figure as JSON; - is stdout.", metavar="FILE|-"
    )
    html: Path | None = option(None, "Measure, and write one page with charts.", metavar="FILE")

    def run(self) -> None:
        """Quantise a model's folder, or one that holds model and codec; print and report.

        Raises:
            OptionError: a word that means nothing.
        """
        from mosstalk.checkpoints.calibrate import document_of, page_of
        from mosstalk.checkpoints.quantize import Request, quantize
        from mosstalk.models.quantization import Quantization
        from mosstalk.progress import progress_bar

        activations = self.activations or ("calibrated" if self.calibrate else "row")
        request = Request(
            self.folder, self.out, Quantization(self.blocks, activations), self.calibrate,
            self.statistic, self.device, self.dtype, bool(self.json or self.html),
        )  # fmt: skip
        with self.printing():
            with progress_bar() as tell:
                found, written = quantize(request, tell)
            self._print(found, written)
        if found.measured:
            self.deliver_both(
                document_of(found.record, found.settings, found.measured),
                partial(page_of, found.settings, found.measured),
            )

    def _print(self, found: "Found", written: "Written") -> None:
        from mosstalk.checkpoints.calibrate import PLUMBING, tables_of

        print_found(found.settings, (), width=14)
        if found.measured:
            if found.settings["weights"] == "synthetic":
                print(PLUMBING)
            print_found({}, tables_of(found.measured)[:2])
            print()
        before, after = (size / 2**20 for size in (written.bytes_before, written.bytes_after))
        print(
            f"{self.folder} -> {self.out}: {found.record.describe()}; {written.products} of "
            f"{written.tensors} tensors, {before:,.1f} MiB -> {after:,.1f} MiB in "
            f"{found.seconds:.1f} s"
        )
        print(
            f"  largest anonymous memory {written.peak_anonymous_bytes / 2**20:.0f} MiB "
            "while writing (mapped files apart)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Synthesize:
    """Write random weights in the published layout: model, codec, voice and tokenizer.

    mosstalk checkpoint synthesize random --size tiny,hidden_size=256

    What such a model says is noise. It serves to measure speed, memory and
    exactness on real shapes. A full one takes 20 GiB, codec included.
    """

    out: Path = argument("A new folder; gets OUT/model and OUT/codec.", metavar="OUT")
    size: list[str] | None = option(
        None,
        "tiny, full, or KEY=VALUE; repeat or join with commas, e.g. "
        "tiny,hidden_size=256,flow.input_size=96. Default: tiny.",
        autocompletion=opt.offered("tiny", "full"),
    )
    seed: int = option(0, "Same seed and sizes, same weights.")
    dtype: str = option(
        "bfloat16",
        "Of the language model: bfloat16, float16 or float32.",
        autocompletion=opt.offered("bfloat16", "float16", "float32"),
    )
    tokenizer: Path | None = option(None, "A tokenizer.json to use instead of a byte-level one.")

    def run(self) -> None:
        """Write it, and print what it is."""
        from mosstalk.synthesis.weights import run_synthesize

        run_synthesize(self.out, self.size or ["tiny"], self.seed, self.dtype, self.tokenizer)


@dataclass(frozen=True, eq=False, repr=False)
class Inspect(WritesDocument):
    """Say what a checkpoint holds, and name what is missing or does not fit.

    mosstalk checkpoint inspect MOSS-Speech

    Of a folder that mosstalk build made: what it was checked on, and whether
    its kernels serve here.

    Exit code 1: it has problems. 2: it is no checkpoint at all.
    """

    folder: Path = argument(
        "A model folder, a codec folder, one that holds model/ and codec/, one that "
        "mosstalk build made; or pocket or synthetic.",
        metavar="DIR",
        autocompletion=opt.offered_models,
    )
    hashes: bool | None = option(
        None, "Read every byte for SHA-256 sums. Default: yes, but of a built folder no."
    )

    def run(self) -> int:
        """Print what the folder holds; 1 when something is wrong with it.

        Raises:
            CheckpointError: it is a built folder of another version.
        """
        from mosstalk.prepared.default_models import ENGINE_FILE
        from mosstalk.progress import progress_bar

        with self.printing(), progress_bar() as tell:
            if (self.folder / ENGINE_FILE).exists():
                document, text, problems = self._built(tell)
            else:
                document, text, problems = self._checkpoint(tell)
        self.deliver(document, text)
        return int(problems)

    def _checkpoint(self, tell: "Progress") -> Inspected:
        from mosstalk.checkpoints.inspect import inspect, text_of
        from mosstalk.prepared.default_models import NAMES, chosen_model

        folder = self.folder
        if str(folder) in NAMES and not folder.exists():
            folder = chosen_model(folder, None)[0].parent
        reports = inspect(folder, hashes=self.hashes is not False, tell=tell)
        document = [report.as_dict() for report in reports]
        problems = any(report.problems for report in reports)
        return document, "".join(map(text_of, reports)), problems

    def _built(self, tell: "Progress") -> Inspected:
        from mosstalk.build.report import document_of, lines_of, report_of
        from mosstalk.prepared.default_models import BuiltEngine

        engine = BuiltEngine.read(self.folder)
        report = report_of(engine, hashes=bool(self.hashes), tell=tell)
        lines = (f"  {name:<18} {value}" if name else value for name, value in lines_of(report))
        return document_of(report), "\n".join(lines) + "\n", bool(report.problems)


@dataclass(frozen=True, eq=False, repr=False)
class Convert:
    """Write a checkpoint in one dtype, matrices fused, with a manifest of hashes.

    mosstalk checkpoint convert MOSS-Speech converted --dtype bf16

    The language model's q, k, v and gate, up become one matrix each; the
    codec's .pt files become safetensors beside configs that say their sizes.
    One shard is in memory at a time. Killed, it goes on where it stopped.
    """

    folder: Path = argument(
        "A model folder, a codec folder, or one that holds model/ and codec/.", metavar="DIR"
    )
    out: Path = argument("A new folder for the converted checkpoint.", metavar="OUT")
    dtype: str = option(
        "bf16",
        "bf16, fp16 or fp32, of the language model; the codec keeps its own.",
        autocompletion=opt.offered("bf16", "fp16", "fp32"),
    )
    shard_gib: float = option(2.0, "Largest file written, in GiB; memory taken grows with it.")

    def run(self) -> None:
        """Write it, and print what was done."""
        from mosstalk.checkpoints.convert import run_convert

        run_convert(self.folder, self.out, self.dtype, self.shard_gib)


app = typer.Typer(help="Work with checkpoint folders.", no_args_is_help=True)
add_command(app, "synthesize", Synthesize)
add_command(app, "inspect", Inspect)
add_command(app, "convert", Convert)
add_command(app, "quantize", Quantize)
