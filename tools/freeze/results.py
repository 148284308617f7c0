"""What was recorded: a folder of items, one json file each, and the sounds that they name."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sound = NDArray[np.int16] | NDArray[np.float32] | NDArray[np.uint8]


class Results:
    """Writes items and sounds below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sounds").mkdir(parents=True)

    def add(self, name: str, value: Any) -> None:
        """Keep an item under a name such as ``speak/plain``."""
        path = self._folder / "items" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise ValueError(f"two items are called {name}")
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def sound(self, samples: Sound, rate: int) -> dict[str, Any]:
        """Keep a sound (n,) or (n, channels); what an item says of it."""
        digest = hashlib.sha256(np.ascontiguousarray(samples).tobytes()).hexdigest()
        np.save(self._folder / "sounds" / f"{digest}.npy", samples)
        return {"sha256": digest, "samples": len(samples), "rate": rate, "type": str(samples.dtype)}


def read_items(folder: Path) -> dict[str, Any]:
    """All items of a folder by name."""
    root = folder / "items"
    return {
        str(path.relative_to(root).with_suffix("")): json.loads(path.read_text())
        for path in sorted(root.rglob("*.json"))
    }


def apart(old: Path, new: Path, digests: tuple[str, str]) -> float | None:
    """The largest difference of two sounds, full scale being 1; None if their lengths differ."""
    names = [f / "sounds" / f"{d}.npy" for f, d in zip((old, new), digests, strict=True)]
    if not all(name.exists() for name in names):
        return None
    one, other = (np.load(name) for name in names)
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    scale = 32768.0 if one.dtype == np.int16 else 1.0
    return float(np.abs(one.astype(np.float64) - other).max(initial=0.0) / scale)


def hashes(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, or of every file below a folder."""
    files = sorted(path for path in [folder, *folder.rglob("*")] if path.is_file())
    return {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }  # fmt: skip


MEASURED = (
    "_ms", "_s", "_gib", "real_time_factor", "share", "peak_memory_mib", "peaks_bytes", "error",
    "errors",
)  # fmt: skip
"""Ends of the keys under which documents have what was measured, on this machine and now."""
_HEARD = ("seconds", "audio_s", "start_s", "end_s")


def masked(value: Any, measured: tuple[str, ...] = MEASURED, kept: tuple[str, ...] = _HEARD) -> Any:
    """A document without numbers under keys that end so, however deep below them."""
    if isinstance(value, list):
        return [masked(each, measured, kept) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _number_free(each)
        if key.endswith(measured) and key not in kept
        else masked(each, measured, kept)
        for key, each in value.items()
    }


def _number_free(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number_free(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_number_free(each) for each in value]
    return "#" if isinstance(value, int | float) and not isinstance(value, bool) else value
