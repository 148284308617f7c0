"""Status lines and progress bars on standard error; nothing is shown where that is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is."""


def no_progress(what: str, done: int, total: int) -> None:
    """A ``Progress`` that shows nothing: the default of what can be watched."""
    del what, done, total


@contextmanager
def status_line(text: str) -> Iterator["Status"]:
    """A line that says what is being done; ``update`` it as things go on."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with console.status(text) as status:
        yield status


@contextmanager
def loading() -> Iterator[tuple["Status", Progress]]:
    """A status line, and a function that counts the tensors loaded on it."""
    with status_line("loading") as status:

        def tell(what: str, done: int, total: int) -> None:
            status.update(f"{what}: {done} of {total} tensors")

        yield status, tell


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar that names what is being done."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done / max(total, 1))

        yield tell
