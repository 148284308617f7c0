"""Replies that have run away: codes that go round in one short cycle.

What is normal was measured on mosstalk-pocket: in 19 of its replies no cycle lasted longer than
2 codes (the same code twice), in 6 s of human speech 2, in a pause of digital silence as long as
the pause, in a second of room noise some 7.
"""

from dataclasses import dataclass, field

LONGEST_PERIOD = 8
"""Codes in the longest cycle that is looked for: 640 ms."""


@dataclass
class RepetitionDetector:
    """Watches codes as they come for a cycle that lasts ``limit`` codes after its first round."""

    limit: int | None
    _codes: list[int] = field(default_factory=list)
    _runs: list[int] = field(default_factory=lambda: [0] * LONGEST_PERIOD)

    def add(self, code: int) -> bool:
        """Take the next code; whether they have been going round for too long."""
        runs = self._runs
        for place in range(LONGEST_PERIOD):
            period = place + 1
            again = len(self._codes) >= period and self._codes[-period] == code
            runs[place] = runs[place] + 1 if again else 0
        self._codes = [*self._codes[1 - LONGEST_PERIOD :], code]
        return self.limit is not None and max(runs) >= self.limit
