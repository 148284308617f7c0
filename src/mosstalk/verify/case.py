"""A golden case: a folder with ``case.json``, weights and ``expected.safetensors``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mosstalk.errors import CaseError
from mosstalk.files import read_json

EXPECTED = "expected.safetensors"


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
        named = None if self._holds_weights() else self.settings.get("weights")
        chosen = self.given_weights or (self.folder / str(named) if named else self.folder)
        if not chosen.is_dir():
            raise CaseError(
                f"{self.folder}: its weights are not at {chosen}; say where with --weights DIR"
            )
        part = chosen / ("model" if self.component == "language_model" else "codec")
        return part if part.is_dir() else chosen

    def _holds_weights(self) -> bool:
        files = {path for path in self.folder.iterdir() if path.name != EXPECTED}
        return any(path.suffix in (".safetensors", ".pt") for path in files)

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
        CaseError: the folder is no case, or its files cannot be read.
        ConfigError: ``case.json`` is missing or malformed.
    """
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder; give folders that hold a case.json")
    settings = read_json(folder / "case.json")
    path = folder / EXPECTED
    try:
        expected = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CaseError(f"{path}: cannot be read ({error}); copy the case again") from None
    return Case(folder, settings, expected, given_weights=weights)


def pcm_from(samples: Tensor) -> Tensor:
    """16-bit samples as float32 in [-1, 1)."""
    return samples.to(torch.float32) / 32768
