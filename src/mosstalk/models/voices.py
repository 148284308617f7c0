"""Voices: what a reply should sound like, as one safetensors file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mosstalk.constants import CODE_MS, MEL_FRAMES_PER_CODE
from mosstalk.errors import ConfigError, VoiceError
from mosstalk.files import parse_json, write_whole

SUFFIX = ".safetensors"
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
    if not bool(mel.isfinite().all() & embedding.isfinite().all()):
        raise VoiceError(f"{path}: holds NaN or infinity; make it again")
    if codes.numel() == 0 or int(codes.min()) < 0 or int(codes.max()) >= code_limit:
        raise VoiceError(f"{path}: codes do not fit this codec; make the voice again with it")
    return Voice(codes.to(torch.int64), mel.float(), embedding.float(), info)


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
    there = ", ".join(known) or "none"
    raise VoiceError(f"unknown voice {name!r}; {folder} has: {there}. Or give a voice file's path")


def list_voices(folder: Path) -> list[str]:
    """Names of the voices in a folder, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))
