"""Typed exceptions for everything others send us.

``cli.command`` makes exit codes of them, ``session.events`` makes error events, and the server
makes HTTP statuses and its protocol's events. Each message is one line: what is wrong, then what to
do.
"""


class MosstalkError(Exception):
    """Base of all errors caused by input, never by a fault of this package."""


class ConfigError(MosstalkError):
    """A config file is missing, malformed, or asks for arithmetic we do not do."""


class CheckpointError(MosstalkError):
    """A checkpoint folder is not one, is incomplete, damaged, or does not fit its config."""


class AudioError(MosstalkError):
    """A recording cannot be read, or holds nothing a model could hear."""


class AudioWarning(UserWarning):
    """A recording is used, but not all of it is there."""


class TextError(MosstalkError):
    """Text cannot be put before the model."""


class VoiceError(MosstalkError):
    """A voice is unknown, damaged, or made for another codec."""


class ContextLengthError(MosstalkError):
    """A conversation does not fit into the model's context."""


class EngineFullError(MosstalkError):
    """The engine takes no more requests now; ``retry_after_s`` says when it may again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CodecFullError(EngineFullError):
    """The codec has no room for another reply now; the message names what is full."""


class EngineStoppedError(MosstalkError):
    """The engine has ended, or was never started."""


class EngineInputError(MosstalkError):
    """A step was about to read an input that is missing, misshapen or of another step."""


class PoisonedError(MosstalkError):
    """A request's logits are not finite; the message names the request."""


class OptionError(MosstalkError, ValueError):
    """An option has a value that means nothing."""


class ScriptError(MosstalkError):
    """A reply script does not parse or cannot be followed."""


class CaseError(MosstalkError):
    """A golden case cannot be read."""


class OutputError(MosstalkError):
    """A result cannot be written where it was asked for."""


class DeviceError(MosstalkError):
    """A device or precision was asked for that this machine does not have."""


class BuildError(MosstalkError):
    """What was built does not compute what it must; the message names the part."""


class BenchError(MosstalkError):
    """A measurement lacks what it needs: a judge, a voice, or sentences."""


class DetectorError(MosstalkError):
    """A detector of speech is not installed, or unknown."""


class SessionError(MosstalkError):
    """A session refuses a command; ``code`` says why in one word, see ``session.events``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
