"""Items that a client puts into a conversation, takes out of it, or cuts."""

from collections.abc import Awaitable, Callable
from typing import Any

from mosstalk.session import commands as commands
from mosstalk.session.conversation_state import ConversationState, new_id
from mosstalk.session.events import ItemDeleted, Reason
from mosstalk.session.history import Entry
from mosstalk.session.response_manager import ResponseManager


class ItemCommands:
    """What commands do to the items of a session."""

    def __init__(self, state: ConversationState, answers: ResponseManager) -> None:
        self._state, self._responses = state, answers
        self.handlers: dict[type[commands.Command], Callable[[Any, float], Awaitable[None]]] = {
            commands.CreateText: self.create_text,
            commands.CreateAudio: self.create_audio,
            commands.CreateMessage: self.create_message,
            commands.DeleteItem: self.delete,
            commands.Truncate: self.truncate,
        }

    async def create_text(self, command: commands.CreateText, _: float) -> None:
        """Put typed text into the conversation."""
        await self._create(commands.Message(command.role, (command.text,)), command)

    async def create_audio(self, command: commands.CreateAudio, _: float) -> None:
        """Put recorded speech into the conversation."""
        sound = commands.Sound(command.pcm, command.rate)
        await self._create(commands.Message("user", (sound,)), command)

    async def create_message(self, command: commands.CreateMessage, _: float) -> None:
        """Put text and speech into the conversation."""
        await self._create(command.message, command)

    async def _create(
        self,
        message: commands.Message,
        command: commands.CreateText | commands.CreateAudio | commands.CreateMessage,
    ) -> None:
        self._state.history.require_new(command.item_id)
        self._state.require_place(0, message.role)  # before anything is made of it
        entry = await self._state.entry_of(message, command.item_id or new_id("item"))
        self._state.require_place(len(entry.rows), entry.role)
        await self._insert(entry, command.previous_item_id, command.command_id)

    async def _insert(self, entry: Entry, after: str | None, command_id: str | None) -> None:
        self._state.add(entry, after, command_id)
        if not self._responses.current:
            self._state.make_room()
        self._state.prefill_soon()

    async def delete(self, command: commands.DeleteItem, _: float) -> None:
        """Take an item out; a response that is making it ends."""
        entry = self._state.history.find(command.item_id)
        await self._cancel_response_of(entry)
        if entry in self._state.history:  # the end of a response may have dropped it
            self._state.history.remove(entry)
        self._state.emit(
            ItemDeleted(entry.item_id, clock=self._state.clock, command_id=command.command_id)
        )
        self._state.prefill_soon()

    async def truncate(self, command: commands.Truncate, _: float) -> None:
        """Cut a spoken reply; if it is being made or played, that ends."""
        entry = self._state.history.find(command.item_id)
        await self._cancel_response_of(entry)
        self._responses.truncate(entry, command.heard_ms, command_id=command.command_id)
        if self._state.playback.latest == entry.item_id:
            self._state.silence()
        self._state.prefill_soon()

    async def _cancel_response_of(self, entry: Entry) -> None:
        """End the response that is making this item, if it is being made."""
        current = self._responses.current
        if current and current.plan.item_id == entry.item_id:
            await self._responses.cancel(None, Reason.CLIENT_CANCELLED)
