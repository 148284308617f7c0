"""Sound and spectrograms as parts of a page that needs nothing but itself."""

import base64
import io
import struct
import zlib
from html import escape

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from mosstalk.audio.sound import Samples, resample
from mosstalk.constants import INPUT_RATE, MEL_FRAME_SAMPLES, OUTPUT_RATE
from mosstalk.models.features import vocoder_mel

_SHORTEST_PICTURE = 4 * MEL_FRAME_SAMPLES
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_TYPE = 3
_ANCHORS = bytes.fromhex("000004 3b0f70 8c2981 de4968 fe9f6d fcfdbf")
"""Colours from quiet to loud, evenly spaced: dark violet over red to pale yellow."""
_COLOURS = 64
_RANGE_DB = 70.0
_DB_PER_NAT = 20 / np.log(10)
_SCALE = 2


def player(samples: Samples) -> str:
    """Sound (n,) at 24 kHz as HTML that plays it; says so where there is none."""
    if not len(samples):
        return '<p class="fault">no sound</p>'
    kind, content = encode_sound(samples)
    return f'<audio controls preload="metadata" src="{_data(kind, content)}"></audio>'


def encode_sound(samples: Samples) -> tuple[str, bytes]:
    """Sound (n,) at 24 kHz as a small file with its media type: mp3, or wav where it cannot be."""
    file = io.BytesIO()
    if "MP3" in soundfile.available_formats():
        soundfile.write(file, samples, OUTPUT_RATE, format="MP3")
        return "audio/mpeg", file.getvalue()
    smaller = resample(samples, OUTPUT_RATE, INPUT_RATE)
    soundfile.write(file, smaller, INPUT_RATE, format="WAV", subtype="PCM_16")
    return "audio/wav", file.getvalue()


def picture(samples: Samples, name: str, longest: int) -> str:
    """The spectrogram of sound (n,) at 24 kHz as HTML, or nothing for a very short one.

    A second is as wide in all pictures of sounds of which the longest has ``longest`` samples.
    """
    if len(samples) < _SHORTEST_PICTURE:
        return ""
    source = _data("image/png", spectrogram_png(samples))
    width = f"width: {len(samples) / longest:.1%}"
    return f'<img src="{source}" style="{width}" alt="mel spectrogram, {escape(name)}">\n'


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


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
    anchors = np.frombuffer(_ANCHORS, np.uint8).reshape(-1, 3).astype(np.float64)
    at = np.linspace(0, len(anchors) - 1, _COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, place]) for place in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
