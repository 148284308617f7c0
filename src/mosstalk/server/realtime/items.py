"""Items of the conversation: a client's as commands, a session's as shown, all in their order.

A session knows the items that the model reads. The client may have put others between them, such
as results of functions, and items that were dropped for want of room are still there for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mosstalk.server.limits import Limits
from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.validation import AudioFormat, WireError
from mosstalk.session import commands, events
from mosstalk.session.commands import ROOT

_UNREAD = told.Vendor(warnings=["kept and shown, but the model does not read it"])


@dataclass(frozen=True)
class NewItem:
    """An item that a client wants: ``item`` as it will be shown, and what the model gets of it.

    Without ``message`` the model gets nothing of it, without ``item`` it is neither kept nor
    shown. ``note`` is a line for the log.
    """

    item: told.Item | None
    message: commands.Message | None = None
    note: str | None = None

    def command(self, command_id: str, previous_item_id: str | None) -> commands.Command:
        """The command that puts it into the conversation."""
        item, message = self.item, self.message
        assert item is not None, "an item that is ignored"
        assert message is not None, "an item that the model does not read"
        where = (item.id, previous_item_id)
        match message.parts:
            case (str() as text,):
                return commands.CreateText(message.role, text, *where, command_id=command_id)
            case (commands.Sound() as sound,):
                return commands.CreateAudio(sound.pcm, sound.rate, *where, command_id=command_id)
        return commands.CreateMessage(message, *where, command_id=command_id)


def new_item(item: asked.NewItem, path: str, sound: AudioFormat, limits: Limits) -> NewItem:
    """What becomes of an item that stands at ``path`` in its event.

    Raises:
        WireError: it holds what cannot be heard.
    """
    item_id = item.id or events.new_id("item")
    match item:
        case asked.MessageItem():
            return _new_message(item, item_id, path, sound, limits)
        case asked.ApprovalResponse():  # Pipecat's session ends on being shown one
            return NewItem(None, note=f"an {item.type} is ignored")
    own: dict[str, Any] = {"call_id": item.call_id or None}
    if isinstance(item, asked.FunctionCall):
        own |= {"name": item.name, "arguments": item.arguments or "{}"}
    else:
        own["output"] = item.output or ""
    shown = told.FunctionItem(id=item_id, type=item.type, mosstalk=_UNREAD, **own)
    return NewItem(shown, note=f"a {item.type} is kept, but the model does not read it")


def _new_message(
    item: asked.MessageItem, item_id: str, path: str, sound: AudioFormat, limits: Limits
) -> NewItem:
    role = "system" if item.role == "developer" else item.role or "user"
    parts = [
        _read(part, f"{path}.content[{place}].audio", sound, limits)
        for place, part in enumerate(item.content)
    ]
    if role != "user" and any(isinstance(part, bytes) and part for part in parts):
        path = f"{path}.content"
        message = f"Invalid '{path}': the sound of a user alone can be heard."
        raise WireError("invalid_value", message, path)
    shown = told.Message(
        id=item_id, role=role, content=[_shown(part, role) for part in item.content]
    )
    images = sum(isinstance(part, asked.ImagePart) for part in item.content)
    note = f"{images} images are not looked at" if images else None
    if joined := tuple(joined_parts([part for part in parts if part], sound.sample_rate)):
        return NewItem(shown, commands.Message(role, joined), note)
    shown.mosstalk = _UNREAD
    return NewItem(shown, note=note or "an item without text or sound")


def _read(part: asked.Part, path: str, sound: AudioFormat, limits: Limits) -> str | bytes | None:
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


def joined_parts(read: list[str | bytes], rate: int) -> Iterator[str | commands.Sound]:
    """What the model reads of an item: texts that follow one another as one, sounds as well."""
    for kind, group in groupby(read, type):
        if kind is bytes:
            pcm = b"".join(each for each in group if isinstance(each, bytes))
            yield commands.Sound(pcm, rate)
        elif (text := "\n".join(each for each in group if isinstance(each, str))).strip():
            yield text


def _shown(part: asked.Part, role: str) -> told.Content:
    """A part as it is shown: sound and pictures are not sent back."""
    match part:
        case asked.TextPart(text=text):
            return told.TextContent(type=_own(role, "text"), text=text or "")
        case asked.ImagePart():
            return told.ImageContent()
    return told.AudioContent(type=_own(role, "audio"), transcript=part.transcript)


def _own(role: str, kind: str) -> Any:
    """What a role's text or audio is called: everybody's but the assistant's is input."""
    return f"output_{kind}" if role == "assistant" else f"input_{kind}"


def shown_item(item: events.Item) -> told.Message:
    """A session's item that no client has made: speech of the user, or a reply."""
    content: list[told.Content] = []
    if item.audio_ms is not None:
        said = item.text if item.text_is_spoken else None
        content.append(told.AudioContent(type=_own(item.role, "audio"), transcript=said))
    if item.text and not item.text_is_spoken:
        content.append(told.TextContent(type=_own(item.role, "text"), text=item.text))
    return told.Message(id=item.item_id, status=item.status.value, role=item.role, content=content)


def transcribed(item: told.Item, text: str | None) -> told.Item:
    """The item with a transcript of its sound, or without."""
    if not isinstance(item, told.Message):
        return item
    content = [
        part.model_copy(update={"transcript": text})
        if isinstance(part, told.AudioContent)
        else part
        for part in item.content
    ]
    return item.model_copy(update={"content": content})


def cut(item: told.Item, said: str | None) -> told.Item:
    """The item as it is after a truncation; ``said``: what was heard of its words, if known."""
    if not isinstance(item, told.Message):
        return item
    content = [part for part in item.content if part.type != "output_text"]
    return transcribed(item.model_copy(update={"content": content}), said)


@dataclass(eq=False)
class ListedItem:
    """An item of the protocol; ``read``: the session has it, so the model reads it."""

    item: told.Item
    read: bool = True


class ItemList:
    """Items in the client's order; of those that are not read the latest ``kept_chars``."""

    def __init__(self, kept_chars: int) -> None:
        self._ids: list[str] = []
        self._items: dict[str, ListedItem] = {}
        self._unread: dict[str, int] = {}
        """Sizes of those that are not read, the latest last."""
        self._unread_chars, self._most_chars = 0, kept_chars

    def __iter__(self) -> Iterator[ListedItem]:
        return (self._items[each] for each in self._ids)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._items

    @property
    def last_id(self) -> str | None:
        """Id of the last item."""
        return self._ids[-1] if self._ids else None

    def find(self, item_id: str) -> ListedItem | None:
        """The item of that id."""
        return self._items.get(item_id)

    def before(self, item_id: str) -> str | None:
        """Id of the item before that one; None if it is the first, or not there."""
        place = self._place(item_id) if item_id in self else 0
        return self._ids[place - 1] if place else None

    def add(self, item: told.Item, after: str | None = None, *, read: bool = True) -> None:
        """Put an item after another one, at the end without one, or first after ``ROOT``."""
        place = len(self._ids)
        if after == ROOT:
            place = 0
        elif after is not None and after in self:
            place = self._place(after) + 1
        self._ids.insert(place, item.id)
        self._items[item.id] = ListedItem(item, read)
        if not read:
            self._keep(item)

    def remove(self, item_id: str) -> None:
        """Take an item out, if it is there."""
        if self._items.pop(item_id, None):
            self._ids.remove(item_id)
            self._unread_chars -= self._unread.pop(item_id, 0)

    def forget(self, item_id: str) -> None:
        """The model reads this item no more."""
        listed = self.find(item_id)
        if listed and listed.read:
            listed.read = False
            self._keep(listed.item)

    def read_before(self, item_id: str) -> str:
        """Id of the last item up to this one that the session has; ``ROOT`` if there is none."""
        last = self._place(item_id) if item_id in self else len(self._ids) - 1
        up_to = reversed(self._ids[: last + 1])
        return next((each for each in up_to if self._items[each].read), ROOT)

    def _place(self, item_id: str) -> int:
        """Where an item stands; at once for the last one, which is nearly always asked for."""
        last = len(self._ids) - 1
        return last if self._ids[last] == item_id else self._ids.index(item_id)

    def _keep(self, item: told.Item) -> None:
        """Make room for an item that is not read: those that have not been for longest go."""
        self._unread[item.id] = len(repr(item))
        self._unread_chars += self._unread[item.id]
        while self._unread_chars > self._most_chars and len(self._unread) > 1:
            self.remove(next(iter(self._unread)))
