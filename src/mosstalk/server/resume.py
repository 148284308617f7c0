"""How a client comes back to a conversation: the token that it shows, and what is found for it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from mosstalk.server.admission import NOT_RESUMED, RefusedError, ServerContext
from mosstalk.server.conversations import Conversations, Keeper, KeptConversation
from mosstalk.server.keys import Grant
from mosstalk.server.realtime.protocol import RealtimeProtocol, Resumption

if TYPE_CHECKING:
    from mosstalk.server.engine_client import SessionProxy

_RESUME = "resume"
"""The part of the query that takes a token, for pages too; and the header that does."""
_RESUME_HEADER = "x-mosstalk-resume"


def resume_key(asked: HTTPConnection, context: ServerContext, grant: Grant) -> str | None:
    """Under what the conversation is kept whose token a client shows, if it shows one."""
    token = asked.query_params.get(_RESUME) or asked.headers.get(_RESUME_HEADER)
    return context.conversation_key(token, grant) if token else None


async def end_forerunner(asked: HTTPConnection, context: ServerContext, grant: Grant) -> None:
    """End the connection that has the conversation which a client comes back to, if one has."""
    key = resume_key(asked, context, grant)
    if key and context.conversations:
        await context.conversations.end_connection(key)


@dataclass(frozen=True)
class Beginning:
    """What a session begins with: a conversation that was kept, or a new one that may be.

    ``resumption`` is what its client is told; None: it cannot come back to this conversation.
    """

    kept: KeptConversation | None = None
    resumption: Resumption | None = None
    _conversations: Conversations | None = field(default=None, repr=False)
    _old_key: str = field(default="", repr=False)
    _new_key: str = field(default="", repr=False)

    @classmethod
    async def of(
        cls, asked: HTTPConnection, context: ServerContext, grant: Grant, *, resumable: bool = True
    ) -> "Beginning":
        """Take up the conversation whose token a client shows, or begin one.

        Raises:
            RefusedError: there is none for its token.
            StoreError: the store does not answer.
        """
        conversations = context.conversations if resumable else None
        old, kept = resume_key(asked, context, grant), None
        if old:
            kept = await conversations.take(old) if conversations else None
            if kept is None:
                raise RefusedError(NOT_RESUMED)
        if conversations is None:
            return cls()
        resumption = conversations.resumption(kept)
        new = context.conversation_key(resumption.token, grant)
        return cls(kept, resumption, conversations, old or "", new)

    async def open(self, context: ServerContext, protocol: RealtimeProtocol) -> "SessionProxy":
        """The session that begins with it, as the client has asked for it.

        Raises:
            EngineFullError, EngineStoppedError: there can be none.
        """
        return await context.engine.open(
            context.fitted(protocol.settings),
            rows=context.recorder is not None,
            keep=self.resumption is not None,
            items=self.kept.items if self.kept else (),
        )

    async def give_back(self) -> None:
        """Keep what was taken up as before, under the token that was shown: nothing came of it."""
        if self.kept and self._conversations:
            await self._conversations.give_back(self._old_key, self.kept)

    def keeper(self, protocol: RealtimeProtocol, session: "SessionProxy") -> Keeper | None:
        """What keeps the conversation from now on, if it can be kept."""
        if self._conversations is None:
            return None
        give_back = self.give_back if self.kept else None
        return self._conversations.begin(self._new_key, protocol, session, give_back)
