"""Tell the assistant's own voice, come back through the microphone, from a user who speaks.

No echo is removed. The levels of 20 bands at the microphone are held against those of what is
being played: an echo follows them at some delay and some loss, which are learned while it
plays, and a user is what exceeds them. (The double-talk detectors of acoustic echo control do
the same with waveforms; see Hänsler and Schmidt 2004, "Acoustic Echo and Noise Control",
chapter 13. Levels bear delays that jump, reverberation and bad loudspeakers better.)

``EchoPath`` is what is learned of the way from loudspeaker to microphone: its delay, and its loss
by band. All levels are in dB of full scale, of 20 mel bands; time goes in hops of 16 ms.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.vad.frames import Frames, finite, follow_noise

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

    def rest(self, hops: int) -> None:
        """``play`` nothing for so many hops."""
        decayed = self.played[0] - _DECAY_DB * np.arange(hops, 0, -1)[:, None]
        silence = np.full((hops, BANDS), LOWEST_DB)
        self.played = np.concatenate([decayed.clip(LOWEST_DB), self.played[:-hops]])
        self.bare = np.concatenate([silence, self.bare[:-hops]])
        self.peak = np.maximum(self.peak - _PEAK_FALL_DB * hops, LOWEST_DB)

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


ECHO_BELOW_DB = 1.75
"""Mean excess over the expected echo below which a frame is one.

Measured in simulated rooms: `mosstalk bench vad` prints what follows from it.
"""
_SMOOTHING = 1 - float(np.exp(-HOP_SAMPLES / 1280))
"""Over 80 ms, as the score jumps from hop to hop."""
_NOISE_RISE_DB = 0.05
_FEWEST_BANDS = 5
_MOST_EXCESS_DB = 20.0
_SURE = 2500.0
"""``EchoPath.unlike`` beyond which, on either side, a verdict need not wait for more."""
_RECENT_HOPS = 12
"""Echo is told with certainty only so late, as a voice shows some 0.2 s after its beginning."""
_IDLE_HOPS = 32
"""While nothing is played, levels are worked out for so many hops at once: far less work."""
_LONGEST_HOPS = HOPS - 1
"""Whatever is still undecided after 0.4 s is what is likelier."""
_NOTHING: Samples = np.zeros(0, np.float32)


@dataclass
class EchoState:
    """All that the gate knows of one stream; positions count the microphone's samples.

    Attributes:
        position: where the next window begins.
        heard: microphone samples from there on, fewer than a window.
        idle: pieces of 256 microphone samples before it, of hops in which nothing was played and
            whose levels are not worked out yet.
        reference: what is played from there on, as far as it is known.
        path: what is learned of the way from one to the other.
        noise: (20,) the microphone's noise by band, None before the first hop.
        scores: (38,) mean excess by delay.
        late: (2, 25, 20) the microphone and its noise, the last hop first.
        verdict: whether the last hop is echo, None while that is undecided.
        verdicts: of the hops from number ``first`` on that no frame has needed yet.
        open: how many hops after those are undecided, or too recent to be called echo.
        waiting: probabilities of the frames that are held back.
    """

    position: int = 0
    heard: Samples = field(default_factory=lambda: _NOTHING)
    idle: list[Samples] = field(default_factory=list)
    reference: Samples = field(default_factory=lambda: _NOTHING)
    path: EchoPath = field(default_factory=EchoPath)
    noise: Levels | None = None
    scores: Levels = field(default_factory=lambda: np.zeros(LAGS))
    late: Levels = field(default_factory=lambda: np.full((2, HOPS, BANDS), LOWEST_DB))
    verdict: bool | None = False
    first: int = 0
    verdicts: list[bool] = field(default_factory=list)
    open: int = 0
    waiting: Samples = field(default_factory=lambda: _NOTHING)


class EchoGate:
    """Takes speech out of frames in which nothing but the assistant is heard, for one stream.

    Until 0.75 s of loud echo have been heard, frames that come while the assistant plays are held
    back until what was heard in them, and 0.4 s before, follows what was played, or does not: a
    voice is then handed on from its beginning. A path is learned from echo alone.
    A loudspeaker turned up by 6 dB between replies is taken for a user once, then learned; a
    microphone whose gain wanders by 4 dB within seconds, now and then. A delay may change.
    ``state`` may be copied (``copy.deepcopy``) and put back.
    """

    def __init__(self) -> None:
        self.state = EchoState()

    def played(self, samples: Samples, at_samples: int | None = None) -> None:
        """What is played: (n,) float32 at 16 kHz, from the microphone's sample ``at_samples`` on.

        As the player's clock has it: the microphone may hear it 0 to 600 ms later. Without
        ``at_samples`` it follows on what was given before, or begins with the next sample heard.
        What is already past is dropped. What was known of that time and later is forgotten, so
        a stretch may be given anew when the player's clock turns out to be another.

        Raises:
            AudioError: a sample is NaN or infinite.
        """
        state = self.state
        known = state.reference
        begin = max(len(known), len(state.heard))
        if at_samples is not None:
            begin = at_samples - state.position
        samples = finite(samples)[max(-begin, 0) :]
        begin = max(begin, 0)
        gap = np.zeros(max(begin - len(known), 0), np.float32)
        state.reference = np.concatenate([known[:begin], gap, samples])

    def stopped(self, at_samples: int) -> None:
        """Playing was cut off at the microphone's sample ``at_samples``."""
        self.state.reference = self.state.reference[: max(at_samples - self.state.position, 0)]

    def paused(self, samples: int, at_samples: int) -> None:
        """Nothing was recorded for so many ``samples`` before the microphone's ``at_samples``.

        What was to be played meanwhile is past.
        """
        state = self.state
        begin = max(at_samples - state.position, 0)
        known = state.reference
        state.reference = np.concatenate([known[:begin], known[begin + samples :]])
        state.path.fall_silent()

    @property
    def held(self) -> int:
        """How many frames are held back until they are decided."""
        return len(self.state.waiting)

    def forget(self) -> None:
        """What is held back is no speech that matters."""
        self.state.waiting = np.zeros_like(self.state.waiting)

    def heard(self, samples: Samples, frames: Frames) -> Frames:
        """Hear the microphone's next samples (n,), and judge the frames found in them.

        ``frames`` are what a detector gave for these same samples. Returns those that are
        decided by now, held back ones first, with probability 0 where there is only echo.

        Raises:
            AudioError: a sample is NaN or infinite.
        """
        state = self.state
        state.heard = np.concatenate([state.heard, finite(samples)])
        while len(state.heard) >= WINDOW_SAMPLES:
            self._hop()
            state.position += HOP_SAMPLES
            state.heard = state.heard[HOP_SAMPLES:]
            state.reference = state.reference[HOP_SAMPLES:]
        length, after = frames.frame_samples, frames.end_samples
        # A frame shares the fate of the last hop in it.
        last, next_one = (
            (end - WINDOW_SAMPLES) // HOP_SAMPLES - state.first for end in (after, after + length)
        )
        if not len(state.waiting) and last < len(state.verdicts) and not any(state.verdicts):
            self._forget(next_one)  # nothing is played, as for most of the time
            return frames
        speech = np.concatenate([state.waiting, frames.speech])
        start = after - length * len(speech)
        ends = start + length * np.arange(1, len(speech) + 2)
        hops = (ends - WINDOW_SAMPLES) // HOP_SAMPLES - state.first
        count = int(np.searchsorted(hops[:-1], len(state.verdicts)))
        is_echo = np.array([False, *state.verdicts])[hops[:count].clip(-1) + 1]
        self._forget(int(hops[count]))
        state.waiting = speech[count:]
        return Frames(start, length, np.where(is_echo, np.float32(0), speech[:count]))

    def _forget(self, hops: int) -> None:
        """Drop the verdicts of so many hops, or of all that there are."""
        state = self.state
        past = min(max(hops, 0), len(state.verdicts))
        state.verdicts, state.first = state.verdicts[past:], state.first + past

    def _hop(self) -> None:
        state = self.state
        if self._idle:
            if len(state.idle) == _IDLE_HOPS:
                self._catch_up()
            state.idle.append(state.heard[:HOP_SAMPLES])
            state.verdicts.append(False)
            return
        if state.idle:
            self._catch_up()
        reference = state.reference[:WINDOW_SAMPLES]
        windows = np.zeros((2, WINDOW_SAMPLES), np.float32)
        windows[0] = state.heard[:WINDOW_SAMPLES]
        windows[1, : len(reference)] = reference
        levels = band_levels(windows)
        state.noise = follow_noise(state.noise, levels[0], _NOISE_RISE_DB)
        state.late[:, 1:] = state.late[:, :-1]
        state.late[:, 0] = levels[0], state.noise
        state.path.play(levels[1])
        verdict = self._judge()
        if verdict is False:
            decided = state.path.silent or state.path.known
            self._settle(state.open, is_echo=decided and state.verdict is not False)
            state.verdicts.append(False)
        else:
            state.open += 1
            if verdict:
                self._settle(state.open - (0 if state.path.known else _RECENT_HOPS), is_echo=True)
        state.verdict = verdict

    @property
    def _idle(self) -> bool:
        """Whether nothing is played in the next hop, nor can still be heard, nor is undecided."""
        state = self.state
        if len(state.reference) or state.open or state.verdict is not False:
            return False
        return bool(state.idle) or state.path.silent

    def _catch_up(self) -> None:
        """Work out the levels of the idle hops."""
        state = self.state
        sound = np.concatenate([*state.idle, state.heard[:HOP_SAMPLES]])
        windows = np.lib.stride_tricks.sliding_window_view(sound, WINDOW_SAMPLES)[::HOP_SAMPLES]
        state.path.rest(len(state.idle))
        state.idle = []
        state.scores = np.zeros(LAGS)
        levels, noise = band_levels(windows), list[Levels]()
        for heard in levels:
            state.noise = follow_noise(state.noise, heard, _NOISE_RISE_DB)
            noise.append(state.noise)
        newest = np.stack([levels, noise])[:, ::-1]
        state.late = np.concatenate([newest, state.late], axis=1)[:, :HOPS]

    def _settle(self, count: int, *, is_echo: bool) -> None:
        """Say what the first ``count`` hops were that are open; a path is learned from echo."""
        state = self.state
        for ago in range(state.open - 1, state.open - 1 - count, -1):
            if is_echo:
                state.path.learn(state.late[0, ago], ago)
            state.verdicts.append(is_echo)
        state.open -= max(count, 0)

    def _judge(self) -> bool | None:
        """Whether the last hop is echo, or else may be a voice; None if that is open yet."""
        state, path = self.state, self.state.path
        heard, noise = state.late[:, 0]
        if path.silent:
            state.scores = np.zeros(LAGS)
            return False
        audible = heard > noise + AUDIBLE_OVER_NOISE_DB
        if path.known:
            expected = np.maximum(path.echo(), noise + NOISE_MARGIN_DB)
            excess = (heard - expected).clip(0, _MOST_EXCESS_DB) @ audible
            mean = excess / max(int(audible.sum()), _FEWEST_BANDS)
            state.scores = state.scores + _SMOOTHING * (mean - state.scores)
            if state.scores.min() < ECHO_BELOW_DB:
                return True
            # The way may have changed: its loss by a knob, its delay by a player.
            whole, last = path.unlike(*state.late)
            return whole < -_SURE and last < -_SURE / 3
        if state.verdict is not None and not audible.any():
            return state.verdict
        unlike, _ = path.unlike(*state.late)
        if abs(unlike) < _SURE and state.open < _LONGEST_HOPS:
            return None
        return unlike <= 0
