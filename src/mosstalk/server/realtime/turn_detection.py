"""Who ends a user's turn, in the protocol's words and in the session's."""

from dataclasses import dataclass
from typing import Any, cast

from mosstalk.server.realtime.errors import WireError
from mosstalk.server.realtime.reading import Fields, unknown_value
from mosstalk.vad.turns import Eagerness, TurnDetection

SERVER, SEMANTIC = "server_vad", "semantic_vad"
_EAGERNESS = ("low", "medium", "high", "auto")
_LONGEST_MS = 600_000
_THRESHOLDS = (0.01, 0.99)


@dataclass(frozen=True)
class TurnTaking:
    """``detection`` None: the client commits. ``wire`` is what a session shows of it."""

    detection: TurnDetection | None
    create_response: bool
    interrupt_response: bool
    wire: dict[str, Any] | None


def turn_taking_of(audio_input: Fields, default: TurnTaking) -> TurnTaking:
    """What a session's ``turn_detection`` asks for; ``default`` if it is not there.

    ``semantic_vad`` judges no words here: its eagerness chooses how long a silence is waited for.

    Raises:
        WireError: another kind of detection, or values that mean nothing.
    """
    if not audio_input.has("turn_detection"):
        return default
    if audio_input.value["turn_detection"] in (None, False):
        return TurnTaking(None, default.create_response, default.interrupt_response, None)
    fields = audio_input.object("turn_detection")
    kind = fields.text("type") or SERVER
    if kind not in (SERVER, SEMANTIC):
        raise unknown_value(fields.path("type"), kind, (SERVER, SEMANTIC))
    detection, shown = _semantic(fields) if kind == SEMANTIC else _silence(fields, default)
    create, interrupt = (fields.flag(name) for name in ("create_response", "interrupt_response"))
    return shown_as(detection, create is not False, interrupt is not False, shown)


def shown_as(
    detection: TurnDetection | None,
    create_response: bool,
    interrupt_response: bool,
    shown: dict[str, Any] | None = None,
) -> TurnTaking:
    """Turn taking as a session shows it; without ``shown``, as ``server_vad``."""
    if detection is None:
        return TurnTaking(None, create_response, interrupt_response, None)
    wire = {
        **(shown or _server_vad(detection)),
        "create_response": create_response,
        "interrupt_response": interrupt_response,
    }
    return TurnTaking(detection, create_response, interrupt_response, wire)


def _silence(fields: Fields, default: TurnTaking) -> tuple[TurnDetection, dict[str, Any]]:
    usual = default.detection or TurnDetection()
    threshold = fields.number("threshold", 0.0, 1.0)
    lowest, highest = _THRESHOLDS
    padding = fields.whole("prefix_padding_ms", 0, _LONGEST_MS)
    silence = fields.whole("silence_duration_ms", 0, _LONGEST_MS)
    detection = TurnDetection(
        usual.threshold if threshold is None else min(max(threshold, lowest), highest),
        usual.prefix_padding_ms if padding is None else padding,
        usual.silence_duration_ms if silence is None else silence,
        fields.whole("idle_timeout_ms", 0, _LONGEST_MS),
    )
    return detection, _server_vad(detection)


def _semantic(fields: Fields) -> tuple[TurnDetection, dict[str, Any]]:
    asked = fields.text("eagerness") or "auto"
    if asked not in _EAGERNESS:
        raise WireError(
            "invalid_value",
            f"Invalid '{fields.path('eagerness')}': one of {', '.join(_EAGERNESS)}.",
            fields.path("eagerness"),
        )
    detection = TurnDetection.for_eagerness(cast(Eagerness, asked))
    return detection, {"type": SEMANTIC, "eagerness": asked}


def _server_vad(detection: TurnDetection) -> dict[str, Any]:
    return {
        "type": SERVER,
        "threshold": detection.threshold,
        "prefix_padding_ms": detection.prefix_padding_ms,
        "silence_duration_ms": detection.silence_duration_ms,
        "idle_timeout_ms": detection.idle_timeout_ms,
    }
