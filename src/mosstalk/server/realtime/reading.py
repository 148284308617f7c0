"""What clients send, read with care: JSON of limited size, and fields whose path is known."""

import base64
import binascii
import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mosstalk.files import deeper_than
from mosstalk.server.realtime.errors import WireError

MIB = 1 << 20
_AUDIO = re.compile(r'"audio"[ \t\r\n]*:[ \t\r\n]*"')
_AUDIO_BYTES = re.compile(_AUDIO.pattern.encode())
_LARGEST = 1e12
_MOST_OBJECTS = 1024
"""Longest list of objects that is looked through."""
_DEEPEST = 64
"""Levels of objects and arrays in one message. Code that follows them may recurse."""


@dataclass(frozen=True)
class WireLimits:
    """How much one message may bring.

    Attributes:
        message_bytes: longest message. 15 MiB of sound are 20 MiB of base64.
        audio_bytes: most sound in one append or item, as bytes of its own format.
        text_chars: longest text of an item or of instructions.
        kept_chars: most that is kept beside the session for the client's eyes alone: a session's
            fields, and items that the model does not read.
        tools_chars: longest ``tools`` of a session, as JSON.
        event_bytes: longest message without what sound takes in it.
    """

    message_bytes: int = 32 * MIB
    audio_bytes: int = 15 * MIB
    text_chars: int = 32_768
    kept_chars: int = 1 * MIB
    tools_chars: int = MIB // 8
    event_bytes: int = 1 * MIB


class Fields:
    """A JSON object from a client, field by field; null is the same as absent.

    Every method raises WireError, with the field's path, for a value of the wrong kind.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise _wrong_kind(path, "an object", value)
        self.value: dict[str, Any] = value
        self._path = path

    def path(self, name: str = "") -> str:
        """Where a field, or the object itself, stands in the message."""
        return ".".join(part for part in (self._path, name) if part)

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self.value

    def object(self, name: str) -> "Fields":
        """A nested object; an empty one if there is none."""
        value = self.value.get(name)
        return Fields({} if value is None else value, self.path(name))

    def objects(self, name: str) -> list["Fields"]:
        """A list of objects; empty if there is none."""
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise _wrong_kind(self.path(name), "an array", value)
        if len(value) > _MOST_OBJECTS:
            raise WireError(
                "array_above_max_length",
                f"Invalid '{self.path(name)}': at most {_MOST_OBJECTS} elements, not {len(value)}.",
                self.path(name),
            )
        return [Fields(each, f"{self.path(name)}[{i}]") for i, each in enumerate(value)]

    def text(self, name: str, most: int | None = None) -> str | None:
        """A string of at most ``most`` characters."""
        value = self.value.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise _wrong_kind(self.path(name), "a string", value)
        if most is not None and len(value) > most:
            raise too_long(self.path(name), f"{most} characters", f"{len(value)}")
        return value

    def required(self, name: str, most: int | None = None) -> str:
        """A string that must be there."""
        value = self.text(name, most)
        if value is None:
            path = self.path(name)
            raise WireError(
                "missing_required_parameter", f"Missing required parameter: '{path}'.", path
            )
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        """One of a few strings."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise unknown_value(self.path(name), value, choices)
        return value

    def number(self, name: str, low: float = -_LARGEST, high: float = _LARGEST) -> float | None:
        """A number from ``low`` to ``high``."""
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_kind(self.path(name), "a number", value)
        if not low <= value <= high:
            said = value if isinstance(value, float) or abs(value) < _LARGEST else "that"
            raise WireError(
                "invalid_value",
                f"Invalid '{self.path(name)}': from {low:g} to {high:g}, not {said}.",
                self.path(name),
            )
        return float(value)

    def whole(self, name: str, low: int = 0, high: int = int(_LARGEST)) -> int | None:
        """A whole number from ``low`` to ``high``; 500.0 is one, and 500.4 is taken as one."""
        value = self.number(name, low, high)
        return None if value is None else round(value)

    def flag(self, name: str) -> bool | None:
        """True or false."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong_kind(self.path(name), "true or false", value)
        return value


def event_of(raw: str | bytes, limits: WireLimits) -> Fields:
    """The event in a message, be it text or the bytes of UTF-8. All its numbers are finite.

    Raises:
        WireError: it is too long, no JSON, or no object.
    """
    if len(raw) > limits.message_bytes:
        raise too_long("message", f"{limits.message_bytes} bytes", f"{len(raw)}")
    require_sound_or_short(raw, limits.event_bytes)
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise WireError("invalid_json", f"The message is no valid JSON: {error}"[:300]) from error
    if not isinstance(value, dict):
        raise WireError("invalid_json", "The message is no JSON object.")
    return Fields(value)


def require_sound_or_short(raw: str | bytes, most: int) -> None:
    """Raise WireError for a message with more than ``most`` bytes or characters beside its sound.

    A message is not parsed for this. What is looked for are fields ``"audio": "..."``, whatever
    the order of fields and however deep; what their strings take does not count. The scan ends as
    soon as the rest is too long, so it looks at no more than ``most`` and the sound.
    """
    if len(raw) <= most:
        return
    field, quote = (_AUDIO, '"') if isinstance(raw, str) else (_AUDIO_BYTES, b'"')
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
            "sound of an 'audio' field. Send less at a time.",
            "message",
        )


def require_plain(event: Fields, raw: str | bytes) -> None:
    """Check what JSON allows and nothing behind this door can bear; ``raw`` is the message.

    Raises:
        WireError: it is nested deeply, or holds half a surrogate pair, which no text may hold.
    """
    if deeper_than(event.value, _DEEPEST):
        raise _too_deep()
    marks: Any = ("\\ud", "\\uD") if isinstance(raw, str) else (b"\\ud", b"\\uD")
    if any(mark in raw for mark in marks) and not is_text(
        json.dumps(event.value, ensure_ascii=False)
    ):
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


def sound_of(fields: Fields, name: str, limits: WireLimits) -> bytes:
    """The bytes of a field of base64.

    Raises:
        WireError: it is missing, no base64, or longer than sound may be.
    """
    text, path = fields.required(name), fields.path(name)
    if len(text) // 4 * 3 > limits.audio_bytes + 2:
        raise too_long(path, f"{limits.audio_bytes} bytes of sound", f"{len(text) // 4 * 3}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"Invalid '{path}'. Expected base64-encoded audio bytes: {error}."
        raise WireError("invalid_value", message, path) from error


def too_long(path: str, most: str, got: str) -> WireError:
    """The error for something that is longer than it may be."""
    return WireError(
        "string_above_max_length", f"Invalid '{path}': at most {most}, not {got}.", path
    )


def unknown_value(path: str, value: str, known: Collection[str]) -> WireError:
    """The error for a value that means nothing here."""
    names = ", ".join(f"'{each}'" for each in sorted(known))
    message = f"Invalid value: '{value[:80]}'. Supported values are: {names}."
    return WireError("invalid_value", message, path)


def _wrong_kind(path: str, wanted: str, value: Any) -> WireError:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    got = "null" if value is None else kinds.get(type(value), "a number")
    message = f"Invalid type for '{path}': expected {wanted}, but got {got} instead."
    return WireError("invalid_type", message, path or None)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    """A number, the largest there is for one beyond it: JSON has no infinity to answer with."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def _too_deep() -> WireError:
    return WireError("invalid_json", f"The message is nested more than {_DEEPEST} levels deep.")
