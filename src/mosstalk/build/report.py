"""What a built folder is like here and now: its files, and whether its kernels serve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mosstalk.build.machine import foreign, machine_of
from mosstalk.checkpoint.restartable import sha256
from mosstalk.errors import CheckpointError
from mosstalk.prepared.folder import CODEC, ENGINE_FILE, MODEL, BuiltEngine
from mosstalk.prepared.kernel_cache import Kernels, kernels_in
from mosstalk.prepared.tiles import TILES_FILE, tiles_for
from mosstalk.progress import Progress
from mosstalk.runtime.device import pick_device


@dataclass(frozen=True)
class Report:
    """``foreign``: what of the machine is not as at the build; ``problems``: what is wrong."""

    engine: BuiltEngine
    kernels: Kernels
    foreign: list[str]
    problems: list[str]


def report_of(engine: BuiltEngine, *, hashes: bool, tell: Progress) -> Report:
    """Look at a built folder; ``hashes``: read every byte of model and codec."""
    here = machine_of(pick_device("auto"), str(engine.values["weights"]))
    kernels = kernels_in(engine.cache)
    strange = foreign(engine.values["machine"], here)
    if engine.values["kernels"]["count"] > kernels.count:
        lost = engine.values["kernels"]["count"] - kernels.count
        strange.append(f"{lost} compiled kernels are gone from {engine.cache.name}/")
    problems = _problems(engine, hashes=hashes, tell=tell) + _tile_problems(engine, here)
    return Report(engine, kernels, strange, problems)


def _tile_problems(engine: BuiltEngine, here: Mapping[str, Any]) -> list[str]:
    path = engine.folder / TILES_FILE
    if engine.values.get("tiles") and not path.is_file():
        return [f"{TILES_FILE} is missing: the package's tiles are used; build it again"]
    try:
        tiles_for(path, here)
    except CheckpointError as error:
        return [str(error)]
    return []


def _problems(engine: BuiltEngine, *, hashes: bool, tell: Progress) -> list[str]:
    found = []
    for part in (MODEL, CODEC):
        for name, digest in engine.values["files"][part].items():
            path = engine.folder / part / name
            if not path.is_file():
                found.append(f"{part}/{name} is missing: build it again")
            elif hashes and sha256(path, tell) != digest:
                found.append(
                    f"{part}/{name} is not the file that {ENGINE_FILE} was made of: build it again"
                )
    return found
