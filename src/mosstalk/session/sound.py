"""PCM as it comes and goes: checked, resampled as a stream, counted, and played."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Resampler, Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import SessionError
from mosstalk.session.commands import INPUT_RATES, Pcm
from mosstalk.session.events import ErrorCode

_FULL_SCALE = 32768.0
LONGEST_STALL_S = 3.5
"""A microphone may fall silent for so long and send what it recorded in a burst. Whoever is
silent for longer has recorded nothing meanwhile."""


def samples_of(pcm: Pcm) -> Samples:
    """Float samples (n,) of PCM; what is beyond full scale is clipped.

    Raises:
        SessionError: half a sample, or samples that are not (n,), not int16 or float, or not
            finite.
    """
    if isinstance(pcm, bytes):
        if len(pcm) % 2:
            raise SessionError(
                ErrorCode.HALF_SAMPLE,
                f"{len(pcm)} bytes end within a sample: send whole samples of 2 bytes",
            )
        pcm = np.frombuffer(pcm, "<i2")
    if pcm.ndim != 1 or pcm.dtype not in (np.int16, np.float32, np.float64):
        raise SessionError(
            ErrorCode.BAD_SOUND,
            f"sound of shape {pcm.shape} and type {pcm.dtype}: give (n,) int16 or float32",
        )
    if pcm.dtype == np.int16:
        return pcm.astype(np.float32) / np.float32(_FULL_SCALE)
    if not np.isfinite(pcm).all():
        raise SessionError(ErrorCode.BAD_SOUND, "the sound holds NaN or infinite samples")
    return pcm.clip(-1, 1).astype(np.float32)


def pcm_of(samples: Samples) -> bytes:
    """Little-endian int16 of float samples (n,); what is beyond full scale is clipped."""
    scaled: npt.NDArray[np.float32] = np.rint(samples * np.float32(_FULL_SCALE - 1))
    return scaled.clip(-_FULL_SCALE, _FULL_SCALE - 1).astype("<i2").tobytes()


class InputClock:
    """Counts the samples that came in, at whatever rates, as if all had come at 16 kHz."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._earlier, self._received = 0, 0
        """What came at other rates, at 16 kHz, and the samples since then."""

    @property
    def samples(self) -> int:
        """Samples so far, counted at 16 kHz."""
        return self._earlier + self._received * INPUT_RATE // self._rate

    def add(self, count: int, rate: int) -> None:
        """So many samples at ``rate`` Hz have come."""
        if count and rate != self._rate:
            self._earlier, self._received, self._rate = self.samples, 0, rate
        self._received += count


def require_rate(rate: int) -> None:
    """Raise SessionError for a rate in Hz that sessions do not take."""
    if rate not in INPUT_RATES:
        raise SessionError(
            ErrorCode.WRONG_RATE, f"{rate} Hz: take one of {', '.join(map(str, INPUT_RATES))} Hz"
        )


def resampled(pcm: Pcm, rate: int) -> Samples:
    """PCM (n,) at ``rate`` Hz as samples at 16 kHz.

    Raises:
        SessionError: a rate that sessions do not take, or what ``samples_of`` refuses.
    """
    require_rate(rate)
    resampler = Resampler(rate)
    return np.concatenate([resampler.push(samples_of(pcm)), resampler.flush()])


class PlaybackClock:
    """Sent sound is played at once and in order, on one clock that samples and the wall move.

    ``samples`` counts the seconds of sound that came in: a microphone runs as fast as a
    loudspeaker. While something is played the clock moves with ``wall`` as well, for those who
    send nothing while they listen. The microphone's own place on the clock may be earlier: what
    it recorded is still on its way. After a pause that is longer than any stall,
    ``skip(pause_s)`` puts it at the present.
    """

    def __init__(self, samples: Callable[[], float], wall: Callable[[], float]) -> None:
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

    def was_heard(self, item_id: str, seconds: float) -> None:
        """So much of an item was played before this session."""
        self._heard_s[item_id] = seconds

    def stop(self) -> None:
        """What was not played by now will not be."""
        for item_id in {item for item, _, _ in self._pieces}:
            self._heard_s[item_id] = self.heard_s(item_id)
        self._pieces.clear()
        self._end_s = float("-inf")
