"""``mosstalk bench compare``: two checkpoints on the same sentences."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli.command import WritesDocument

_Document: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DOCUMENT.json", help="What bench quality wrote with --json.")
]


@dataclass(frozen=True, eq=False, repr=False)
class BenchCompare(WritesDocument):
    """Compare two checkpoints on the same sentences: words that judges heard, and that each wrote.

    mosstalk bench compare before.json after.json

    Both documents are those of mosstalk bench quality --json. Sentences are
    compared in pairs, so that a difference is surer than the two rates are.
    """

    before: _Document
    after: _Document

    def run(self) -> None:
        """Compare, and print a table or the document."""
        from mosstalk.bench.compare import Words, comparison_table
        from mosstalk.bench.compare import compare as compared

        first, second = Words.read(self.before), Words.read(self.after)
        with self.printing():
            found = compared(first.said, second.said)
        settings = {"first": first.settings, "second": second.settings}
        lines = [
            f"{name:<7} {', '.join(map(str, values.values()))}" for name, values in settings.items()
        ]
        self.deliver(
            {"format": "mosstalk-compare-1", **settings, "words": list(map(asdict, found))},
            "\n".join([*lines, "", comparison_table(found).as_text(), ""]),
        )
