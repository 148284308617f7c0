"""Who is speaking, and until when: detectors of speech, turns, and the assistant's own echo.

For one stream, with what the microphone heard as 16 kHz float32 samples of any count::

    detector = open_detector()
    state, turns, gate = detector.start(), TurnDetector(), EchoGate()
    ...
    state, frames = detector.push(state, samples)
    events = turns.push(gate.heard(samples, frames))
"""

from mosstalk.vad.detectors import (
    Detector,
    SileroDetector,
    WebRtcDetector,
    open_detector,
)
from mosstalk.vad.echo import EchoGate
from mosstalk.vad.frames import Frame, Frames
from mosstalk.vad.turns import (
    BargeIn,
    IdleTimeout,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
    TurnDetector,
    TurnEvent,
)

__all__ = [
    "BargeIn",
    "Detector",
    "EchoGate",
    "Frame",
    "Frames",
    "IdleTimeout",
    "SileroDetector",
    "SpeechStarted",
    "SpeechStopped",
    "TurnDetection",
    "TurnDetector",
    "TurnEvent",
    "WebRtcDetector",
    "open_detector",
]
