"""Golden cases, and whether what is found is near enough to them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosstalk.errors import CaseError
from mosstalk.files import read_json
from mosstalk.models.weights import open_safetensors, stored_at

EXPECTED = "expected.safetensors"
ABSOLUTE = 2e-4
RELATIVE = 1e-5
"""Float32 bound of a tensor: ABSOLUTE + RELATIVE x its largest expected magnitude."""
WAVE = 1e-3
"""Float32 bound of waves and vocoder sources."""
LOW_PRECISION = {torch.bfloat16: 0.2, torch.float16: 0.05}
"""In lower precision a tensor passes where ||error|| / ||expected|| is at most this.

These bounds are this project's own, wide enough for rounding and far below what a wrong
operation gives. Ids and rows are then compared and printed, but not judged: one rounding
can turn a greedy choice, and everything after it.
"""


@dataclass
class Case:
    """One case: its settings and expected tensors, and which of them were looked at."""

    folder: Path
    settings: dict[str, Any]
    expected: dict[str, Tensor]
    used: set[str] = field(default_factory=set)
    given_weights: Path | None = None

    @property
    def weights(self) -> Path:
        """The folder that the weights are read from.

        It is the one given from outside, else the case's own where it holds weights, else
        what ``weights`` in ``case.json`` names. A folder with ``model`` and ``codec`` in it
        stands for the one of the two that the component belongs to.

        Raises:
            CaseError: there is no such folder.
        """
        names = {path.name.removesuffix(".xz") for path in self.folder.iterdir()} - {EXPECTED}
        own = any(name.endswith((".safetensors", ".pt")) for name in names)
        named = None if own else self.settings.get("weights")
        chosen = self.given_weights or (self.folder / str(named) if named else self.folder)
        if not chosen.is_dir():
            raise CaseError(
                f"{self.folder}: its weights are not at {chosen}; say where with --weights DIR"
            )
        part = chosen / ("model" if self.component == "language_model" else "codec")
        return part if part.is_dir() else chosen

    @property
    def component(self) -> str:
        """Which part of the model the case is about."""
        return str(self.settings.get("component"))

    def get(self, key: str) -> Any:
        """A setting; raise CaseError where it is missing."""
        if key not in self.settings:
            raise CaseError(f"{self.folder}/case.json: key {key!r} is missing")
        return self.settings[key]

    def has(self, name: str) -> bool:
        """Whether a tensor is expected."""
        return name in self.expected

    def wants(self, name: str) -> bool:
        """Whether to compare a tensor: always in a case that brings its own weights.

        A case recorded from weights that lie elsewhere compares what could be recorded.
        """
        return self.weights == self.folder or self.has(name)

    def tensor(self, name: str) -> Tensor:
        """An expected tensor; raise CaseError where it is missing."""
        if name not in self.expected:
            raise CaseError(f"{self.folder}/expected.safetensors: tensor {name!r} is missing")
        self.used.add(name)
        return self.expected[name]

    @property
    def unused(self) -> list[str]:
        """Expected tensors that nothing was compared with."""
        return sorted(set(self.expected) - self.used)


def read_case(folder: Path, weights: Path | None = None) -> Case:
    """Read a case's settings and expected tensors; ``weights`` says where its weights are.

    Raises:
        CaseError: the folder is no case, or nothing in it says what is expected.
        CheckpointError: what is expected is damaged.
        ConfigError: ``case.json`` is missing or malformed.
    """
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder; give folders that hold a case.json")
    settings = read_json(folder / "case.json")
    path = folder / EXPECTED
    if not stored_at(path).exists():
        raise CaseError(f"{path}: no such file; copy the case again")
    expected = {name: stored.load() for name, stored in open_safetensors(path).items()}
    return Case(folder, settings, expected, given_weights=weights)


def pcm_from(samples: Tensor) -> Tensor:
    """16-bit samples as float32 in [-1, 1)."""
    return samples.to(torch.float32) / 32768


@dataclass(frozen=True)
class Check:
    """One comparison: the error, its bound, and whether it counts."""

    name: str
    error: float
    bound: float
    judged: bool = True
    note: str = ""

    @property
    def passed(self) -> bool:
        """Within the bound; NaN never is."""
        return self.error <= self.bound or not self.judged


@dataclass(frozen=True)
class Comparer:
    """Compares results computed in ``dtype``."""

    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether float32 bounds apply and ids must be equal."""
        return self.dtype not in LOW_PRECISION

    def tensor(self, name: str, found: Tensor, expected: Tensor, *, wave: bool = False) -> Check:
        """Compare shapes and values of floating-point tensors."""
        found, expected = found.detach().double().cpu(), expected.double()
        if found.shape != expected.shape:
            note = f"shape {list(found.shape)}, expected {list(expected.shape)}"
            return Check(name, float("inf"), 0.0, note=note)
        difference = found - expected
        if not self.exact:
            error = float(difference.norm() / expected.norm().clamp_min(1e-12))
            return Check(name, error, LOW_PRECISION[self.dtype], note="relative norm")
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        bound = WAVE if wave else ABSOLUTE + RELATIVE * largest
        return Check(name, float(difference.abs().max()) if expected.numel() else 0.0, bound)

    def ids(self, name: str, found: list[int] | list[list[int]], expected: Tensor) -> Check:
        """Compare ids, rows or modes: they must be equal one by one."""
        wanted = expected.tolist()
        equal = sum(a == b for a, b in zip(found, wanted, strict=False))
        different = max(len(found), len(wanted)) - equal
        note = f"{equal} of {len(wanted)} equal"
        return Check(name, float(different), 0.0, judged=self.exact, note=note)

    def value(self, name: str, found: object, expected: object, *, always: bool = False) -> Check:
        """Compare a plain value, such as a finish reason; ``always`` judges in any precision."""
        note = f"{found}" if found == expected else f"{found}, expected {expected}"
        error = 0.0 if found == expected else 1.0
        return Check(name, error, 0.0, judged=self.exact or always, note=note)
