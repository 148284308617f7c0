"""Sound as it goes over the wire: its formats, and how to come to PCM and back.

G.711 (ITU-T) is the sound of telephones: one byte a sample at 8 kHz, mu-law or A-law.
"""

import base64
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import soxr
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.realtime.validation import (
    ClientObject,
    WireError,
    fault,
    in_range,
    too_long,
    unknown_value,
)
from mosstalk.session.settings import INPUT_RATES

PCM, MU_LAW, A_LAW = "audio/pcm", "audio/pcmu", "audio/pcma"
_OTHER_NAMES = {"pcm16": PCM, "g711_ulaw": MU_LAW, "g711_alaw": A_LAW}
"""Older names, which clients still send."""
_G711_RATE = 8000
_FULL_SCALE = 32767.0
_MU_BIAS, _MU_CLIP, _A_FLIP = 0x84, 32635, 0x55
_Ints = npt.NDArray[np.int32]


def _rate(value: Any, info: ValidationInfo) -> int | None:
    """Samples a second; only of PCM are they looked at."""
    if info.data.get("type") != PCM:
        return None
    rate = round(in_range(value, 0) or 0)
    if rate and rate not in INPUT_RATES:
        known = [str(each) for each in INPUT_RATES]
        raise fault(unknown_value(str(rate), known), "unknown_value")
    return rate or OUTPUT_RATE


class AudioFormat(ClientObject):
    """A format of sound; the ``rate`` of telephones, 8 kHz, goes without saying."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Annotated[int | None, BeforeValidator(_rate)] = Field(
        default=None, exclude_if=lambda rate: rate is None, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """A format may be given by its name alone, and by an older name."""
        value = {"type": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind is None or isinstance(kind, str):
            kind = _OTHER_NAMES.get(kind or PCM, kind or PCM)
        return value | {"type": kind}

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return self.rate or _G711_RATE

    def pcm_of(self, encoded: str, path: str, most_bytes: int) -> bytes:
        """Little-endian int16 samples, at ``sample_rate``, of base64 that stands at ``path``.

        Raises:
            WireError: no base64, more than ``most_bytes`` of sound, or half a sample.
        """
        if len(encoded) // 4 * 3 > most_bytes + 2:
            raise too_long(path, f"{most_bytes} bytes of sound", len(encoded) // 4 * 3)
        try:
            sound = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            message = f"Invalid '{path}'. Expected base64-encoded audio bytes: {error}."
            raise WireError("invalid_value", message, path) from error
        if len(sound) > most_bytes:
            raise WireError(
                "string_above_max_length",
                f"Invalid '{path}': {len(sound)} bytes of sound, where {most_bytes} may come at "
                "once. Send it in pieces.",
                path,
            )
        if self.type != PCM:
            return decode_g711(sound, self.type)
        if len(sound) % 2:
            message = f"Invalid '{path}': {len(sound)} bytes end within a sample of 2."
            raise WireError("invalid_value", message, path)
        return sound


class Encoder:
    """One reply's sound, from 24 kHz PCM to base64 of its format; no piece ends in a sample."""

    def __init__(self, wanted: AudioFormat) -> None:
        self._type = wanted.type
        self._stream: soxr.ResampleStream | None = None
        if wanted.sample_rate != OUTPUT_RATE:
            self._stream = soxr.ResampleStream(
                OUTPUT_RATE, wanted.sample_rate, 1, dtype="float32", quality="HQ"
            )

    def push(self, pcm: bytes, *, last: bool = False) -> str:
        """Base64 of what can be given after these samples, "" if that is nothing.

        With ``last`` also of what resampling has held back.
        """
        if self._stream:
            samples = np.frombuffer(pcm, "<i2").astype(np.float32)
            heard = np.rint(self._stream.resample_chunk(samples, last=last))
            pcm = heard.clip(-_FULL_SCALE - 1, _FULL_SCALE).astype("<i2").tobytes()
        if self._type != PCM:
            pcm = encode_g711(pcm, self._type)
        return base64.b64encode(pcm).decode("ascii")


def decode_g711(sound: bytes, law: str) -> bytes:
    """Little-endian int16 samples of bytes of ``MU_LAW`` or ``A_LAW``."""
    return _g711_samples(law)[np.frombuffer(sound, np.uint8)].tobytes()


def encode_g711(pcm: bytes, law: str) -> bytes:
    """Bytes of ``MU_LAW`` or ``A_LAW`` of little-endian int16 samples."""
    return _g711_bytes(law)[np.frombuffer(pcm, "<u2")].tobytes()


@lru_cache(maxsize=2)
def _g711_samples(law: str) -> npt.NDArray[np.int16]:
    """Of each byte its sample: a sign, exponent (3 bits) and mantissa (4 bits).

    mu-law inverts all bits, A-law the even ones.
    """
    code = np.arange(256, dtype=np.uint8) ^ np.uint8(0xFF if law == MU_LAW else _A_FLIP)
    exponent, mantissa = (code & 0x70).astype(np.int32) >> 4, (code & 0x0F).astype(np.int32)
    if law == MU_LAW:
        size = (((mantissa << 3) + _MU_BIAS) << exponent) - _MU_BIAS
        return np.where(code & 0x80, -size, size).astype("<i2")
    size = (mantissa << 4) + 8
    size = np.where(exponent > 0, (size + 0x100) << np.maximum(exponent - 1, 0), size)
    return np.where(code & 0x80, size, -size).astype("<i2")


@lru_cache(maxsize=2)
def _g711_bytes(law: str) -> npt.NDArray[np.uint8]:
    """Of each sample, as an index of 16 bits, its byte."""
    samples = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int32)
    if law == MU_LAW:
        size = np.minimum(np.abs(samples), _MU_CLIP) + _MU_BIAS
        exponent = _bits(size) - 8
        code = np.where(samples < 0, 0x80, 0) | exponent << 4 | (size >> (exponent + 3)) & 0x0F
        return (~code & 0xFF).astype(np.uint8)
    size = np.where(samples < 0, ~samples, samples)
    exponent = np.maximum(_bits(size) - 8, 0)
    mantissa = (size >> np.where(exponent > 0, exponent + 3, 4)) & 0x0F
    code = np.where(samples < 0, 0, 0x80) | exponent << 4 | mantissa
    return (code ^ _A_FLIP).astype(np.uint8)


def _bits(size: _Ints) -> _Ints:
    """How many bits a number of at least 0 has."""
    return np.frexp(size.astype(np.float64))[1].astype(np.int32)
