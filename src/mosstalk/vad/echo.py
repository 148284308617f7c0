"""Tell the assistant's own voice, come back through the microphone, from a user who speaks.

No echo is removed. The levels of 20 bands at the microphone are held against those of what is
being played: an echo follows them at some delay and some loss, which are learned while it
plays, and a user is what exceeds them. (The double-talk detectors of acoustic echo control do
the same with waveforms; see Hänsler and Schmidt 2004, "Acoustic Echo and Noise Control",
chapter 13. Levels bear delays that jump, reverberation and bad loudspeakers better.)
"""

from dataclasses import dataclass, field

import numpy as np

from mosstalk.codec.audio import Samples
from mosstalk.vad.echo_path import (
    BANDS,
    HOP_SAMPLES,
    LAGS,
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
_NOISE_MARGIN_DB = 3.0
_AUDIBLE_OVER_NOISE_DB = 6.0
_NOISE_RISE_DB = 0.05
_FEWEST_BANDS = 5
_MOST_EXCESS_DB = 20.0


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
        is_echo: of the last hop.
    """

    position: int = 0
    heard: Samples = field(default_factory=_nothing)
    reference: Samples = field(default_factory=_nothing)
    path: EchoPath = field(default_factory=EchoPath)
    noise: Levels | None = None
    scores: Levels = field(default_factory=lambda: np.zeros(LAGS))
    is_echo: bool = False


class EchoGate:
    """Takes speech out of frames in which nothing but the assistant is heard, for one stream.

    Until 0.75 s of the assistant have been heard once, all that comes while it plays is taken
    for echo: that long the first reply of a conversation cannot be interrupted by voice.
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

    def heard(self, samples: Samples, frames: Frames) -> Frames:
        """Hear the microphone's next samples (n,), and judge the frames found in them.

        ``frames`` are what a detector gave for these same samples. Returns them with
        probability 0 where there is only echo.

        Raises:
            AudioError: a sample is NaN or infinite.
        """
        before = self.state.is_echo
        self.state.heard = np.concatenate([self.state.heard, finite(samples)])
        first_end = self.state.position + WINDOW_SAMPLES
        verdicts = [before]
        while len(self.state.heard) >= WINDOW_SAMPLES:
            verdicts.append(self._hop())
        ends = frames.start_samples + frames.frame_samples * np.arange(1, len(frames) + 1)
        # Verdict 0 is the last one before these samples.
        last = ((ends - first_end) // HOP_SAMPLES + 1).clip(0, len(verdicts) - 1)
        speech = np.where(np.array(verdicts)[last], np.float32(0), frames.speech)
        return Frames(frames.start_samples, frames.frame_samples, speech)

    def _hop(self) -> bool:
        state = self.state
        reference = state.reference[:WINDOW_SAMPLES]
        windows = np.zeros((2, WINDOW_SAMPLES), np.float32)
        windows[0] = state.heard[:WINDOW_SAMPLES]
        windows[1, : len(reference)] = reference
        levels = band_levels(windows)
        state.position += HOP_SAMPLES
        state.heard = state.heard[HOP_SAMPLES:]
        state.reference = state.reference[HOP_SAMPLES:]
        state.is_echo = self._judge(levels[0], levels[1])
        return state.is_echo

    def _judge(self, heard: Levels, reference: Levels) -> bool:
        state, path = self.state, self.state.path
        noise = _follow_noise(state.noise, heard)
        state.noise = noise
        path.play(reference)
        if path.silent:
            state.scores = np.zeros(LAGS)
            return False
        path.learn(heard)
        expected = np.maximum(path.echo(), noise + _NOISE_MARGIN_DB)
        audible = heard > noise + _AUDIBLE_OVER_NOISE_DB
        excess = (heard - expected).clip(0, _MOST_EXCESS_DB) @ audible
        mean = excess / max(int(audible.sum()), _FEWEST_BANDS)
        state.scores = state.scores + _SMOOTHING * (mean - state.scores)
        return not path.known or bool(state.scores.min() < ECHO_BELOW_DB)


def _follow_noise(noise: Levels | None, heard: Levels) -> Levels:
    """The noise (20,) by band: quick to fall, 3 dB a second to rise."""
    if noise is None:
        return heard.copy()
    assert heard.shape == (BANDS,), heard.shape
    return np.asarray(np.where(heard < noise, (noise + heard) / 2, noise + _NOISE_RISE_DB))
