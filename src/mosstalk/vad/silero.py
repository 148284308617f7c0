"""Silero VAD (https://github.com/snakers4/silero-vad, MIT): its ONNX file, many streams a call.

The file is read out of the package ``silero-vad``, whose own code, and with it torch, is not
imported. A frame is 512 new samples behind the 64 before them; an LSTM of 128 goes from frame
to frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import DetectorError
from mosstalk.vad.frames import Frames, finite

FRAME_SAMPLES = 512
"""The one frame length that the model takes at 16 kHz: 32 ms."""
CONTEXT_SAMPLES = 64
MEMORY_SIZE = 128
_WINDOW_SAMPLES = CONTEXT_SAMPLES + FRAME_SAMPLES
MINIMUM_SPEECH_MS = 96
"""Three frames: clicks, knocks and slams give two at most, a short word gives eight."""
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
    """

    memory: Samples
    context: Samples
    pending: Samples
    position: int


class SileroDetector:
    """Speech probabilities by Silero's model on the CPU, one thread, shared by all streams.

    Raises:
        DetectorError: onnxruntime or the model's file is not installed, or the file is another.
    """

    name = "silero"
    frame_samples = FRAME_SAMPLES
    minimum_speech_ms = MINIMUM_SPEECH_MS

    def __init__(self) -> None:
        self._session = _open_model(model_file())
        self._rate = np.array(INPUT_RATE, np.int64)
        self.description = f"silero: silero-vad {version('silero-vad')} with onnxruntime"

    def start(self) -> SileroState:
        """The state of a stream before its first sample."""
        nothing = np.zeros(0, np.float32)
        memory = np.zeros((2, MEMORY_SIZE), np.float32)
        return SileroState(memory, np.zeros(CONTEXT_SAMPLES, np.float32), nothing, 0)

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
        counts = [(len(sound) - CONTEXT_SAMPLES) // FRAME_SAMPLES for sound in heard]
        memory = np.stack([state.memory for state in states], axis=1)
        speech = np.zeros((len(heard), max(counts)), np.float32)
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if place < count]
            at = place * FRAME_SAMPLES
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
    used = len(speech) * FRAME_SAMPLES
    rest = heard[used:].copy()
    after = SileroState(
        memory.copy(), rest[:CONTEXT_SAMPLES], rest[CONTEXT_SAMPLES:], state.position + used
    )
    return after, Frames(state.position, FRAME_SAMPLES, speech.copy())


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
