"""Frames of a stream with the probability of speech, and what levels tell of them.

A detector judges windows of some 30 ms. Levels tell silence in far shorter frames: where in a
window speech ended, and that it has not begun again in one that is not whole yet.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.errors import AudioError

Bools = npt.NDArray[np.bool_]


class Frame(NamedTuple):
    """Samples from ``start_samples`` to before ``end_samples``, and how likely they hold speech.

    ``quiet``: they end a window that holds speech, and are silence by their level.
    """

    start_samples: int
    end_samples: int
    speech: float
    quiet: bool = False


@dataclass(frozen=True)
class Frames:
    """Frames of one length, side by side from ``start_samples`` on.

    Positions count samples of a stream at 16 kHz. ``speech`` (n,) in [0, 1] and ``quiet`` (n,) are
    those of each ``Frame``; without ``quiet`` none is.
    """

    start_samples: int
    frame_samples: int
    speech: Samples
    quiet: Bools | None = None

    def __len__(self) -> int:
        return len(self.speech)

    def __iter__(self) -> Iterator[Frame]:
        start, length = self.start_samples, self.frame_samples
        quiet = [False] * len(self) if self.quiet is None else self.quiet.tolist()
        for place, told in enumerate(zip(self.speech.tolist(), quiet, strict=True)):
            yield Frame(start + place * length, start + (place + 1) * length, *told)

    @property
    def end_samples(self) -> int:
        """Where the last frame ends; the start, if there is none."""
        return self.start_samples + len(self) * self.frame_samples


def finite(samples: Samples) -> Samples:
    """The samples as they are; a NaN would stay in a detector's memory for good.

    Raises:
        AudioError: a sample is NaN or infinite.
    """
    assert samples.ndim == 1, samples.shape
    assert samples.dtype == np.float32, samples.dtype
    if not np.isfinite(samples).all():
        raise AudioError("the sound holds NaN or infinite samples; check what sends it")
    return samples


_OVER_NOISE_DB = 4.0
_DRIFT_DB_A_S = 3.0
"""So fast noise seems to rise and speech to fall where nothing tells; noise falls by half the
difference a window."""
_QUIETEST = 1e-7
_NO_SPEECH = 0.1
"""Below it a detector says that there is no speech."""


class StreamLevels(NamedTuple):
    """How loud a stream is, in dB of full scale.

    Attributes:
        noise_db: the noise, at most 0; None before the first window.
        speech_db: the loudest, less 3 dB for each second since.
    """

    noise_db: float | None = None
    speech_db: float = -math.inf

    def after(self, level_db: float, seconds: float) -> "StreamLevels":
        """These after so many seconds at this level."""
        drift_db = _DRIFT_DB_A_S * seconds
        noise_db = float(follow_noise(self.noise_db, level_db, drift_db))
        return StreamLevels(noise_db, max(level_db, self.speech_db - drift_db))

    def quiet(self, levels_db: npt.ArrayLike, under_db: float) -> Bools:
        """Which levels lie at the noise, and so far under the speech before."""
        levels = np.asarray(levels_db, np.float64)
        if self.noise_db is None:
            return np.zeros(levels.shape, bool)
        return (levels <= self.noise_db + _OVER_NOISE_DB) & (levels < self.speech_db - under_db)


@dataclass(frozen=True)
class StreamSoFar:
    """What is known of a stream where its next window begins.

    Attributes:
        position: of that window's first sample in the stream.
        levels: how loud the stream is.
        said: the detector's probability of the window before.
        silent: whether that was silence, by the detector or by its level.
        given: samples of the next window whose frames have been handed out.
    """

    position: int = 0
    levels: StreamLevels = field(default_factory=StreamLevels)
    said: float = 0.0
    silent: bool = True
    given: int = 0

    def after(
        self,
        sound: Samples,
        speech: Samples,
        window: int,
        frame: int,
        under_db: Callable[[float], float],
    ) -> tuple["StreamSoFar", Frames]:
        """What is known after sound (m,), and the frames of ``frame`` samples that are decided.

        ``speech`` (n,) is what the detector says of its whole windows; the rest begins the next
        one. ``under_db`` says how far below speech silence lies, by what the detector says. A
        window's first frames are silence where the one before was, and by their level they are.
        """
        so_far, whole = self, len(speech) * window // frame
        powers = _powers(sound[: len(sound) // frame * frame].reshape(-1, frame))
        levels_db = _db(powers)
        windows_db = _db(powers[:whole].reshape(-1, window // frame).mean(axis=1))
        found = np.repeat(speech, window // frame)
        ends = np.zeros(found.shape, bool)
        for row, level_db in enumerate(windows_db.tolist()):
            here = slice(row * window // frame, (row + 1) * window // frame)
            quiet = so_far.levels.quiet(levels_db[here], under_db(so_far.said))
            ends[here] = _first(quiet[::-1])[::-1]
            if so_far.silent:
                found[here][_first(quiet)] = 0
            levels = so_far.levels.after(level_db, window / INPUT_RATE)
            said = float(speech[row])
            if levels.quiet(level_db, under_db(said)):
                found[here] = 0
            silent = bool(found[here].max() < _NO_SPEECH)
            so_far = StreamSoFar(so_far.position + window, levels, said, silent)
        soon = np.zeros(0, np.float32)
        if so_far.silent:
            quiet = so_far.levels.quiet(levels_db[whole:], under_db(so_far.said))
            soon = np.zeros(_first(quiet).sum(), np.float32)
        frames = Frames(
            self.position + self.given,
            frame,
            np.concatenate([found, soon])[self.given // frame :],
            np.concatenate([ends, soon > 0])[self.given // frame :],
        )
        return replace(so_far, given=len(soon) * frame), frames


def _first(true: Bools) -> Bools:
    """Which come before the first that is not."""
    return np.logical_and.accumulate(true)


def _powers(frames: Samples) -> npt.NDArray[np.float64]:
    """The mean square of each of frames (n, L)."""
    return np.einsum("nl,nl->n", frames, frames, dtype=np.float64) / frames.shape[1]


def _db(powers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 10 * np.log10(powers + _QUIETEST)


def follow_noise(
    noise: npt.ArrayLike | None, level: npt.ArrayLike, rise_db: float
) -> npt.NDArray[np.float64]:
    """The noise in dB after sound at ``level``, of any shape: it falls halfway, and rises slowly.

    ``noise`` is that before; None: there was no sound.
    """
    level = np.asarray(level, np.float64)
    if noise is None:
        return level.copy()
    noise = np.asarray(noise, np.float64)
    return np.where(level < noise, (noise + level) / 2, noise + rise_db)
