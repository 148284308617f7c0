"""What all commands share: errors become one line and an exit code."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mosstalk.environment import install_command
from mosstalk.errors import AudioWarning, MosstalkError, OptionError

if TYPE_CHECKING:
    from mosstalk.cli.opening import ModelRequest, SamplingRequest

_SERVER_PACKAGES = ("fastapi", "prometheus_client", "uvicorn", "websockets")


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


def require_server() -> None:
    """End with exit code 2 and a hint where what a server needs is not installed."""
    if sys.platform == "win32":
        fail("a server needs Linux or macOS; on Windows run it in WSL")
    missing = [name for name in _SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        fail(f"a server needs {', '.join(missing)}; run: {install_command('server')}")


class DrawsReplies:
    """A command that draws replies; each declares these options where its help shows them."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    max_rows: int | None
    seed: int
    script: str | None

    def __post_init__(self) -> None:
        """Refuse what can be refused before a model is read."""
        if self.max_rows is not None and self.max_rows < 1:
            raise OptionError(f"--max-rows must be at least 1, not {self.max_rows}")

    def _sampling(self) -> "SamplingRequest":
        from mosstalk.cli.opening import SamplingRequest
        from mosstalk.offline.defaults import Choices

        choices = Choices(
            self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.max_rows
        )
        return SamplingRequest.of(choices, self.seed, self.script)


class SpeaksReplies(DrawsReplies):
    """A command whose replies are spoken."""

    model: Path | None
    codec: Path | None
    device: str
    dtype: str | None
    vocoder: str
    vocoder_dir: Path | None

    def _model(self) -> "ModelRequest":
        from mosstalk.cli.opening import ModelRequest
        from mosstalk.codec.sound_request import SoundRequest

        sound = SoundRequest(vocoder=self.vocoder, vocoder_folder=self.vocoder_dir)
        return ModelRequest(self.model, self.codec, self.device, self.dtype, sound)
