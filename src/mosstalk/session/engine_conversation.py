"""One conversation in the engine: edits of its rows there, from where they differ on."""

from dataclasses import dataclass, field

from mosstalk.conversation import Conversation, Encode, Row, SpecialIds
from mosstalk.engine.async_engine import AsyncEngine, CachedConversation, Edit, ReplyStream
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.session.history import History, common_rows


@dataclass
class EngineConversation:
    """What the engine has been told of one conversation. One reply at a time.

    The engine keeps the rows. Here stands how far they are known to be those of the system turn
    and of the history, and what the engine has after these: a turn under way, or a reply.
    """

    engine: AsyncEngine
    ids: SpecialIds
    encode: Encode
    _cached: CachedConversation = field(init=False)
    _system: list[Row] = field(default_factory=list)
    _history_rows: int = 0
    _after: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cached = self.engine.open(Conversation(self.ids, self.encode))

    async def update(self, system: list[Row], history: History, live: list[Row]) -> None:
        """Make these rows the conversation's, one after the other; what is new is read ahead."""
        edit = self._edit(system, history, live)
        if edit:
            await self.engine.rewrite(self._cached, edit)

    async def submit(
        self, system: list[Row], history: History, params: ReplyParams, *, speech: bool
    ) -> ReplyStream:
        """Ask for a reply to these rows; raises as ``AsyncEngine.submit`` does."""
        edit = self._edit(system, history, [])
        return await self.engine.submit(self._cached, params, speech=speech, edit=edit)

    async def submit_once(
        self, rows: list[Row], params: ReplyParams, *, speech: bool
    ) -> ReplyStream:
        """Ask for the one reply of a conversation that is closed after it."""
        return await self.engine.submit(
            self._cached, params, speech=speech, edit=Edit(0, tuple(rows))
        )

    async def end_reply(self, stream: ReplyStream) -> None:
        """End a reply, if it has not, and keep its rows; ``update`` may then cut them."""
        await self.engine.cancel(stream)
        await self.engine.close_reply(stream)
        self._after = self._cached.conversation.rows[len(self._system) + self._history_rows :]

    async def close(self) -> None:
        """Forget the conversation; its blocks are free."""
        await self.engine.close(self._cached)

    def _edit(self, system: list[Row], history: History, live: list[Row]) -> Edit | None:
        """What changes the engine's rows into these; None if nothing does."""
        if system == self._system:
            kept = history.unchanged(self._history_rows)
            start, rows = len(system) + kept, history.rows[kept:] + live
            after = self._after if kept == self._history_rows else None
        else:
            start, after = common_rows(self._system, system), None
            rows = system[start:] + history.rows + live
        self._system, self._history_rows, self._after = system, len(history.rows), live
        history.mark_synced()
        if after is None:
            return Edit(start, tuple(rows))
        same = common_rows(after, rows)
        nothing = same == len(rows) == len(after)
        return None if nothing else Edit(start + same, tuple(rows[same:]))
