"""Sound as it goes over the wire: which formats there are, and how to come to PCM and back."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from mosstalk.constants import OUTPUT_RATE
from mosstalk.server.realtime import g711
from mosstalk.server.realtime.errors import WireError
from mosstalk.server.realtime.reading import Fields, WireLimits, sound_of, unknown_value
from mosstalk.session.settings import INPUT_RATES

PCM, MU_LAW, A_LAW = "audio/pcm", "audio/pcmu", "audio/pcma"
_OTHER_NAMES = {
    "pcm16": PCM,
    "g711_ulaw": MU_LAW,
    "g711_alaw": A_LAW,
}
_KINDS = (PCM, MU_LAW, A_LAW)
_FULL_SCALE = 32767.0


@dataclass(frozen=True)
class AudioFormat:
    """``kind`` is the protocol's name; ``rate`` in Hz, 8000 for G.711."""

    kind: str = PCM
    rate: int = OUTPUT_RATE

    @property
    def wire(self) -> dict[str, Any]:
        """As a session has it."""
        return {"type": self.kind, "rate": self.rate} if self.kind == PCM else {"type": self.kind}

    def pcm_of(self, fields: Fields, name: str, limits: WireLimits) -> bytes:
        """Little-endian int16 samples, at ``rate``, of a field of base64.

        Raises:
            WireError: no base64, too long, or half a sample.
        """
        sound = sound_of(fields, name, limits)
        if len(sound) > limits.audio_bytes:
            raise WireError(
                "string_above_max_length",
                f"Invalid '{fields.path(name)}': {len(sound)} bytes of sound, where "
                f"{limits.audio_bytes} may come at once. Send it in pieces.",
                fields.path(name),
            )
        if self.kind == MU_LAW:
            return g711.decode_mu(sound)
        if self.kind == A_LAW:
            return g711.decode_a(sound)
        if len(sound) % 2:
            raise WireError(
                "invalid_value",
                f"Invalid '{fields.path(name)}': {len(sound)} bytes end within a sample of 2.",
                fields.path(name),
            )
        return sound


def format_of(fields: Fields, name: str) -> AudioFormat | None:
    """The format in a field, by either of its names; None if none is given.

    Raises:
        WireError: there is no such format, or it cannot be had at that rate.
    """
    value, path = fields.value.get(name), fields.path(name)
    if value is None:
        return None
    if isinstance(value, str):
        value = {"type": value}
    inner = Fields(value, path)
    asked = inner.text("type") or PCM
    kind = _OTHER_NAMES.get(asked, asked)
    if kind not in _KINDS:
        raise unknown_value(inner.path("type"), asked, _KINDS)
    if kind != PCM:
        return AudioFormat(kind, g711.RATE)
    rate = inner.whole("rate") or OUTPUT_RATE
    if rate not in INPUT_RATES:
        raise unknown_value(inner.path("rate"), str(rate), [str(each) for each in INPUT_RATES])
    return AudioFormat(PCM, rate)


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
