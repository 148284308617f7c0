"""One connection's talk: a client's events to commands, a session's events to a client's.

Synchronous and without sockets: whoever has the socket passes on what a ``ProtocolOutput`` holds.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Literal

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.items import ItemList, ListedItem, NewItem, cut, new_item
from mosstalk.server.realtime.responses import ActiveResponse, ResponseConfig, requested
from mosstalk.server.realtime.server_event_emitter import ServerEventEmitter
from mosstalk.server.realtime.session_config import (
    ServedModel,
    SessionConfig,
    TranscriptionConfig,
    session_config,
)
from mosstalk.server.realtime.session_request import LONGEST_ID
from mosstalk.server.realtime.validation import (
    WireError,
    is_text,
    parse_message,
    require_plain,
    validate,
)
from mosstalk.session import commands
from mosstalk.session.commands import ROOT, Command, SessionSettings
from mosstalk.session.events import Event, new_id

_MOST_UPDATES = 4
"""Updates of a session that may wait for its answer; each is answered with all of the session."""


@dataclass(frozen=True)
class Transcript:
    """What the transcriber has written down of an item's sound, or with ``more`` the next of it.

    The sound lasted ``audio_s``; ``failed`` says why there is no text.
    """

    item_id: str
    text: str = ""
    audio_s: float = 0.0
    failed: str | None = None
    more: bool = False


@dataclass
class ProtocolOutput:
    """What one message or event leads to, each list in order.

    Attributes:
        commands: for the session.
        events: for the client.
        notes: lines for the log; they hold nothing that was said.
    """

    commands: list[Command] = field(default_factory=list)
    events: list[told.Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PendingItem:
    """An item that the session was told to make; ``after`` is where the client wants it."""

    item: told.Item
    after: str | None


@dataclass(frozen=True)
class Resumption:
    """What a client is told so that it can come back, and what it has come back to.

    ``token`` holds for ``seconds`` after the connection's end. ``items`` are those of the
    conversation that goes on here; None: it begins here.
    """

    token: str
    seconds: float
    conversation_id: str | None = None
    items: tuple[ListedItem, ...] | None = None


class ProtocolState:
    """``session`` is what the session has confirmed, ``planned`` what it was last told.

    Attributes:
        updates: by command id, what holds once the session confirms it.
        creations: by command id, items that are being made.
        deletions: ids of the commands that delete items, until the session has done them.
        pending_responses: by command id, how a response is to be shown once it begins.
        responses: by response id, those that are being made.
        waiting: the client's events that have not been heard yet, and errors told in their place.
        unwritten: items that the model is to write down, the first of them now.
        writing: the id of the response in which it does, and what it has written.
    """

    def __init__(
        self,
        served: ServedModel,
        now: Callable[[], float],
        begins: Mapping[str, Any],
        resumption: Resumption | None,
    ) -> None:
        self.served, self.now, self.resumption = served, now, resumption
        self.session = self.planned = session_config({}, served).updated(dict(begins), served)
        self.session_id, self.expires_at = "", 0
        self.conversation_id = (resumption and resumption.conversation_id) or new_id("conv")
        self.items = ItemList(served.limits.kept_chars)
        for listed in (resumption and resumption.items) or ():
            self.items.add(listed.item, read=listed.read)
        self.updates: dict[str, SessionConfig] = {}
        self.creations: dict[str, PendingItem] = {}
        self.deletions = set[str]()
        self.pending_responses: dict[str, ResponseConfig] = {}
        self.responses: dict[str, ActiveResponse] = {}
        self.latest_response_id: str | None = None
        self.waiting: deque[asked.ClientEvent | told.Error] = deque()
        self.unwritten: deque[str] = deque()
        self.writing: tuple[str, str] | None = None
        self.output = ProtocolOutput()
        self._commands = 0

    def command_id(self, event: asked.Event) -> str:
        """A new command's id, which carries the id of the event that it comes from."""
        self._commands += 1
        return f"{self._commands}:{event.event_id or ''}"

    def tell(self, *events: told.Event) -> None:
        """Pass events on to the client."""
        self.output.events.extend(events)

    def tell_of_item(
        self, kind: Literal["conversation.item.added", "conversation.item.done"], item: told.Item
    ) -> None:
        """Tell that a listed item is there, or whole."""
        before = self.items.before(item.id)
        self.tell(told.ItemPlaced(type=kind, previous_item_id=before, item=item))

    def tell_truncated(
        self,
        item_id: str,
        heard_ms: int,
        vendor: told.Vendor | None = None,
        said: str | None = None,
    ) -> None:
        """Tell that an item was cut; of what is written in it ``said`` is what was heard."""
        if listed := self.items.find(item_id):
            listed.item = cut(listed.item, said)
        self.tell(
            told.ItemChanged(
                type="conversation.item.truncated",
                item_id=item_id,
                content_index=0,
                audio_end_ms=heard_ms,
                mosstalk=vendor,
            )
        )

    def delete(self, item_id: str) -> None:
        """Take an item out, and tell."""
        self.items.remove(item_id)
        self.tell(told.ItemChanged(type="conversation.item.deleted", item_id=item_id))

    def note(self, *notes: str) -> None:
        """Pass lines on to the log."""
        self.output.notes.extend(notes)

    def do(self, command: Command) -> None:
        """Pass a command on to the session."""
        self.output.commands.append(command)

    def is_read(self, item_id: str) -> bool | None:
        """Whether the session has an item, or is about to; None: there is no such item."""
        listed = self.items.find(item_id)
        return listed.read if listed else self.is_coming(item_id) or None

    def is_coming(self, item_id: str) -> bool:
        """Whether the session was told to make an item and has not done it yet."""
        return any(each.item.id == item_id for each in self.creations.values())


class RealtimeProtocol:
    """Makes no error of its own: what a client does wrong becomes an ``error`` event.

    ``settings`` is what to open the session with, ``now`` the time of day in seconds since 1970,
    ``begins`` what the session begins with, as a ``session.update`` that can be served asks for it.
    ``resumption`` None: it cannot be taken up again.
    """

    def __init__(
        self,
        served: ServedModel,
        now: Callable[[], float] = time.time,
        begins: Mapping[str, Any] = MappingProxyType({}),
        resumption: Resumption | None = None,
    ) -> None:
        self._state = ProtocolState(served, now, begins, resumption)
        self.settings: SessionSettings = self._state.session.settings
        self._handler = ClientEventHandler(self._state)
        self._emitter = ServerEventEmitter(self._state)
        self._stamp, self._stamped = token_hex(4), 0

    @property
    def transcription(self) -> TranscriptionConfig:
        """What the transcriber is to write down."""
        return self._state.session.transcription

    @property
    def session(self) -> SessionConfig:
        """What holds of the session."""
        return self._state.session

    @property
    def conversation_id(self) -> str:
        """What responses name the conversation."""
        return self._state.conversation_id

    @property
    def items(self) -> ItemList:
        """The conversation as the client sees it, to be read only."""
        return self._state.items

    @property
    def waits(self) -> bool:
        """Whether the session should answer before more of the client's is heard."""
        return bool(self._state.waiting) or len(self._state.updates) > _MOST_UPDATES

    def from_client(self, raw: str | bytes) -> ProtocolOutput:
        """What a WebSocket message, text or binary, leads to."""
        state, limits, value = self._state, self._state.served.limits, dict[str, Any]()
        try:
            value = parse_message(raw, limits)
            require_plain(value, raw)
        except WireError as error:
            state.tell(_error(error, value.get("event_id")))
            return self._output()
        try:
            state.waiting.append(validate(asked.CLIENT_EVENT, value, limits))
        except WireError as error:
            state.waiting.append(_error(error, value.get("event_id")))
        self._hear_waiting()
        return self._output()

    def from_session(self, event: Event) -> ProtocolOutput:
        """What an event of the session leads to."""
        self._emitter.take(event)
        self._hear_waiting()
        return self._output()

    def from_transcript(self, transcript: Transcript) -> ProtocolOutput:
        """What the transcriber has heard in an item."""
        self._emitter.transcript(transcript)
        return self._output()

    def _hear_waiting(self) -> None:
        """Hear what the client has sent, as far as its order allows it now."""
        state = self._state
        while state.waiting:
            event = state.waiting[0]
            try:
                if isinstance(event, told.Error):
                    state.tell(event)
                elif self._handler.must_wait(event):
                    return
                else:
                    self._handler.take(event)
            except WireError as error:
                state.tell(_error(error, event.event_id))
            state.waiting.popleft()

    def _output(self) -> ProtocolOutput:
        """What has come together, every event with an id."""
        output, self._state.output = self._state.output, ProtocolOutput()
        for event in output.events:
            self._stamped += 1
            event.event_id = f"event_{self._stamp}_{self._stamped}"
        return output


_OF_CONVERSATIONS = (asked.CreateItem, asked.CreateResponse, asked.TruncateItem)


class ClientEventHandler:
    """Takes a client's events; raises WireError for what cannot be served."""

    def __init__(self, state: ProtocolState) -> None:
        self._state = state

    def must_wait(self, event: asked.ClientEvent) -> bool:
        """Whether an event speaks of items that the session has yet to make or to delete.

        It is answered here, or names an id that will be free, as openai-agents for JavaScript does
        to replace an item. The session answers in order, so all that comes after waits as well.
        """
        match event:
            case asked.CreateItem():
                if self._state.deletions and (event.item.id or event.previous_item_id):
                    return True
                return bool(self._state.creations) and self._new_item(event).message is None
            case asked.ItemEvent(type="conversation.item.retrieve"):
                return self._state.is_coming(event.item_id)
        return False

    def take(self, event: asked.ClientEvent) -> None:
        """Do what an event asks for."""
        state = self._state
        if state.planned.only_transcribes and isinstance(event, _OF_CONVERSATIONS):
            message = (
                f"'{event.type}' is for conversations, and this session transcribes: connect anew, "
                "with no 'intent'."
            )
            raise WireError("invalid_value", message, "type")
        match event:
            case asked.AppendAudio():  # first, because most are
                sound = state.planned.input_format
                if pcm := sound.pcm_of(event.audio, "audio", state.served.limits.audio_bytes):
                    command_id = state.command_id(event)
                    state.do(commands.Push(pcm, sound.sample_rate, command_id=command_id))
            case asked.SessionUpdate():
                self._update(event)
            case asked.BufferEvent():
                self._end_or_clear(event)
            case asked.CreateItem():
                self._create(event)
            case asked.ItemEvent() | asked.TruncateItem():
                self._look_at_or_change(event)
            case asked.CreateResponse():
                self._respond(event)
            case asked.CancelResponse():
                command_id = state.command_id(event)
                state.do(commands.CancelResponse(event.response_id, command_id=command_id))

    def _end_or_clear(self, event: asked.BufferEvent) -> None:
        """Of the output nothing is left to clear: a WebSocket's client has all sound."""
        state = self._state
        if event.type == "input_audio_buffer.commit":
            state.do(commands.Commit(command_id=state.command_id(event)))
        elif event.type == "input_audio_buffer.clear":
            state.do(commands.Clear(command_id=state.command_id(event)))
        elif latest := state.latest_response_id:
            state.tell(told.OutputBuffer(type="output_audio_buffer.cleared", response_id=latest))

    def _update(self, event: asked.SessionUpdate) -> None:
        state = self._state
        session = state.planned.updated(event.session, state.served)
        state.note(*(each for each in session.warnings if each not in state.planned.warnings))
        command_id = state.command_id(event)
        state.planned = state.updates[command_id] = session
        state.do(commands.UpdateSettings(session.settings, command_id=command_id))

    def _respond(self, event: asked.CreateResponse) -> None:
        state, command_id = self._state, self._state.command_id(event)
        config, command = requested(
            event.response, state.planned, state.served, command_id, state.is_read
        )
        state.note(*config.warnings)
        state.pending_responses[command_id] = config
        state.do(command)

    # Items.

    def _new_item(self, event: asked.CreateItem) -> NewItem:
        state = self._state
        return new_item(event.item, "item", state.planned.input_format, state.served.limits)

    def _create(self, event: asked.CreateItem) -> None:
        state, new, after = self._state, self._new_item(event), event.previous_item_id
        if new.note:
            state.note(new.note)
        item = new.item
        if item is None:
            return
        if item.id in state.items or state.is_coming(item.id):
            raise WireError(
                "item_create_duplicate_item_id",
                f"There is an item '{item.id}' already.",
                "item.id",
            )
        known = after is not None and after in state.items
        if new.message:
            command_id = state.command_id(event)
            state.creations[command_id] = PendingItem(item, after)
            # In the session it comes after what the model reads up to there.
            before = state.items.read_before(after) if after and known and after != ROOT else after
            state.do(new.command(command_id, before))
            return
        if not known and after not in (None, ROOT):
            raise WireError(
                "item_create_invalid_previous_item_id",
                f"There is no item '{after}' to come after.",
                "previous_item_id",
            )
        state.items.add(item, after, read=False)
        state.tell_of_item("conversation.item.added", item)
        state.tell_of_item("conversation.item.done", item)

    def _look_at_or_change(self, event: asked.ItemEvent | asked.TruncateItem) -> None:
        """Do with an item what is asked for, here if the session does not have it."""
        state, item_id = self._state, event.item_id
        listed = state.items.find(item_id)
        if event.type == "conversation.item.retrieve":
            if listed is None:
                message = f"There is no item '{item_id}'."
                raise WireError("item_retrieve_invalid_item_id", message, "item_id")
            state.tell(told.ItemRetrieved(item=listed.item))
            return
        in_session = listed is None or listed.read
        if isinstance(event, asked.TruncateItem):
            heard_ms = None if event.audio_end_ms is None else max(0, round(event.audio_end_ms))
            if in_session:
                command_id = state.command_id(event)
                state.do(commands.Truncate(item_id, heard_ms, command_id=command_id))
            else:
                state.tell_truncated(item_id, heard_ms or 0)
        elif in_session:
            command_id = state.command_id(event)
            state.deletions.add(command_id)
            state.do(commands.DeleteItem(item_id, command_id=command_id))
        else:
            state.delete(item_id)


def _error(error: WireError, event_id: Any) -> told.Error:
    """``event_id`` as the client has sent it, which may be anything."""
    named = isinstance(event_id, str) and len(event_id) <= LONGEST_ID and is_text(event_id)
    body = told.ErrorBody(
        code=error.code,
        message=str(error),
        param=error.param,
        event_id=event_id if named else None,
    )
    return told.Error(error=body)
