"""``mosstalk bench report``: the page that answers the source reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, eq=False, repr=False)
class BenchReport:
    """Write the page that answers the source reports, from measured documents.

    mosstalk bench report step.json prefill.json codec.json --out docs/from-the-reports.md

    What the reports planned, claimed and timed, beside our limits and
    figures. No figure of ours is typed by hand: what no document holds is
    "not measured yet". A document with a run that was not valid is refused.
    """

    documents: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DOCUMENT.json]...",
            help="What bench step, prefill and codec wrote with --json.",
        ),
    ] = None
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE|-", help="The page to write; - is stdout.")
    ] = "-"

    def run(self) -> None:
        """Write the page of the documents."""
        from mosstalk.bench.report import read_document, report_page
        from mosstalk.files import STANDARD_OUTPUT, require_target, write_whole

        if self.out != STANDARD_OUTPUT:
            require_target(Path(self.out))
        page = report_page([read_document(path) for path in self.documents or ()])
        if self.out == STANDARD_OUTPUT:
            typer.echo(page, nl=False)
        else:
            write_whole(Path(self.out), page.encode())
