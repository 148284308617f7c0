"""``mosstalk bench start``."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

BuiltFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that mosstalk build made.")
]
Runs: TypeAlias = Annotated[int, typer.Option(metavar="N", min=1, help="Start N times.")]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write every figure as json; - is stdout."),
]


def start(
    folder: BuiltFolder, runs: Runs = 2, device: opt.Device = "auto", json: JsonFile = None
) -> None:
    """Measure how long a built folder takes from nothing to the first sound.

    mosstalk bench start engine

    Each start is a process of its own that does what serve does, then asks
    once. Before the first one the system is asked to forget the files, and
    how much of them it holds nevertheless is printed, with the rate at which
    the disk gave them.
    """
    with reported():
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.cli.start_console import run_starts

        run_starts(folder, device, runs, Outputs(json))
