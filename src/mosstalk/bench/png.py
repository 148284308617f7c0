"""Spectrograms as pictures: a palette PNG without a drawing library."""

import struct
import zlib

import numpy as np
import numpy.typing as npt
import torch

from mosstalk.audio.sound import Samples
from mosstalk.models.features import vocoder_mel

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_TYPE = 3
_ANCHORS = (
    (0, 0, 4),
    (59, 15, 112),
    (140, 41, 129),
    (222, 73, 104),
    (254, 159, 109),
    (252, 253, 191),
)
"""Colours from quiet to loud, evenly spaced: dark violet over red to pale yellow."""
_COLOURS = 64
_RANGE_DB = 70.0
_DB_PER_NAT = 20 / np.log(10)
_SCALE = 2


def spectrogram_png(samples: Samples) -> bytes:
    """Mel spectrogram of sound (n,) at 24 kHz as a PNG: 20 ms and one of 80 bands are 2 pixels.

    0 to 8 kHz from the bottom up; colours span the 70 dB below the loudest.
    """
    mel = vocoder_mel(torch.from_numpy(samples)).numpy().T[::-1] * _DB_PER_NAT
    level = np.clip((mel - mel.max()) / _RANGE_DB + 1, 0, 1)
    pixels = np.round(level * (_COLOURS - 1)).astype(np.uint8)
    return encode_png(pixels.repeat(_SCALE, 0).repeat(_SCALE, 1), _palette())


def encode_png(pixels: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8]) -> bytes:
    """A PNG (ISO/IEC 15948) of palette indices (height, width); ``palette`` is (colours, 3)."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _PALETTE_TYPE, 0, 0, 0)
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # each row begins with its filter: none
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def _palette() -> npt.NDArray[np.uint8]:
    anchors = np.array(_ANCHORS, np.float64)
    at = np.linspace(0, len(anchors) - 1, _COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, place]) for place in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
