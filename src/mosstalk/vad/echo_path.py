"""What is learned of the way from loudspeaker to microphone: its delay, and its loss by band.

All levels are in dB of full scale, of 20 mel bands; time goes in hops of 16 ms.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE

Levels = npt.NDArray[np.float64]

HOP_SAMPLES = 256
WINDOW_SAMPLES = 512
BANDS = 20
LAGS = 38
"""Delays that are looked for: 0 to 600 ms."""
LOWEST_DB = -110.0
_LOWEST_HZ, _HIGHEST_HZ = 150.0, 6500.0
_HOPS_PER_S = INPUT_RATE / HOP_SAMPLES

_DECAY_DB = 1.6
"""Reverberation a hop: 60 dB in 0.6 s."""
_AUDIBLE_DB = -75.0
_BELOW_PEAK_DB = 25.0
_PEAK_FALL_DB = 0.016
_FORGET_S = 3.0
_LEARNT_S = 0.75
"""Loud echo heard before the path counts as known."""
_BUSY_BANDS = 6
"""More loud bands than these make a hop one to forget older hops for."""
_HOPS_TO_FORGET = _FORGET_S * _HOPS_PER_S
_LOOK_EVERY_HOPS = 4
_LAST_HOPS = 8

HOPS = 25
"""How many hops are held against what was played: 400 ms."""
NOISE_MARGIN_DB = 3.0
AUDIBLE_OVER_NOISE_DB = 6.0
_MOST_GAIN_DB = 10.0
_MOST_MISS_DB = 20.0
_SHARED_CELLS = 2.0
"""A band's loss counts as much as so many of the mean loss of all bands."""
_MISSED_DB = 4.9
"""An echo misses its expected level by less, as the root of the mean square, a voice by more."""


def _mel_bands() -> Levels:
    """Weights (257, 20) that average the power of each band."""

    def mel(hz: float) -> float:
        return 2595 * float(np.log10(1 + hz / 700))

    edges = 700 * (10 ** (np.linspace(mel(_LOWEST_HZ), mel(_HIGHEST_HZ), BANDS + 1) / 2595) - 1)
    bins = np.fft.rfftfreq(WINDOW_SAMPLES, 1 / INPUT_RATE)[:, None]
    inside = (bins >= edges[:-1]) & (bins < edges[1:])
    return np.asarray(inside / inside.sum(axis=0))


_BAND_WEIGHTS = _mel_bands()
_WINDOW = np.hanning(WINDOW_SAMPLES) / np.sqrt(np.square(np.hanning(WINDOW_SAMPLES)).sum())


def band_levels(windows: Samples) -> Levels:
    """Levels (n, 20) in dB of windows (n, 512); white noise has its own level in every band."""
    power = np.square(np.abs(np.fft.rfft(windows * _WINDOW))) @ _BAND_WEIGHTS
    return np.asarray(10 * np.log10(np.maximum(power, 10 ** (LOWEST_DB / 10))))


@dataclass
class EchoPath:
    """Statistics of (microphone less reference) for every delay and band, older hops forgotten.

    Attributes:
        played: (62, 20) what was played 0, 1, ... hops ago, with its reverberation.
        bare: (62, 20) the same without.
        peak: (20,) the loudest of late, by band.
        sums: (3, 38, 20) over hops in which the reference was loud: how many, of the loss, of
            its squares.
        hops: how many were learned from.
        delay: in hops, the one at which the microphone follows the reference most evenly.
        loss: (20,) at that delay in dB, below zero where less comes back than is played; half
            a standard deviation above the mean.
    """

    played: Levels = field(default_factory=lambda: np.full((LAGS + HOPS - 1, BANDS), LOWEST_DB))
    bare: Levels = field(default_factory=lambda: np.full((LAGS + HOPS - 1, BANDS), LOWEST_DB))
    peak: Levels = field(default_factory=lambda: np.full(BANDS, LOWEST_DB))
    sums: Levels = field(default_factory=lambda: np.zeros((3, LAGS, BANDS)))
    hops: int = 0
    delay: int = 0
    loss: Levels = field(default_factory=lambda: np.zeros(BANDS))

    @property
    def silent(self) -> bool:
        """Whether nothing that was played can still be heard."""
        return bool(self.played[:LAGS].max() < _AUDIBLE_DB)

    @property
    def known(self) -> bool:
        """Whether enough was heard to tell an echo from a voice."""
        return bool(self.sums[0, self.delay].sum() >= _LEARNT_S * _HOPS_PER_S * BANDS)

    def play(self, levels: Levels) -> None:
        """The next hop's reference (20,)."""
        now = np.maximum(levels, self.played[0] - _DECAY_DB)
        self.played[1:], self.bare[1:] = self.played[:-1], self.bare[:-1]
        self.played[0], self.bare[0] = now, levels
        self.peak = np.maximum(self.peak - _PEAK_FALL_DB, levels)

    def fall_silent(self) -> None:
        """Nothing that was played can be heard any more."""
        self.played[:] = self.bare[:] = LOWEST_DB

    def learn(self, heard: Levels, ago: int = 0) -> None:
        """Take in the microphone (20,) of the hop ``ago`` hops before the last one played."""
        played = self.played[ago : ago + LAGS]
        loud = played > np.maximum(self.peak - _BELOW_PEAK_DB, _AUDIBLE_DB)
        busy = loud.sum(axis=1) > _BUSY_BANDS
        loss = heard - played
        loss *= loud
        self.sums *= np.where(busy, np.exp(-1 / _HOPS_TO_FORGET), 1.0)[:, None]
        self.sums[0] += loud
        self.sums[1] += loss
        loss *= loss
        self.sums[2] += loss
        if self.hops % _LOOK_EVERY_HOPS == 0:
            self._find_delay()
        self.hops += 1

    def _find_delay(self) -> None:
        count, total, squares = self.sums
        hops = np.maximum(count, 1)
        mean = total / hops
        variance = np.maximum(squares / hops - mean * mean, 0)
        heard = count.sum(axis=1)
        uneven = (variance * count).sum(axis=1) / np.maximum(heard, 1e-9)
        uneven[heard < heard.max() / 2] = np.inf
        self.delay = int(uneven.argmin())
        self.loss = mean[self.delay] + np.sqrt(variance[self.delay]) / 2

    def echo(self) -> Levels:
        """The loudest echo (38, 20) to expect now, were the delay 0, 1, ... hops.

        The loss is that of the likeliest delay: a player's delay changes from one reply to the
        next far more often than its loss does.
        """
        played = self.played[:LAGS]
        near = played.copy()
        near[1:] = np.maximum(near[1:], played[:-1])
        near[:-1] = np.maximum(near[:-1], played[1:])
        return near + self.loss

    def unlike(self, heard: Levels, noise: Levels) -> tuple[float, float]:
        """How much of what was heard of late does not follow what was played: above 0 too much.

        The first figure is that of all these hops, the second that of the last 8 of them.

        ``heard`` and ``noise`` (25, 20), the last hop first. For every delay the loss is taken
        from these hops alone; what counts is the delay at which the echo explains most. An echo
        lies between what was played and that with its reverberation: rooms differ in it.
        """
        bare, with_room = (
            np.lib.stride_tricks.sliding_window_view(_by_band(each), HOPS, axis=1)
            for each in (self.bare, self.played)
        )  # (20, 38, 25)
        here, quiet = _by_band(heard)[:, None], _by_band(noise)[:, None]
        floor = quiet + np.float32(NOISE_MARGIN_DB)
        level = np.maximum(here, floor)
        audible = here > quiet + np.float32(AUDIBLE_OVER_NOISE_DB)
        loud = np.maximum(self.peak - _BELOW_PEAK_DB, _AUDIBLE_DB)[:, None, None]
        both = audible & (bare > loud)
        count, loss = both.sum(axis=2), ((level - bare) * both).sum(axis=2)
        mean = loss.sum(axis=0) / np.maximum(count.sum(axis=0), 1)
        loss = (loss + _SHARED_CELLS * mean) / (count + _SHARED_CELLS)
        loss = np.minimum(loss, _MOST_GAIN_DB)[:, :, None].astype(np.float32)
        lowest, highest = np.maximum(bare + loss, floor), np.maximum(with_room + loss, floor)
        miss = (level - level.clip(lowest, highest)).clip(-_MOST_MISS_DB, _MOST_MISS_DB)
        told = audible | (lowest > floor + np.float32(NOISE_MARGIN_DB))
        over = ((miss * miss - np.float32(_MISSED_DB**2)) * told).sum(axis=0)
        whole = over.sum(axis=1)
        best = int(whole.argmin())
        return float(whole[best]), float(over[best, :_LAST_HOPS].sum())


def _by_band(levels: Levels) -> npt.NDArray[np.float32]:
    """Levels (n, 20) as (20, n), side by side in memory: three times as fast."""
    return np.ascontiguousarray(levels.T, np.float32)
