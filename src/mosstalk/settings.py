"""The one place that reads environment variables."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where generated files that can be made again are kept (``MOSSTALK_CACHE``)."""
    chosen = os.environ.get("MOSSTALK_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mosstalk"
