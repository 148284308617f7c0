"""What the recipes' command lines share: options, the device, and how errors are told."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

Work = Annotated[Path, typer.Option(help="Folder of all stages' files.")]
Minutes = Annotated[float, typer.Option(help="Train for at most this long, loading included.")]
Steps = Annotated[int, typer.Option(help="Train for at most this many steps.")]
Seed = Annotated[int, typer.Option(help="Same seed, same draws.")]
NO_LIMIT = 10_000_000
"""Of steps or lines."""


def stages(help_text: str) -> typer.Typer:
    """A command line of stages, one command each."""
    return typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def pick_device() -> torch.device:
    """The first GPU where there is one; its matrices are multiplied in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_stages(app: typer.Typer, *mended_by_users: type[Exception]) -> None:
    """Run the command line; what a user can mend is told in one line, with exit status 2."""
    expected: tuple[type[Exception], ...] = (FileNotFoundError, *mended_by_users)
    try:
        app()
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
