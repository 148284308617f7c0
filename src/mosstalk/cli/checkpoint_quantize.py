"""``mosstalk checkpoint quantize``: products in 8 bits, and what that costs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesPage
from mosstalk.cli.options import argument, option

if TYPE_CHECKING:
    from mosstalk.checkpoints.quantize import Found, Written


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
        from mosstalk.checkpoints.quantize import Request, quantize
        from mosstalk.checkpoints.quantize_report import document_of, page_of
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
        from mosstalk.checkpoints.quantize_report import PLUMBING, tables_of
        from mosstalk.cli.measured_output import print_found

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
