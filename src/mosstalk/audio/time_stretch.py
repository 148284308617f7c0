"""Speech faster or slower at its own pitch, by WSOLA.

W. Verhelst and M. Roelands, "An overlap-add technique based on waveform similarity (WSOLA) for
high quality time-scale modification of speech", ICASSP 1993.
"""

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples

SLOWEST, FASTEST = 0.25, 4.0
_WINDOW_S, _SEARCH_S = 0.04, 0.0125
"""A window holds four periods of a voice at 100 Hz, and one period is found on either side."""
_LEAST_ENERGY = 1e-9


class TimeStretch:
    """Sound at ``speed`` times its pace, the same samples however it is cut into pieces.

    Windows of 40 ms overlap by half in what goes out. Each is taken from where it belongs in what
    came in, or from up to 12.5 ms beside it: where it looks most like what would have followed the
    window before, so that the two add up without a break.
    """

    def __init__(self, speed: float, rate: int) -> None:
        assert SLOWEST <= speed <= FASTEST, speed
        self._speed = speed
        self._hop = round(rate * _WINDOW_S / 2)
        self._reach = round(rate * _SEARCH_S)
        rising = np.hanning(2 * self._hop + 1)[: self._hop]
        self._rising, self._falling = rising, 1 - rising
        self._came = self._windows = 0
        """Samples that came in, and windows that were taken."""
        self._buffer = np.zeros(0)
        self._start = 0
        """Where the buffer begins in what came in, and below, what follows the latest window."""
        self._next = 0

    def push(self, samples: Samples) -> Samples:
        """What can be said of samples (n,) and those before: (m,), perhaps none."""
        self._came += len(samples)
        self._buffer = np.concatenate((self._buffer, samples))
        return self._stretched(int(self._came / self._speed))

    def finish(self) -> Samples:
        """The rest: in all as many samples went out as came in, over the speed."""
        left = round(self._came / self._speed) - self._gone
        hops = -(-left // self._hop)
        silence = round((hops + 4) * self._hop * max(1.0, self._speed)) + 2 * self._reach
        self._buffer = np.concatenate((self._buffer, np.zeros(silence)))
        return self._stretched(self._gone + hops * self._hop)[:left]

    def _stretched(self, last: int) -> Samples:
        """Hops that there is enough of, until so many samples went out."""
        hops = [np.zeros(0)]
        while self._gone + self._hop <= last and self._needed <= len(self._buffer):
            hops.append(self._hop_out())
        return np.concatenate(hops).astype(np.float32)

    @property
    def _gone(self) -> int:
        """Samples that went out."""
        return self._windows * self._hop

    @property
    def _target(self) -> int:
        """Where the next window belongs in what came in."""
        return round(self._gone * self._speed)

    @property
    def _needed(self) -> int:
        """Samples of the buffer that the next window is chosen from."""
        last = max(self._target + self._reach, self._next) + 2 * self._hop
        return last - self._start

    def _hop_out(self) -> npt.NDArray[np.float64]:
        """Take the next window, and what it makes of the overlap with the one before."""
        following = self._cut(self._next)
        place = self._chosen(following) if self._windows else 0
        chosen = self._cut(place)
        out = following[: self._hop] * self._falling + chosen[: self._hop] * self._rising
        self._windows += 1
        self._next = place + self._hop
        unused = min(self._next, max(0, self._target - self._reach)) - self._start
        self._buffer = self._buffer[unused:]
        self._start += unused
        return out

    def _chosen(self, following: npt.NDArray[np.float64]) -> int:
        """The place near the target where the sound is most like ``following`` (2 hops,)."""
        first = max(0, self._target - self._reach)
        size = 2 * self._hop
        begin = first - self._start
        near = self._buffer[begin : self._target + self._reach + size - self._start]
        power = np.concatenate(([0.0], np.cumsum(near * near)))
        energy = power[size:] - power[:-size]
        likeness = np.correlate(near, following) / np.sqrt(np.maximum(energy, _LEAST_ENERGY))
        return first + int(likeness.argmax())

    def _cut(self, place: int) -> npt.NDArray[np.float64]:
        """Two hops of what came in."""
        begin = place - self._start
        return self._buffer[begin : begin + 2 * self._hop]
