"""What all commands share: errors become one line and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mosstalk.errors import MosstalkError, OptionError


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors in what we were given into one line and exit code 2."""
    try:
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


def fail(message: str) -> None:
    """Print an error as one line and end with exit code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def one_of(option: str, value: str, *choices: str) -> str:
    """Return ``value`` if it is one of ``choices``; raise OptionError otherwise."""
    if value not in choices:
        raise OptionError(f"{option} must be {' or '.join(choices)}, not {value!r}")
    return value
