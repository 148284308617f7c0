"""What a measurement or a build ran on, and whether this machine is that one."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mosstalk.environment import stated_commit


def machine_facts(device: torch.device, weights: str) -> dict[str, str]:
    """For the head of every table and document. ``weights``: synthetic, pocket or real."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mosstalk": version("mosstalk"),
        "commit": commit(),
        "weights": weights,
    }


def device_name(device: torch.device) -> str:
    """The GPU's own name, or the processor with its cores and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of the source that runs, with a mark if it was changed; "unknown" elsewhere.

    Where the source travels without its history, ``MOSSTALK_COMMIT`` may say it.
    """
    stated = stated_commit()
    if stated:
        return stated
    here = Path(__file__).parent
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


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
