"""The x-vector: 192 numbers that say whose voice it is.

CAM++ (Wang et al. 2023, "CAM++: A Fast and Efficient Network for Speaker Verification Using
Context-Aware Masking") reads Kaldi filter banks; the codec's folder holds it as an ONNX file.
The packages that this takes are the ``voices`` extra, imported on first use.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE
from mosstalk.environment import install_command
from mosstalk.errors import CheckpointError, VoiceError

X_VECTOR_FILE = "campplus.onnx"
"""Its name in a codec's ``flow`` folder, published and synthetic."""
X_VECTOR_SIZE = 192
FBANK_BINS = 80
_FBANK_LOW_HZ = 20.0
PACKAGES = ("kaldi_native_fbank", "onnxruntime")
_ANY_LENGTH = None
_LOG_NOTHING = 4


def require_packages() -> None:
    """Import what the x-vector takes.

    Raises:
        VoiceError: a package is not installed; the message says how to.
    """
    for name in PACKAGES:
        _package(name)


def fbank(samples: Samples) -> Samples:
    """Kaldi's log filter banks, mean-subtracted over time: (frames, 80) float32.

    ``samples`` (n,) mono at 16 kHz in [-1, 1], at least 25 ms of them; a frame is 25 ms, and
    one begins every 10 ms. Povey window, pre-emphasis 0.97, bands from 20 to 8000 Hz, no
    dither. Unlike in Kaldi's own recipes samples are not scaled to 16 bits: the floor of the
    logarithm, 1.2e-7, depends on that.

    Raises:
        VoiceError: kaldi-native-fbank is not installed.
    """
    kaldi = _package("kaldi_native_fbank")
    options = kaldi.FbankOptions()
    options.frame_opts.samp_freq = INPUT_RATE
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = FBANK_BINS
    options.mel_opts.low_freq = _FBANK_LOW_HZ
    options.mel_opts.high_freq = 0.0
    banks = kaldi.OnlineFbank(options)
    banks.accept_waveform(INPUT_RATE, samples.tolist())
    banks.input_finished()
    features = np.stack([banks.get_frame(index) for index in range(banks.num_frames_ready)])
    return np.asarray(features - features.mean(axis=0), np.float32)


def x_vector(model: Path, samples: Samples, size: int = X_VECTOR_SIZE) -> Tensor:
    """The x-vector (size,) float32 of ``samples`` (n,) mono at 16 kHz, by the ONNX file ``model``.

    Raises:
        CheckpointError: ``model`` is missing, damaged, or takes or gives other shapes than
            (1, T, 80) and (1, ``size``).
        VoiceError: it gives NaN or infinity, or a package is not installed.
    """
    session = _session(model)
    _check_shapes(model, session, size)
    errors = _runtime_errors()
    try:
        value = session.run(None, {session.get_inputs()[0].name: fbank(samples)[None]})[0]
    except errors as error:
        raise _foreign(model, size, _reason(error)) from None
    if value.size != size:
        raise _foreign(model, size, f"it gave {list(value.shape)}")
    vector = torch.from_numpy(np.asarray(value, np.float32).reshape(size).copy())
    if not bool(vector.isfinite().all()):
        raise VoiceError(
            f"{model}: gives NaN or infinity for this sample; try another recording, "
            f"or copy {X_VECTOR_FILE} from the codec's release again"
        )
    return vector


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise VoiceError(
            f"making a voice needs the package {name} ({error}); run: {install_command('voices')}"
        ) from None


def _runtime_errors() -> tuple[type[Exception], ...]:
    """All that ONNX Runtime raises: its exceptions have no base of their own."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    kinds = [kind for kind in vars(state).values() if isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception))


def _session(model: Path) -> Any:
    if not model.is_file():
        raise CheckpointError(
            f"{model}: no such file; a voice needs the codec's x-vector model: copy "
            f"{X_VECTOR_FILE} from the codec's release"
        )
    runtime = _package("onnxruntime")
    options = runtime.SessionOptions()
    # Its log would come between the user and our one line; what is wrong it raises as well.
    options.log_severity_level = _LOG_NOTHING
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    errors = _runtime_errors()
    try:
        return runtime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except errors as error:
        raise CheckpointError(
            f"{model}: not a readable ONNX file ({_reason(error)}); "
            f"copy {X_VECTOR_FILE} from the codec's release again"
        ) from None


def _reason(error: Exception) -> str:
    """The last part of ONNX Runtime's message, in one line: before it stand codes and files."""
    reason = str(error).rpartition(" failed:")[2].rpartition(" : ")[2]
    return " ".join(reason.split()).rstrip(".")


def _check_shapes(model: Path, session: Any, size: int) -> None:
    inputs, outputs = session.get_inputs(), session.get_outputs()
    taken, given = (", ".join(map(_said, values)) for values in (inputs, outputs))
    fits = (
        len(inputs) == 1
        and inputs[0].type == outputs[0].type == "tensor(float)"
        and _admits(inputs[0].shape, (1, _ANY_LENGTH, FBANK_BINS))
        # An exporter may leave the shape of what it gives unsaid; what comes is checked too.
        and (not outputs[0].shape or _admits(outputs[0].shape, (1, size)))
    )
    if not fits:
        raise _foreign(model, size, f"it takes {taken} and gives {given}")


def _said(value: Any) -> str:
    return f"{value.type.removeprefix('tensor').strip('()')} {value.shape}"


def _admits(declared: Sequence[int | str | None], wanted: tuple[int | None, ...]) -> bool:
    """Whether a declared shape, with names for what is left open, admits a wanted one."""
    return len(declared) == len(wanted) and all(
        not isinstance(length, int) or length == want
        for length, want in zip(declared, wanted, strict=True)
    )


def _foreign(model: Path, size: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{model}: is no x-vector model of (1, T, {FBANK_BINS}) to (1, {size}): {reason}; "
        f"copy {X_VECTOR_FILE} from the codec's release"
    )
