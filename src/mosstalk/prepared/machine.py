"""What a measurement or a build ran on and took, and whether this machine is that one."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mosstalk.environment import stated_commit

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_COMPARED = ("card", "capability", "torch", "triton")
"""What may differ from one machine to another; of these the capability and Triton decide."""


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


def host_peak_bytes() -> int | None:
    """Largest resident memory of this process; None where no counter tells."""
    try:
        import resource
    except ImportError:  # Windows has no such counter
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Peaks:
    """Watches from its making on; ``look`` now and then.

    Of a GPU: the most that torch ever held, graphs' pools included, and what the process takes
    besides (context, libraries, graphs themselves), the most of that which ``look`` has seen.
    """

    device: torch.device
    _besides: int = 0

    def __post_init__(self) -> None:
        """Begin."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> None:
        """See what a GPU has in use besides torch's memory."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            besides = total - free - torch.cuda.memory_reserved(self.device)
            self._besides = max(self._besides, besides)

    @property
    def device_bytes(self) -> int | None:
        """The GPU's peak; None without one."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_reserved(self.device) + self._besides

    def as_values(self) -> dict[str, int | None]:
        """For documents."""
        return {"host": host_peak_bytes(), "device": self.device_bytes}
