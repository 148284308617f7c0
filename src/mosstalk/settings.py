"""The one place that reads and sets environment variables."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where generated files that can be made again are kept (``MOSSTALK_CACHE``)."""
    chosen = os.environ.get("MOSSTALK_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mosstalk"


def share_the_processor() -> None:
    """Let torch's idle threads sleep instead of spin; call before torch is imported.

    Spinning, two threads on a core that another process also uses make a hop a hundred times
    slower. A policy that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
