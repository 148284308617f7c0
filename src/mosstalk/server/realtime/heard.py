"""What a client's events ask of the session, one method an event."""

from collections.abc import Callable

from mosstalk.server.realtime.errors import WireError
from mosstalk.server.realtime.items import NewItem, cut, new_item
from mosstalk.server.realtime.reading import Fields, unknown_value
from mosstalk.server.realtime.requests import request_of
from mosstalk.server.realtime.settings import updated
from mosstalk.server.realtime.state import Creation, State
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


class Heard:
    """Takes a client's events; raises WireError for what cannot be served."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._takers: dict[str, Callable[[Fields], None]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "output_audio_buffer.clear": self._clear_output,
            "conversation.item.create": self._create,
            "conversation.item.retrieve": self._retrieve,
            "conversation.item.truncate": self._truncate,
            "conversation.item.delete": self._delete,
            "response.create": self._respond,
            "response.cancel": self._cancel,
        }

    def must_wait(self, event: Fields) -> bool:
        """Whether an event is answered here and speaks of items that the session is making.

        The session answers in order, so all that comes after waits as well.
        """
        kind = event.value.get("type")
        if kind == "conversation.item.create":
            return bool(self._state.creations) and not self._new_item(event).read
        if kind == "conversation.item.retrieve":
            return self._state.is_coming(event.required("item_id"))
        return False

    def take(self, event: Fields) -> None:
        """Do what an event asks for."""
        kind = event.required("type")
        if kind not in self._takers:
            raise unknown_value("type", kind, self._takers)
        self._takers[kind](event)

    # The session and its sound.

    def _update(self, event: Fields) -> None:
        state = self._state
        if not event.has("session"):
            event.required("session")
        session = updated(state.planned, event.object("session"), state.served)
        state.out.notes += [each for each in session.warnings if each not in state.planned.warnings]
        command_id = state.command_id(event)
        state.planned = state.updates[command_id] = session
        state.do(UpdateSettings(session.settings, command_id=command_id))

    def _append(self, event: Fields) -> None:
        state = self._state
        sound = state.planned.input_format
        pcm = sound.pcm_of(event, "audio", state.served.limits)
        if pcm:
            state.do(Push(pcm, sound.rate, command_id=state.command_id(event)))

    def _commit(self, event: Fields) -> None:
        self._state.do(Commit(command_id=self._state.command_id(event)))

    def _clear(self, event: Fields) -> None:
        self._state.do(Clear(command_id=self._state.command_id(event)))

    def _clear_output(self, _: Fields) -> None:
        """Over a WebSocket all sound is with the client already: there is nothing to clear."""
        if response_id := self._state.latest_response_id:
            cleared = {"type": "output_audio_buffer.cleared", "response_id": response_id}
            self._state.tell(cleared)

    # Items.

    def _new_item(self, event: Fields) -> NewItem:
        state = self._state
        if not event.has("item"):
            event.required("item")
        return new_item(event.object("item"), state.planned.input_format, state.served.limits)

    def _create(self, event: Fields) -> None:
        state, item = self._state, self._new_item(event)
        after = event.text("previous_item_id")
        if item.note:
            state.out.notes.append(item.note)
        if item.ignored:
            return
        if item.item_id in state.ledger or state.is_coming(item.item_id):
            raise WireError(
                "item_create_duplicate_item_id",
                f"There is an item '{item.item_id}' already.",
                "item.id",
            )
        if item.read:
            command_id = state.command_id(event)
            state.creations[command_id] = Creation(item, after)
            state.do(item.command(command_id, self._in_session(after)))
        else:
            self._keep(item, after)

    def _in_session(self, after: str | None) -> str | None:
        """Where the session has to put what the client wants after an item of its own view."""
        if after is None or after == ROOT:
            return after
        return self._state.ledger.read_before(after) if after in self._state.ledger else after

    def _keep(self, item: NewItem, after: str | None) -> None:
        """List an item that the session never hears of."""
        ledger = self._state.ledger
        if after not in (None, ROOT) and after not in ledger:
            raise WireError(
                "item_create_invalid_previous_item_id",
                f"There is no item '{after}' to come after.",
                "previous_item_id",
            )
        ledger.add(item.wire, after, read=False)
        before = {"previous_item_id": ledger.before(item.item_id), "item": item.wire}
        self._state.tell(
            {"type": "conversation.item.added", **before},
            {"type": "conversation.item.done", **before},
        )

    def _retrieve(self, event: Fields) -> None:
        item_id = event.required("item_id")
        listed = self._state.ledger.find(item_id)
        if listed is None:
            raise WireError(
                "item_retrieve_invalid_item_id", f"There is no item '{item_id}'.", "item_id"
            )
        self._state.tell({"type": "conversation.item.retrieved", "item": listed.item})

    def _truncate(self, event: Fields) -> None:
        item_id = event.required("item_id")
        end_ms = event.number("audio_end_ms")
        heard_ms = None if end_ms is None else max(0, round(end_ms))
        listed = self._state.ledger.find(item_id)
        if listed is None or listed.read:
            command_id = self._state.command_id(event)
            self._state.do(Truncate(item_id, heard_ms, command_id=command_id))
            return
        listed.item = cut(listed.item)
        self._state.tell(
            {
                "type": "conversation.item.truncated",
                "item_id": item_id,
                "content_index": 0,
                "audio_end_ms": heard_ms or 0,
            }
        )

    def _delete(self, event: Fields) -> None:
        item_id = event.required("item_id")
        listed = self._state.ledger.find(item_id)
        if listed is None or listed.read:
            self._state.do(DeleteItem(item_id, command_id=self._state.command_id(event)))
            return
        self._state.ledger.remove(item_id)
        self._state.tell({"type": "conversation.item.deleted", "item_id": item_id})

    # Responses.

    def _respond(self, event: Fields) -> None:
        state, command_id = self._state, self._state.command_id(event)
        wish, command = request_of(
            event.object("response"), state.planned, state.served, command_id, state.is_read
        )
        state.out.notes += wish.warnings
        state.wishes[command_id] = wish
        state.do(command)

    def _cancel(self, event: Fields) -> None:
        command_id = self._state.command_id(event)
        self._state.do(CancelResponse(event.text("response_id"), command_id=command_id))
