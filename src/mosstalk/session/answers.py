"""The responses of one session: begun, cut short, ended, and made into items."""

import math
from contextlib import suppress
from dataclasses import dataclass
from secrets import randbits

from mosstalk.constants import CODE_MS, CODES_PER_SECOND, OUTPUT_RATE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import Reply, Row
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.errors import EngineFullError, EngineStoppedError, SessionError
from mosstalk.sampling_options import Limits
from mosstalk.script import Script
from mosstalk.session.commands import CreateResponse
from mosstalk.session.desk import Desk, new_id
from mosstalk.session.events import (
    ErrorCode,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    ItemTruncated,
    Reason,
    ResponseDone,
    ResponseStarted,
    ResponseStatus,
)
from mosstalk.session.history import Entry
from mosstalk.session.line import Line
from mosstalk.session.response import Listeners, Outcome, Plan, Response
from mosstalk.session.settings import Playback, ReplyMode

MOST_APART = 4
"""Responses outside the conversation that a session may have at a time."""
_COME_BACK_S = 1.0


@dataclass(frozen=True)
class Cause:
    """What a response answers: when its turn ended on the wall clock, and the detector's wait."""

    committed_s: float
    vad_wait_ms: float | None = None


@dataclass
class _Open:
    """A response that is being made, the item it makes, and its line to the engine."""

    response: Response
    entry: Entry
    line: Line


class Answers:
    """At most one response in the conversation at a time, and ``MOST_APART`` apart from it."""

    def __init__(self, desk: Desk, listeners: Listeners) -> None:
        self._desk = desk
        self._listeners = listeners
        self._open: dict[str, _Open] = {}

    @property
    def current(self) -> Response | None:
        """The response in the conversation that is being made."""
        return next((o.response for o in self._open.values() if _own(o.response)), None)

    @property
    def _apart(self) -> int:
        return sum(not _own(each.response) for each in self._open.values())

    @property
    def busy(self) -> bool:
        """Whether any response is being made."""
        return bool(self._open)

    async def create(self, command: CreateResponse, cause: Cause) -> None:
        """Begin a response.

        Raises:
            SessionError: there is one in the conversation already, or a name is taken or unknown.
            ContextLengthError, EngineFullError: there is no room, ever or now.
            OptionError, VoiceError: what was chosen means nothing.
        """
        if command.in_conversation and self.current:
            raise SessionError(
                ErrorCode.RESPONSE_ACTIVE,
                f"response {self.current.plan.response_id} is being made: cancel it first",
            )
        if command.response_id in self._open:
            raise SessionError(
                ErrorCode.BAD_VALUE, f"there is a response {command.response_id!r} already"
            )
        if not command.in_conversation and self._apart >= MOST_APART:
            raise EngineFullError(
                f"{MOST_APART} responses outside the conversation are being made, which is all "
                "that one session may have at a time: wait for the end of one",
                _COME_BACK_S,
            )
        plan = await self._plan(command, cause)
        whole = plan.in_conversation and command.input is None
        line = self._desk.line if whole else self._desk.new_line()
        speech = plan.reply is ReplyMode.AUDIO
        if whole:
            system = self._desk.system(plan.reply, command.instructions)
            ticket = await line.ask(system, self._desk.history, plan.ask, speech=speech)
        else:
            ticket = await line.ask_once(plan.prompt, plan.ask, speech=speech)
        entry = Entry(
            plan.item_id, "assistant", status=ItemStatus.IN_PROGRESS,
            response_id=plan.response_id, speech=speech,
        )  # fmt: skip
        response = Response(plan, ticket, self._desk.stage, self._listeners)
        self._open[plan.response_id] = _Open(response, entry, line)
        self._announce(plan, entry, command.command_id)
        response.start()

    async def cancel(self, response_id: str | None, reason: Reason) -> None:
        """End a response where it is.

        Raises:
            SessionError: there is none of that id, or none in the conversation.
        """
        current = self.current
        found = current.plan.response_id if response_id is None and current else response_id
        if found not in self._open:
            what = "no response is" if response_id is None else f"response {response_id!r} is not"
            raise SessionError(ErrorCode.RESPONSE_NOT_ACTIVE, f"{what} being made")
        await self._stop(self._open[found], reason)

    async def cancel_all(self, reason: Reason) -> None:
        """End every response where it is."""
        for each in list(self._open.values()):
            await self._stop(each, reason)

    async def interrupt(self) -> None:
        """The user speaks: end the conversation's response, and by the settings cut what plays."""
        desk = self._desk
        if self.current:
            await self.cancel(None, Reason.TURN_DETECTED)
        if desk.settings.playback is Playback.SESSION and desk.playback.audible:
            for entry in reversed([entry for entry in desk.history if entry.speech]):
                if round(1000 * desk.playback.heard_s(entry.item_id)) >= (entry.audio_ms or 0):
                    break
                self.truncate(entry, None, by_session=True)
            await self.follow()
        desk.silence()

    def truncate(
        self,
        entry: Entry,
        heard_ms: float | None,
        *,
        by_session: bool = False,
        command_id: str | None = None,
    ) -> None:
        """Cut an item to what was heard of it; None asks the session's own clock.

        Raises:
            SessionError: it is no spoken reply, or the time is no number.
        """
        desk = self._desk
        if not entry.speech or entry.reply is None:
            raise SessionError(
                ErrorCode.BAD_ITEM, f"item {entry.item_id!r} is no spoken reply: nothing to cut"
            )
        if heard_ms is None:
            heard = round(desk.playback.heard_s(entry.item_id) * OUTPUT_RATE)
        elif math.isfinite(heard_ms):
            heard = round(max(0.0, heard_ms) * OUTPUT_RATE / 1000)
        else:
            raise SessionError(ErrorCode.BAD_VALUE, f"{heard_ms} is no time")
        codes = -(-heard // OUTPUT_SAMPLES_PER_CODE)
        entry.cut(codes)
        self._write(entry)
        left_ms = entry.audio_ms or 0
        desk.tell(
            ItemTruncated(
                entry.item_id, min(heard * 1000 // OUTPUT_RATE, left_ms), -(-left_ms // CODE_MS),
                by_session, clock=desk.clock, command_id=command_id,
            )
        )  # fmt: skip

    async def finish(self, response: Response) -> None:
        """Make an item of a response that has ended, and go on without it."""
        found = self._open.pop(response.plan.response_id, None)
        if found is None:
            return  # it was stopped at the moment in which it ended
        with suppress(EngineStoppedError):  # the host tells every session of that
            await found.line.end(response.ticket)
            if found.line is not self._desk.line:
                await found.line.close()
        self._settle(found)
        self._tell_done(found)
        if response.plan.in_conversation:
            self._desk.make_room()
            with suppress(EngineStoppedError):
                await self.follow()

    async def follow(self) -> None:
        """Let the engine read what is new, unless it is answering: then at the end of that."""
        self._desk.unfollowed_s = None
        if not self.current:
            await self._desk.follow()

    async def _stop(self, each: _Open, reason: Reason) -> None:
        each.response.stop(Outcome(ResponseStatus.CANCELLED, reason))
        await self.finish(each.response)

    async def _plan(self, command: CreateResponse, cause: Cause) -> Plan:
        desk = self._desk
        reply = command.reply or desk.settings.reply
        spoken = reply is ReplyMode.AUDIO
        voice = await desk.stage.voice(command.voice or desk.settings.voice) if spoken else None
        prompt = await self._prompt(command, desk.system(reply, command.instructions))
        ask, bounded_by = self._ask(
            reply, len(prompt), command.max_rows, in_conversation=command.in_conversation
        )
        repeating_s = desk.settings.limits.repeating_s
        return Plan(
            response_id=command.response_id or new_id("resp"),
            item_id=new_id("item"),
            reply=reply,
            prompt=prompt,
            ask=ask,
            voice=voice,
            in_conversation=command.in_conversation,
            metadata=dict(command.metadata),
            bounded_by=bounded_by,
            repeating_codes=None if repeating_s is None else _codes(repeating_s),
            committed_s=cause.committed_s,
            vad_wait_ms=cause.vad_wait_ms,
        )

    async def _prompt(self, command: CreateResponse, system: list[Row]) -> list[Row]:
        """The rows that a response answers, the reply's own opening left out."""
        desk, rows = self._desk, list(system)
        if command.input is None:
            desk.require_room(len(system))
            return rows + desk.history.rows
        for each in command.input:
            if isinstance(each, str):
                rows += desk.history.find(each).rows
            else:
                rows += (await desk.entry_of(each, new_id("item"))).rows
        return rows

    def _ask(
        self, reply: ReplyMode, prompt_rows: int, most: int | None, *, in_conversation: bool
    ) -> tuple[ReplyParams, Reason]:
        """What to ask of the engine, and what it means if the reply comes to its longest."""
        desk, chosen = self._desk, self._desk.choices()
        seed = desk.settings.sampling.seed
        bounds = [chosen.limits().max_new_rows]
        if most is not None:
            bounds.append(Limits(most).max_new_rows)
        if reply is ReplyMode.AUDIO:
            bounds.append(_codes(desk.settings.limits.longest_s))
        rows, bounded_by = min(bounds), Reason.MAX_LENGTH
        room = desk.context_rows - prompt_rows - desk.scribe.prefix_rows
        if room < rows:
            rows, bounded_by = max(1, room), Reason.CONTEXT
        script = Script.parse(desk.settings.script) if desk.settings.script else None
        options = chosen.options(randbits(63) if seed is None else seed)
        return ReplyParams(
            options, Limits(rows), script, background=not in_conversation
        ), bounded_by

    def _announce(self, plan: Plan, entry: Entry, command_id: str | None) -> None:
        desk = self._desk
        desk.tell(
            ResponseStarted(
                plan.response_id, plan.reply, plan.in_conversation, plan.metadata,
                clock=desk.clock, command_id=command_id,
            )
        )  # fmt: skip
        before = None
        if plan.in_conversation:
            desk.history.insert(entry)
            before = desk.history.before(entry)
        desk.tell(ItemAdded(entry.item, before, plan.in_conversation, clock=desk.clock))

    def _settle(self, each: _Open) -> None:
        """Make history of what was made: of a reply that was cut short, what was sent of it."""
        response, entry = each.response, each.entry
        made, outcome = response.ticket.reply, response.outcome
        assert outcome is not None, "a response that has not ended"
        whole = outcome.status is ResponseStatus.COMPLETED
        # The engine may have gone on before it heard that the response was over.
        read = len(made.rows) if whole else response.rows_read
        entry.reply = Reply(made.rows[:read], made.modes[:read], made.finish_reason)
        entry.heard_codes = response.sent_codes if entry.speech and not whole else None
        entry.audio_ms = response.sent_ms if entry.speech else None
        entry.status = ItemStatus.COMPLETED if whole else ItemStatus.INCOMPLETE
        self._write(entry)

    def _write(self, entry: Entry) -> None:
        """Give an item the rows and the text of what is kept of its reply."""
        desk, reply, heard = self._desk, entry.reply, entry.heard_codes
        assert reply is not None
        rows = desk.scribe.reply(reply, speech=entry.speech, heard_codes=heard)
        desk.history.rewrite(entry, rows)
        text = desk.stage.pipeline.tokenizer.decode(desk.scribe.written(reply, heard))
        entry.text = text if text or not entry.speech else None

    def _tell_done(self, each: _Open) -> None:
        desk, plan, outcome = self._desk, each.response.plan, each.response.outcome
        assert outcome is not None
        own = plan.in_conversation and each.entry in desk.history
        before = desk.history.before(each.entry) if own else None
        item: Item = each.entry.item
        desk.tell(ItemDone(item, before, plan.in_conversation, clock=desk.clock))
        desk.tell(
            ResponseDone(
                plan.response_id, outcome.status, outcome.reason, (item,), each.response.usage,
                each.response.timings(), plan.in_conversation, outcome.message, plan.metadata,
                clock=desk.clock,
            )
        )  # fmt: skip


def _own(response: Response) -> bool:
    return response.plan.in_conversation


def _codes(seconds: float) -> int:
    return max(1, math.ceil(seconds * CODES_PER_SECOND))
