"""Detectors of speech: what they give, Silero's, WebRTC's, and which of them is opened.

A detector gives probabilities of frames on the sample clock. Silero VAD
(https://github.com/snakers4/silero-vad, MIT) is an ONNX file that hears many streams a call, read
out of the package ``silero-vad``, whose own code, and with it torch, is not imported. A frame is
512 new samples behind the 64 before them; an LSTM of 128 goes from frame to frame.

WebRTC's detector (https://webrtc.org), Gaussian mixtures over six bands, is the fall-back where
there is no onnxruntime. It says yes or no.

Both also look at levels, since Silero still says yes for some 80 ms after a last word, and WebRTC's
detector to steady noise for good. Noise is followed as the lowest levels are. To WebRTC's a frame
must lie above it; music stays speech to it. To Silero a frame is none that lies at the noise and
far below the speech before it.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import AudioError, DetectorError


class Frame(NamedTuple):
    """Samples from ``start_samples`` to before ``end_samples``, and how likely they hold speech."""

    start_samples: int
    end_samples: int
    speech: float


@dataclass(frozen=True)
class Frames:
    """Frames of one length, side by side from ``start_samples`` on; ``speech`` (n,) in [0, 1].

    Positions count samples of a stream at 16 kHz.
    """

    start_samples: int
    frame_samples: int
    speech: Samples

    def __len__(self) -> int:
        return len(self.speech)

    def __iter__(self) -> Iterator[Frame]:
        start, length = self.start_samples, self.frame_samples
        for place, speech in enumerate(self.speech.tolist()):
            yield Frame(start + place * length, start + (place + 1) * length, speech)

    @property
    def end_samples(self) -> int:
        """Where the last frame ends; the start, if there is none."""
        return self.start_samples + len(self) * self.frame_samples


class Detector(Protocol):
    """Finds speech in many streams at once; what it knows of a stream is a value of its own.

    A state may be given to ``push`` once: with some detectors the new one holds what is inside
    the old one.

    Attributes:
        name: ``silero`` or ``webrtc``.
        description: the name, the package's version and its settings, for logs and tables.
        frame_samples: length of every frame.
        minimum_speech_ms: what looks like speech for less than this is as likely a click.
    """

    name: str
    description: str
    frame_samples: int
    minimum_speech_ms: int

    def start(self) -> Any:
        """The state of a stream before its first sample."""

    def push(self, state: Any, samples: Samples) -> tuple[Any, Frames]:
        """Hear the next samples (n,) float32 in [-1, 1] at 16 kHz, any number of them.

        Returns the new state and the frames that are now whole.

        Raises:
            AudioError: a sample is NaN or infinite.
        """

    def push_many(
        self, states: Sequence[Any], sounds: Sequence[Samples]
    ) -> list[tuple[Any, Frames]]:
        """As ``push``, for one stream after another or for all in one batch."""


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
difference a frame."""
_QUIETEST = 1e-7


class StreamLevels(NamedTuple):
    """How loud a stream is, in dB of full scale.

    Attributes:
        noise_db: the noise, at most 0; None before the first frame.
        speech_db: the loudest, less 3 dB for each second since.
    """

    noise_db: float | None = None
    speech_db: float = -math.inf

    def over_noise(self, level_db: float) -> bool:
        """Whether a frame is louder than noise alone would be."""
        return self.noise_db is None or level_db > self.noise_db + _OVER_NOISE_DB


def _followed(levels: StreamLevels, frames: Samples) -> Iterator[tuple[float, StreamLevels]]:
    """The level of each of frames (n, L), and the stream's with it."""
    drift_db = _DRIFT_DB_A_S * frames.shape[1] / INPUT_RATE
    powers = np.square(frames, dtype=np.float64).mean(axis=1)
    for level_db in (10 * np.log10(powers + _QUIETEST)).tolist():
        noise_db = float(follow_noise(levels.noise_db, level_db, drift_db))
        levels = StreamLevels(noise_db, max(level_db, levels.speech_db - drift_db))
        yield level_db, levels


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


SILERO_FRAME_SAMPLES = 512
"""The one frame length that the model takes at 16 kHz: 32 ms."""
CONTEXT_SAMPLES = 64
MEMORY_SIZE = 128
_WINDOW_SAMPLES = CONTEXT_SAMPLES + SILERO_FRAME_SAMPLES
SILERO_MINIMUM_SPEECH_MS = 96
"""Three frames: clicks, knocks and slams give two at most, a short word gives eight."""
_SURE = 0.9
_SURE_UNDER_DB, _DOUBTFUL_UNDER_DB = 30.0, 20.0
"""At the noise and so far below the speech before it a frame is none, though Silero is sure that it
is one, or doubts it."""
INSTALL = install_command("vad")
_MODEL_FILE = Path("data", "silero_vad.onnx")
_LOG_NOTHING = 4


@dataclass(frozen=True)
class SileroState:
    """What is known of one stream: nothing in it is ever written to.

    Attributes:
        memory: (2, 128), the LSTM's h and c.
        context: (64,), the samples before the next frame.
        pending: (n,) with n < 512, samples of the next frame.
        position: of the next frame's first sample in the stream.
        levels: how loud it is.
    """

    memory: Samples
    context: Samples
    pending: Samples
    position: int
    levels: StreamLevels


class SileroDetector:
    """Speech probabilities by Silero's model on the CPU, one thread, shared by all streams.

    Raises:
        DetectorError: onnxruntime or the model's file is not installed, or the file is another.
    """

    name = "silero"
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
        return SileroState(
            memory, np.zeros(CONTEXT_SAMPLES, np.float32), nothing, 0, StreamLevels()
        )

    def push(self, state: SileroState, samples: Samples) -> tuple[SileroState, Frames]:
        """Hear the next samples of one stream; see ``Detector.push``."""
        return self.push_many([state], [samples])[0]

    def push_many(
        self, states: Sequence[SileroState], sounds: Sequence[Samples]
    ) -> list[tuple[SileroState, Frames]]:
        """Hear the next samples of many streams, their n-th frames in one run of the model.

        A stream's probabilities differ in the last bits (below 1e-5) with who else is in the
        batch: sums are taken in another order.
        """
        if not states:
            return []
        heard = [
            np.concatenate([state.context, state.pending, finite(sound)])
            for state, sound in zip(states, sounds, strict=True)
        ]
        counts = [(len(sound) - CONTEXT_SAMPLES) // SILERO_FRAME_SAMPLES for sound in heard]
        memory = np.stack([state.memory for state in states], axis=1)
        speech = np.zeros((len(heard), max(counts)), np.float32)
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if place < count]
            at = place * SILERO_FRAME_SAMPLES
            windows = np.stack([heard[row][at : at + _WINDOW_SAMPLES] for row in rows])
            speech[rows, place], memory[:, rows] = self._run(windows, memory[:, rows])
        return [
            _advance(state, sound, speech[row, : counts[row]], memory[:, row])
            for row, (state, sound) in enumerate(zip(states, heard, strict=True))
        ]

    def _run(self, windows: Samples, memory: Samples) -> tuple[Samples, Samples]:
        """Probabilities (B,) and the new memory (2, B, 128) of windows (B, 576)."""
        given = {"input": windows, "state": memory, "sr": self._rate}
        speech, memory = self._session.run(None, given)
        return speech[:, 0], memory


def _advance(
    state: SileroState, heard: Samples, speech: Samples, memory: Samples
) -> tuple[SileroState, Frames]:
    used = len(speech) * SILERO_FRAME_SAMPLES
    rest = heard[used:].copy()
    new = heard[CONTEXT_SAMPLES : CONTEXT_SAMPLES + used].reshape(-1, SILERO_FRAME_SAMPLES)
    said, levels = speech.copy(), state.levels
    for place, (level_db, levels) in enumerate(_followed(state.levels, new)):
        under_db = _SURE_UNDER_DB if said[place] >= _SURE else _DOUBTFUL_UNDER_DB
        if not levels.over_noise(level_db) and level_db < levels.speech_db - under_db:
            said[place] = 0
    after = SileroState(
        memory.copy(), rest[:CONTEXT_SAMPLES], rest[CONTEXT_SAMPLES:], state.position + used, levels
    )
    return after, Frames(state.position, SILERO_FRAME_SAMPLES, said)


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
    # A frame is too little work to share; waiting threads would spin against the engine.
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


WEBRTC_FRAME_SAMPLES = 480
"""The longest frame that it takes: 30 ms."""
WEBRTC_MINIMUM_SPEECH_MS = 210
"""Seven frames: it says yes for 90 to 180 ms after most clicks."""
WEBRTC_MODE = 3
"""Of 0 to 3 the one that takes the least noise for speech."""
_FULL_SCALE = 32767


@dataclass(frozen=True)
class WebRtcState:
    """What is known of one stream: the library's own object, and what follows the last frame.

    The object cannot be copied, so a state that was pushed to is used up.
    """

    inside: Any
    pending: Samples
    position: int
    levels: StreamLevels


class WebRtcDetector:
    """Yes (1.0) or no (0.0) for each frame, by WebRTC's detector in its mode 3.

    Raises:
        DetectorError: the package webrtcvad-wheels is not installed.
    """

    name = "webrtc"
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
        return WebRtcState(
            self._package.Vad(WEBRTC_MODE), np.zeros(0, np.float32), 0, StreamLevels()
        )

    def push(self, state: WebRtcState, samples: Samples) -> tuple[WebRtcState, Frames]:
        """Hear the next samples of one stream; see ``Detector.push``."""
        heard = np.concatenate([state.pending, finite(samples)])
        count = len(heard) // WEBRTC_FRAME_SAMPLES
        used = count * WEBRTC_FRAME_SAMPLES
        frames = heard[:used].reshape(count, WEBRTC_FRAME_SAMPLES)
        whole = (frames.clip(-1, 1) * _FULL_SCALE).astype("<i2")
        said, levels = np.zeros(count, np.float32), state.levels
        for place, (level_db, levels) in enumerate(_followed(state.levels, frames)):
            yes = state.inside.is_speech(whole[place].tobytes(), INPUT_RATE)
            said[place] = yes and levels.over_noise(level_db)
        after = WebRtcState(state.inside, heard[used:].copy(), state.position + used, levels)
        return after, Frames(state.position, WEBRTC_FRAME_SAMPLES, said)

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
