"""``mosstalk bench report``."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli.common import reported

Documents: TypeAlias = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DOCUMENT.json]...", help="What bench step, prefill and codec wrote with --json."
    ),
]
PageFile: TypeAlias = Annotated[
    str, typer.Option("--out", metavar="FILE|-", help="The page to write; - is stdout.")
]


def report(documents: Documents = None, out: PageFile = "-") -> None:
    """Write the page that answers the source reports, from measured documents.

    mosstalk bench report step.json prefill.json codec.json --out docs/from-the-reports.md

    What the reports planned, claimed and timed, beside our limits and
    figures. No figure of ours is typed by hand: what no document holds is
    "not measured yet". A document with a run that was not valid is refused.
    """
    with reported():
        from mosstalk.bench.report_figures import read_document
        from mosstalk.bench.report_page import report_page
        from mosstalk.files import STANDARD_OUTPUT, require_target, write_whole

        if out != STANDARD_OUTPUT:
            require_target(Path(out))
        page = report_page([read_document(path) for path in documents or ()])
        if out == STANDARD_OUTPUT:
            typer.echo(page, nl=False)
        else:
            write_whole(Path(out), page.encode())
