"""Tell the assistant's own voice, come back through the microphone, from a user who speaks.

No echo is removed. The levels of 20 bands at the microphone are held against those of what is
being played: an echo follows them at some delay and some loss, which are learned while it
plays, and a user is what exceeds them. (The double-talk detectors of acoustic echo control do
the same with waveforms; see Hänsler and Schmidt 2004, "Acoustic Echo and Noise Control",
chapter 13. Levels bear delays that jump, reverberation and bad loudspeakers better.)
"""

from dataclasses import dataclass, field

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.vad.echo_path import (
    AUDIBLE_OVER_NOISE_DB,
    BANDS,
    HOP_SAMPLES,
    HOPS,
    LAGS,
    LOWEST_DB,
    NOISE_MARGIN_DB,
    WINDOW_SAMPLES,
    EchoPath,
    Levels,
    band_levels,
)
from mosstalk.vad.frames import Frames, finite

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
_LONGEST_HOPS = HOPS - 1
"""Whatever is still undecided after 0.4 s is what is likelier."""


def _nothing() -> Samples:
    return np.zeros(0, np.float32)


@dataclass
class EchoState:
    """All that the gate knows of one stream; positions count the microphone's samples.

    Attributes:
        position: where the next window begins.
        heard: microphone samples from there on, fewer than a window.
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
    heard: Samples = field(default_factory=_nothing)
    reference: Samples = field(default_factory=_nothing)
    path: EchoPath = field(default_factory=EchoPath)
    noise: Levels | None = None
    scores: Levels = field(default_factory=lambda: np.zeros(LAGS))
    late: Levels = field(default_factory=lambda: np.full((2, HOPS, BANDS), LOWEST_DB))
    verdict: bool | None = False
    first: int = 0
    verdicts: list[bool] = field(default_factory=list)
    open: int = 0
    waiting: Samples = field(default_factory=_nothing)


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
        speech = np.concatenate([state.waiting, frames.speech])
        length, start = frames.frame_samples, frames.end_samples
        start -= length * len(speech)
        # A frame shares the fate of the last hop in it.
        ends = start + length * np.arange(1, len(speech) + 2)
        hops = (ends - WINDOW_SAMPLES) // HOP_SAMPLES - state.first
        count = int(np.searchsorted(hops[:-1], len(state.verdicts)))
        is_echo = np.array([False, *state.verdicts])[hops[:count].clip(-1) + 1]
        past = min(max(int(hops[count]), 0), len(state.verdicts))
        state.verdicts, state.first = state.verdicts[past:], state.first + past
        state.waiting = speech[count:]
        return Frames(start, length, np.where(is_echo, np.float32(0), speech[:count]))

    def _hop(self) -> None:
        state = self.state
        reference = state.reference[:WINDOW_SAMPLES]
        windows = np.zeros((2, WINDOW_SAMPLES), np.float32)
        windows[0] = state.heard[:WINDOW_SAMPLES]
        windows[1, : len(reference)] = reference
        levels = band_levels(windows)
        state.position += HOP_SAMPLES
        state.heard = state.heard[HOP_SAMPLES:]
        state.reference = state.reference[HOP_SAMPLES:]
        state.noise = _follow_noise(state.noise, levels[0])
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


def _follow_noise(noise: Levels | None, heard: Levels) -> Levels:
    """The noise (20,) by band: quick to fall, 3 dB a second to rise."""
    if noise is None:
        return heard.copy()
    assert heard.shape == (BANDS,), heard.shape
    return np.asarray(np.where(heard < noise, (noise + heard) / 2, noise + _NOISE_RISE_DB))
