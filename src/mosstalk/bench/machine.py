"""What a measurement ran on: device, versions, commit, and the kind of weights."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

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
