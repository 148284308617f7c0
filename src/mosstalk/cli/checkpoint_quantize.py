"""``mosstalk checkpoint quantize``: products in 8 bits, and what that costs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import one_of

if TYPE_CHECKING:
    from mosstalk.checkpoints.quantize import Found, Written
    from mosstalk.models.quantization import Quantization


@dataclass(frozen=True, eq=False, repr=False)
class Quantize:
    """Write a checkpoint whose products are in 8 bits, and say what that costs.

    mosstalk checkpoint quantize MOSS-Speech MOSS-Speech-FP8 --html fp8.html

    Embeddings, norms and heads stay as stored, as do both modality blocks
    unless --blocks all. The model is run only to calibrate, and for --json
    and --html: errors of every product, and how far each head's distribution
    moves, on conversations that were not calibrated on. A tensor at a time is
    in memory while it writes; OUT is there whole or not at all.
    """

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A model folder, published or converted; one that holds model/ and codec/; or "
            "pocket or synthetic.",
        ),
    ]
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder for the quantised checkpoint.")
    ]
    scheme: Annotated[
        str, typer.Option(help="fp8: E4M3, with a float32 scale for each output channel.")
    ] = "fp8"
    blocks: Annotated[
        str,
        typer.Option(
            metavar="shared|all", help="The shared block's products, or both modality blocks' too."
        ),
    ] = "shared"
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="row|calibrated",
            help="Scale a product's input row by row as it comes, or by one number found "
            "beforehand. Default: calibrated with --calibrate, else row.",
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="PROMPTS.jsonl",
            help="Conversations to calibrate and measure on, one a line; every tenth is measured "
            "on. Default, where any are needed: 600 made with the model itself.",
        ),
    ] = None
    statistic: Annotated[
        str,
        typer.Option(
            metavar="largest|p99.99",
            help="What a calibrated scale is made of: the largest magnitude, or that of all but 1 "
            "in 10,000.",
        ),
    ] = "largest"
    device: opt.Device = "auto"
    dtype: opt.ModelDtype = None
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Measure, and write every figure; - is stdout."
        ),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Measure, and write one page with charts."),
    ] = None

    def run(self) -> None:
        """Quantise a model's folder, or one that holds model and codec; print and report.

        Raises:
            OptionError: a word that means nothing.
        """
        from mosstalk.checkpoints.quantize import Request, quantize
        from mosstalk.checkpoints.quantize_report import document_of, page_of
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.progress import progress_bar

        record = self._record()
        to = Outputs(self.json, self.html)
        to.require()
        request = Request(
            self.folder, self.out, record, self.calibrate, self.statistic, self.device, self.dtype,
            to.wanted,
        )  # fmt: skip
        with to.text_for_people():
            with progress_bar() as tell:
                found, written = quantize(request, tell)
            self._print(found, written)
        if found.measured:
            to.write(
                document_of(found.record, found.settings, found.measured),
                partial(page_of, found.settings, found.measured),
            )

    def _record(self) -> "Quantization":
        """What the config will say, but for what is known later."""
        from mosstalk.models.quantization import (
            ACTIVATIONS,
            BLOCKS,
            SCHEMES,
            STATISTICS,
            Quantization,
        )

        one_of("--scheme", self.scheme, *SCHEMES)
        one_of("--blocks", self.blocks, *BLOCKS)
        one_of("--statistic", self.statistic, *STATISTICS)
        activations = self.activations or ("calibrated" if self.calibrate else "row")
        one_of("--activations", activations, *ACTIVATIONS)
        return Quantization(self.blocks, activations)

    def _print(self, found: "Found", written: "Written") -> None:
        from mosstalk.checkpoints.quantize_report import PLUMBING, tables_of
        from mosstalk.cli.measured_output import print_settings, print_tables

        print_settings(found.settings, width=14)
        if found.measured:
            if found.settings["weights"] == "synthetic":
                print(PLUMBING)
            print_tables(tables_of(found.measured)[:2])
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
