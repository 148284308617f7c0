"""What a reply is drawn with, and how long it may be. No torch."""

import math
from dataclasses import dataclass

from mosstalk.errors import OptionError


@dataclass(frozen=True)
class SamplingOptions:
    """How ids are drawn; the defaults are the public demo's. Temperature 0 is greedy."""

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
    repetition_penalty: float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise OptionError for values no distribution follows from."""
        if not 0 <= self.temperature < math.inf:
            raise OptionError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise OptionError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")


@dataclass(frozen=True)
class Limits:
    """How long a reply may be, in rows; ``min_new_rows`` holds eosp back, as published."""

    max_new_rows: int = 1024
    min_new_rows: int = 0

    def __post_init__(self) -> None:
        """Raise OptionError where no row could ever be generated."""
        if self.max_new_rows < 1:
            raise OptionError(f"max_new_rows must be at least 1, not {self.max_new_rows}")
