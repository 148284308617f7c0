"""Items that a client puts into a conversation, takes out of it, or cuts."""

from collections.abc import Awaitable, Callable
from typing import Any

from mosstalk.session import commands as told
from mosstalk.session.answers import Answers
from mosstalk.session.desk import Desk, new_id
from mosstalk.session.events import ItemDeleted, Reason
from mosstalk.session.history import Entry


class Items:
    """What commands do to the items of a session."""

    def __init__(self, desk: Desk, answers: Answers) -> None:
        self._desk, self._answers = desk, answers
        self.handlers: dict[type[told.Command], Callable[[Any, float], Awaitable[None]]] = {
            told.CreateText: self.create_text,
            told.CreateAudio: self.create_audio,
            told.CreateMessage: self.create_message,
            told.DeleteItem: self.delete,
            told.Truncate: self.truncate,
        }

    async def create_text(self, command: told.CreateText, _: float) -> None:
        """Put typed text into the conversation."""
        await self._create(told.Message(command.role, (command.text,)), command)

    async def create_audio(self, command: told.CreateAudio, _: float) -> None:
        """Put recorded speech into the conversation."""
        sound = told.Sound(command.pcm, command.rate)
        await self._create(told.Message("user", (sound,)), command)

    async def create_message(self, command: told.CreateMessage, _: float) -> None:
        """Put text and speech into the conversation."""
        await self._create(command.message, command)

    async def _create(
        self,
        message: told.Message,
        command: told.CreateText | told.CreateAudio | told.CreateMessage,
    ) -> None:
        self._desk.history.require_new(command.item_id)
        self._desk.require_place(0, message.role)  # before anything is made of it
        entry = await self._desk.entry_of(message, command.item_id or new_id("item"))
        self._desk.require_place(len(entry.rows), entry.role)
        await self._insert(entry, command.previous_item_id, command.command_id)

    async def _insert(self, entry: Entry, after: str | None, command_id: str | None) -> None:
        self._desk.add(entry, after, command_id)
        if not self._answers.current:
            self._desk.make_room()
        self._desk.follow_soon()

    async def delete(self, command: told.DeleteItem, _: float) -> None:
        """Take an item out; a response that is making it ends."""
        entry = self._desk.history.find(command.item_id)
        await self._leave(entry)
        if entry in self._desk.history:  # the end of a response may have dropped it
            self._desk.history.remove(entry)
        self._desk.tell(
            ItemDeleted(entry.item_id, clock=self._desk.clock, command_id=command.command_id)
        )
        self._desk.follow_soon()

    async def truncate(self, command: told.Truncate, _: float) -> None:
        """Cut a spoken reply; if it is being made or played, that ends."""
        entry = self._desk.history.find(command.item_id)
        await self._leave(entry)
        self._answers.truncate(entry, command.heard_ms, command_id=command.command_id)
        if self._desk.playback.latest == entry.item_id:
            self._desk.silence()
        self._desk.follow_soon()

    async def _leave(self, entry: Entry) -> None:
        """End the response that is making this item, if it is being made."""
        current = self._answers.current
        if current and current.plan.item_id == entry.item_id:
            await self._answers.cancel(None, Reason.CLIENT_CANCELLED)
