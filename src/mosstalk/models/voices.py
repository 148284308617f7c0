"""Voices: what a reply should sound like, as one safetensors file; and the x-vector of a recording.

The x-vector is 192 numbers that say whose voice it is. CAM++ (Wang et al. 2023, "CAM++: A Fast and
Efficient Network for Speaker Verification Using Context-Aware Masking") reads Kaldi filter banks;
the codec's folder holds it as an ONNX file. The packages that this takes are the ``voices`` extra,
imported on first use.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mosstalk.constants import CODE_MS, INPUT_RATE, MEL_FRAMES_PER_CODE
from mosstalk.environment import install_command
from mosstalk.errors import CheckpointError, ConfigError, VoiceError
from mosstalk.files import parse_json, write_whole

if TYPE_CHECKING:
    from mosstalk.audio.sound import Samples  # doctor runs where soxr is broken

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


def fbank(samples: "Samples") -> "Samples":
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


def x_vector(model: Path, samples: "Samples", size: int = X_VECTOR_SIZE) -> Tensor:
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


SUFFIX = ".safetensors"
NO_VOICE = "none, make one with mosstalk voice create"
"""What a message says in place of the names of voices where a codec has none."""
CODEC_KEY = "codec"
"""Key of a voice's info under which the fingerprint of its codec stands."""
_FORMAT = "mosstalk-voice-1"
_BLOCK_CODES = 5
_WHOLE_NUMBERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, repr=False)
class Voice:
    """A voice prompt: ``codes`` (n,) int64, ``mel`` (4n, 80), ``embedding`` (192,) x-vector."""

    codes: Tensor
    mel: Tensor
    embedding: Tensor
    info: dict[str, str] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        seconds = len(self.codes) * CODE_MS / 1000
        return f"<Voice: {self.info.get('name', 'without a name')}, prompt of {seconds:.1f} s>"

    @cached_property
    def digest(self) -> bytes:
        """Tells voices apart by content: the same file read twice is one voice."""
        parts = (self.codes, self.mel, self.embedding)
        blocks = [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
        return hashlib.sha256(b"".join(blocks)).digest()


def trimmed(codes: Tensor, mel: Tensor, embedding: Tensor, info: dict[str, str]) -> Voice:
    """A voice cut to whole blocks: n = min(frames // 4, codes), down to a multiple of 5.

    Raises:
        VoiceError: less than one block is left.
    """
    count = min(mel.shape[0] // MEL_FRAMES_PER_CODE, codes.shape[0])
    count -= count % _BLOCK_CODES
    if count == 0:
        raise VoiceError("the voice sample is shorter than 400 ms: record at least 3 s")
    return Voice(codes[:count], mel[: count * MEL_FRAMES_PER_CODE], embedding, info)


def save_voice(voice: Voice, path: Path) -> None:
    """Write a voice file, whole or not at all; its ``info`` becomes metadata.

    Raises:
        OutputError: the disk cannot take it. What stood at ``path`` is as it was.
    """
    tensors = {"codes": voice.codes, "mel": voice.mel, "embedding": voice.embedding}
    contiguous = {name: value.contiguous().cpu() for name, value in tensors.items()}
    info = json.dumps({"format": _FORMAT} | voice.info)
    write_whole(path, save(contiguous, metadata={"info": info}))


def load_voice(
    path: Path,
    *,
    code_limit: int,
    mel_bins: int = 80,
    embedding_size: int = 192,
    fingerprint: Callable[[], str] | None = None,
) -> Voice:
    """Read a voice file for a codec whose flow knows codes below ``code_limit``.

    ``fingerprint`` gives the codec's; it is asked for only where the voice names one. A voice
    that names none is taken at its word.

    Raises:
        VoiceError: unreadable, misshapen, not finite, made for another codec, or with codes
            that the codec does not have.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            codes, mel, embedding = map(handle.get_tensor, ("codes", "mel", "embedding"))
            info = parse_json(metadata.get("info", "{}"))
    except (SafetensorError, OSError, ValueError, ConfigError) as error:
        raise VoiceError(f"{path}: not a voice file ({error}); make it again") from None
    if codes.dtype not in _WHOLE_NUMBERS or not isinstance(info, dict):
        raise VoiceError(f"{path}: codes must be whole numbers, info an object; make it again")
    if info.pop("format", _FORMAT) != _FORMAT:
        raise VoiceError(f"{path}: was made by another version of mosstalk; make it again")
    if fingerprint and CODEC_KEY in info and info[CODEC_KEY] != fingerprint():
        raise VoiceError(f"{path}: was made for another codec; make it again with this one")
    frames = codes.shape[0] * MEL_FRAMES_PER_CODE if codes.ndim == 1 else -1
    if tuple(mel.shape) != (frames, mel_bins) or tuple(embedding.shape) != (embedding_size,):
        raise VoiceError(
            f"{path}: codes {list(codes.shape)}, mel {list(mel.shape)} and embedding "
            f"{list(embedding.shape)} do not fit (n), (4n, {mel_bins}) and ({embedding_size})"
        )
    mel, embedding = mel.float(), embedding.float()
    if not bool(mel.isfinite().all() & embedding.isfinite().all()):
        raise VoiceError(f"{path}: holds NaN or infinity; make it again")
    if codes.numel() == 0 or int(codes.min()) < 0 or int(codes.max()) >= code_limit:
        raise VoiceError(f"{path}: codes do not fit this codec; make the voice again with it")
    return Voice(codes.to(torch.int64), mel, embedding, info)


def find_voice(name: str, folder: Path) -> Path:
    """The file of a voice given by name (in ``folder``) or by path.

    Raises:
        VoiceError: there is none; the message lists those there are.
    """
    if name.endswith(SUFFIX) and Path(name).is_file():
        return Path(name)
    known = list_voices(folder)
    if name in known:
        return folder / f"{name}{SUFFIX}"
    there = ", ".join(known) or NO_VOICE
    raise VoiceError(f"unknown voice {name!r}; {folder} has: {there}. Or give a voice file's path")


def list_voices(folder: Path) -> list[str]:
    """Names of the voices in a folder, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))


def any_voice(names: Sequence[str]) -> str:
    """The voice to use where none was asked for: ``default`` if it is among ``names`` or they are
    empty, else the first of them.
    """
    return "default" if "default" in names or not names else names[0]
