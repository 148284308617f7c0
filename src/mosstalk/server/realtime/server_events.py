"""What a client is told: one model an event, checked when it is made and written as it stands.

Fields come in the order in which they are declared. One that is None is written as null, unless it
is declared as ``Omitted``: then it is left out. What the protocol has no field for stands under
``mosstalk``, inside the object that it is about.
"""

import json
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mosstalk.server.realtime.session_request import (
    Inert,
    NoiseReduction,
    SemanticVad,
    ServerVad,
    Texts,
    Transcription,
)
from mosstalk.server.realtime.validation import AudioFormat, Omitted
from mosstalk.session.commands import Sampling

Modalities = list[Literal["audio", "text"]]
Length = int | Literal["inf"]
"""Rows of a response at most."""


class ServerObject(BaseModel):
    """An object inside an event."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Vendor(ServerObject):
    """What the protocol has no field for, each in the object that it is about.

    Attributes:
        warnings: what was taken without effect, in words.
        timings: of a response, as ``session.events.Timings``.
        reason: the true one why a response ended.
        retry_after_s: when it is worth trying again.
        speech_end_ms, vad_wait_ms: of a turn, the last speech, and the silence waited for.
        codes: of 80 ms each, what is left of a reply that was cut.
        by_server: the client did not ask for that.
    """

    warnings: Omitted[list[str]] = None
    timings: Omitted[dict[str, float | None]] = None
    reason: Omitted[str] = None
    retry_after_s: Omitted[int | float] = None
    speech_end_ms: Omitted[int] = None
    vad_wait_ms: Omitted[int] = None
    codes: Omitted[int] = None
    by_server: Omitted[bool] = None


# Sessions.


class AudioInput(ServerObject):
    """``session.audio.input``."""

    format: AudioFormat
    noise_reduction: NoiseReduction
    transcription: Transcription
    turn_detection: ServerVad | SemanticVad | None


class AudioOutput(ServerObject):
    """``audio.output`` of a session or response."""

    format: AudioFormat
    voice: str
    speed: Omitted[float] = None


class Audio(ServerObject):
    """``audio`` of a session or response."""

    input: Omitted[AudioInput] = None
    output: Omitted[AudioOutput] = None


class Resume(ServerObject):
    """How the conversation is taken up again once its connection is lost.

    Attributes:
        token: what ``?resume=`` takes, once.
        seconds: for how long after the end of the connection.
        items: those that came back, in the first event of a connection that took one up.
    """

    token: str
    seconds: int | float
    items: Omitted[int] = None


class SessionVendor(ServerObject):
    """``asked``: what was asked for where something else holds, by path."""

    voices: list[str]
    sampling: Sampling
    playback: str
    echo_gate: bool
    asked: dict[str, str | float]
    warnings: list[str]
    silence_duration_ms: Omitted[int] = None
    resume: Omitted[Resume] = None


class Session(Inert, ServerObject):
    """All that holds of a session."""

    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    model: str
    output_modalities: Modalities
    instructions: str
    max_output_tokens: Length
    truncation: Literal["auto", "disabled"] | dict[str, str | float]
    audio: Audio
    mosstalk: SessionVendor
    id: str = ""
    expires_at: int = 0


class TranscriptionSession(ServerObject):
    """All that holds of a session that writes down what is said, and answers nothing."""

    type: Literal["transcription"] = "transcription"
    object: Literal["realtime.transcription_session"] = "realtime.transcription_session"
    audio: Audio
    include: list[str] | None
    mosstalk: SessionVendor
    id: str = ""
    expires_at: int = 0


# Items.


class TextContent(ServerObject):
    """Text of an item, or as ``response.content_part`` events have it."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class AudioContent(ServerObject):
    """Sound, which is not sent back, and what was said in it if that was written down."""

    type: Literal["input_audio", "output_audio", "audio"]
    transcript: str | None


class ImageContent(ServerObject):
    """A picture, which is not sent back."""

    type: Literal["input_image"] = "input_image"


Content = TextContent | AudioContent | ImageContent


class Message(ServerObject):
    """What one role said."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: str = "completed"
    role: str
    content: list[Content] = Field(default_factory=list)
    mosstalk: Omitted[Vendor] = None


class FunctionItem(ServerObject):
    """A call of a function, or what it has returned: the model does not read it."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["function_call", "function_call_output"]
    status: Literal["completed"] = "completed"
    mosstalk: Vendor
    name: Omitted[str] = None
    arguments: Omitted[str] = None
    call_id: Omitted[str] = None
    output: Omitted[str] = None


Item = Message | FunctionItem


# Responses.


class StatusDetails(ServerObject):
    """Why a response ended before its end; of ``error`` type, code and message."""

    type: str
    error: Omitted[Texts] = None
    reason: Omitted[str] = None


class Usage(ServerObject):
    """What a response cost: rows of the grid stand for tokens, by what they hold.

    Of rows read before, ``cached_tokens``, the kind is not known.
    """

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: dict[str, int]
    output_token_details: dict[str, int]


class Response(ServerObject):
    """A response as it stands."""

    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: str
    status_details: StatusDetails | None = None
    output: list[Item] = Field(default_factory=list)
    conversation_id: str | None
    output_modalities: Modalities
    max_output_tokens: Length
    audio: Audio
    metadata: Texts | None
    usage: Usage | None = None
    mosstalk: Omitted[Vendor] = None


# Events.


class Event(ServerObject):
    """What all events of the server have; the ``event_id`` is given when one is sent."""

    event_id: str = ""
    type: str

    def to_json(self) -> str:
        """The message."""
        return json.dumps(self.model_dump())


class SessionEvent(Event):
    """The session is there, which is the first event, or an update was done."""

    type: Literal["session.created", "session.updated"]
    session: Session | TranscriptionSession


class ErrorBody(ServerObject):
    """What went wrong; ``event_id`` is the client's, of the event that was at fault."""

    type: str = "invalid_request_error"
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    mosstalk: Omitted[Vendor] = None


class Error(Event):
    """Something was refused, or failed; the connection stays."""

    type: Literal["error"] = "error"
    error: ErrorBody


class SpeechEvent(Event):
    """The user began to speak, has finished, or did not for the ``idle_timeout_ms``."""

    type: Literal[
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.timeout_triggered",
    ]
    audio_start_ms: Omitted[int] = None
    audio_end_ms: Omitted[int] = None
    item_id: str
    mosstalk: Omitted[Vendor] = None


class InputCommitted(Event):
    """The user's turn is an item."""

    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    previous_item_id: str | None
    item_id: str


class InputCleared(Event):
    """Sound since the last turn is forgotten."""

    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"


class OutputBuffer(Event):
    """A response's sound begins to be played by the server, has ended, or is played no further.

    Over a WebSocket the client plays it, and nothing is left to clear.
    """

    type: Literal[
        "output_audio_buffer.started", "output_audio_buffer.stopped", "output_audio_buffer.cleared"
    ]
    response_id: str


class ItemPlaced(Event):
    """An item stands in the conversation, or is whole."""

    type: Literal["conversation.item.added", "conversation.item.done"]
    previous_item_id: str | None
    item: Item


class ItemRetrieved(Event):
    """An item as it stands."""

    type: Literal["conversation.item.retrieved"] = "conversation.item.retrieved"
    item: Item


class ItemChanged(Event):
    """A reply was cut to the ``audio_end_ms`` that were heard of it, or an item is gone."""

    type: Literal["conversation.item.truncated", "conversation.item.deleted"]
    item_id: str
    content_index: Omitted[int] = None
    audio_end_ms: Omitted[int] = None
    mosstalk: Omitted[Vendor] = None


class Transcribed(Event):
    """More of what the user said; all of it, and what that has cost; or why that could not be."""

    type: Literal[
        "conversation.item.input_audio_transcription.delta",
        "conversation.item.input_audio_transcription.completed",
        "conversation.item.input_audio_transcription.failed",
    ]
    item_id: str
    content_index: int = 0
    delta: Omitted[str] = None
    transcript: Omitted[str] = None
    usage: Omitted[dict[str, Any]] = None
    error: Omitted[dict[str, str | None]] = None


class ResponseEvent(Event):
    """A response is being made, or has ended."""

    type: Literal["response.created", "response.done"]
    response: Response


class OutputItemEvent(Event):
    """A response has an item, which comes before anything of it, or that item is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    response_id: str
    output_index: int = 0
    item: Item


class _OfContent(Event):
    """What all events about the content of a response's item have."""

    response_id: str
    item_id: str
    output_index: int = 0
    content_index: int


class ContentPart(_OfContent):
    """An item has another part, or that part is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Content


class Delta(_OfContent):
    """More of a part: sound as base64, what is said in it, or text.

    Most of what is sent are these, so they are written without a detour.
    """

    type: Literal[
        "response.output_audio.delta",
        "response.output_audio_transcript.delta",
        "response.output_text.delta",
    ]
    delta: str

    def to_json(self) -> str:
        """The message, as ``Event`` writes it."""
        quoted = encode_basestring_ascii
        return (
            f'{{"event_id": {quoted(self.event_id)}, "type": "{self.type}", '
            f'"response_id": {quoted(self.response_id)}, "item_id": {quoted(self.item_id)}, '
            f'"output_index": {self.output_index}, "content_index": {self.content_index}, '
            f'"delta": {quoted(self.delta)}}}'
        )


class ContentDone(_OfContent):
    """Sound, what was said in it, or text is whole; "" for what nobody has written down."""

    type: Literal[
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.output_text.done",
    ]
    transcript: Omitted[str] = None
    text: Omitted[str] = None


class RateLimitsUpdated(Event):
    """There are no such limits; clients wait for the event."""

    type: Literal["rate_limits.updated"] = "rate_limits.updated"
    rate_limits: list[Any] = Field(default_factory=list)


ServerEvent = Annotated[
    SessionEvent | Error | SpeechEvent | InputCommitted | InputCleared | OutputBuffer
    | ItemPlaced | ItemRetrieved | ItemChanged | Transcribed | ResponseEvent | OutputItemEvent
    | ContentPart | Delta | ContentDone | RateLimitsUpdated,
    Field(discriminator="type"),
]  # fmt: skip
SERVER_EVENT: TypeAdapter[ServerEvent] = TypeAdapter(ServerEvent)
