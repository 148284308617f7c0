"""How long a session has lasted, and since when nothing has happened in it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mosstalk.session.events import CloseReason
from mosstalk.session.settings import Durations


@dataclass
class Timeouts:
    """Seconds on two clocks, of which the one that is further counts.

    ``heard_s`` counts the samples that came in, so that time stands still for nobody who sends
    them faster than they are; ``wall_s`` goes on for those who send none.
    """

    durations: Durations
    heard_s: Callable[[], float]
    wall_s: Callable[[], float]
    _begun: tuple[float, float] = field(init=False)
    _touched: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._touched = self._now()

    def touch(self) -> None:
        """Something happens."""
        self._touched = self._now()

    def expired(self) -> CloseReason | None:
        """Why the session must end now, if it must."""
        if self._since(self._begun) >= self.durations.longest_s:
            return CloseReason.LONGEST
        return CloseReason.IDLE if self._since(self._touched) >= self.durations.idle_s else None

    @property
    def remaining_s(self) -> float:
        """Seconds that will pass before it can be over."""
        return max(
            0.0,
            min(
                self.durations.longest_s - self._since(self._begun),
                self.durations.idle_s - self._since(self._touched),
            ),
        )

    def _now(self) -> tuple[float, float]:
        return self.heard_s(), self.wall_s()

    def _since(self, then: tuple[float, float]) -> float:
        return max(now - before for now, before in zip(self._now(), then, strict=True))
