"""One turn's codes while they come, what may still change them, and what each push did to them."""

from dataclasses import dataclass, field

from mosstalk.codec.tokenizer_segment import LiveSegment
from mosstalk.constants import INPUT_RATE


@dataclass(frozen=True)
class Change:
    """What sound did to a stream's codes: the first ``kept`` stay, ``codes`` follow them.

    ``kept`` is less than the number of codes before where some of them changed: whatever was
    computed from the others is to be dropped. ``repaired``: some were encoded again, whether
    or not they changed.
    """

    kept: int
    codes: list[int]
    repaired: bool


@dataclass(frozen=True)
class Repair:
    """One repair: after how many samples of the turn, and how many rows of 20 ms it cost."""

    at_samples: int
    rows_again: int

    @property
    def at_s(self) -> float:
        """Seconds into the turn."""
        return self.at_samples / INPUT_RATE


@dataclass
class LiveCodes:
    """One turn's codes and all that its stream keeps; only ``LiveTokenizer`` writes here.

    The first ``settled`` of ``codes`` are final, the others but for repairs. ``gaps`` says of
    each of those how much nearer its entry of the codebook is than the next one, and ``trusted``
    is the maximum that is still taken for this turn's. For the record: ``blocks`` counts the
    times that something was encoded, ``rows`` all rows of 20 ms that were, and ``ties`` the
    segments encoded whole at their end, because rounding could choose between two entries.
    """

    segment: LiveSegment = field(repr=False)
    trusted: float | None
    codes: list[int] = field(default_factory=list)
    settled: int = 0
    gaps: list[float] = field(default_factory=list)
    samples: int = 0
    finished: bool = False
    maximum_before: float | None = None
    repairs: list[Repair] = field(default_factory=list)
    blocks: int = 0
    rows: int = 0
    ties: int = 0

    @property
    def seconds(self) -> float:
        """Length of the sound that was taken."""
        return self.samples / INPUT_RATE

    @property
    def rows_again(self) -> int:
        """Rows of 20 ms that repairs encoded again: their cost."""
        return sum(repair.rows_again for repair in self.repairs)

    @property
    def maximum(self) -> float | None:
        """Log power of the loudest band of any frame, to begin the speaker's next turn with.

        Of the latest segment of which anything was encoded; None before that.
        """
        return self.segment.loudest if self.segment.frames else self.maximum_before
