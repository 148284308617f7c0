"""What events of the server are about: sessions, items and responses as they are shown.

Fields come in the order in which they are declared. One that is None is written as null, unless it
is declared as ``Omitted``: then it is left out. What the protocol has no field for stands under
``mosstalk``, inside the object that it is about.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mosstalk.server.realtime.session_request import (
    Include,
    NoiseReduction,
    Prompt,
    SemanticVad,
    ServerVad,
    Texts,
    Tool,
    ToolChoice,
    Tracing,
    Transcription,
)
from mosstalk.session.settings import Sampling

_T = TypeVar("_T")
Omitted = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
Modalities = list[Literal["audio", "text"]]
Length = int | Literal["inf"]
"""Rows of a response at most."""


class ServerObject(BaseModel):
    """An object inside an event."""

    model_config = ConfigDict(strict=True, extra="forbid")


# Sessions.


class SessionInputObject(ServerObject):
    """``session.audio.input``."""

    format: "FormatObject"
    noise_reduction: NoiseReduction
    transcription: Transcription
    turn_detection: ServerVad | SemanticVad | None


class FormatObject(ServerObject):
    """A format of sound; the ``rate`` of telephones goes without saying."""

    type: str
    rate: Omitted[int] = None


class OutputObject(ServerObject):
    """``audio.output`` of a session or response."""

    format: FormatObject
    voice: str
    speed: Omitted[float] = None


class SessionAudioObject(ServerObject):
    """``session.audio``."""

    input: SessionInputObject
    output: OutputObject


class Retention(ServerObject):
    """How much of a conversation that is too long is kept."""

    type: Literal["retention_ratio"] = "retention_ratio"
    retention_ratio: float


class SessionVendor(ServerObject):
    """``asked``: what was asked for where something else holds, by path."""

    voices: list[str]
    sampling: Sampling
    playback: str
    echo_gate: bool
    asked: dict[str, str | float]
    warnings: list[str]
    silence_duration_ms: Omitted[int] = None


class Session(ServerObject):
    """All that holds of a session."""

    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    model: str
    output_modalities: Modalities
    instructions: str
    max_output_tokens: Length
    truncation: Literal["auto", "disabled"] | Retention
    tools: list[Tool]
    tool_choice: ToolChoice
    tracing: Tracing
    prompt: Prompt
    include: Include
    reasoning: Omitted[Texts] = None
    parallel_tool_calls: Omitted[bool] = None
    audio: SessionAudioObject
    mosstalk: SessionVendor
    id: str = ""
    expires_at: int = 0


# Items.


class Text(ServerObject):
    """Text of an item, or as ``response.content_part`` events have it."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Sound(ServerObject):
    """Sound, which is not sent back, and what was said in it if that was written down."""

    type: Literal["input_audio", "output_audio", "audio"]
    transcript: str | None


class Image(ServerObject):
    """A picture, which is not sent back."""

    type: Literal["input_image"] = "input_image"


Part = Text | Sound | Image


class Warnings(ServerObject):
    """What was taken without effect."""

    warnings: list[str]


class Message(ServerObject):
    """What one role said."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: str = "completed"
    role: str
    content: list[Part] = []
    mosstalk: Omitted[Warnings] = None


class _Unread(ServerObject):
    """An item that the model does not read."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: str
    status: Literal["completed"] = "completed"
    mosstalk: Warnings


class FunctionCall(_Unread):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    name: str
    arguments: str
    call_id: Omitted[str] = None


class FunctionCallOutput(_Unread):
    """What a function has returned."""

    type: Literal["function_call_output"] = "function_call_output"
    call_id: str
    output: str


Item = Message | FunctionCall | FunctionCallOutput


# Responses.


class ResponseAudio(ServerObject):
    """``response.audio``."""

    output: OutputObject


class Failure(ServerObject):
    """What a response failed at."""

    type: str
    code: str
    message: str


class StatusDetails(ServerObject):
    """Why a response ended before its end."""

    type: str
    error: Omitted[Failure] = None
    reason: Omitted[str] = None


class InputTokens(ServerObject):
    """What was read; of rows read before, ``cached_tokens``, the kind is not known."""

    text_tokens: int
    audio_tokens: int
    cached_tokens: int


class OutputTokens(ServerObject):
    """What was made."""

    text_tokens: int
    audio_tokens: int


class Usage(ServerObject):
    """What a response cost: rows of the grid stand for tokens."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokens
    output_token_details: OutputTokens


class ResponseVendor(ServerObject):
    """``timings`` as ``session.events.Timings``; ``reason``: the true one."""

    warnings: Omitted[list[str]] = None
    timings: Omitted[dict[str, float | None]] = None
    reason: Omitted[str] = None
    retry_after_s: Omitted[int | float] = None


class Response(ServerObject):
    """A response as it stands."""

    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: str
    status_details: StatusDetails | None
    output: list[Item]
    conversation_id: str | None
    output_modalities: Modalities
    max_output_tokens: Length
    audio: ResponseAudio
    metadata: Texts | None
    usage: Usage | None = None
    mosstalk: Omitted[ResponseVendor] = None
