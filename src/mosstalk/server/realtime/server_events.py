"""What a client is told: one model an event, checked when it is made and written as it stands."""

import json
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from mosstalk.server.realtime.server_objects import (
    Item,
    Omitted,
    Part,
    Response,
    ServerObject,
    Session,
)


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
    session: Session


class RetryVendor(ServerObject):
    """When it is worth trying again."""

    retry_after_s: int | float


class ErrorBody(ServerObject):
    """What went wrong; ``event_id`` is the client's, of the event that was at fault."""

    type: str = "invalid_request_error"
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    mosstalk: Omitted[RetryVendor] = None


class Error(Event):
    """Something was refused, or failed; the connection stays."""

    type: Literal["error"] = "error"
    error: ErrorBody


class SpeechStarted(Event):
    """The user began to speak."""

    type: Literal["input_audio_buffer.speech_started"] = "input_audio_buffer.speech_started"
    audio_start_ms: int
    item_id: str


class SpeechVendor(ServerObject):
    """The last speech, and the silence that was waited for."""

    speech_end_ms: int
    vad_wait_ms: int


class SpeechStopped(Event):
    """The user has finished."""

    type: Literal["input_audio_buffer.speech_stopped"] = "input_audio_buffer.speech_stopped"
    audio_end_ms: int
    item_id: str
    mosstalk: SpeechVendor


class TimeoutTriggered(Event):
    """Nobody spoke for the detector's ``idle_timeout_ms``."""

    type: Literal["input_audio_buffer.timeout_triggered"] = "input_audio_buffer.timeout_triggered"
    audio_start_ms: int
    audio_end_ms: int
    item_id: str


class InputCommitted(Event):
    """The user's turn is an item."""

    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    previous_item_id: str | None
    item_id: str


class InputCleared(Event):
    """Sound since the last turn is forgotten."""

    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"


class OutputCleared(Event):
    """An answer to what has no effect over a WebSocket."""

    type: Literal["output_audio_buffer.cleared"] = "output_audio_buffer.cleared"
    response_id: str


class ItemEvent(Event):
    """An item stands in the conversation, or is whole."""

    type: Literal["conversation.item.added", "conversation.item.done"]
    previous_item_id: str | None
    item: Item


class ItemRetrieved(Event):
    """An item as it stands."""

    type: Literal["conversation.item.retrieved"] = "conversation.item.retrieved"
    item: Item


class TruncatedVendor(ServerObject):
    """Codes of 80 ms that are left; ``by_server``: the client did not ask."""

    codes: int
    by_server: bool


class ItemTruncated(Event):
    """A reply was cut to what was heard of it."""

    type: Literal["conversation.item.truncated"] = "conversation.item.truncated"
    item_id: str
    content_index: int = 0
    audio_end_ms: int
    mosstalk: Omitted[TruncatedVendor] = None


class ItemDeleted(Event):
    """An item is gone."""

    type: Literal["conversation.item.deleted"] = "conversation.item.deleted"
    item_id: str


class Duration(ServerObject):
    """How much sound was written down."""

    type: Literal["duration"] = "duration"
    seconds: float


class TranscriptionCompleted(Event):
    """What the user said."""

    type: Literal["conversation.item.input_audio_transcription.completed"] = (
        "conversation.item.input_audio_transcription.completed"
    )
    item_id: str
    content_index: int = 0
    transcript: str
    usage: Duration


class TranscriptionFault(ServerObject):
    """Why nothing was written down."""

    type: Literal["transcription_error"] = "transcription_error"
    code: Literal["audio_unintelligible"] = "audio_unintelligible"
    message: str
    param: None = None


class TranscriptionFailed(Event):
    """What the user said could not be written down."""

    type: Literal["conversation.item.input_audio_transcription.failed"] = (
        "conversation.item.input_audio_transcription.failed"
    )
    item_id: str
    content_index: int = 0
    error: TranscriptionFault


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


class _OfItem(Event):
    """What all events about the content of a response's item have."""

    response_id: str
    item_id: str
    output_index: int = 0


class ContentPartAdded(_OfItem):
    """An item has another part."""

    type: Literal["response.content_part.added"] = "response.content_part.added"
    content_index: int
    part: Part


class ContentPartDone(_OfItem):
    """A part is whole."""

    type: Literal["response.content_part.done"] = "response.content_part.done"
    part: Part
    content_index: int


class Delta(_OfItem):
    """More of a part: sound as base64, what is said in it, or text.

    Most of what is sent are these, so they are written without a detour.
    """

    type: Literal[
        "response.output_audio.delta",
        "response.output_audio_transcript.delta",
        "response.output_text.delta",
    ]
    content_index: int
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


class AudioDone(_OfItem):
    """The sound is whole."""

    type: Literal["response.output_audio.done"] = "response.output_audio.done"
    content_index: int


class TranscriptDone(_OfItem):
    """What was said in the sound; "" where nobody has written it down."""

    type: Literal["response.output_audio_transcript.done"] = "response.output_audio_transcript.done"
    transcript: str
    content_index: int


class TextDone(_OfItem):
    """The text is whole."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    content_index: int


class RateLimitsUpdated(Event):
    """There are no such limits; clients wait for the event."""

    type: Literal["rate_limits.updated"] = "rate_limits.updated"
    rate_limits: list[Any] = Field(default_factory=list)


ServerEvent = Annotated[
    SessionEvent
    | Error
    | SpeechStarted
    | SpeechStopped
    | TimeoutTriggered
    | InputCommitted
    | InputCleared
    | OutputCleared
    | ItemEvent
    | ItemRetrieved
    | ItemTruncated
    | ItemDeleted
    | TranscriptionCompleted
    | TranscriptionFailed
    | ResponseEvent
    | OutputItemEvent
    | ContentPartAdded
    | ContentPartDone
    | Delta
    | AudioDone
    | TranscriptDone
    | TextDone
    | RateLimitsUpdated,
    Field(discriminator="type"),
]
SERVER_EVENT: TypeAdapter[ServerEvent] = TypeAdapter(ServerEvent)
