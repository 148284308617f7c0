"""Items that a client puts into a conversation, takes out of it, or cuts."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from mosstalk.codec.audio import SHORTEST_MS
from mosstalk.conversation import SpeechSegment
from mosstalk.errors import SessionError
from mosstalk.model.tokenizer import LONG_CHARS
from mosstalk.session import commands as told
from mosstalk.session.answers import Answers
from mosstalk.session.desk import Desk, new_id
from mosstalk.session.events import ErrorCode, ItemDeleted, Reason
from mosstalk.session.history import ROLES, Entry
from mosstalk.session.sound import resampled, samples_of
from mosstalk.units import CODES_PER_SECOND, INPUT_RATE

_T = TypeVar("_T")


class Items:
    """What commands do to the items of a session."""

    def __init__(self, desk: Desk, answers: Answers) -> None:
        self._desk, self._answers = desk, answers
        self.handlers: dict[type[told.Command], Callable[[Any, float], Awaitable[None]]] = {
            told.CreateText: self.create_text,
            told.CreateAudio: self.create_audio,
            told.DeleteItem: self.delete,
            told.Truncate: self.truncate,
        }

    async def create_text(self, command: told.CreateText, _: float) -> None:
        """Put typed text into the conversation."""
        if command.role not in ROLES or not command.text.strip():
            raise SessionError(
                ErrorCode.BAD_ITEM, f"an item needs text, and a role of {', '.join(ROLES)}"
            )
        self._desk.history.require_new(command.item_id)
        write = partial(self._desk.scribe.text, command.role, command.text)
        rows = await self._beside(write) if len(command.text) > LONG_CHARS else write()
        self._desk.require_place(len(rows), command.role)
        entry = Entry(command.item_id or new_id("item"), command.role, rows, text=command.text)
        await self._insert(entry, command.previous_item_id, command.command_id)

    async def create_audio(self, command: told.CreateAudio, _: float) -> None:
        """Put recorded speech into the conversation."""
        self._desk.history.require_new(command.item_id)
        rate = command.rate or self._desk.settings.input_rate
        self._desk.require_place(int(command.samples / rate * CODES_PER_SECOND))
        samples = await self._beside(lambda: resampled(samples_of(command.pcm), rate))
        length_ms = len(samples) * 1000 // INPUT_RATE
        if length_ms < SHORTEST_MS:
            raise SessionError(
                ErrorCode.BAD_ITEM, f"{length_ms} ms of sound are too short to be heard"
            )
        codes = await self._desk.stage.senses.codes_of(samples)
        rows = self._desk.scribe.turn("user", SpeechSegment(tuple(codes)))
        self._desk.require_place(len(rows))
        entry = Entry(command.item_id or new_id("item"), "user", rows, audio_ms=length_ms)
        await self._insert(entry, command.previous_item_id, command.command_id)

    async def _beside(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns, done on another thread."""
        async with self._desk.stage.long_work:
            return await asyncio.to_thread(work)

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
