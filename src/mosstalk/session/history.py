"""The items of a conversation, the grid rows that they make, and what the engine has of these."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mosstalk.constants import CODE_MS
from mosstalk.conversation import (
    Conversation,
    Encode,
    Mode,
    Reply,
    Row,
    Segment,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
    common_rows,
    cut_reply,
)
from mosstalk.engine.async_engine import AsyncEngine, CachedConversation, Edit, ReplyStream
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.errors import SessionError
from mosstalk.session.commands import ROOT
from mosstalk.session.events import ErrorCode, Item, ItemStatus, KeptItem

ROLES = ("user", "system", "assistant")


class PromptBuilder:
    """Writes turns as rows, each by itself: what came before changes no row of a turn.

    ``writes_first``: see ``Conversation``.
    """

    def __init__(self, ids: SpecialIds, encode: Encode, *, writes_first: bool = False) -> None:
        self.ids = ids
        self.writes_first = writes_first
        self._encode = encode
        self._empty_turn = self.turn("user", SpeechSegment(()))
        # Without codes the turn ends with eosp, im_end and the newline.
        self._closing = 2 + len(encode("\n"))
        self.prefix_rows = 2 + len(encode("assistant\n"))
        """Rows that open a spoken reply."""

    def turn(self, role: str, *segments: Segment) -> list[Row]:
        """Rows of a whole turn."""
        conversation = Conversation(self.ids, self._encode)
        conversation.add_turn(Turn(role, segments))
        return conversation.rows

    def text(self, role: str, text: str) -> list[Row]:
        """Rows of a typed turn; raise TextError if it cannot be encoded."""
        return self.turn(role, self.text_segment(text))

    def text_segment(self, text: str) -> TextSegment:
        """Text as a part of a turn; raise TextError if it cannot be encoded."""
        return TextSegment(tuple(self._encode(text)))

    def open_turn(self, codes: list[int]) -> list[Row]:
        """Rows of a spoken turn of the user that goes on."""
        opening = self._empty_turn[: -self._closing]
        return opening + [(self.ids.modality_pad, code) for code in codes]

    def reply(self, reply: Reply, *, speech: bool, heard_codes: int | None) -> list[Row]:
        """Rows of a generated reply as history, cut after ``heard_codes``."""
        conversation = Conversation(self.ids, self._encode, writes_first=self.writes_first)
        conversation.open_reply(speech)
        conversation.close_reply(reply, heard_codes)
        return conversation.rows

    def text_ids(self, reply: Reply, heard_codes: int | None) -> list[int]:
        """Text ids of a reply that its history holds."""
        prefix = (self.ids.im_end, self.ids.audio_pad)
        rows, _ = cut_reply(reply, heard_codes, self.ids, prefix, writes_first=self.writes_first)
        # Rows of speech hold no text id that counts.
        return Reply(rows, [Mode.TEXT] * len(rows)).text_ids(self.ids)


@dataclass(eq=False)
class Entry:
    """An item with its rows. Of a spoken reply also what it was cut from."""

    item_id: str
    role: str
    rows: list[Row] = field(default_factory=list)
    text: str | None = None
    audio_ms: int | None = None
    status: ItemStatus = ItemStatus.COMPLETED
    response_id: str | None = None
    reply: Reply | None = None
    speech: bool = False
    text_is_spoken: bool = False
    heard_codes: int | None = None

    @property
    def item(self) -> Item:
        """What is told of it."""
        return Item(
            self.item_id, self.role, self.text, self.audio_ms, self.status, self.response_id,
            self.text_is_spoken,
        )  # fmt: skip

    @classmethod
    def of(cls, kept: KeptItem) -> "Entry":
        """The item again; the rows of a reply are still to be made of what was drawn."""
        item, reply = kept.item, None
        if kept.modes is not None:
            reply = Reply(list(kept.rows), list(kept.modes))
        return cls(
            item.item_id, item.role, [] if reply else list(kept.rows), item.text, item.audio_ms,
            item.status, item.response_id, reply, kept.speech, item.text_is_spoken,
            kept.heard_codes,
        )  # fmt: skip

    def kept(self) -> KeptItem:
        """What another session needs to go on from it."""
        reply = self.reply
        rows, modes = (reply.rows, tuple(reply.modes)) if reply else (self.rows, None)
        return KeptItem(self.item, tuple(rows), modes, self.heard_codes, self.speech)

    def cut(self, codes: int) -> None:
        """Keep what was heard of a reply: ``codes``, or less if less was kept before."""
        assert self.reply is not None, "only replies can be cut"
        if self.heard_codes is not None:
            codes = min(codes, self.heard_codes)
        self.heard_codes = codes
        self.audio_ms = min(self.audio_ms or 0, codes * CODE_MS)


class History:
    """Items in order, and the rows of all of them."""

    def __init__(self) -> None:
        self.system_rows = 0
        """Rows of typed instructions (role "system"), which are never dropped."""
        self.rows: list[Row] = []
        """To be read only: it grows and shrinks with the items."""
        self.unchanged = 0
        """How many of the first rows are as they were when an ``EngineConversation`` set this."""
        self._entries: list[Entry] = []
        self._by_id: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def last_id(self) -> str | None:
        """Id of the last item."""
        return self._entries[-1].item_id if self._entries else None

    def rewrite(self, entry: Entry, rows: list[Row]) -> None:
        """Give an item other rows, whether it is among these or not."""
        if self._by_id.get(entry.item_id) is entry:
            self._replace(self._start(entry), entry.rows, rows)
        entry.rows = rows

    def _start(self, entry: Entry) -> int:
        """Where the rows of an item begin; found from the end, as the latest ones change."""
        start = len(self.rows)
        for each in reversed(self._entries):
            start -= len(each.rows)
            if each is entry:
                break
        return start

    def _replace(self, start: int, before: list[Row], after: list[Row]) -> None:
        """Put rows in place of those that stand at ``start``."""
        same = common_rows(before, after)
        if same < max(len(before), len(after)):
            self.rows[start + same : start + len(before)] = after[same:]
            self.unchanged = min(self.unchanged, start + same)

    def before(self, entry: Entry) -> str | None:
        """Id of the item before this one."""
        last = len(self._entries) - 1
        place = last if entry is self._entries[last] else self._entries.index(entry)
        return self._entries[place - 1].item_id if place else None

    def get(self, item_id: str) -> Entry | None:
        """The item of that id, if there is one."""
        return self._by_id.get(item_id)

    def find(self, item_id: str) -> Entry:
        """The item of that id; raise SessionError if there is none."""
        found = self.get(item_id)
        if found is None:
            raise SessionError(
                ErrorCode.UNKNOWN_ITEM, f"there is no item {item_id!r} in this conversation"
            )
        return found

    def require_new(self, item_id: str | None) -> None:
        """Raise SessionError if an item has this id already."""
        if item_id in self._by_id:
            raise SessionError(ErrorCode.DUPLICATE_ITEM, f"there is an item {item_id!r} already")

    def insert(self, entry: Entry, previous_item_id: str | None = None) -> None:
        """Put an item after another one; None is the end, ``ROOT`` the beginning.

        Raises:
            SessionError: the id is taken, or there is no such item before it.
        """
        self.require_new(entry.item_id)
        if previous_item_id is None:
            place = len(self._entries)
        elif previous_item_id == ROOT:
            place = 0
        else:
            place = self._entries.index(self.find(previous_item_id)) + 1
        self._entries.insert(place, entry)
        self._by_id[entry.item_id] = entry
        # Its own rows, which that counts, are not there yet.
        self._replace(self._start(entry) + len(entry.rows), [], entry.rows)
        if entry.role == "system":
            self.system_rows += len(entry.rows)

    def remove(self, entry: Entry) -> None:
        """Take an item out."""
        self._replace(self._start(entry), entry.rows, [])
        self._entries.remove(entry)
        self._by_id.pop(entry.item_id)
        if entry.role == "system":
            self.system_rows -= len(entry.rows)

    def drop_oldest(self, rows: int) -> list[Entry]:
        """Take out the oldest items until at most ``rows`` rows are left, and return them.

        What is left begins with a turn that is no reply. Typed instructions (role "system")
        stay, and so does the last item.
        """
        left, dropped = len(self.rows), list[Entry]()
        droppable = [entry for entry in self._entries[:-1] if entry.role != "system"]
        for entry in droppable:
            if left <= rows and not (dropped and entry.role == "assistant"):
                break
            dropped.append(entry)
            left -= len(entry.rows)
        for entry in dropped:
            self.remove(entry)
        return dropped


@dataclass
class EngineConversation:
    """What the engine has been told of one conversation. One reply at a time.

    The engine keeps the rows. Here stands how far they are known to be those of the system turn
    and of the history, and what the engine has after these: a turn under way, or a reply.
    """

    engine: AsyncEngine
    ids: SpecialIds
    encode: Encode
    writes_first: bool = False
    _cached: CachedConversation = field(init=False)
    _system: list[Row] = field(default_factory=list)
    _history_rows: int = 0
    _after: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        conversation = Conversation(self.ids, self.encode, writes_first=self.writes_first)
        self._cached = self.engine.open(conversation)

    async def update(self, system: list[Row], history: History, live: list[Row]) -> None:
        """Make these rows the conversation's, one after the other; what is new is read ahead."""
        edit = self._edit(system, history, live)
        if edit:
            await self.engine.rewrite(self._cached, edit)

    async def submit(
        self,
        system: list[Row],
        history: History,
        live: list[Row],
        params: ReplyParams,
        *,
        speech: bool,
    ) -> ReplyStream:
        """Ask for a reply to these rows; raises as ``AsyncEngine.submit`` does."""
        edit = self._edit(system, history, live)
        return await self.engine.submit(self._cached, params, speech=speech, edit=edit)

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
            kept = min(self._history_rows, history.unchanged)
            start, rows = len(system) + kept, history.rows[kept:] + live
            after = self._after if kept == self._history_rows else None
        else:
            start, after = common_rows(self._system, system), None
            rows = system[start:] + history.rows + live
        self._system, self._history_rows, self._after = system, len(history.rows), live
        history.unchanged = len(history.rows)
        if after is None:
            return Edit(start, tuple(rows))
        same = common_rows(after, rows)
        nothing = same == len(rows) == len(after)
        return None if nothing else Edit(start + same, tuple(rows[same:]))
