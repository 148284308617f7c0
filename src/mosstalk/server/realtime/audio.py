"""Sound as it goes over the wire: which formats there are, and how to come to PCM and back."""

import base64
from dataclasses import dataclass

import numpy as np
import soxr

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.realtime import g711
from mosstalk.server.realtime.validation import WireError, too_long

PCM, MU_LAW, A_LAW = "audio/pcm", "audio/pcmu", "audio/pcma"
OTHER_NAMES = {
    "pcm16": PCM,
    "g711_ulaw": MU_LAW,
    "g711_alaw": A_LAW,
}
"""Older names, which clients still send."""
_FULL_SCALE = 32767.0


@dataclass(frozen=True)
class AudioFormat:
    """``kind`` is the protocol's name; ``rate`` in Hz, 8000 for G.711."""

    kind: str = PCM
    rate: int = OUTPUT_RATE

    def pcm_of(self, encoded: str, path: str, most_bytes: int) -> bytes:
        """Little-endian int16 samples, at ``rate``, of base64 that stands at ``path``.

        Raises:
            WireError: no base64, more than ``most_bytes`` of sound, or half a sample.
        """
        sound = _decoded(encoded, path, most_bytes)
        if len(sound) > most_bytes:
            raise WireError(
                "string_above_max_length",
                f"Invalid '{path}': {len(sound)} bytes of sound, where {most_bytes} may come at "
                "once. Send it in pieces.",
                path,
            )
        if self.kind == MU_LAW:
            return g711.decode_mu(sound)
        if self.kind == A_LAW:
            return g711.decode_a(sound)
        if len(sound) % 2:
            message = f"Invalid '{path}': {len(sound)} bytes end within a sample of 2."
            raise WireError("invalid_value", message, path)
        return sound


def _decoded(encoded: str, path: str, most_bytes: int) -> bytes:
    if len(encoded) // 4 * 3 > most_bytes + 2:
        raise too_long(path, f"{most_bytes} bytes of sound", f"{len(encoded) // 4 * 3}")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        message = f"Invalid '{path}'. Expected base64-encoded audio bytes: {error}."
        raise WireError("invalid_value", message, path) from error


class Encoder:
    """One reply's sound, from 24 kHz PCM to base64 of its format; no piece ends in a sample."""

    def __init__(self, wanted: AudioFormat) -> None:
        self._format = wanted
        self._stream: soxr.ResampleStream | None = None
        if wanted.rate != OUTPUT_RATE:
            self._stream = soxr.ResampleStream(
                OUTPUT_RATE, wanted.rate, 1, dtype="float32", quality="HQ"
            )

    def push(self, pcm: bytes) -> str:
        """Base64 of what can be given after these samples, "" if that is nothing."""
        return self._encoded(pcm if self._stream is None else self._resampled(pcm, last=False))

    def finish(self) -> str:
        """Base64 of what resampling has held back, "" if nothing."""
        if self._stream is None:
            return ""
        return self._encoded(self._resampled(b"", last=True))

    def _resampled(self, pcm: bytes, *, last: bool) -> bytes:
        assert self._stream is not None, "nothing to resample"
        samples = np.frombuffer(pcm, "<i2").astype(np.float32)
        heard = np.rint(self._stream.resample_chunk(samples, last=last))
        return heard.clip(-_FULL_SCALE - 1, _FULL_SCALE).astype("<i2").tobytes()

    def _encoded(self, pcm: bytes) -> str:
        if self._format.kind == MU_LAW:
            pcm = g711.encode_mu(pcm)
        elif self._format.kind == A_LAW:
            pcm = g711.encode_a(pcm)
        return base64.b64encode(pcm).decode("ascii")
