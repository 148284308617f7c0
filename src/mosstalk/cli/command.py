"""From a frozen dataclass, whose fields are options, to a command; what commands print alike."""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from copy import copy
from dataclasses import Field, dataclass
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import typer
from typer.core import TyperCommand

from mosstalk.cli import options as opt
from mosstalk.cli.options import option
from mosstalk.environment import this_command
from mosstalk.errors import AudioWarning, MosstalkError, OptionError
from mosstalk.files import as_text, require_target, write_document, write_whole

if TYPE_CHECKING:
    from mosstalk.reporting.tables import Table

STANDARD = "-"
"""In place of a file's name: standard input or output."""
_CHOICES = re.compile(r"[a-z0-9.]+(\|[a-z0-9.]+)*")
"""The metavar of an option that takes one of a few words."""
_SHOWN_LAST = ("stats", "trace", "html", "json", "force", "quiet")


class Options(Protocol):
    """A command: its fields are options and arguments, its docstring is what ``--help`` says.

    Each field is an ``option`` or an ``argument``, or of a type in ``cli.options``. What cannot be
    meant is refused with OptionError: words beside those of a metavar such as ``bf16|fp8`` for all
    commands alike, other values by ``run`` or, before anything heavy is imported,
    ``__post_init__``.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def run(self) -> int | None:
        """Do what was asked for; the exit code, None for 0."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WritesDocument:
    """A command that can leave what it found as a JSON document.

    Its text for people goes to stdout, or to stderr where something else is written there.
    """

    json: str | None = option(
        None,
        "Write everything as one JSON document to FILE; - is stdout, as is --json alone at "
        "the end.",
        metavar="FILE|-",
    )
    force: opt.Force = False

    def outputs(self) -> list[Path]:
        """The files that the command is to write; none for stdout."""
        return [Path(self.json)] if self.json and self.json != STANDARD else []

    def takes_stdout(self) -> bool:
        """Whether stdout is kept for a document or for sound."""
        return self.json == STANDARD

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print what is printed in the block where it belongs, if all files can be written.

        Raises:
            OutputError: a file's folder is missing, or it exists and there is no ``--force``.
        """
        for path in self.outputs():
            require_target(path, replace=self.force)
        with redirect_stdout(sys.stderr) if self.takes_stdout() else nullcontext():
            yield

    def deliver(self, document: Mapping[str, Any] | Sequence[Any], text: str = "") -> None:
        """Print ``text`` unless the document goes to stdout, and write that where it is to go."""
        if self.json != STANDARD:
            print(text, end="")
            if self.json:
                write_document(Path(self.json), document)
        else:
            print(as_text(document), end="", flush=True)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WritesPage(WritesDocument):
    """A command that can also leave one page of HTML."""

    html: Path | None = option(
        None, "Write one page of HTML: tables, and sound where there is any.", metavar="FILE"
    )

    def outputs(self) -> list[Path]:
        """The document's file and the page."""
        return [*super().outputs(), *([self.html] if self.html else [])]

    def deliver_both(self, document: Mapping[str, Any], page: Callable[[], str]) -> None:
        """Write the document, and the page where one is asked for."""
        self.deliver(document)
        if self.html:
            write_whole(self.html, page().encode())


class _Command(TyperCommand):
    """A command as people type it.

    ``ctx.meta["order"]`` has the names of its options in the order in which they were given. A
    bare ``--json``, at the end or before another option, is taken for ``--json -``: it was a flag.
    """

    def make_parser(self, ctx: Any) -> Any:
        """The usual parser, which leaves the order in ``ctx``."""
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found = parse(args=_with_json_on_stdout(args))
            ctx.meta["order"] = [each.name for each in found[2]]
            return found

        parser.parse_args = parse_args
        return parser


def _with_json_on_stdout(args: list[str]) -> list[str]:
    own = args[: args.index("--")] if "--" in args else args
    words = [
        "--json=-" if word == "--json" and (after == "" or after[:1] == "-" != after) else word
        for word, after in zip_longest(own, own[1:], fillvalue="")
    ]
    return words + args[len(own) :]


def add_command(app: typer.Typer, name: str, options: type[Options]) -> None:
    """Make ``options`` the command ``name`` of ``app``; errors become one line and an exit code.

    Every command also takes ``--quiet``.
    """

    def command(*, quiet: bool, **given: Any) -> None:
        with reported(), _silent() if quiet else nullcontext():
            for each in fields:
                _check_choice(each, given.get(each.name))
            code = options(**given).run()
        if code is not None:
            raise typer.Exit(code)

    silence = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=opt.Quiet
    )
    fields = [*map(partial(_parameter, options), inspect.signature(options).parameters), silence]
    place = {name: number for number, name in enumerate(_SHOWN_LAST, 1)}
    fields.sort(key=lambda each: place.get(each.name, 0))
    command.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    app.command(name, cls=_Command, help=options.__doc__)(command)


def _parameter(options: type[Options], name: str) -> inspect.Parameter:
    """A field of a command as typer reads it."""
    spec = inspect.signature(options).parameters[name]
    info = options.__dataclass_fields__[name].metadata.get(opt.INFO)
    if info and info.default is False and not info.param_decls:
        info.param_decls = (f"--{name.replace('_', '-')}",)  # without a --no- beside it
    found = spec.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=info or spec.default)
    if panel := getattr(options, "panels", {}).get(name):
        found = _in_panel(found, panel)
    if choices := _choices(found):
        _info(found).autocompletion = opt.offered(*choices)
    return found


def _in_panel(option: inspect.Parameter, panel: str) -> inspect.Parameter:
    """The option in a box of its help that is called ``panel``; others may share what it says."""
    info = copy(_info(option))
    info.rich_help_panel = panel
    if option.default is _info(option):
        return option.replace(default=info)
    return option.replace(annotation=Annotated[option.annotation.__origin__, info])


def _info(option: inspect.Parameter) -> Any:
    """What typer knows of an option, which stands in its annotation or in its default."""
    return next(iter(getattr(option.annotation, "__metadata__", ())), option.default)


def _choices(option: inspect.Parameter) -> list[str]:
    """The words in an option's metavar such as ``bf16|fp8``, beside which it takes none."""
    metavar = getattr(_info(option), "metavar", None) or ""
    return metavar.split("|") if _CHOICES.fullmatch(metavar) else []


def _check_choice(option: inspect.Parameter, given: Any) -> None:
    """Raise OptionError for a word that is none of those in the option's metavar, ``bf16|fp8``."""
    choices = _choices(option)
    for word in given if isinstance(given, list) else [given]:
        if choices and word is not None and word not in choices:
            decls = _info(option).param_decls or ()
            name = next(iter(decls), f"--{option.name.replace('_', '-')}")
            raise OptionError(f"{name} must be {' or '.join(choices)}, not {word!r}")


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


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors in what we were given into one line and exit code 2, warnings into one line."""
    try:
        with _warnings_as_lines():
            yield
    except MosstalkError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ImportError as error:
        fail(f"{error}; run: {this_command()} doctor")
    except MemoryError:
        fail("out of memory; use a machine with more, or a smaller --dtype")
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        fail("out of memory; use a device with more, a smaller --dtype or a shorter input")


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what is written to stderr: notes, warnings, figures, progress."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # noqa: PTH123
        yield


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each warning about a recording as one line on standard error, without code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", AudioWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
            if issubclass(category, AudioWarning):
                typer.echo(f"warning: {message}", err=True)
            else:
                others(message, category, *more, **named)

        warnings.showwarning = show
        yield


def fail(message: str) -> None:
    """Print an error as one line and end with exit code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def measured_document(name: str, settings: Mapping[str, str], **figures: Any) -> dict[str, Any]:
    """The document of a format: settings, the kind of weights, and all figures."""
    return {"format": name, "settings": settings, "weights": settings["weights"]} | figures


def print_found(
    settings: Mapping[str, Any],
    tables: "Iterable[Table]",
    skipped: Iterable[str] = (),
    *,
    width: int | None = None,
) -> None:
    """Print settings, tables with an empty line before each, and what was not measured.

    A setting is a line, its value after ``width`` characters or the longest name.
    """
    width = max(map(len, settings), default=0) if width is None else width
    for name, value in settings.items():
        print(f"{name:<{width}} {value}")
    for table in tables:
        print(f"\n{table.as_text()}")
    for line in skipped:
        print(f"\nnot measured: {line}")


def numbers(option: str, words: str) -> list[int]:
    """The numbers of ``1,8,32``, each above 0.

    Raises:
        OptionError: ``words`` say something else.
    """
    parts = [word.strip() for word in words.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"{option} {words}: give numbers above 0, like 1,8,32")
    return list(map(int, parts))


def from_evals(module: str, name: str) -> Any:
    """What a module of ``evals`` calls ``name``; None where there is no such package.

    It is looked for beside this package and, in a clone, beside ``src``: an installation need not
    know of it, and another package of that name is never taken for it.
    """
    for folder in Path(__file__).parents[2:4]:
        if (folder / "evals" / "commands.py").is_file():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
            return getattr(import_module(f"evals.{module}"), name)
    return None
