"""The model that is there without a download.

Until a trained one ships with the package, it is a tiny synthetic one: the whole path runs,
and what is heard is noise.
"""

from pathlib import Path

from mosstalk.atomic import new_folder
from mosstalk.settings import cache_folder
from mosstalk.synthesis.sizes import TINY
from mosstalk.synthesis.write import Synthesis, synthesize

_FOLDER = "synthetic-tiny-4"
"""Changes whenever what is written under it would."""


def default_model() -> tuple[Path, Path]:
    """Folders of the default model and codec, written to the cache on first use.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    folder = cache_folder() / _FOLDER
    if not folder.exists():
        with new_folder(folder) as part:
            synthesize(part, Synthesis(TINY))
    return folder / "model", folder / "codec"
