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
from mosstalk.session.conversation_state import ConversationState, new_id
from mosstalk.session.engine_conversation import EngineConversation
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
from mosstalk.session.response import Outcome, Response, ResponseObserver, ResponsePlan
from mosstalk.session.settings import Playback, ReplyMode

MOST_OUT_OF_BAND = 4
"""Responses outside the conversation that a session may have at a time."""
_COME_BACK_S = 1.0


@dataclass(frozen=True)
class TurnTiming:
    """What a response answers: when its turn ended on the wall clock, and the detector's wait."""

    committed_s: float
    vad_wait_ms: float | None = None


@dataclass
class _ActiveResponse:
    """A response that is being made, the item it makes, and its conversation in the engine."""

    response: Response
    entry: Entry
    conversation: EngineConversation


class ResponseManager:
    """At most one response in the conversation at a time, ``MOST_OUT_OF_BAND`` apart from it."""

    def __init__(self, state: ConversationState, observer: ResponseObserver) -> None:
        self._state = state
        self._observer = observer
        self._active: dict[str, _ActiveResponse] = {}

    @property
    def current(self) -> Response | None:
        """The response in the conversation that is being made."""
        return next((o.response for o in self._active.values() if _own(o.response)), None)

    @property
    def _out_of_band(self) -> int:
        return sum(not _own(each.response) for each in self._active.values())

    @property
    def busy(self) -> bool:
        """Whether any response is being made."""
        return bool(self._active)

    async def create(self, command: CreateResponse, timing: TurnTiming) -> None:
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
        if command.response_id in self._active:
            raise SessionError(
                ErrorCode.BAD_VALUE, f"there is a response {command.response_id!r} already"
            )
        if not command.in_conversation and self._out_of_band >= MOST_OUT_OF_BAND:
            raise EngineFullError(
                f"{MOST_OUT_OF_BAND} responses outside the conversation are being made, which is "
                "all that one session may have at a time: wait for the end of one",
                _COME_BACK_S,
            )
        plan = await self._plan(command, timing)
        whole = plan.in_conversation and command.input is None
        conversation = self._state.conversation if whole else self._state.new_conversation()
        speech = plan.reply is ReplyMode.AUDIO
        if whole:
            system = self._state.system(plan.reply, command.instructions)
            stream = await conversation.submit(
                system, self._state.history, plan.params, speech=speech
            )
        else:
            stream = await conversation.submit_once(plan.prompt, plan.params, speech=speech)
        entry = Entry(
            plan.item_id, "assistant", status=ItemStatus.IN_PROGRESS,
            response_id=plan.response_id, speech=speech,
        )  # fmt: skip
        response = Response(plan, stream, self._state.resources, self._observer)
        self._active[plan.response_id] = _ActiveResponse(response, entry, conversation)
        self._announce(plan, entry, command.command_id)
        response.start()

    async def cancel(self, response_id: str | None, reason: Reason) -> None:
        """End a response where it is.

        Raises:
            SessionError: there is none of that id, or none in the conversation.
        """
        current = self.current
        found = current.plan.response_id if response_id is None and current else response_id
        if found not in self._active:
            what = "no response is" if response_id is None else f"response {response_id!r} is not"
            raise SessionError(ErrorCode.RESPONSE_NOT_ACTIVE, f"{what} being made")
        await self._stop(self._active[found], reason)

    async def cancel_all(self, reason: Reason) -> None:
        """End every response where it is."""
        for each in list(self._active.values()):
            await self._stop(each, reason)

    async def interrupt(self) -> None:
        """The user speaks: end the conversation's response, and by the settings cut what plays."""
        state = self._state
        if self.current:
            await self.cancel(None, Reason.TURN_DETECTED)
        if state.settings.playback is Playback.SESSION and state.playback.audible:
            for entry in reversed([entry for entry in state.history if entry.speech]):
                if round(1000 * state.playback.heard_s(entry.item_id)) >= (entry.audio_ms or 0):
                    break
                self.truncate(entry, None, by_session=True)
            await self.prefill_ahead()
        state.silence()

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
        state = self._state
        if not entry.speech or entry.reply is None:
            raise SessionError(
                ErrorCode.BAD_ITEM, f"item {entry.item_id!r} is no spoken reply: nothing to cut"
            )
        if heard_ms is None:
            heard = round(state.playback.heard_s(entry.item_id) * OUTPUT_RATE)
        elif math.isfinite(heard_ms):
            heard = round(max(0.0, heard_ms) * OUTPUT_RATE / 1000)
        else:
            raise SessionError(ErrorCode.BAD_VALUE, f"{heard_ms} is no time")
        codes = -(-heard // OUTPUT_SAMPLES_PER_CODE)
        entry.cut(codes)
        self._rewrite_item(entry)
        left_ms = entry.audio_ms or 0
        state.emit(
            ItemTruncated(
                entry.item_id, min(heard * 1000 // OUTPUT_RATE, left_ms), -(-left_ms // CODE_MS),
                by_session, clock=state.clock, command_id=command_id,
            )
        )  # fmt: skip

    async def finish(self, response: Response) -> None:
        """Make an item of a response that has ended, and go on without it."""
        found = self._active.pop(response.plan.response_id, None)
        if found is None:
            return  # it was stopped at the moment in which it ended
        with suppress(EngineStoppedError):  # the host tells every session of that
            await found.conversation.end_reply(response.stream)
            if found.conversation is not self._state.conversation:
                await found.conversation.close()
        self._complete_item(found)
        self._emit_done(found)
        if response.plan.in_conversation:
            self._state.make_room()
            with suppress(EngineStoppedError):
                await self.prefill_ahead()

    async def prefill_ahead(self) -> None:
        """Let the engine read what is new, unless it is answering: then at the end of that."""
        self._state.prefill_due_s = None
        if not self.current:
            await self._state.prefill_ahead()

    async def _stop(self, each: _ActiveResponse, reason: Reason) -> None:
        each.response.stop(Outcome(ResponseStatus.CANCELLED, reason))
        await self.finish(each.response)

    async def _plan(self, command: CreateResponse, timing: TurnTiming) -> ResponsePlan:
        state = self._state
        reply = command.reply or state.settings.reply
        spoken = reply is ReplyMode.AUDIO
        voice = (
            await state.resources.voice(command.voice or state.settings.voice) if spoken else None
        )
        prompt = await self._prompt(command, state.system(reply, command.instructions))
        params, bounded_by = self._reply_params(
            reply, len(prompt), command.max_rows, in_conversation=command.in_conversation
        )
        repeating_s = state.settings.limits.repeating_s
        return ResponsePlan(
            response_id=command.response_id or new_id("resp"),
            item_id=new_id("item"),
            reply=reply,
            prompt=prompt,
            params=params,
            voice=voice,
            in_conversation=command.in_conversation,
            metadata=dict(command.metadata),
            bounded_by=bounded_by,
            repeating_codes=None if repeating_s is None else _codes(repeating_s),
            committed_s=timing.committed_s,
            vad_wait_ms=timing.vad_wait_ms,
        )

    async def _prompt(self, command: CreateResponse, system: list[Row]) -> list[Row]:
        """The rows that a response answers, the reply's own opening left out."""
        state, rows = self._state, list(system)
        if command.input is None:
            state.require_room(len(system))
            return rows + state.history.rows
        for each in command.input:
            if isinstance(each, str):
                rows += state.history.find(each).rows
            else:
                rows += (await state.entry_of(each, new_id("item"))).rows
        return rows

    def _reply_params(
        self, reply: ReplyMode, prompt_rows: int, most: int | None, *, in_conversation: bool
    ) -> tuple[ReplyParams, Reason]:
        """What to ask of the engine, and what it means if the reply comes to its longest."""
        state, chosen = self._state, self._state.choices()
        seed = state.settings.sampling.seed
        bounds = [chosen.limits().max_new_rows]
        if most is not None:
            bounds.append(Limits(most).max_new_rows)
        if reply is ReplyMode.AUDIO:
            bounds.append(_codes(state.settings.limits.longest_s))
        rows, bounded_by = min(bounds), Reason.MAX_LENGTH
        room = state.context_rows - prompt_rows - state.prompts.prefix_rows
        if room < rows:
            rows, bounded_by = max(1, room), Reason.CONTEXT
        script = Script.parse(state.settings.script) if state.settings.script else None
        options = chosen.options(randbits(63) if seed is None else seed)
        return ReplyParams(
            options, Limits(rows), script, background=not in_conversation
        ), bounded_by

    def _announce(self, plan: ResponsePlan, entry: Entry, command_id: str | None) -> None:
        state = self._state
        state.emit(
            ResponseStarted(
                plan.response_id, plan.reply, plan.in_conversation, plan.metadata,
                clock=state.clock, command_id=command_id,
            )
        )  # fmt: skip
        before = None
        if plan.in_conversation:
            state.history.insert(entry)
            before = state.history.before(entry)
        state.emit(ItemAdded(entry.item, before, plan.in_conversation, clock=state.clock))

    def _complete_item(self, each: _ActiveResponse) -> None:
        """Make history of what was made: of a reply that was cut short, what was sent of it."""
        response, entry = each.response, each.entry
        made, outcome = response.stream.reply, response.outcome
        assert outcome is not None, "a response that has not ended"
        whole = outcome.status is ResponseStatus.COMPLETED
        # The engine may have gone on before it heard that the response was over.
        read = len(made.rows) if whole else response.rows_read
        entry.reply = Reply(made.rows[:read], made.modes[:read], made.finish_reason)
        entry.heard_codes = response.sent_codes if entry.speech and not whole else None
        entry.audio_ms = response.sent_ms if entry.speech else None
        entry.status = ItemStatus.COMPLETED if whole else ItemStatus.INCOMPLETE
        self._rewrite_item(entry)

    def _rewrite_item(self, entry: Entry) -> None:
        """Give an item the rows and the text of what is kept of its reply."""
        state, reply, heard = self._state, entry.reply, entry.heard_codes
        assert reply is not None
        rows = state.prompts.reply(reply, speech=entry.speech, heard_codes=heard)
        state.history.rewrite(entry, rows)
        text = state.resources.pipeline.tokenizer.decode(state.prompts.text_ids(reply, heard))
        entry.text = text if text or not entry.speech else None

    def _emit_done(self, each: _ActiveResponse) -> None:
        state, plan, outcome = self._state, each.response.plan, each.response.outcome
        assert outcome is not None
        own = plan.in_conversation and each.entry in state.history
        before = state.history.before(each.entry) if own else None
        item: Item = each.entry.item
        state.emit(ItemDone(item, before, plan.in_conversation, clock=state.clock))
        state.emit(
            ResponseDone(
                plan.response_id, outcome.status, outcome.reason, (item,), each.response.usage,
                each.response.timings(), plan.in_conversation, outcome.message, plan.metadata,
                clock=state.clock,
            )
        )  # fmt: skip


def _own(response: Response) -> bool:
    return response.plan.in_conversation


def _codes(seconds: float) -> int:
    return max(1, math.ceil(seconds * CODES_PER_SECOND))
