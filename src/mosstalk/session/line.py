"""A conversation's line to the engine: its rows there, changed only from where they differ."""

from dataclasses import dataclass, field

from mosstalk.conversation import Conversation, Encode, Row, SpecialIds
from mosstalk.engine.async_engine import AsyncEngine, ReplyStream
from mosstalk.engine.cached_conversation import CachedConversation, Edit
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.session.history import common_rows


@dataclass
class Line:
    """What the engine has been told of one conversation. One reply at a time."""

    engine: AsyncEngine
    ids: SpecialIds
    encode: Encode
    _talk: CachedConversation = field(init=False)
    _known: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._talk = self.engine.talk(Conversation(self.ids, self.encode))

    def same_as(self, rows: list[Row]) -> int:
        """How many leading rows the engine was told as they are."""
        return common_rows(self._known, rows)

    async def tell(self, rows: list[Row]) -> None:
        """Make ``rows`` the conversation's; the engine reads ahead what is new."""
        edit = self._edit(rows)
        if edit:
            await self.engine.rewrite(self._talk, edit)

    async def ask(self, rows: list[Row], ask: ReplyParams, *, speech: bool) -> ReplyStream:
        """Ask for a reply to ``rows``; raises as ``Engine.submit`` does."""
        return await self.engine.submit(self._talk, ask, speech=speech, edit=self._edit(rows))

    async def end(self, ticket: ReplyStream) -> None:
        """End a reply, if it has not, and keep its rows; ``tell`` may then cut them."""
        await self.engine.cancel(ticket)
        await self.engine.close_reply(ticket)
        self._known = list(self._talk.conversation.rows)

    async def close(self) -> None:
        """Forget the conversation; its blocks are free."""
        await self.engine.close(self._talk)

    def _edit(self, rows: list[Row]) -> Edit | None:
        start = self.same_as(rows)
        if start == len(rows) == len(self._known):
            return None
        self._known = rows
        return Edit(start, tuple(rows[start:]))
