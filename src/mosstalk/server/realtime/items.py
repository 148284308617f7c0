"""Items of the conversation: a client's as commands, a session's as the protocol shows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from secrets import token_hex
from typing import Any

from mosstalk.server.realtime.audio import AudioFormat
from mosstalk.server.realtime.errors import VENDOR, WireError
from mosstalk.server.realtime.reading import Fields, WireLimits, unknown_value
from mosstalk.session.commands import (
    Command,
    CreateAudio,
    CreateMessage,
    CreateText,
    Message,
    Sound,
)
from mosstalk.session.events import Item

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_UNREAD = ("function_call", "function_call_output")
"""Kinds of items that are kept for the client and that the model never reads."""
_IGNORED = ("mcp_approval_response",)
"""Kinds that answer to what is never asked here. Pipecat's session ends on being shown one."""
_OTHER_KINDS = {"text": "input_text", "audio": "input_audio"}
"""Older names of content, which clients still send."""
_LONGEST_ID = 512
_UNREAD_WHY = "kept and shown, but the model does not read it"


@dataclass(frozen=True)
class NewItem:
    """An item that a client wants: ``wire`` as it will be shown, and what the model gets of it.

    Without ``message`` the model gets nothing of it. ``note`` is a line for the log. One that is
    ``ignored`` is neither kept nor shown.
    """

    wire: dict[str, Any]
    message: Message | None = None
    note: str | None = None
    ignored: bool = False

    @property
    def item_id(self) -> str:
        """The client's id of it, or a new one."""
        return str(self.wire["id"])

    @property
    def read(self) -> bool:
        """Whether the model gets anything of it."""
        return self.message is not None

    def command(self, command_id: str, previous_item_id: str | None) -> Command:
        """The command that puts it into the conversation."""
        message = self.message
        assert message is not None, "an item that the model does not read"
        where = (self.item_id, previous_item_id)
        match message.parts:
            case (str() as text,):
                return CreateText(message.role, text, *where, command_id=command_id)
            case (Sound() as sound,):
                return CreateAudio(sound.pcm, sound.rate, *where, command_id=command_id)
        return CreateMessage(message, *where, command_id=command_id)


def new_id(kind: str) -> str:
    """An id that nobody else has, as ``item_...``."""
    return f"{kind}_{token_hex(8)}"


def new_item(fields: Fields, sound: AudioFormat, limits: WireLimits) -> NewItem:
    """The item of a ``conversation.item.create``.

    Raises:
        WireError: it is none, or holds what cannot be heard or read.
    """
    kind = fields.choice("type", ("message", *_UNREAD, *_IGNORED)) or "message"
    item_id = fields.text("id", _LONGEST_ID) or new_id("item")
    if kind in _IGNORED:
        return NewItem({"id": item_id}, note=f"an {kind} is ignored", ignored=True)
    if kind != "message":
        return _unread(fields, kind, item_id, limits)
    role = _ROLES[fields.choice("role", _ROLES) or "user"]
    parts = fields.objects("content")
    read = [each for part in parts if (each := _read(part, sound, limits))]
    if role != "user" and any(isinstance(each, bytes) for each in read):
        raise WireError(
            "invalid_value",
            f"Invalid '{fields.path('content')}': the sound of a user alone can be heard.",
            fields.path("content"),
        )
    wire = _message(item_id, role, [_shown(part, role) for part in parts])
    images = sum(part.text("type") == "input_image" for part in parts)
    note = f"{images} images are not looked at" if images else None
    if joined := tuple(_joined(read, sound.rate)):
        return NewItem(wire, Message(role, joined), note)
    wire[VENDOR] = {"warnings": [_UNREAD_WHY]}
    return NewItem(wire, note=note or "an item without text or sound")


def _joined(read: list[str | bytes], rate: int) -> Iterator[str | Sound]:
    """What the model reads of an item: texts that follow one another as one, sounds as well."""
    for kind, group in groupby(read, type):
        if kind is bytes:
            yield Sound(b"".join(each for each in group if isinstance(each, bytes)), rate)
        elif (text := "\n".join(each for each in group if isinstance(each, str))).strip():
            yield text


def shown_item(item: Item, *, heard: str | None = None) -> dict[str, Any]:
    """A session's item that no client has made: speech of the user, or a reply.

    ``heard`` is a transcript of its sound, if there is one.
    """
    content: list[dict[str, Any]] = []
    if item.role == "user" and item.audio_ms is not None:
        content.append({"type": "input_audio", "transcript": heard})
    elif item.audio_ms is not None:
        content.append({"type": "output_audio", "transcript": heard})
    if item.text:
        kind = "output_text" if item.role == "assistant" else "input_text"
        content.append({"type": kind, "text": item.text})
    return _message(item.item_id, item.role, content) | {"status": str(item.status)}


def transcribed(item: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The item with a transcript of its sound, or without."""
    content = [
        part | {"transcript": text} if part["type"] in ("input_audio", "output_audio") else part
        for part in item.get("content", [])
    ]
    return item | {"content": content}


def cut(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is after a truncation: nothing written is known to have been heard."""
    if "content" not in item:
        return item
    content = [part for part in item["content"] if part["type"] != "output_text"]
    return transcribed(item | {"content": content}, None)


def _message(item_id: str, role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": role,
        "content": content,
    }


def _unread(fields: Fields, kind: str, item_id: str, limits: WireLimits) -> NewItem:
    """An item that stays between this server and its client."""
    most = limits.text_chars
    wire = {
        "id": item_id,
        "object": "realtime.item",
        "type": kind,
        "status": "completed",
        VENDOR: {"warnings": [_UNREAD_WHY]},
    }
    if kind == "function_call_output":
        call_id = fields.required("call_id", _LONGEST_ID)
        wire |= {"call_id": call_id, "output": fields.text("output", most) or ""}
    else:
        wire |= {"name": fields.required("name", _LONGEST_ID)}
        wire |= {"arguments": fields.text("arguments", most) or "{}"}
        if call_id_or_none := fields.text("call_id", _LONGEST_ID):
            wire["call_id"] = call_id_or_none
    return NewItem(wire, note=f"a {kind} is kept, but the model does not read it")


def _kind(part: Fields) -> str:
    """The kind of a part of content, by either of its names."""
    kind = part.required("type")
    return _OTHER_KINDS.get(kind, kind)


def _is_audio(part: Fields) -> bool:
    return _kind(part) in ("input_audio", "output_audio")


def _read(part: Fields, sound: AudioFormat, limits: WireLimits) -> str | bytes | None:
    """What the model gets of a part of content: text, or sound as PCM.

    Of speech without its sound that is its transcript, with its sound the sound alone.

    Raises:
        WireError: there is no such kind of content, or it holds what cannot be heard.
    """
    kind = _kind(part)
    if kind in ("input_text", "output_text"):
        return part.text("text", limits.text_chars)
    if _is_audio(part):
        transcript = part.text("transcript", limits.text_chars)
        heard = kind == "input_audio" and part.text("audio")
        return sound.pcm_of(part, "audio", limits) if heard else transcript
    if kind != "input_image":
        raise unknown_value(
            part.path("type"),
            kind,
            ("input_text", "input_audio", "input_image", "output_text", "output_audio"),
        )
    return None


def _shown(part: Fields, role: str) -> dict[str, Any]:
    """A part as it is shown: sound and pictures are not sent back."""
    kind = _kind(part)
    if _is_audio(part):
        own = "output_audio" if role == "assistant" else "input_audio"
        return {"type": own, "transcript": part.text("transcript")}
    if kind == "input_image":
        return {"type": kind}
    own = "output_text" if role == "assistant" else "input_text"
    return {"type": own, "text": part.text("text") or ""}
