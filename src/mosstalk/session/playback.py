"""What the listener has heard by now, as far as the one who sends the sound can tell."""

from collections.abc import Callable

Clock = Callable[[], float]

LONGEST_STALL_S = 3.5
"""A microphone may fall silent for so long and send what it recorded in a burst. Whoever is
silent for longer has recorded nothing meanwhile."""


class PlaybackClock:
    """Sent sound is played at once and in order, on one clock that samples and the wall move.

    ``samples`` counts the seconds of sound that came in: a microphone runs as fast as a
    loudspeaker. While something is played the clock moves with ``wall`` as well, for those who
    send nothing while they listen. The microphone's own place on the clock may be earlier: what
    it recorded is still on its way. After a pause that is longer than any stall,
    ``skip(pause_s)`` puts it at the present.
    """

    def __init__(self, samples: Clock, wall: Clock) -> None:
        self._samples, self._wall = samples, wall
        self._skipped_s = 0.0
        self._wall_ahead_s = float("-inf")
        """What the clock is, less the wall's time, while something is played."""
        self._pieces: list[tuple[str, float, float]] = []
        """Of each piece its item, when it begins, and its seconds."""
        self._end_s = float("-inf")
        self._heard_s: dict[str, float] = {}

    @property
    def _microphone_s(self) -> float:
        return self._samples() + self._skipped_s

    @property
    def _now_s(self) -> float:
        return max(self._microphone_s, self._wall() + self._wall_ahead_s)

    def sent(self, item_id: str, seconds: float) -> float:
        """More sound of an item is on its way; when it will be heard, counted in samples."""
        if not self.audible:
            self.stop()
            self._wall_ahead_s = self._microphone_s - self._wall()
        begin = max(self._end_s, self._now_s)
        self._pieces.append((item_id, begin, seconds))
        self._end_s = begin + seconds
        return begin - self._skipped_s

    @property
    def audible(self) -> bool:
        """Whether something is being played now."""
        return self._now_s < self._end_s

    @property
    def audible_to_microphone(self) -> bool:
        """Whether something was being played when the next sample was recorded."""
        return self._microphone_s < self._end_s

    @property
    def pause_s(self) -> float:
        """For how long nothing was recorded until now; 0 if that may still be on its way."""
        behind_s = self._now_s - self._microphone_s
        return behind_s if behind_s > LONGEST_STALL_S else 0.0

    def skip(self, seconds: float) -> None:
        """The next sample was recorded so much later than the last one."""
        self._skipped_s += seconds

    @property
    def latest(self) -> str | None:
        """The item whose sound was sent last, unless that was stopped."""
        return self._pieces[-1][0] if self._pieces else None

    def heard_s(self, item_id: str) -> float:
        """Seconds of an item that have been played."""
        now_s = self._now_s
        mine = ((begin, seconds) for item, begin, seconds in self._pieces if item == item_id)
        played = sum(min(max(now_s - begin, 0.0), seconds) for begin, seconds in mine)
        return self._heard_s.get(item_id, 0.0) + played

    def stop(self) -> None:
        """What was not played by now will not be."""
        for item_id in {item for item, _, _ in self._pieces}:
            self._heard_s[item_id] = self.heard_s(item_id)
        self._pieces.clear()
        self._end_s = float("-inf")
