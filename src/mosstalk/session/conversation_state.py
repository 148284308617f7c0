"""What the parts of one session share: its settings, items and place in the engine."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mosstalk.audio.sound import SHORTEST_MS
from mosstalk.constants import CODE_MS, CODES_PER_SECOND, INPUT_RATE
from mosstalk.conversation import Row, Segment, SpeechSegment
from mosstalk.errors import ContextLengthError, SessionError
from mosstalk.models.text_tokenizer import LONG_CHARS
from mosstalk.offline.pipeline import PROMPTS
from mosstalk.session.commands import (
    INSTRUCTIONS,
    ContextPolicy,
    Message,
    ReplyMode,
    SessionSettings,
    Sound,
    sample_count,
)
from mosstalk.session.events import (
    ContextDropped,
    ErrorCode,
    Event,
    ItemAdded,
    ItemDone,
    ItemStatus,
    KeptItem,
    ms_of,
)
from mosstalk.session.history import ROLES, EngineConversation, Entry, History, PromptBuilder
from mosstalk.session.listener import Listener
from mosstalk.session.sound import PlaybackClock, require_rate, resampled

if TYPE_CHECKING:
    from mosstalk.session.host import Host

_T = TypeVar("_T")
LEAST_REPLY_ROWS = 32
"""Rows that must be left of the context for a reply to be begun."""
UNFINISHED = "\ufffd"
"""What a decoder of text gives for the bytes of half a character."""
_MORE_S = 0.05
"""How long an item waits for more of them before the engine reads it ahead."""


class ConversationState:
    """What the parts of one session share: its settings, its items, its conversation in the engine.

    ``tell`` is given every event; ``settings`` have been checked by ``require_usable``.
    """

    def __init__(
        self,
        host: "Host",
        settings: SessionSettings,
        tell: Callable[[Event], None],
        on_codes: Callable[[BaseException | None], None],
    ) -> None:
        """``on_codes`` is as ``Listener`` takes it."""
        self.host, self.settings, self._tell = host, settings, tell
        self.listener = Listener(host.encoder_worker, settings, on_codes)
        self.playback = PlaybackClock(lambda: self.clock / INPUT_RATE, host.clock)
        self.history = History()
        pipeline = host.pipeline
        self.prompts = PromptBuilder(
            pipeline.ids, pipeline.tokenizer.encode,
            writes_first=settings.task == "chat" and pipeline.defaults.writes_first,
        )  # fmt: skip
        self.conversation = self.new_conversation()
        self.prefill_due_s: float | None = None
        """When, on the loop's clock, the engine is to read items ahead; None: it knows of all."""
        self._systems: dict[str, list[Row]] = {}

    @property
    def clock(self) -> int:
        """Samples of input so far, counted at 16 kHz."""
        return self.listener.clock

    @property
    def context_rows(self) -> int:
        """The longest that this conversation may become."""
        longest = self.host.context_rows
        return min(self.settings.context.rows or longest, longest)

    def emit(self, event: Event) -> None:
        """Tell an event, which gets the session's time."""
        self._tell(replace(event, clock=self.clock))

    def new_conversation(self) -> EngineConversation:
        """Another conversation in the engine."""
        pipeline = self.host.pipeline
        return EngineConversation(
            self.host.engine, pipeline.ids, pipeline.tokenizer.encode,
            self.prompts.writes_first,
        )  # fmt: skip

    def silence(self) -> None:
        """What was sent and not played by now will not be."""
        if self.playback.audible:
            self.listener.stopped()
        self.playback.stop()

    def system(self, reply: ReplyMode, instructions: str | None = None) -> list[Row]:
        """Rows of the system turn for a kind of reply, with other instructions if given."""
        usual = PROMPTS.get(self.settings.task, INSTRUCTIONS[reply])
        given = (instructions, self.settings.instructions, usual)
        text = next(each for each in given if each is not None)
        if text and text not in self._systems:
            self._systems = {text: self.prompts.text("system", text)}
        return self._systems[text] if text else []

    def live_rows(self) -> list[Row]:
        """Rows of the turn under way, without its end unless silence has begun that may be it."""
        turn = self.listener.turn
        if turn and (final := turn.final_codes):
            return self.prompts.turn("user", SpeechSegment(tuple(final)))
        codes = turn.codes.codes.copy() if turn else []  # more may be made meanwhile
        return self.prompts.open_turn(codes) if codes else []

    def rows(self) -> list[Row]:
        """All that was said, the turn under way last."""
        return self.system(self.settings.reply) + self.history.rows + self.live_rows()

    @property
    def prefill_is_due(self) -> bool:
        """Whether the moment has passed for which ``prefill_soon`` waits."""
        due_s = self.prefill_due_s
        return due_s is not None and asyncio.get_running_loop().time() >= due_s

    def prefill_soon(self) -> None:
        """Have the engine read new items ahead once no more have come for a moment.

        Items that come by the hundred are told as one, and those that a reply is asked for at
        once are told with it.
        """
        self.prefill_due_s = asyncio.get_running_loop().time() + _MORE_S

    def add(
        self, entry: Entry, previous_item_id: str | None = None, command_id: str | None = None
    ) -> None:
        """Put a finished item into the conversation and tell of it."""
        self.history.insert(entry, previous_item_id)
        before = self.history.before(entry)
        for kind in (ItemAdded, ItemDone):
            self.emit(kind(entry.item, before, command_id=command_id))

    def take_up(self, items: Iterable[KeptItem]) -> None:
        """Go on from the items of an earlier session, while there are none of this one's.

        A reply that was not whole by then stays as it is, and its end is told.
        """
        for kept in items:
            entry = Entry.of(kept)
            self.history.insert(entry)
            unfinished = entry.status is ItemStatus.IN_PROGRESS
            if unfinished:
                entry.status = ItemStatus.INCOMPLETE
                entry.audio_ms = (entry.heard_codes or 0) * CODE_MS if entry.speech else None
            if entry.reply:
                self.rewrite_reply(entry)
            self.playback.was_heard(entry.item_id, (entry.audio_ms or 0) / 1000)
            if unfinished:
                self.emit(ItemDone(entry.item, self.history.before(entry)))
        self.make_room()

    def rewrite_reply(self, entry: Entry) -> None:
        """Give an item the rows and the text of what is kept of its reply."""
        reply, heard = entry.reply, entry.heard_codes
        assert reply is not None, "only replies are cut"
        rows = self.prompts.reply(reply, speech=entry.speech, heard_codes=heard)
        self.history.rewrite(entry, rows)
        text = self.host.pipeline.tokenizer.decode(self.prompts.text_ids(reply, heard))
        if heard is not None:
            text = text.rstrip(UNFINISHED)
        entry.text = text if text or not entry.speech else None

    async def entry_of(self, message: Message, item_id: str) -> Entry:
        """A message as a finished item, which is not in the conversation yet.

        Raises:
            SessionError: there is no such role, no text and no sound, sound that is not the
                user's, at a rate that is not taken, or too short to be heard.
            TextError: text that cannot be encoded.
            ContextLengthError: no context could hold it.
        """
        texts = [part for part in message.parts if isinstance(part, str) and part.strip()]
        sounds = [part for part in message.parts if isinstance(part, Sound)]
        if message.role not in ROLES or not (texts or sounds):
            raise SessionError(
                ErrorCode.BAD_ITEM, f"an item needs text or sound, and a role of {', '.join(ROLES)}"
            )
        if sounds and message.role != "user":
            raise SessionError(ErrorCode.BAD_ITEM, "the sound of a user alone can be heard")
        seconds = sum(sample_count(sound.pcm) / self._rate_of(sound) for sound in sounds)
        self._require_rows(seconds * CODES_PER_SECOND)
        segments, length_ms = list[Segment](), 0
        for part in message.parts:
            if isinstance(part, Sound):
                speech, ms = await self._speech(part)
                segments.append(speech)
                length_ms += ms
            elif part.strip():
                write = partial(self.prompts.text_segment, part)
                segments.append(await self._on_thread(write) if len(part) > LONG_CHARS else write())
        rows = self.prompts.turn(message.role, *segments)
        self._require_rows(len(rows))
        text = "\n".join(texts) or None
        return Entry(item_id, message.role, rows, text, length_ms if sounds else None)

    def _rate_of(self, sound: Sound) -> int:
        rate = sound.rate or self.settings.input_rate
        require_rate(rate)
        return rate

    async def _speech(self, sound: Sound) -> tuple[SpeechSegment, int]:
        """The codes of a recording, and how many milliseconds it lasts."""
        samples = await self._on_thread(partial(resampled, sound.pcm, self._rate_of(sound)))
        length_ms = ms_of(len(samples))
        if length_ms < SHORTEST_MS:
            raise SessionError(
                ErrorCode.BAD_ITEM, f"{length_ms} ms of sound are too short to be heard"
            )
        codes = await self.host.encoder_worker.codes_of(samples)
        return SpeechSegment(tuple(codes)), length_ms

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns, done on another thread."""
        async with self.host.long_work:
            return await asyncio.to_thread(work)

    # Room in the context.

    def make_room(self) -> None:
        """Between turns: drop the oldest turns if the context fills and that is the policy."""
        context, system_rows = self.settings.context, len(self.system(self.settings.reply))
        if system_rows + len(self.history.rows) > context.full * self.context_rows:
            self._drop(system_rows)

    def require_place(self, rows: int, role: str = "user") -> None:
        """Make sure that an item of so many rows may come into the conversation.

        Raises:
            ContextLengthError: the context cannot hold it, or is full and nothing can be dropped.
        """
        kept = int(self.settings.context.keep * self.context_rows)
        self._require_rows(rows)
        if role == "system" and self.history.system_rows + rows > kept:
            raise ContextLengthError(
                f"system items, which are never dropped, may take {kept} rows and would take "
                f"{self.history.system_rows + rows}: delete some, or use instructions"
            )
        if len(self.history.rows) > self.context_rows:
            raise ContextLengthError(
                f"the conversation is {len(self.history.rows)} rows long and its context holds "
                f"{self.context_rows}: delete items, or wait for the end of the response if one is "
                "being made"
            )

    def has_room(self, system_rows: int, more: int) -> bool:
        """Whether a reply can begin after so many rows more, with nothing dropped."""
        return len(self.history.rows) + more <= self._room(system_rows)

    def require_room(self, system_rows: int) -> None:
        """Make sure that a reply to all that was said can begin.

        Raises:
            ContextLengthError: it cannot, and nothing may or can be dropped.
        """
        room = self._room(system_rows)
        if len(self.history.rows) > room:
            self._drop(system_rows)
        rows = len(self.history.rows)
        if rows > room:
            raise ContextLengthError(
                f"the conversation is {rows} rows long and its context holds {self.context_rows}, "
                "instructions and reply included: delete items, or begin anew"
            )

    def _require_rows(self, rows: float) -> None:
        """Raise ContextLengthError if the context could not hold so many rows beside a reply."""
        room = self._room(len(self.system(self.settings.reply)))
        if rows > room:
            raise ContextLengthError(
                f"this item is {rows:.0f} rows long, and beside instructions and reply the context "
                f"of {self.context_rows} rows holds {max(0, room)}: say less at a time"
            )

    def _room(self, system_rows: int) -> int:
        return self.context_rows - self.prompts.prefix_rows - LEAST_REPLY_ROWS - system_rows

    def _drop(self, system_rows: int) -> None:
        """Drop the oldest turns, if that is the policy, until the part is left that is kept."""
        context = self.settings.context
        if context.policy is ContextPolicy.DROP:
            keep = int(context.keep * self.context_rows) - system_rows
            if dropped := self.history.drop_oldest(keep):
                ids, rows = tuple(each.item_id for each in dropped), len(self.history.rows)
                self.emit(ContextDropped(ids, system_rows + rows))
