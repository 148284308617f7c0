"""Codes on the wire for everything that is refused or has failed, in one table.

Clients act on these: Pipecat ends its session on any ``error`` event but two codes, LiveKit
passes over three, so both the code and the event that carries it are chosen with care.
"""

from dataclasses import dataclass
from typing import Any

from mosstalk.errors import MosstalkError
from mosstalk.session.events import ErrorCode, ErrorRaised

VENDOR = "mosstalk"
"""The one key under which what the protocol has no field for stands, in the object it is about."""
_INVALID = "invalid_request_error"
_SERVER = "server_error"
_BUSY = "rate_limit_error"


class WireError(MosstalkError):
    """A client's event cannot be served; ``param`` is the path of what is wrong in it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True)
class _Known:
    code: str
    kind: str = _INVALID
    param: str | None = None


_CODES = {
    ErrorCode.HALF_SAMPLE: _Known("invalid_value", param="audio"),
    ErrorCode.WRONG_RATE: _Known("invalid_value", param="session.audio.input.format"),
    ErrorCode.BAD_SOUND: _Known("invalid_value", param="audio"),
    ErrorCode.COMMIT_EMPTY: _Known("input_audio_buffer_commit_empty"),
    ErrorCode.TURN_TOO_LONG: _Known("input_audio_buffer_full"),
    ErrorCode.RESPONSE_ACTIVE: _Known("conversation_already_has_active_response"),
    ErrorCode.RESPONSE_NOT_ACTIVE: _Known("response_cancel_not_active"),
    ErrorCode.UNKNOWN_ITEM: _Known("invalid_item_id", param="item_id"),
    ErrorCode.DUPLICATE_ITEM: _Known("item_create_duplicate_item_id", param="item.id"),
    ErrorCode.BAD_ITEM: _Known("invalid_value", param="item"),
    ErrorCode.BAD_VALUE: _Known("invalid_value"),
    ErrorCode.UNKNOWN_VOICE: _Known("invalid_value", param="session.audio.output.voice"),
    ErrorCode.CONTEXT_FULL: _Known("context_length_exceeded"),
    ErrorCode.ENGINE_FULL: _Known("rate_limit_exceeded", _BUSY),
    ErrorCode.ENGINE_STOPPED: _Known("server_error", _SERVER),
    ErrorCode.RESPONSE_FAILED: _Known("server_error", _SERVER),
    ErrorCode.INTERNAL: _Known("server_error", _SERVER),
}
_BY_COMMAND = {
    ("DeleteItem", ErrorCode.UNKNOWN_ITEM): _Known("item_delete_invalid_item_id", param="item_id"),
    ("Truncate", ErrorCode.UNKNOWN_ITEM): _Known("item_truncate_invalid_item_id", param="item_id"),
    ("Truncate", ErrorCode.BAD_ITEM): _Known("item_truncate_invalid_item_id", param="item_id"),
    ("CreateText", ErrorCode.UNKNOWN_ITEM): _Known(
        "item_create_invalid_previous_item_id", param="previous_item_id"
    ),
    ("CreateAudio", ErrorCode.UNKNOWN_ITEM): _Known(
        "item_create_invalid_previous_item_id", param="previous_item_id"
    ),
    ("CreateMessage", ErrorCode.UNKNOWN_ITEM): _Known(
        "item_create_invalid_previous_item_id", param="previous_item_id"
    ),
    ("CreateResponse", ErrorCode.UNKNOWN_ITEM): _Known("invalid_item_id", param="response.input"),
    ("CreateResponse", ErrorCode.BAD_ITEM): _Known("invalid_value", param="response.input"),
}
_LEADS = {ErrorCode.RESPONSE_NOT_ACTIVE: "Cancellation failed: "}
"""LiveKit knows a cancel that came too late by how its message begins."""
FAILED_RESPONSES = (ErrorCode.CONTEXT_FULL, ErrorCode.ENGINE_FULL, ErrorCode.RESPONSE_FAILED)
"""What keeps a response from being made is told as one that has failed: that ends no client."""


def told(error: ErrorRaised) -> dict[str, Any]:
    """Body of an ``error`` event for what a session has refused or failed at."""
    known = _known(error)
    body = refusal(
        known.code, _LEADS.get(error.code, "") + error.message, known.param, kind=known.kind
    )
    if error.retry_after_s is not None:
        body[VENDOR] = {"retry_after_s": error.retry_after_s}
    return body


def refusal(
    code: str, message: str, param: str | None = None, *, kind: str = _INVALID
) -> dict[str, Any]:
    """Body of an ``error`` event; whose fault it was is added by the one who knows."""
    return {"type": kind, "code": code, "message": message, "param": param, "event_id": None}


def failure(error: ErrorRaised) -> dict[str, Any]:
    """``status_details`` of a response that could not be begun."""
    known = _known(error)
    details = {"type": known.kind, "code": known.code, "message": error.message}
    return {"type": "failed", "error": details}


def _known(error: ErrorRaised) -> _Known:
    return _BY_COMMAND.get((error.command or "", error.code)) or _CODES[error.code]
