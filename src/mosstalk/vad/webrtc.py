"""WebRTC's detector of speech (https://webrtc.org): Gaussian mixtures over six bands.

The fall-back where there is no onnxruntime. It says yes or no, and says yes to steady noise for
good, so that no turn would end: a frame must lie above the noise as well, which is followed as
its lowest levels are. Music stays speech to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import DetectorError
from mosstalk.vad.frames import Frames, finite

FRAME_SAMPLES = 480
"""The longest frame that it takes: 30 ms."""
MINIMUM_SPEECH_MS = 210
"""Seven frames: it says yes for 90 to 180 ms after most clicks."""
MODE = 3
"""Of 0 to 3 the one that takes the least noise for speech."""
INSTALL = install_command("vad")
_FULL_SCALE = 32767
_OVER_NOISE_DB = 4.0
_NOISE_RISE_DB = 0.09
"""A frame, 3 dB a second; it falls by half the difference."""
_QUIETEST = 1e-7


@dataclass(frozen=True)
class WebRtcState:
    """What is known of one stream: the library's own object, and what follows the last frame.

    The object cannot be copied, so a state that was pushed to is used up. ``noise_db`` is the
    level of the noise below full scale, None before the first frame.
    """

    inside: Any
    pending: Samples
    position: int
    noise_db: float | None = None


class WebRtcDetector:
    """Yes (1.0) or no (0.0) for each frame, by WebRTC's detector in its mode 3.

    Raises:
        DetectorError: the package webrtcvad-wheels is not installed.
    """

    name = "webrtc"
    frame_samples = FRAME_SAMPLES
    minimum_speech_ms = MINIMUM_SPEECH_MS

    def __init__(self) -> None:
        try:
            self._package = import_module("webrtcvad")
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise DetectorError(
                f"finding speech needs the package webrtcvad-wheels ({reason}); run: {INSTALL}"
            ) from None
        self.description = f"webrtc: webrtcvad-wheels {version('webrtcvad-wheels')}, mode {MODE}"

    def start(self) -> WebRtcState:
        """The state of a stream before its first sample."""
        return WebRtcState(self._package.Vad(MODE), np.zeros(0, np.float32), 0)

    def push(self, state: WebRtcState, samples: Samples) -> tuple[WebRtcState, Frames]:
        """Hear the next samples of one stream; see ``Detector.push``."""
        heard = np.concatenate([state.pending, finite(samples)])
        count = len(heard) // FRAME_SAMPLES
        used = count * FRAME_SAMPLES
        whole = (heard[:used].clip(-1, 1) * _FULL_SCALE).astype("<i2").reshape(count, FRAME_SAMPLES)
        levels = _levels(heard[:used].reshape(count, FRAME_SAMPLES))
        said, noise = np.zeros(count, np.float32), state.noise_db
        for place, (frame, level) in enumerate(zip(whole, levels, strict=True)):
            noise = _follow_noise(noise, level)
            yes = state.inside.is_speech(frame.tobytes(), INPUT_RATE)
            said[place] = yes and level > noise + _OVER_NOISE_DB
        after = WebRtcState(state.inside, heard[used:].copy(), state.position + used, noise)
        return after, Frames(state.position, FRAME_SAMPLES, said)

    def push_many(
        self, states: Sequence[WebRtcState], sounds: Sequence[Samples]
    ) -> list[tuple[WebRtcState, Frames]]:
        """As ``push``, one stream after another."""
        return [self.push(state, sound) for state, sound in zip(states, sounds, strict=True)]


def _levels(frames: Samples) -> list[float]:
    """Levels in dB of full scale of frames (n, 480)."""
    powers = np.square(frames, dtype=np.float64).mean(axis=1)
    levels: list[float] = (10 * np.log10(powers + _QUIETEST)).tolist()
    return levels


def _follow_noise(noise: float | None, level: float) -> float:
    if noise is None:
        return level
    return (noise + level) / 2 if level < noise else noise + _NOISE_RISE_DB
