"""Conversations that outlive their connection: what is kept of one, and how it is taken up again.

Whoever has a conversation is told a token. What the model reads of it, what the client sees of it
and its settings are kept under a digest of the token, of whose it is, and of the model: so who
shows the token of somebody else finds as little as who has made one up. A token is good for
once. What is kept goes when nobody has come back in time.

Nothing is kept in a connection's way: a task beside it writes what has changed since it last did.
"""

import asyncio
import base64
import hashlib
import json
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from mosstalk.conversation import Mode
from mosstalk.server.logs import LogLimiter
from mosstalk.server.observers import Metrics, SessionObserver
from mosstalk.server.realtime import server_events as told
from mosstalk.server.realtime.items import ListedItem, shown_item
from mosstalk.server.realtime.protocol import RealtimeProtocol, Resumption
from mosstalk.server.store import (
    MEMORY,
    Fields,
    MemoryStore,
    RedisStore,
    Store,
    StoreError,
    StoreOptions,
    Written,
)
from mosstalk.session.events import Item, ItemStatus, KeptItem

if TYPE_CHECKING:
    from mosstalk.conversation import Row
    from mosstalk.server.engine_client import SessionProxy

_LOG = logging.getLogger("mosstalk.server.conversations")
TOKEN_PREFIX = "resume_"
"""What a token begins with; then come 43 characters that nobody can guess."""
FORMAT = 1
_HEAD, _ITEM = "head", "item:"
_AGAIN_S = 1.0
"""How long a store is left alone once it has failed."""
_PACE_S = 0.1
"""Between two writes of one conversation: sound comes in pieces, each of which adds to it."""
_SHARE = 0.05
"""Of one core, what packing may take for one conversation: large ones are written less often."""
_STALE_S = 60.0
"""How long at most nothing is written of a conversation in which nothing happens."""
_LAST_S = 5.0
"""How long what is kept last may take when a connection has ended."""


def shown_token(token: str) -> str:
    """A token as files and logs may have it."""
    return f"{token[: len(TOKEN_PREFIX) + 4]}..."


@dataclass(frozen=True)
class KeptConversation:
    """A conversation as it was kept: ``asked`` of its session, what the client and the model see.

    ``items`` are those that the model reads, ``fields`` all of it as it was found.
    """

    fields: Fields = field(repr=False)
    asked: dict[str, Any]
    conversation_id: str
    listed: tuple[ListedItem, ...]
    items: tuple[KeptItem, ...]


_SHOWN: TypeAdapter[told.Item] = TypeAdapter(told.Item)


def _packed_item(listed: ListedItem, kept: KeptItem | None) -> bytes:
    packed: dict[str, Any] = {"shown": listed.item.model_dump()}
    if kept:
        rows = array("i", (each for row in kept.rows for each in row))
        packed["kept"] = {
            "item": asdict(kept.item),
            "rows": base64.b64encode(rows.tobytes()).decode(),
            "modes": None if kept.modes is None else "".join(str(int(m)) for m in kept.modes),
            "heard_codes": kept.heard_codes,
            "speech": kept.speech,
        }
    return json.dumps(packed).encode()


def _unpacked_item(packed: bytes) -> tuple[ListedItem, KeptItem | None]:
    value = json.loads(packed)
    shown = _SHOWN.validate_json(json.dumps(value["shown"]))
    held = value.get("kept")
    if held is None:
        return ListedItem(shown, read=False), None
    numbers = array("i", base64.b64decode(held["rows"]))
    rows: tuple[Row, ...] = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    modes = None if held["modes"] is None else tuple(Mode(int(each)) for each in held["modes"])
    item = Item(**held["item"] | {"status": ItemStatus(held["item"]["status"])})
    if ItemStatus.IN_PROGRESS in (shown.status, item.status):
        shown = shown_item(item)  # it has ended since the client was told of it, or has not yet
    return ListedItem(shown), KeptItem(item, rows, modes, held["heard_codes"], held["speech"])


def unpacked(fields: Fields) -> KeptConversation:
    """A conversation of its fields.

    Raises:
        ValueError: they are another version's, or damaged.
    """
    try:
        head = json.loads(fields[_HEAD])
        if head["format"] != FORMAT:
            raise ValueError(f"it has the format {head['format']}, not {FORMAT}")
        items = [_unpacked_item(fields[_ITEM + item_id]) for item_id in head["items"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    listed = tuple(listed for listed, _ in items)
    kept = tuple(kept for _, kept in items if kept)
    return KeptConversation(fields, head["asked"], head["conversation_id"], listed, kept)


_CHANGES = frozenset((
    "session.created", "session.updated", "conversation.item.added", "conversation.item.done",
    "conversation.item.truncated", "conversation.item.deleted", "response.done",
    "conversation.item.input_audio_transcription.completed", "response.output_audio.delta",
    "response.output_text.delta",
))  # fmt: skip
"""Events after which there is more to keep, or less."""


class Keeper(SessionObserver):
    """Keeps one session's conversation, as its client has been told of it, from time to time.

    ``end`` is called once the conversation has been taken up in another connection. ``give_back``
    is done if the client went before it was told anything, so that it can come back as before.
    """

    def __init__(
        self,
        conversations: "Conversations",
        key: str,
        protocol: RealtimeProtocol,
        session: "SessionProxy",
        give_back: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.end: Callable[[], None] = lambda: None
        self._conversations, self._key = conversations, key
        self._protocol, self._session, self._give_back = protocol, session, give_back
        self._changed, self._over = asyncio.Event(), asyncio.Event()
        self._written: dict[str, tuple[object, ...]] = {}
        """By field, what it was made of when it was last written."""
        self._packing_s = 0.0
        self._whole = True
        """Whether all is to be written: nobody knows what is there."""
        self.task = asyncio.create_task(self._run())

    def on_message(
        self, sender: str, message: str | bytes, event: told.Event | None = None
    ) -> None:
        """What the client is told may be worth keeping."""
        del message
        if sender == "server" and event and event.type in _CHANGES:
            self._give_back = None
            self._changed.set()

    def on_close(self, reason: str, rows: "list[Row] | None") -> None:
        """Keep how it has ended, and for how long it can be taken up from now on."""
        del reason, rows
        self._over.set()
        self._changed.set()

    async def _run(self) -> None:
        store = self._conversations
        try:
            while not self._over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), store.stale_s)
                self._changed.clear()
                kept = await self._keep(store.resume_s + store.stale_s)
                if kept is Written.TAKEN:
                    self.end()
                    return
                if kept is None:
                    self._changed.set()
                with suppress(TimeoutError):
                    pause_s = _AGAIN_S if kept is None else _PACE_S
                    pause_s = max(pause_s, self._packing_s / _SHARE)
                    await asyncio.wait_for(self._over.wait(), pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    if self._give_back:
                        await self._give_back()
                        return
                    while await self._keep(store.resume_s) is None:
                        await asyncio.sleep(_AGAIN_S)
        except Exception:  # of this one: it cannot be taken up, and the talk goes on
            _LOG.exception("a conversation is kept no more")
        finally:
            store.left(self._key)

    async def _keep(self, seconds: float) -> Written | None:
        """Write what has changed, to be kept for so long; None: the store does not answer."""
        if self._protocol.session.only_transcribes:
            return Written.DONE
        whole, begun_s = self._whole, time.perf_counter()
        made = self._made_of()
        changed = {
            name: parts for name, parts in made.items()
            if whole or not _same(self._written.get(name), parts)
        }  # fmt: skip
        fields = {name: self._packed(name, parts) for name, parts in changed.items()}
        gone = [] if whole else [name for name in self._written if name not in made]
        self._whole, self._packing_s = True, time.perf_counter() - begun_s
        written = await self._conversations.write(self._key, fields, gone, seconds, whole=whole)
        if written is Written.UNKNOWN:  # the store has lost it
            return await self._keep(seconds)
        if written is Written.DONE:
            self._whole, self._written = False, made
        return written

    def _made_of(self) -> dict[str, tuple[object, ...]]:
        """By field, what it is made of: values that are replaced when they change."""
        protocol, kept = self._protocol, self._session.kept
        made: dict[str, tuple[object, ...]] = {}
        for listed in protocol.items:
            item = listed.item
            its = kept.get(item.id) if listed.read else None
            if its or item.status != ItemStatus.IN_PROGRESS:  # of that nothing was heard yet
                made[_ITEM + item.id] = (item, its)
        order = tuple(name.removeprefix(_ITEM) for name in made)
        before = self._written.get(_HEAD, ((), ()))[1]
        made[_HEAD] = (protocol.session.asked, before if before == order else order)
        return made

    def _packed(self, name: str, parts: tuple[Any, ...]) -> bytes:
        if name != _HEAD:
            return _packed_item(ListedItem(parts[0]), parts[1])
        head = {
            "format": FORMAT, "asked": parts[0], "items": parts[1],
            "conversation_id": self._protocol.conversation_id,
        }  # fmt: skip
        return json.dumps(head).encode()


def _same(before: tuple[object, ...] | None, parts: Iterable[object]) -> bool:
    return before is not None and all(a is b for a, b in zip(before, parts, strict=True))


class Conversations:
    """All conversations of a server that can be taken up again: its own, and its store's."""

    def __init__(self, options: StoreOptions, metrics: Metrics) -> None:
        self.resume_s = options.resume_s
        self.stale_s = min(options.resume_s / 3, _STALE_S)
        self._store: Store
        if options.url == MEMORY:
            self._store = memory = MemoryStore()
            metrics.kept.set_function(lambda: len(memory))
        else:
            self._store = RedisStore(options.url)
        self._metrics = metrics
        self._live: dict[str, Keeper] = {}
        """Of connections of this process, by key."""
        self._failures = LogLimiter(most=1, per_s=10.0)
        self._is_away = False

    async def start(self) -> None:
        """Ask the store for nothing, so that its owner is told at once if it does not answer."""
        with suppress(StoreError):
            await self._ask("take", self._store.take("nobody", self.resume_s))

    def begin(
        self,
        key: str,
        protocol: RealtimeProtocol,
        session: "SessionProxy",
        give_back: Callable[[], Awaitable[None]] | None = None,
    ) -> Keeper:
        """Keep a session's conversation under this key; ``give_back``: see ``Keeper``."""
        if give_back:
            self._metrics.resumed.inc()
        keeper = self._live[key] = Keeper(self, key, protocol, session, give_back)
        return keeper

    def left(self, key: str) -> None:
        """A connection is over, and what there is to keep of it has been kept."""
        self._live.pop(key, None)

    async def end_connection(self, key: str) -> None:
        """End the connection that has this conversation, if this process does, and wait for it.

        Its client has come back: it is no more at the other end, though nobody has noticed yet.
        """
        if keeper := self._live.get(key):
            keeper.end()
            await asyncio.wait((keeper.task,), timeout=2 * _LAST_S)

    def resumption(self, kept: KeptConversation | None) -> Resumption:
        """What a client is told so that it can come back to a conversation, new or taken up."""
        token = TOKEN_PREFIX + token_urlsafe(32)
        if kept is None:
            return Resumption(token, self.resume_s)
        return Resumption(token, self.resume_s, kept.conversation_id, kept.listed)

    async def take(self, key: str) -> KeptConversation | None:
        """A conversation, to go on with; None if there is none under this key any more.

        Raises:
            StoreError: the store does not answer.
        """
        fields = await self._ask("take", self._store.take(key, self.resume_s + self.stale_s))
        if not fields:
            return None
        try:
            return unpacked(fields)
        except ValueError as error:
            _LOG.error("a conversation that was kept cannot be read: %s", error)
            return None

    async def delete(self, key: str) -> KeptConversation | None:
        """Have a conversation end everywhere: what it was, or None if there is none.

        This process closes the connection that has it. Another one does so when it next writes.

        Raises:
            StoreError: the store does not answer.
        """
        kept = await self.take(key)
        await self.end_connection(key)
        return kept

    async def write(
        self, key: str, fields: Fields, gone: Collection[str], seconds: float, *, whole: bool
    ) -> Written | None:
        """See ``Store``; None: it does not answer, which has been told."""
        writing = self._store.write(key, fields, gone, seconds, whole=whole)
        try:
            return Written(await self._ask("write", writing))
        except StoreError:
            return None

    async def give_back(self, key: str, conversation: KeptConversation) -> None:
        """Keep a conversation under its key again: it could not be gone on with."""
        giving = self._store.give_back(key, conversation.fields, self.resume_s)
        with suppress(StoreError):
            await self._ask("write", giving)

    async def stop(self) -> None:
        """Wait for what there is still to keep, and let go of the store."""
        tasks = [keeper.task for keeper in self._live.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)
        for task in tasks:
            task.cancel()
        await self._store.close()

    async def _ask(self, what: str, asking: Any) -> Any:
        """What the store answers; how long that took, and that it does not, is told."""
        begun_s = time.monotonic()
        try:
            answer = await asking
        except StoreError as error:
            self._is_away = True
            self._metrics.store_failures.labels(what).inc()
            self._metrics.store_up.set(0)
            if self._failures.take(what, begun_s) is not None:
                _LOG.warning(
                    "the store of conversations fails, and talks go on without it: %s", error
                )
            raise
        finally:
            self._metrics.store_time.observe(time.monotonic() - begun_s)
        if self._is_away:
            _LOG.info("the store of conversations answers again")
        self._is_away = False
        self._metrics.store_up.set(1)
        return answer


def key_of(token: str, owner: str, model: str) -> str:
    """Under what a conversation is kept: who does not know all three finds nothing."""
    said = json.dumps([token, owner, model]).encode()
    return hashlib.sha256(said).hexdigest()
