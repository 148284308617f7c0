"""From a frozen dataclass, whose fields are options, to a command of the terminal."""

import inspect
from typing import Any, Protocol

import typer

from mosstalk.cli.common import fail, reported


class Options(Protocol):
    """A command: its fields are options and arguments, its docstring is what ``--help`` says.

    Each field is ``Annotated`` with a ``typer.Option`` or ``typer.Argument``. Values that cannot
    be meant are refused with OptionError by ``run`` or, where others of them suffice to tell, by
    ``__post_init__``.
    """

    def run(self) -> int | None:
        """Do what was asked for; the exit code, None for 0."""


def add_command(
    app: typer.Typer, name: str, options: type[Options], *, cls: Any = None, hidden: bool = False
) -> None:
    """Make ``options`` the command ``name`` of ``app``.

    Errors become one line and an exit code; see ``reported``. ``cls``: a kind of TyperCommand.
    """

    def command(**given: Any) -> None:
        with reported():
            code = options(**given).run()
            if code is not None:
                raise typer.Exit(code)

    command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    app.command(name, cls=cls, hidden=hidden, help=options.__doc__)(command)


def add_moved(app: typer.Typer, path: str, now: str) -> None:
    """Have the command that ``path`` was, such as ``bench prefill``, say what it is ``now``."""

    def moved() -> None:
        fail(f"mosstalk {path} is gone; use: mosstalk {now}")

    app.command(
        path.rpartition(" ")[2],
        hidden=True,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(moved)
