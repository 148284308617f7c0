"""What all commands share: errors become one line and an exit code."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from mosstalk.errors import AudioWarning, MosstalkError, OptionError


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
        fail(f"{error}; run: mosstalk doctor")
    except MemoryError:
        fail("out of memory; use a machine with more, or a smaller --dtype")
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        fail("out of memory; use a device with more, a smaller --dtype or a shorter input")


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


def one_of(option: str, value: str, *choices: str) -> str:
    """Return ``value`` if it is one of ``choices``; raise OptionError otherwise."""
    if value not in choices:
        raise OptionError(f"{option} must be {' or '.join(choices)}, not {value!r}")
    return value
