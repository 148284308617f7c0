"""How evenly loud a recording's speech is: what tells two people or a moved microphone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples

JUMP_DB = 12.0
"""Difference between two stretches of speech that one person at one distance rarely makes."""
_FRAME_MS = 20
_STEP_FRAMES = 12
_WINDOW_FRAMES = 25
"""A window is 500 ms, and one begins every 240 ms."""
_STRETCH_WINDOWS = 4
"""Neighbouring windows that make a stretch: 1.22 s, so that one word cannot decide."""
_FLOOR_PERCENTILE = 5.0
_ABOVE_FLOOR_DB = 6.0
_SWING_DB = 8.0
"""Speech rises and falls by more than this within 500 ms; hiss and hum do not."""
_SILENCE_DB = -100.0


@dataclass(frozen=True)
class Jump:
    """Two stretches of speech of unlike level: where in seconds each begins, how far apart."""

    decibels: float
    loud_s: float
    quiet_s: float


def loudness_jump(samples: Samples, rate: int) -> Jump | None:
    """The largest difference in level between two stretches of speech, if above ``JUMP_DB``.

    ``samples`` (n,) mono at ``rate`` Hz. A window of 500 ms counts as speech when it lies above
    the noise floor (the 5th percentile of 20 ms levels) and swings as speech does. Of two
    stretches of at least 1 s, the quietest window of one is compared with the loudest window
    of the other, so that the fall at the end of a sentence makes no jump.
    """
    frames_db = _frame_levels(samples, rate)
    starts, levels = _speech_windows(frames_db)
    if len(levels) < _STRETCH_WINDOWS:
        return None
    stretches = np.lib.stride_tricks.sliding_window_view(levels, _STRETCH_WINDOWS)
    loud, quiet = stretches.min(axis=1), stretches.max(axis=1)
    decibels = float(loud.max() - quiet.min())
    if decibels <= JUMP_DB:
        return None
    at_loud, at_quiet = (
        float(starts[index]) * _FRAME_MS / 1000 for index in (loud.argmax(), quiet.argmin())
    )
    return Jump(decibels, at_loud, at_quiet)


def _frame_levels(samples: Samples, rate: int) -> npt.NDArray[np.float64]:
    """Mean power of each 20 ms, (frames,) in dB of full scale."""
    size = rate * _FRAME_MS // 1000
    whole = samples[: len(samples) // size * size].reshape(-1, size).astype(np.float64)
    return np.asarray(10 * np.log10(np.square(whole).mean(axis=1) + 10 ** (_SILENCE_DB / 10)))


def _speech_windows(
    frames_db: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """First frame and level (90th percentile of its frames) of each window that holds speech."""
    if len(frames_db) < _WINDOW_FRAMES:
        return np.zeros(0, np.int64), np.zeros(0)
    floor = np.percentile(frames_db, _FLOOR_PERCENTILE)
    windows = np.lib.stride_tricks.sliding_window_view(frames_db, _WINDOW_FRAMES)[::_STEP_FRAMES]
    low, high = np.percentile(windows, (10.0, 90.0), axis=1)
    speech = (high > floor + _ABOVE_FLOOR_DB) & (high - low > _SWING_DB)
    starts = np.arange(len(windows)) * _STEP_FRAMES
    return starts[speech], high[speech]
