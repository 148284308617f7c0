"""What the listener has heard by now, as far as the one who sends the sound can tell."""

from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass
class _Line:
    """Pieces of sound played one after the other on one clock, each as soon as it was sent."""

    clock: Clock
    pieces: list[tuple[str, float, float]] = field(default_factory=list)
    """Of each piece its item, when it begins, and its seconds."""
    end_s: float = float("-inf")

    def add(self, item_id: str, seconds: float) -> float:
        begin = max(self.end_s, self.clock())
        self.pieces.append((item_id, begin, seconds))
        self.end_s = begin + seconds
        return begin

    def played_s(self, item_id: str) -> float:
        now = self.clock()
        mine = ((begin, seconds) for item, begin, seconds in self.pieces if item == item_id)
        return sum(min(max(now - begin, 0.0), seconds) for begin, seconds in mine)

    def stop(self) -> None:
        self.pieces.clear()
        self.end_s = float("-inf")


class Playback:
    """Sent sound is played at once and in order, at the speed of whichever clock is ahead.

    One clock counts the samples that come in meanwhile: a microphone runs as fast as a
    loudspeaker. The other is the wall's, for those who send nothing while they listen.
    """

    def __init__(self, *clocks: Clock) -> None:
        self._lines = [_Line(clock) for clock in clocks]
        self._heard_s: dict[str, float] = {}

    def sent(self, item_id: str, seconds: float) -> float:
        """More sound of an item is on its way; when it will be heard, by the first clock."""
        if not self.audible:
            self.stop()
        begins = [line.add(item_id, seconds) for line in self._lines]
        return begins[0]

    @property
    def audible(self) -> bool:
        """Whether something is being played now."""
        return all(line.clock() < line.end_s for line in self._lines)

    @property
    def latest(self) -> str | None:
        """The item whose sound was sent last, unless that was stopped."""
        pieces = self._lines[0].pieces
        return pieces[-1][0] if pieces else None

    def heard_s(self, item_id: str) -> float:
        """Seconds of an item that have been played."""
        played = max(line.played_s(item_id) for line in self._lines)
        return self._heard_s.get(item_id, 0.0) + played

    def stop(self) -> None:
        """What was not played by now will not be."""
        for item_id in {item for item, _, _ in self._lines[0].pieces}:
            self._heard_s[item_id] = self.heard_s(item_id)
        for line in self._lines:
            line.stop()
