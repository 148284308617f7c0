"""ITU-T G.711, the sound of telephones: one byte a sample at 8 kHz, mu-law or A-law."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

RATE = 8000
"""Samples a second, by the standard."""
_BIAS = 0x84
_CLIP = 32635
_A_FLIP = 0x55

_Bytes = npt.NDArray[np.uint8]
_Pcm = npt.NDArray[np.int16]


def decode_mu(sound: bytes) -> bytes:
    """Little-endian int16 samples of mu-law bytes."""
    return _mu_values()[np.frombuffer(sound, np.uint8)].tobytes()


def decode_a(sound: bytes) -> bytes:
    """Little-endian int16 samples of A-law bytes."""
    return _a_values()[np.frombuffer(sound, np.uint8)].tobytes()


def encode_mu(pcm: bytes) -> bytes:
    """Mu-law bytes of little-endian int16 samples."""
    return _mu_bytes()[np.frombuffer(pcm, "<u2")].tobytes()


def encode_a(pcm: bytes) -> bytes:
    """A-law bytes of little-endian int16 samples."""
    return _a_bytes()[np.frombuffer(pcm, "<u2")].tobytes()


@lru_cache(maxsize=1)
def _mu_values() -> _Pcm:
    """Of each byte its sample: an inverted sign, exponent (3 bits) and mantissa (4 bits)."""
    code = ~np.arange(256, dtype=np.uint8)
    size = (((code & 0x0F).astype(np.int32) << 3) + _BIAS) << ((code & 0x70) >> 4)
    return np.where(code & 0x80, _BIAS - size, size - _BIAS).astype("<i2")


@lru_cache(maxsize=1)
def _a_values() -> _Pcm:
    """Of each byte its sample; even bits are inverted."""
    code = np.arange(256, dtype=np.uint8) ^ _A_FLIP
    exponent = ((code & 0x70) >> 4).astype(np.int32)
    size = ((code & 0x0F).astype(np.int32) << 4) + 8
    size = np.where(exponent > 0, (size + 0x100) << np.maximum(exponent - 1, 0), size)
    return np.where(code & 0x80, size, -size).astype("<i2")


@lru_cache(maxsize=1)
def _mu_bytes() -> _Bytes:
    """Of each sample, as an index of 16 bits, its byte."""
    samples = _every_sample()
    size = np.minimum(np.abs(samples), _CLIP) + _BIAS
    exponent = _bits(size) - 8
    mantissa = (size >> (exponent + 3)) & 0x0F
    sign = np.where(samples < 0, 0x80, 0)
    return (~(sign | exponent << 4 | mantissa) & 0xFF).astype(np.uint8)


@lru_cache(maxsize=1)
def _a_bytes() -> _Bytes:
    samples = _every_sample()
    size = np.where(samples < 0, ~samples, samples)
    exponent = np.maximum(_bits(size) - 8, 0)
    mantissa = (size >> np.where(exponent > 0, exponent + 3, 4)) & 0x0F
    sign = np.where(samples < 0, 0, 0x80)
    return ((sign | exponent << 4 | mantissa) ^ _A_FLIP).astype(np.uint8)


def _every_sample() -> npt.NDArray[np.int32]:
    return np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int32)


def _bits(size: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """How many bits a number of at least 0 has."""
    return np.frexp(size.astype(np.float64))[1].astype(np.int32)
