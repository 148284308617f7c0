"""``mosstalk bench report``: the page that answers the source reports."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import STANDARD
from mosstalk.cli.options import argument, option


@dataclass(frozen=True, eq=False, repr=False)
class BenchReport:
    """Write the page that answers the source reports, from measured documents.

    mosstalk bench report step.json prefill.json codec.json --out docs/from-the-reports.md

    What the reports planned, claimed and timed, beside our limits and
    figures. No figure of ours is typed by hand: what no document holds is
    "not measured yet". A document with a run that was not valid is refused.
    """

    documents: list[Path] | None = argument(
        "What bench step, step --prefill and codec wrote with --json.",
        metavar="[DOCUMENT.json]...",
        default=None,
    )
    out: str = option(STANDARD, "The page to write; - is stdout.", "--out", "-o", metavar="FILE|-")
    force: opt.Force = False

    def run(self) -> None:
        """Write the page of the documents."""
        from mosstalk.bench.report import read_document, report_page
        from mosstalk.files import require_target, write_whole

        if self.out != STANDARD:
            require_target(Path(self.out), replace=self.force)
        page = report_page([read_document(path) for path in self.documents or ()])
        if self.out == STANDARD:
            print(page, end="")
        else:
            write_whole(Path(self.out), page.encode())
