"""Codes on the wire for everything that is refused or has failed, in one table.

Clients act on these: Pipecat ends its session on any ``error`` event but two codes, LiveKit
passes over three, so both the code and the event that carries it are chosen with care.
"""

from dataclasses import dataclass

from mosstalk.server.realtime.server_events import ErrorBody, RetryVendor
from mosstalk.server.realtime.server_objects import Failure, StatusDetails
from mosstalk.session.events import ErrorCode, ErrorRaised

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_BUSY = "rate_limit_error"


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


def error_body(error: ErrorRaised, event_id: str | None) -> ErrorBody:
    """What an ``error`` event says of what a session has refused or failed at.

    ``event_id`` is that of the client's event at fault.
    """
    known, retry_after_s = _known(error), error.retry_after_s
    return ErrorBody(
        type=known.kind,
        code=known.code,
        message=_LEADS.get(error.code, "") + error.message,
        param=known.param,
        event_id=event_id,
        mosstalk=None if retry_after_s is None else RetryVendor(retry_after_s=retry_after_s),
    )


def failure(error: ErrorRaised) -> StatusDetails:
    """``status_details`` of a response that could not be begun."""
    known = _known(error)
    failed = Failure(type=known.kind, code=known.code, message=error.message)
    return StatusDetails(type="failed", error=failed)


def _known(error: ErrorRaised) -> _Known:
    return _BY_COMMAND.get((error.command or "", error.code)) or _CODES[error.code]
