"""``mosstalk engine``: what a built folder is."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

app = typer.Typer(help="Look at folders that mosstalk build made.", no_args_is_help=True)

BuiltFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that mosstalk build made.")
]


@app.command("inspect")
def inspect(folder: BuiltFolder, hashes: opt.Hashes = False, json: opt.AsJson = False) -> None:
    """Say what an engine is, what it was checked on, and whether its kernels serve here.

    mosstalk engine inspect engine

    Exit code 1: something is missing or, with --hashes, was changed. 2: it is
    no such folder.
    """
    with reported():
        from mosstalk.cli.engine_console import run_inspect

        raise typer.Exit(run_inspect(folder, hashes=hashes, as_json=json))
