"""Packages of the ``quality`` extra, imported where they are needed or named where missing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mosstalk.environment import install_command
from mosstalk.errors import BenchError

INSTALL = install_command("quality")
INSTALL_NATURALNESS = "pip install --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0"
"""Without what they ask for: transformers, librosa and torchaudio, of which nothing is run."""
INSTALL_PESQ = f"{install_command('pesq')} (needs a C compiler)"


def extra(module: str, install: str = INSTALL) -> Any:
    """Import a module of the extra.

    Raises:
        BenchError: it is not installed, or cannot be imported here; ``install`` is the remedy.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BenchError(f"{module} cannot be imported ({reason}); install it: {install}") from None


def distillmos() -> Any:
    """The module ``distillmos``, which imports torchaudio and uses it in its own command alone.

    torchaudio is released for older torch; where it is absent, an empty module stands in for
    the time of the import.

    Raises:
        BenchError: see ``extra``.
    """
    with _in_place_of_absent("torchaudio"):
        return extra("distillmos", INSTALL_NATURALNESS)


@contextmanager
def _in_place_of_absent(name: str) -> Iterator[None]:
    if find_spec(name) is not None:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
