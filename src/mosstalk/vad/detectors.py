"""Detectors of speech: what they give, Silero's, WebRTC's, and which of them is opened.

A detector gives probabilities of frames on the sample clock. Silero VAD
(https://github.com/snakers4/silero-vad, MIT) is an ONNX file that hears many streams a call, read
out of the package ``silero-vad``, whose own code, and with it torch, is not imported. A window is
512 new samples behind the 64 before them; an LSTM of 128 goes from window to window.

WebRTC's detector (https://webrtc.org), Gaussian mixtures over six bands, is the fall-back where
there is no onnxruntime. It says yes or no.

Levels are looked at as well, since Silero still says yes for some 80 ms after a last word, and
WebRTC's detector to steady noise for good. For WebRTC's speech lies above the noise; music stays
speech to it. For Silero's what lies at the noise and far below the speech before it is none.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import DetectorError
from mosstalk.vad.frames import Frames, StreamSoFar, finite


class Detector(Protocol):
    """Finds speech in many streams at once; what it knows of a stream is a value of its own.

    It judges a window of sound at a time, and says of shorter frames what it found. A state may be
    given to ``push`` once: with some detectors the new one holds what is inside the old one.

    Attributes:
        name: ``silero`` or ``webrtc``.
        description: the name, the package's version and its settings, for logs and tables.
        window_samples: how much sound is judged at once.
        frame_samples: length of every frame; some make a window.
        minimum_speech_ms: what looks like speech for less than this is as likely a click.
    """

    name: str
    description: str
    window_samples: int
    frame_samples: int
    minimum_speech_ms: int

    def start(self) -> Any:
        """The state of a stream before its first sample."""

    def push(self, state: Any, samples: Samples) -> tuple[Any, Frames]:
        """Hear the next samples (n,) float32 in [-1, 1] at 16 kHz, any number of them.

        Returns the new state and the frames that are decided by now: those of whole windows, and
        after them those that are silence by their level.

        Raises:
            AudioError: a sample is NaN or infinite.
        """

    def push_many(
        self, states: Sequence[Any], sounds: Sequence[Samples]
    ) -> list[tuple[Any, Frames]]:
        """As ``push``, for one stream after another or for all in one batch."""


SILERO_WINDOW_SAMPLES = 512
"""The one length that the model takes at 16 kHz: 32 ms."""
SILERO_FRAME_SAMPLES = 64
CONTEXT_SAMPLES = 64
MEMORY_SIZE = 128
_INPUT_SAMPLES = CONTEXT_SAMPLES + SILERO_WINDOW_SAMPLES
SILERO_MINIMUM_SPEECH_MS = 68
"""Speech in three windows: clicks, knocks and slams give two at most, a short word gives eight."""
_SURE = 0.9
_SURE_UNDER_DB, _DOUBTFUL_UNDER_DB = 30.0, 20.0
"""At the noise and so far below the speech before it there is none, though Silero is sure that
there is, or doubts it."""
INSTALL = install_command("vad")
_MODEL_FILE = Path("data", "silero_vad.onnx")
_LOG_NOTHING = 4


@dataclass(frozen=True)
class SileroState:
    """What is known of one stream: nothing in it is ever written to.

    Attributes:
        memory: (2, 128), the LSTM's h and c.
        context: (64,), the samples before the next window.
        pending: (n,) with n < 512, samples of the next window.
        judged: what else is known there.
    """

    memory: Samples
    context: Samples
    pending: Samples
    judged: StreamSoFar


class SileroDetector:
    """Speech probabilities by Silero's model on the CPU, one thread, shared by all streams.

    Raises:
        DetectorError: onnxruntime or the model's file is not installed, or the file is another.
    """

    name = "silero"
    window_samples = SILERO_WINDOW_SAMPLES
    frame_samples = SILERO_FRAME_SAMPLES
    minimum_speech_ms = SILERO_MINIMUM_SPEECH_MS

    def __init__(self) -> None:
        self._session = _open_model(model_file())
        self._rate = np.array(INPUT_RATE, np.int64)
        self.description = f"silero: silero-vad {version('silero-vad')} with onnxruntime"

    def start(self) -> SileroState:
        """The state of a stream before its first sample."""
        nothing = np.zeros(0, np.float32)
        memory = np.zeros((2, MEMORY_SIZE), np.float32)
        return SileroState(memory, np.zeros(CONTEXT_SAMPLES, np.float32), nothing, StreamSoFar())

    def push(self, state: SileroState, samples: Samples) -> tuple[SileroState, Frames]:
        """Hear the next samples of one stream; see ``Detector.push``."""
        return self.push_many([state], [samples])[0]

    def push_many(
        self, states: Sequence[SileroState], sounds: Sequence[Samples]
    ) -> list[tuple[SileroState, Frames]]:
        """Hear the next samples of many streams, their n-th windows in one run of the model.

        A stream's probabilities differ in the last bits (below 1e-5) with who else is in the
        batch: sums are taken in another order.
        """
        if not states:
            return []
        heard = [
            np.concatenate([state.context, state.pending, finite(sound)])
            for state, sound in zip(states, sounds, strict=True)
        ]
        counts = [(len(sound) - CONTEXT_SAMPLES) // SILERO_WINDOW_SAMPLES for sound in heard]
        memory = np.stack([state.memory for state in states], axis=1)
        speech = np.zeros((len(heard), max(counts)), np.float32)
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if place < count]
            at = place * SILERO_WINDOW_SAMPLES
            given = np.stack([heard[row][at : at + _INPUT_SAMPLES] for row in rows])
            speech[rows, place], memory[:, rows] = self._run(given, memory[:, rows])
        return [
            _advance(state, sound, speech[row, : counts[row]], memory[:, row])
            for row, (state, sound) in enumerate(zip(states, heard, strict=True))
        ]

    def _run(self, windows: Samples, memory: Samples) -> tuple[Samples, Samples]:
        """Probabilities (B,) and the new memory (2, B, 128) of windows and context (B, 576)."""
        given = {"input": windows, "state": memory, "sr": self._rate}
        speech, memory = self._session.run(None, given)
        return speech[:, 0], memory


def _advance(
    state: SileroState, heard: Samples, speech: Samples, memory: Samples
) -> tuple[SileroState, Frames]:
    used, sound = len(speech) * SILERO_WINDOW_SAMPLES, heard[CONTEXT_SAMPLES:]
    judged, frames = state.judged.after(
        sound, speech, SILERO_WINDOW_SAMPLES, SILERO_FRAME_SAMPLES, _under_db
    )
    context = heard[used : used + CONTEXT_SAMPLES].copy()
    return SileroState(memory.copy(), context, sound[used:].copy(), judged), frames


def _under_db(speech: float) -> float:
    return _SURE_UNDER_DB if speech >= _SURE else _DOUBTFUL_UNDER_DB


def model_file() -> Path:
    """Where the installed package keeps the model.

    Raises:
        DetectorError: it is not installed, or no longer holds the file.
    """
    # Looked up, not imported: the package itself would import torch.
    found = find_spec("silero_vad")
    if found is None or not found.submodule_search_locations:
        raise DetectorError(f"finding speech needs the package silero-vad; run: {INSTALL}")
    path = Path(found.submodule_search_locations[0]) / _MODEL_FILE
    if not path.is_file():
        raise DetectorError(f"{path}: no such file; install silero-vad again: {INSTALL}")
    return path


def _open_model(path: Path) -> Any:
    try:
        runtime = import_module("onnxruntime")
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise DetectorError(
            f"finding speech needs the package onnxruntime ({reason}); run: {INSTALL}"
        ) from None
    options = runtime.SessionOptions()
    # A window is too little work to share; waiting threads would spin against the engine.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # What is wrong it raises as well; its log would come between the user and our line.
    options.log_severity_level = _LOG_NOTHING
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except _runtime_errors() as error:
        reason = " ".join(str(error).split())
        raise DetectorError(
            f"{path}: not a readable model ({reason}); install silero-vad again: {INSTALL}"
        ) from None
    names = [each.name for each in session.get_inputs()], [e.name for e in session.get_outputs()]
    if names != (["input", "state", "sr"], ["output", "stateN"]):
        raise DetectorError(f"{path}: another model than silero-vad 6 has; run: {INSTALL}")
    return session


def _runtime_errors() -> tuple[type[Exception], ...]:
    """All that ONNX Runtime raises: its exceptions have no base of their own."""
    state = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    kinds = [kind for kind in vars(state).values() if isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception))


WEBRTC_WINDOW_SAMPLES = 480
"""The longest that it takes: 30 ms."""
WEBRTC_FRAME_SAMPLES = 60
WEBRTC_MINIMUM_SPEECH_MS = 184
"""Speech in seven windows: it says yes for 90 to 180 ms after most clicks."""
WEBRTC_MODE = 3
"""Of 0 to 3 the one that takes the least noise for speech."""
_FULL_SCALE = 32767


@dataclass(frozen=True)
class WebRtcState:
    """What is known of one stream: the library's own object, and what follows the last window.

    The object cannot be copied, so a state that was pushed to is used up.
    """

    inside: Any
    pending: Samples
    judged: StreamSoFar


class WebRtcDetector:
    """Yes (1.0) or no (0.0), by WebRTC's detector in its mode 3.

    Raises:
        DetectorError: the package webrtcvad-wheels is not installed.
    """

    name = "webrtc"
    window_samples = WEBRTC_WINDOW_SAMPLES
    frame_samples = WEBRTC_FRAME_SAMPLES
    minimum_speech_ms = WEBRTC_MINIMUM_SPEECH_MS

    def __init__(self) -> None:
        try:
            self._package = import_module("webrtcvad")
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise DetectorError(
                f"finding speech needs the package webrtcvad-wheels ({reason}); run: {INSTALL}"
            ) from None
        package = f"webrtcvad-wheels {version('webrtcvad-wheels')}"
        self.description = f"webrtc: {package}, mode {WEBRTC_MODE}"

    def start(self) -> WebRtcState:
        """The state of a stream before its first sample."""
        return WebRtcState(self._package.Vad(WEBRTC_MODE), np.zeros(0, np.float32), StreamSoFar())

    def push(self, state: WebRtcState, samples: Samples) -> tuple[WebRtcState, Frames]:
        """Hear the next samples of one stream; see ``Detector.push``."""
        heard = np.concatenate([state.pending, finite(samples)])
        used = len(heard) - len(heard) % WEBRTC_WINDOW_SAMPLES
        windows = heard[:used].reshape(-1, WEBRTC_WINDOW_SAMPLES)
        whole = (windows.clip(-1, 1) * _FULL_SCALE).astype("<i2")
        said = [state.inside.is_speech(each.tobytes(), INPUT_RATE) for each in whole]
        judged, frames = state.judged.after(
            heard,
            np.array(said, np.float32),
            WEBRTC_WINDOW_SAMPLES,
            WEBRTC_FRAME_SAMPLES,
            lambda _: -math.inf,
        )
        return WebRtcState(state.inside, heard[used:].copy(), judged), frames

    def push_many(
        self, states: Sequence[WebRtcState], sounds: Sequence[Samples]
    ) -> list[tuple[WebRtcState, Frames]]:
        """As ``push``, one stream after another."""
        return [self.push(state, sound) for state, sound in zip(states, sounds, strict=True)]


DetectorKind: TypeAlias = Literal["auto", "silero", "webrtc"]
_log = logging.getLogger(__name__)


def open_detector(kind: str = "auto") -> Detector:
    """Open ``silero``, ``webrtc``, or with ``auto`` the first of them that is installed.

    Says in one log line which; ``Detector.description`` has the same words.

    Raises:
        DetectorError: what is asked for is not installed, or there is no such detector; the
            message says what to install or choose.
    """
    if kind not in get_args(DetectorKind):
        known = ", ".join(get_args(DetectorKind))
        raise DetectorError(f"unknown detector {kind!r}; choose from {known}")
    detector = _OPENERS[kind]()
    _log.info("speech is found by %s", detector.description)
    return detector


def _open_best() -> Detector:
    try:
        return SileroDetector()
    except DetectorError as silero:
        try:
            detector = WebRtcDetector()
        except DetectorError as webrtc:
            raise DetectorError(f"{silero}; and {webrtc}") from None
        _log.warning("%s; until then a detector that noise misleads stands in", silero)
        return detector


_OPENERS = {"auto": _open_best, "silero": SileroDetector, "webrtc": WebRtcDetector}
