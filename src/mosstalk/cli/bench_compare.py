"""``mosstalk bench compare``: two checkpoints on the same sentences."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from mosstalk.cli import options as opt


@dataclass(frozen=True, eq=False, repr=False)
class BenchCompare:
    """Compare two checkpoints on the same sentences: words that judges heard, and that each wrote.

    mosstalk bench compare before.json after.json

    Both documents are those of mosstalk bench quality --json. Sentences are
    compared in pairs, so that a difference is surer than the two rates are.
    """

    before: Annotated[
        Path, typer.Argument(metavar="DOCUMENT.json", help="What bench quality wrote with --json.")
    ]
    after: Annotated[
        Path, typer.Argument(metavar="DOCUMENT.json", help="What bench quality wrote with --json.")
    ]
    json: opt.AsJson = False

    def run(self) -> None:
        """Compare, and print a table or the document."""
        from mosstalk.bench.compare import Words, comparison_table
        from mosstalk.bench.compare import compare as compared
        from mosstalk.files import as_text

        first, second = Words.read(self.before), Words.read(self.after)
        found = compared(first.said, second.said)
        settings = {"first": first.settings, "second": second.settings}
        if self.json:
            rows = [asdict(row) for row in found]
            typer.echo(
                as_text({"format": "mosstalk-compare-1", **settings, "words": rows}), nl=False
            )
            return
        for name, values in settings.items():
            typer.echo(f"{name:<7} {', '.join(str(value) for value in values.values())}")
        typer.echo(f"\n{comparison_table(found).as_text()}")
