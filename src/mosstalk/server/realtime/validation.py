"""What clients send, read with care: JSON of limited size, checked by the models of its events.

What pydantic finds wrong becomes a ``WireError`` with the code, and the path of the field, that
clients of the protocol know: ``_wire_error`` alone translates. Sound comes as base64, of which
G.711 (ITU-T) is the form of telephones: one byte a sample at 8 kHz, mu-law or A-law.
"""

import base64
import json
import re
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import soxr
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from mosstalk.constants import OUTPUT_RATE
from mosstalk.errors import MosstalkError
from mosstalk.files import deeper_than
from mosstalk.server.limits import Limits
from mosstalk.session.commands import INPUT_RATES

LARGEST = 1e12
_DEEPEST = 64
"""Levels of objects and arrays in one message. Code that follows them may recurse."""
_QUOTED = re.compile("'([^']*)'")
_FIELD = r'"%s"[ \t\r\n]*:[ \t\r\n]*"'
_EXPECTED = {
    "string_type": "a string", "literal_error": "a string", "float_type": "a number",
    "bool_type": "true or false", "list_type": "an array",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip
"""What was expected, by pydantic's type of error."""
_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
_TOO_LONG = {
    "string_too_long": ("string_above_max_length", "characters"),
    "too_long": ("array_above_max_length", "elements"),
}
"""Code and unit, by pydantic's type of error."""
_TAGS: set[str] = set()
"""Names of the members of unions, which pydantic puts into an error's location."""
_T = TypeVar("_T")


Omitted = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
"""A field that is left out of what the server shows where it is None."""


class WireError(MosstalkError):
    """A client's event cannot be served; ``param`` is the path of what is wrong in it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class ClientObject(BaseModel):
    """An object from a client: nothing is converted, unknown fields are passed over."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Note what a member of a union is called."""
        if "type" in cls.model_fields:
            _TAGS.update(get_args(cls.model_fields["type"].annotation))


def parse_message(raw: str | bytes, limits: Limits, sound: str = "audio") -> dict[str, Any]:
    """The object in a message, be it text or the bytes of UTF-8. All its numbers are finite.

    ``sound`` is what a field is called that holds sound.

    Raises:
        WireError: it is too long, no JSON, or no object.
    """
    if len(raw) > limits.message_bytes:
        raise too_long("message", f"{limits.message_bytes} bytes", len(raw))
    _require_sound_or_short(raw, limits.event_bytes, sound)
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise WireError("invalid_json", f"The message is no valid JSON: {error}"[:300]) from error
    if not isinstance(value, dict):
        raise WireError("invalid_json", "The message is no JSON object.")
    return value


def _require_sound_or_short(raw: str | bytes, most: int, sound: str) -> None:
    """Raise WireError for a message with more than ``most`` bytes or characters beside its sound.

    A message is not parsed for this. What is looked for are fields ``"audio": "..."``, or what
    ``sound`` is, whatever the order of fields and however deep; what their strings take does not
    count. The scan ends as soon as the rest is too long, so it looks at no more than ``most`` and
    the sound.
    """
    if len(raw) <= most:
        return
    field, quote = _sound_field(sound, isinstance(raw, str)), '"' if isinstance(raw, str) else b'"'
    place = rest = 0
    while found := field.search(raw, place, place + most - rest + 1):  # type: ignore[arg-type]
        rest += found.end() - place
        place = raw.find(quote, found.end())  # type: ignore[arg-type]
        if place < 0:
            break
    if place < 0 or rest + len(raw) - place > most:
        raise WireError(
            "string_above_max_length",
            f"Invalid 'message': {len(raw)} bytes, where at most {most} may be anything but the "
            f"sound of fields named '{sound}'. Send less at a time.",
            "message",
        )


@lru_cache
def _sound_field(name: str, is_text: bool) -> re.Pattern[str] | re.Pattern[bytes]:
    """The beginning of a field up to its string's first quote."""
    pattern = _FIELD % name
    return re.compile(pattern) if is_text else re.compile(pattern.encode())


def require_plain(event: dict[str, Any], raw: str | bytes) -> None:
    """Check what JSON allows and the server cannot bear; ``raw`` is the message.

    Raises:
        WireError: it is nested deeply, or holds half a surrogate pair, which no text may hold.
    """
    if deeper_than(event, _DEEPEST):
        raise _too_deep()
    low, high = ("\\ud", "\\uD") if isinstance(raw, str) else (b"\\ud", b"\\uD")
    escaped = low in raw or high in raw  # type: ignore[operator]
    if escaped and not is_text(json.dumps(event, ensure_ascii=False)):
        raise WireError(
            "invalid_json", "The message holds half a surrogate pair (\\ud800 to \\udfff)."
        )


def is_text(value: str) -> bool:
    """Whether UTF-8 can write it: half a surrogate pair it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def validate(form: TypeAdapter[_T], value: Any, limits: Limits, path: str = "") -> _T:
    """A client's value as the model that it has to be; ``path`` is where it stands in its event.

    Raises:
        WireError: it is not; of several faults the first is told.
    """
    try:
        return form.validate_python(value, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise _wire_error(first, path)


def _wire_error(found: ErrorDetails, path: str) -> WireError:
    """What pydantic has found, in the protocol's words."""
    kind, value, ctx = found["type"], found["input"], found.get("ctx", {})
    for part in found["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TAGS:
            path += f".{part}" if path else part
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        assert isinstance(value, dict), "others are of the wrong type"
        path, value = f"{path}.type" if path else "type", value.get("type")
        kind = "literal_error" if isinstance(value, str) else "string_type"
    if kind == "missing" or (value is None and kind == "string_type" and not path.endswith("]")):
        return WireError(
            "missing_required_parameter", f"Missing required parameter: '{path}'.", path
        )
    if kind == "literal_error" and isinstance(value, str):
        known = _QUOTED.findall(ctx.get("expected_tags") or ctx["expected"])
        return WireError("invalid_value", unknown_value(value, known), path)
    if kind in _EXPECTED:
        got = "null" if value is None else _JSON_TYPES.get(type(value), "a number")
        message = f"Invalid type for '{path}': expected {_EXPECTED[kind]}, but got {got} instead."
        return WireError("invalid_type", message, path or None)
    if kind in _TOO_LONG:
        code, unit = _TOO_LONG[kind]
        return too_long(path, f"{ctx['max_length']} {unit}", len(value), code)
    if kind == "unknown_value":
        return WireError("invalid_value", found["msg"], path)
    return WireError(kind, f"Invalid '{path}': {found['msg']}", path)


def in_range(value: Any, low: float = -LARGEST, high: float = LARGEST) -> float | None:
    """A field's check: a number from ``low`` to ``high``, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticKnownError("float_type")
    if not low <= value <= high:
        got = value if isinstance(value, float) or abs(value) < LARGEST else "that"
        raise fault(f"from {low:g} to {high:g}, not {got}.")
    return float(value)


def number(low: float = -LARGEST, high: float = LARGEST) -> BeforeValidator:
    """A number from ``low`` to ``high``, or None."""
    return BeforeValidator(lambda value: in_range(value, low, high))


def whole(low: float = 0, high: float = LARGEST) -> BeforeValidator:
    """The same as a whole number: 500.0 is one, and 500.4 is taken as one."""

    def check(value: Any) -> int | None:
        found = in_range(value, low, high)
        return None if found is None else round(found)

    return BeforeValidator(check)


def fault(message: str, kind: str = "invalid_value") -> PydanticCustomError:
    """What a field's check raises: the message of a ``WireError``, and its code.

    Of ``unknown_value`` the message is whole, of others the field's path is put before it.
    """
    return PydanticCustomError(kind, message)


def too_long(path: str, most: str, got: int, code: str = "string_above_max_length") -> WireError:
    """The error for something that is longer than it may be."""
    return WireError(code, f"Invalid '{path}': at most {most}, not {got}.", path)


def unknown_value(value: str, known: Collection[str]) -> str:
    """What is said of a value that means nothing here."""
    names = ", ".join(f"'{each}'" for each in sorted(known))
    return f"Invalid value: '{value[:80]}'. Supported values are: {names}."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    """A number, the largest there is for one beyond it: JSON has no infinity to answer with."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _too_deep() -> WireError:
    return WireError("invalid_json", f"The message is nested more than {_DEEPEST} levels deep.")


# Sound.

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
    """One reply's sound, from 24 kHz PCM to base64 of its format; each piece has whole samples."""

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
