"""A golden case: a folder with ``case.json``, weights and ``expected.safetensors``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mosstalk.config import read_json
from mosstalk.errors import CaseError


@dataclass
class Case:
    """One case: its settings and expected tensors, and which of them were looked at."""

    folder: Path
    settings: dict[str, Any]
    expected: dict[str, Tensor]
    used: set[str] = field(default_factory=set)

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


def read_case(folder: Path) -> Case:
    """Read a case's settings and expected tensors.

    Raises:
        CaseError: the folder is no case, or its files cannot be read.
        ConfigError: ``case.json`` is missing or malformed.
    """
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder; give folders that hold a case.json")
    settings = read_json(folder / "case.json")
    path = folder / "expected.safetensors"
    try:
        expected = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CaseError(f"{path}: cannot be read ({error}); copy the case again") from None
    return Case(folder, settings, expected)


def pcm_from(samples: Tensor) -> Tensor:
    """16-bit samples as float32 in [-1, 1)."""
    return samples.to(torch.float32) / 32768
