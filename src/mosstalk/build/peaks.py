"""The most memory that a process took, of the host and of a GPU."""

import sys
from dataclasses import dataclass, field

import torch


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
    _besides: int = field(default=0)

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
