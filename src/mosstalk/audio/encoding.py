"""Sound as files have it, made piece by piece while it comes: for streams that nobody rewinds."""

import io

import numpy as np
import soundfile

from mosstalk.audio.sound import WAV_UNKNOWN, wav_header

_LIBSNDFILE = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
}
_CONSTANT_RATE = {"bitrate_mode": "CONSTANT", "compression_level": 0.6}
"""Of MP3: 64 kbit/s at 24 kHz. At a rate that varies, players guess the length wrong, because the
header that would say it is written at the end, when it has long been sent."""
FORMATS = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Formats by name, each with its media type. ``pcm`` is little-endian int16 without a header."""


class SoundEncoder:
    """Mono sound in one of ``FORMATS``: all that ``push`` and ``finish`` return, joined, is a file.

    Its header says that the length is unknown. MP3 comes in frames of 24 ms, FLAC in blocks of some
    170 ms and Opus in pages of 1 s, so ``push`` may return nothing.
    """

    def __init__(self, name: str, rate: int) -> None:
        self._begun = b"" if name != "wav" else wav_header(rate, WAV_UNKNOWN)
        self._stream = _ForwardOnly()
        self._file: soundfile.SoundFile | None = None
        if name in _LIBSNDFILE:
            kind, subtype = _LIBSNDFILE[name]
            more = _CONSTANT_RATE if name == "mp3" else {}
            self._file = soundfile.SoundFile(
                self._stream, "w", rate, 1, subtype=subtype, format=kind, **more
            )

    def push(self, pcm: bytes) -> bytes:
        """What follows with more sound, little-endian int16."""
        if self._file:
            self._file.write(np.frombuffer(pcm, "<i2"))
            return self._stream.take()
        begun, self._begun = self._begun, b""
        return begun + pcm

    def finish(self) -> bytes:
        """The end of the file; nothing may be pushed any more."""
        if self._file:
            self._file.close()
        return self._stream.take()


def sound_file(name: str, pcm: bytes, rate: int) -> bytes:
    """A whole file in one of ``FORMATS``, of little-endian int16: its header knows the length."""
    if name not in _LIBSNDFILE:
        return (wav_header(rate, len(pcm)) if name == "wav" else b"") + pcm
    kind, subtype = _LIBSNDFILE[name]
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm, "<i2"), rate, subtype=subtype, format=kind)
    return file.getvalue()


class _ForwardOnly:
    """A file that keeps what is written at its end, and drops what would change what has gone.

    libsndfile goes back at the end to write lengths and checksums into headers.
    """

    def __init__(self) -> None:
        self._place = self._end = 0
        self._kept = bytearray()

    def take(self) -> bytes:
        """What was written since this was last asked."""
        taken = bytes(self._kept)
        self._kept.clear()
        return taken

    def write(self, data: bytes) -> int:
        if self._place == self._end:
            self._kept += data
            self._end += len(data)
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._end)[whence]
        return self._place

    def tell(self) -> int:
        return self._place
