"""Items of the conversation: a client's as commands, a session's as the protocol shows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from secrets import token_hex
from typing import Any

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.audio import AudioFormat
from mosstalk.server.realtime.validation import WireError, WireLimits
from mosstalk.session.commands import (
    Command,
    CreateAudio,
    CreateMessage,
    CreateText,
    Message,
    Sound,
)
from mosstalk.session.events import Item

_UNREAD = shown.Warnings(warnings=["kept and shown, but the model does not read it"])


@dataclass(frozen=True)
class NewItem:
    """An item that a client wants: ``item`` as it will be shown, and what the model gets of it.

    Without ``message`` the model gets nothing of it, without ``item`` it is neither kept nor
    shown. ``note`` is a line for the log.
    """

    item: shown.Item | None
    message: Message | None = None
    note: str | None = None

    def command(self, command_id: str, previous_item_id: str | None) -> Command:
        """The command that puts it into the conversation."""
        item, message = self.item, self.message
        assert item is not None, "an item that is ignored"
        assert message is not None, "an item that the model does not read"
        where = (item.id, previous_item_id)
        match message.parts:
            case (str() as text,):
                return CreateText(message.role, text, *where, command_id=command_id)
            case (Sound() as sound,):
                return CreateAudio(sound.pcm, sound.rate, *where, command_id=command_id)
        return CreateMessage(message, *where, command_id=command_id)


def new_id(kind: str) -> str:
    """An id that nobody else has, as ``item_...``."""
    return f"{kind}_{token_hex(8)}"


def new_item(item: asked.AnyItem, path: str, sound: AudioFormat, limits: WireLimits) -> NewItem:
    """What becomes of an item that stands at ``path`` in its event.

    Raises:
        WireError: it holds what cannot be heard.
    """
    item_id = item.id or new_id("item")
    if isinstance(item, asked.MessageItem):
        return _new_message(item, item_id, path, sound, limits)
    if isinstance(item, asked.ApprovalResponse):  # Pipecat's session ends on being shown one
        return NewItem(None, note=f"an {item.type} is ignored")
    note = f"a {item.type} is kept, but the model does not read it"
    if isinstance(item, asked.FunctionCallOutput):
        output = item.output or ""
        return NewItem(
            shown.FunctionCallOutput(
                id=item_id, mosstalk=_UNREAD, call_id=item.call_id, output=output
            ),
            note=note,
        )
    call = shown.FunctionCall(
        id=item_id,
        mosstalk=_UNREAD,
        name=item.name,
        arguments=item.arguments or "{}",
        call_id=item.call_id or None,
    )
    return NewItem(call, note=note)


def _new_message(
    item: asked.MessageItem, item_id: str, path: str, sound: AudioFormat, limits: WireLimits
) -> NewItem:
    role = "system" if item.role == "developer" else item.role or "user"
    read = list[str | bytes]()
    for place, part in enumerate(item.content):
        if given := _read(part, f"{path}.content[{place}].audio", sound, limits):
            read.append(given)
    if role != "user" and any(isinstance(each, bytes) for each in read):
        path = f"{path}.content"
        message = f"Invalid '{path}': the sound of a user alone can be heard."
        raise WireError("invalid_value", message, path)
    message_item = shown.Message(
        id=item_id, role=role, content=[_shown(part, role) for part in item.content]
    )
    images = sum(isinstance(part, asked.ImagePart) for part in item.content)
    note = f"{images} images are not looked at" if images else None
    if joined := tuple(_joined(read, sound.rate)):
        return NewItem(message_item, Message(role, joined), note)
    message_item.mosstalk = _UNREAD
    return NewItem(message_item, note=note or "an item without text or sound")


def _read(
    part: asked.Part, path: str, sound: AudioFormat, limits: WireLimits
) -> str | bytes | None:
    """What the model gets of a part of content: text, or sound as PCM.

    Of speech without its sound that is its transcript, with its sound the sound alone.

    Raises:
        WireError: it holds what cannot be heard.
    """
    match part:
        case asked.TextPart():
            return part.text
        case asked.InputAudioPart(audio=str(audio)) if audio:
            return sound.pcm_of(audio, path, limits.audio_bytes)
        case asked.InputAudioPart() | asked.OutputAudioPart():
            return part.transcript
    return None


def _joined(read: list[str | bytes], rate: int) -> Iterator[str | Sound]:
    """What the model reads of an item: texts that follow one another as one, sounds as well."""
    for kind, group in groupby(read, type):
        if kind is bytes:
            yield Sound(b"".join(each for each in group if isinstance(each, bytes)), rate)
        elif (text := "\n".join(each for each in group if isinstance(each, str))).strip():
            yield text


def _shown(part: asked.Part, role: str) -> shown.Part:
    """A part as it is shown: sound and pictures are not sent back."""
    match part:
        case asked.TextPart(text=text):
            return shown.Text(type=_own(role, "text"), text=text or "")
        case asked.ImagePart():
            return shown.Image()
    return shown.Sound(type=_own(role, "audio"), transcript=part.transcript)


def _own(role: str, kind: str) -> Any:
    """What a role's text or audio is called: everybody's but the assistant's is input."""
    return f"output_{kind}" if role == "assistant" else f"input_{kind}"


def shown_item(item: Item) -> shown.Message:
    """A session's item that no client has made: speech of the user, or a reply."""
    content: list[shown.Part] = []
    if item.audio_ms is not None:
        content.append(shown.Sound(type=_own(item.role, "audio"), transcript=None))
    if item.text:
        content.append(shown.Text(type=_own(item.role, "text"), text=item.text))
    return shown.Message(id=item.item_id, status=item.status.value, role=item.role, content=content)


def transcribed(item: shown.Item, text: str | None) -> shown.Item:
    """The item with a transcript of its sound, or without."""
    if not isinstance(item, shown.Message):
        return item
    content = [
        part.model_copy(update={"transcript": text}) if isinstance(part, shown.Sound) else part
        for part in item.content
    ]
    return item.model_copy(update={"content": content})


def cut(item: shown.Item) -> shown.Item:
    """The item as it is after a truncation: nothing written is known to have been heard."""
    if not isinstance(item, shown.Message):
        return item
    content = [part for part in item.content if part.type != "output_text"]
    return transcribed(item.model_copy(update={"content": content}), None)
