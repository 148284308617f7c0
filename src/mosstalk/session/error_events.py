"""The one place that turns what a session refuses or fails at into an event."""

from mosstalk.errors import (
    AudioError,
    ContextLengthError,
    EngineFullError,
    EngineStoppedError,
    MosstalkError,
    OptionError,
    ScriptError,
    SessionError,
    TextError,
    VoiceError,
)
from mosstalk.session.commands import Command
from mosstalk.session.events import ErrorCode, ErrorRaised

_CODES: tuple[tuple[type[MosstalkError], ErrorCode], ...] = (
    (AudioError, ErrorCode.BAD_SOUND),
    (ContextLengthError, ErrorCode.CONTEXT_FULL),
    (EngineFullError, ErrorCode.ENGINE_FULL),
    (EngineStoppedError, ErrorCode.ENGINE_STOPPED),
    (OptionError, ErrorCode.BAD_VALUE),
    (ScriptError, ErrorCode.BAD_VALUE),
    (TextError, ErrorCode.BAD_ITEM),
    (VoiceError, ErrorCode.UNKNOWN_VOICE),
)


def error_event(error: MosstalkError, clock: int, command: Command | None = None) -> ErrorRaised:
    """The event that tells of an error which a command, if any, has met with."""
    return ErrorRaised(
        _code(error),
        str(error),
        type(command).__name__ if command else None,
        command.command_id if command else None,
        error.retry_after_s if isinstance(error, EngineFullError) else None,
        clock=clock,
    )


def _code(error: MosstalkError) -> ErrorCode:
    if isinstance(error, SessionError):
        return ErrorCode(error.code)
    return next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL)
