"""What a client's events ask of the session, one method an event."""

from collections.abc import Callable
from typing import Any

from mosstalk.server.realtime import client_events as asked
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime import server_objects as shown
from mosstalk.server.realtime.effective_session import updated
from mosstalk.server.realtime.items import NewItem, cut, new_item
from mosstalk.server.realtime.responses import request_of
from mosstalk.server.realtime.state import PendingItem, ProtocolState
from mosstalk.server.realtime.validation import WireError
from mosstalk.session.commands import (
    ROOT,
    CancelResponse,
    Clear,
    Commit,
    DeleteItem,
    Push,
    Truncate,
    UpdateSettings,
)


class ClientEventHandler:
    """Takes a client's events; raises WireError for what cannot be served."""

    def __init__(self, state: ProtocolState) -> None:
        self._state = state
        self._takers: dict[type[asked.Event], Callable[[Any], None]] = {
            asked.SessionUpdate: self._update,
            asked.InputAudioBufferAppend: self._append,
            asked.InputAudioBufferCommit: self._commit,
            asked.InputAudioBufferClear: self._clear,
            asked.OutputAudioBufferClear: self._clear_output,
            asked.ConversationItemCreate: self._create,
            asked.ConversationItemRetrieve: self._retrieve,
            asked.ConversationItemTruncate: self._truncate,
            asked.ConversationItemDelete: self._delete,
            asked.ResponseCreate: self._respond,
            asked.ResponseCancel: self._cancel,
        }

    def must_wait(self, event: asked.ClientEvent) -> bool:
        """Whether an event is answered here and speaks of items that the session is making.

        The session answers in order, so all that comes after waits as well.
        """
        if isinstance(event, asked.ConversationItemCreate):
            return bool(self._state.creations) and self._new_item(event).message is None
        if isinstance(event, asked.ConversationItemRetrieve):
            return self._state.is_coming(event.item_id)
        return False

    def take(self, event: asked.ClientEvent) -> None:
        """Do what an event asks for."""
        self._takers[type(event)](event)

    # The session and its sound.

    def _update(self, event: asked.SessionUpdate) -> None:
        state = self._state
        session = updated(state.planned, event.session, state.served)
        state.note(*(each for each in session.warnings if each not in state.planned.warnings))
        command_id = state.command_id(event)
        state.planned = state.updates[command_id] = session
        state.do(UpdateSettings(session.settings, command_id=command_id))

    def _append(self, event: asked.InputAudioBufferAppend) -> None:
        state = self._state
        sound = state.planned.input_format
        pcm = sound.pcm_of(event.audio, "audio", state.served.limits.audio_bytes)
        if pcm:
            state.do(Push(pcm, sound.rate, command_id=state.command_id(event)))

    def _commit(self, event: asked.InputAudioBufferCommit) -> None:
        self._state.do(Commit(command_id=self._state.command_id(event)))

    def _clear(self, event: asked.InputAudioBufferClear) -> None:
        self._state.do(Clear(command_id=self._state.command_id(event)))

    def _clear_output(self, _: asked.OutputAudioBufferClear) -> None:
        """Over a WebSocket all sound is with the client already: there is nothing to clear."""
        if response_id := self._state.latest_response_id:
            self._state.tell(told.OutputCleared(response_id=response_id))

    # Items.

    def _new_item(self, event: asked.ConversationItemCreate) -> NewItem:
        state = self._state
        return new_item(event.item, "item", state.planned.input_format, state.served.limits)

    def _create(self, event: asked.ConversationItemCreate) -> None:
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
        if new.message:
            command_id = state.command_id(event)
            state.creations[command_id] = PendingItem(item, after)
            state.do(new.command(command_id, self._in_session(after)))
        else:
            self._keep(item, after)

    def _in_session(self, after: str | None) -> str | None:
        """Where the session has to put what the client wants after an item of its own view."""
        if after is None or after == ROOT:
            return after
        return self._state.items.read_before(after) if after in self._state.items else after

    def _keep(self, item: shown.Item, after: str | None) -> None:
        """List an item that the session never hears of."""
        items = self._state.items
        if after not in (None, ROOT) and after not in items:
            raise WireError(
                "item_create_invalid_previous_item_id",
                f"There is no item '{after}' to come after.",
                "previous_item_id",
            )
        items.add(item, after, read=False)
        before = items.before(item.id)
        self._state.tell(
            told.ItemEvent(type="conversation.item.added", previous_item_id=before, item=item),
            told.ItemEvent(type="conversation.item.done", previous_item_id=before, item=item),
        )

    def _retrieve(self, event: asked.ConversationItemRetrieve) -> None:
        listed = self._state.items.find(event.item_id)
        if listed is None:
            message = f"There is no item '{event.item_id}'."
            raise WireError("item_retrieve_invalid_item_id", message, "item_id")
        self._state.tell(told.ItemRetrieved(item=listed.item))

    def _truncate(self, event: asked.ConversationItemTruncate) -> None:
        state, item_id, end_ms = self._state, event.item_id, event.audio_end_ms
        heard_ms = None if end_ms is None else max(0, round(end_ms))
        listed = state.items.find(item_id)
        if listed is None or listed.read:
            state.do(Truncate(item_id, heard_ms, command_id=state.command_id(event)))
            return
        listed.item = cut(listed.item)
        state.tell(told.ItemTruncated(item_id=item_id, audio_end_ms=heard_ms or 0))

    def _delete(self, event: asked.ConversationItemDelete) -> None:
        state, item_id = self._state, event.item_id
        listed = state.items.find(item_id)
        if listed is None or listed.read:
            state.do(DeleteItem(item_id, command_id=state.command_id(event)))
            return
        state.items.remove(item_id)
        state.tell(told.ItemDeleted(item_id=item_id))

    # Responses.

    def _respond(self, event: asked.ResponseCreate) -> None:
        state, command_id = self._state, self._state.command_id(event)
        config, command = request_of(
            event.response, state.planned, state.served, command_id, state.is_read
        )
        state.note(*config.warnings)
        state.configs[command_id] = config
        state.do(command)

    def _cancel(self, event: asked.ResponseCancel) -> None:
        command_id = self._state.command_id(event)
        self._state.do(CancelResponse(event.response_id, command_id=command_id))
