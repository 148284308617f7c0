"""PCM as it comes and goes: checked samples in, resampled as a stream; int16 out."""

import numpy as np
import numpy.typing as npt
import soxr

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import SessionError
from mosstalk.session.commands import Pcm
from mosstalk.session.events import ErrorCode
from mosstalk.session.settings import INPUT_RATES

_FULL_SCALE = 32768.0
_QUALITY = "HQ"
"""At 24 kHz it holds sound back for 37 ms at most, where "VHQ" does so for 76."""


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


class Resampler:
    """A stream at ``rate`` Hz to 16 kHz; the same samples however it is cut.

    They are those of ``soxr.resample`` on the whole stretch from one ``flush`` to the next.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._stream = self._fresh()

    def push(self, samples: Samples) -> Samples:
        """What can be given after these samples; the rest is held back."""
        if self._stream is None:
            return samples
        return np.asarray(self._stream.resample_chunk(samples), np.float32)

    def flush(self) -> Samples:
        """What was held back; what comes next begins anew."""
        nothing = np.zeros(0, np.float32)
        if self._stream is None:
            return nothing
        rest = np.asarray(self._stream.resample_chunk(nothing, last=True), np.float32)
        self._stream = self._fresh()
        return rest

    def _fresh(self) -> soxr.ResampleStream | None:
        if self.rate == INPUT_RATE:
            return None
        return soxr.ResampleStream(self.rate, INPUT_RATE, 1, dtype="float32", quality=_QUALITY)


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


def resampled(samples: Samples, rate: int) -> Samples:
    """Samples (n,) at ``rate`` Hz as samples at 16 kHz.

    Raises:
        SessionError: a rate that sessions do not take.
    """
    require_rate(rate)
    resampler = Resampler(rate)
    return np.concatenate([resampler.push(samples), resampler.flush()])
