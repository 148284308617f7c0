"""What a client may send: one model an event, of the fields that are looked at."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from mosstalk.server.realtime import session_request as fields
from mosstalk.server.realtime.session_request import Id, Object, Objects, Text, typed
from mosstalk.server.realtime.validation import ClientObject, fault

_MOST_INPUTS = 64
"""Items that a response may bring along."""
_MOST_METADATA, _LONGEST_METADATA = 64, 2048


# Items.


class TextPart(ClientObject):
    """Text of an item."""

    type: Literal["input_text", "output_text"]
    text: Text | None = None


class InputAudioPart(ClientObject):
    """Sound of a user, as base64, or what was said where there is no sound."""

    type: Literal["input_audio"]
    audio: str | None = None
    transcript: Text | None = None


class OutputAudioPart(ClientObject):
    """What an assistant said."""

    type: Literal["output_audio"]
    transcript: Text | None = None


class ImagePart(ClientObject):
    """A picture, which nobody looks at."""

    type: Literal["input_image"]


Part = Annotated[
    TextPart | InputAudioPart | OutputAudioPart | ImagePart,
    Field(discriminator="type"),
    typed(None, text="input_text", audio="input_audio"),
]
"""Clients still send "text" and "audio", the older names."""


class MessageItem(ClientObject):
    """What one role says."""

    type: Literal["message"]
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Objects[Part] = Field(default_factory=list)


class FunctionCall(ClientObject):
    """A call of a function, which is kept and not read."""

    type: Literal["function_call"]
    id: Id | None = None
    name: Id
    arguments: Text | None = None
    call_id: Id | None = None


class FunctionCallOutput(ClientObject):
    """What a function has returned, which is kept and not read."""

    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: Id
    output: Text | None = None


class ApprovalResponse(ClientObject):
    """An answer to what is never asked here."""

    type: Literal["mcp_approval_response"]
    id: Id | None = None


class ItemReference(ClientObject):
    """An item that is there already."""

    type: Literal["item_reference"]
    id: str | None = None


NewItem = MessageItem | FunctionCall | FunctionCallOutput | ApprovalResponse
_KIND = typed("message")


# Events.


def _metadata(value: Any) -> Any:
    """Words that come back as they are; what is no string is written as one."""
    if not isinstance(value, dict):
        return value
    told = {name: each if isinstance(each, str) else str(each) for name, each in value.items()}
    if len(told) > _MOST_METADATA or any(len(each) > _LONGEST_METADATA for each in told.values()):
        raise fault(f"at most {_MOST_METADATA} values of {_LONGEST_METADATA} characters.")
    return told


class ResponseAudio(ClientObject):
    """``response.audio``."""

    output: Object[fields.OutputRequest] = fields.OutputRequest()


class ResponseRequest(ClientObject):
    """What a ``response.create`` asks for; None is as the session has it."""

    audio: Object[ResponseAudio] = ResponseAudio()
    max_output_tokens: fields.Rows = None
    metadata: Annotated[fields.Texts | None, BeforeValidator(_metadata)] = None
    conversation: str | None = None
    input: Annotated[
        list[Annotated[NewItem | ItemReference, Field(discriminator="type"), _KIND]] | None,
        Field(max_length=_MOST_INPUTS),
    ] = None
    tools: Objects[dict[str, Any]] = Field(default_factory=list)
    output_modalities: fields.Reply = None
    instructions: Text | None = None
    prompt: Any = None
    temperature: Any = None
    reasoning: Any = None


class Event(ClientObject):
    """What all events of a client have."""

    event_id: Id | None = None


class SessionUpdate(Event):
    """What it asks for is checked once it is merged into that before: see ``SessionRequest``."""

    type: Literal["session.update"]
    session: Object[dict[str, Any]]


class AppendAudio(Event):
    """Sound, as base64 of the session's format."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class BufferEvent(Event):
    """The user's turn ends here, or sound since then, or not yet played, is to be forgotten."""

    type: Literal[
        "input_audio_buffer.commit", "input_audio_buffer.clear", "output_audio_buffer.clear"
    ]


class CreateItem(Event):
    """A new item, after ``previous_item_id``: an id, "root" or None for the end."""

    type: Literal["conversation.item.create"]
    item: Annotated[NewItem, Field(discriminator="type"), _KIND, fields.null_is({})]
    previous_item_id: str | None = None


class ItemEvent(Event):
    """An item is to be shown, or to go."""

    type: Literal["conversation.item.retrieve", "conversation.item.delete"]
    item_id: str


class TruncateItem(Event):
    """So much was heard of a reply; None: the session's own clock decides."""

    type: Literal["conversation.item.truncate"]
    item_id: str
    audio_end_ms: fields.Number = None


class CreateResponse(Event):
    """A response is to be made."""

    type: Literal["response.create"]
    response: Object[ResponseRequest] = ResponseRequest()


class CancelResponse(Event):
    """A response, or the conversation's, is to end."""

    type: Literal["response.cancel"]
    response_id: str | None = None


ClientEvent = Annotated[
    SessionUpdate | AppendAudio | BufferEvent | CreateItem | ItemEvent | TruncateItem
    | CreateResponse | CancelResponse,
    Field(discriminator="type"),
]  # fmt: skip
CLIENT_EVENT: TypeAdapter[ClientEvent] = TypeAdapter(ClientEvent)
