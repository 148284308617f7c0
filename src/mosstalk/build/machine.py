"""What kernels were compiled for, and whether this machine is that one."""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mosstalk.bench.machine import machine_facts

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_COMPARED = ("card", "capability", "torch", "triton")
"""What may differ from one machine to another; of these the capability and Triton decide."""


def machine_of(device: torch.device, weights: str) -> dict[str, Any]:
    """Versions and, of a GPU, its name, capability, memory in bytes and driver.

    Without a GPU these four are None.
    """
    facts: dict[str, Any] = {
        **machine_facts(device, weights),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "platform": sys.platform,
    }
    card = dict.fromkeys(("card", "capability", "memory_bytes", "driver"))
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        card |= {
            "card": torch.cuda.get_device_name(device),
            "capability": f"{major}.{minor}",
            "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "driver": _driver(),
        }
    return facts | card


def foreign(built: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What of a build's machine is not so here, a line each; empty where all kernels serve."""
    if built["card"] is None:
        return ["it was built without a GPU, so no kernel was compiled"] if here["card"] else []
    if here["card"] is None:
        return ["there is no GPU here: kernels are not used"]
    return [
        f"{name} is {here[name]} here, and {built[name]} where it was built"
        for name in _COMPARED
        if here[name] != built[name]
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The kernel module's version; torch knows that of the interface alone."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None
