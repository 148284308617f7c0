"""The responses of one session: begun, cut short, ended, and made into items."""

import math
from collections.abc import Callable
from contextlib import suppress
from secrets import randbits

from mosstalk.constants import CODE_MS, CODES_PER_SECOND, OUTPUT_RATE, OUTPUT_SAMPLES_PER_CODE
from mosstalk.conversation import Reply, Row
from mosstalk.engine.engine_core import ReplyParams
from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError, SessionError
from mosstalk.reply_options import Limits, Script
from mosstalk.session import events
from mosstalk.session.commands import CreateResponse, Playback, ReplyMode
from mosstalk.session.conversation_state import ConversationState
from mosstalk.session.events import ErrorCode, ItemStatus, Reason, ResponseStatus, new_id
from mosstalk.session.history import Entry, History
from mosstalk.session.response import Outcome, Response

MOST_OUT_OF_BAND = 4
"""Responses outside the conversation that a session may have at a time."""
_COME_BACK_S = 1.0
_MOST_WRITTEN = 256
"""Rows for what is written before it is spoken, beside those for the speech."""


class ResponseManager:
    """At most one response in the conversation at a time, ``MOST_OUT_OF_BAND`` apart from it.

    ``on_end`` is called with each that has come to its end by itself; then ``finish`` it.
    """

    def __init__(self, state: ConversationState, on_end: Callable[[Response], None]) -> None:
        self._state, self._on_end = state, on_end
        self._active: dict[str, Response] = {}
        self._early: tuple[Response, list[Row]] | None = None
        """A response to the turn under way, of these rows, that nobody has been told of."""

    @property
    def current(self) -> Response | None:
        """The response in the conversation that is being made."""
        return next((each for each in self._active.values() if each.in_conversation), None)

    @property
    def busy(self) -> bool:
        """Whether any response is being made."""
        return bool(self._active)

    async def prefill_ahead(self) -> None:
        """Let the engine read what is new, unless it is answering: then at the end of that."""
        state = self._state
        state.prefill_due_s = None
        if not self.current and not self._early:
            system = state.system(state.settings.reply)
            await state.conversation.update(system, state.history, state.live_rows())

    async def begin_early(self) -> None:
        """Answer the turn under way as if it ended where silence has begun, and tell nobody.

        ``adopt_early`` makes it the response to the turn if that does end there, and ``drop_early``
        leaves no trace of it. Where others are being answered there is no time for what may be
        thrown away.
        """
        state, turn = self._state, self._state.listener.turn
        if self.current or self._early or not (turn and turn.final_codes):
            return
        if not state.settings.create_response or not state.host.has_slack:
            return
        system, rows = state.system(state.settings.reply), state.live_rows()
        if not state.has_room(len(system), len(rows)):
            return
        try:
            response = await self._response(CreateResponse(), state.host.clock(), None, rows)
            await response.submit(state.conversation, state.history, system, rows)
        except EngineStoppedError:
            raise
        except MosstalkError:
            return  # whoever asks for it when the turn has ended is told why
        response.start(held=True)
        self._early = response, rows

    async def adopt_early(
        self, entry: Entry, committed_s: float, vad_wait_ms: float | None
    ) -> bool:
        """Go on with what was begun early if it answers this turn, the last item; whether it does.

        ``committed_s`` and ``vad_wait_ms`` are as ``create`` takes them.
        """
        if self._early is None or self._early[1] != entry.rows:
            await self.drop_early()
            return False
        (response, _), self._early = self._early, None
        self._state.host.early_used += 1
        response.committed_s, response.vad_wait_ms = committed_s, vad_wait_ms
        self._announce(response, None)
        response.release()
        return True

    async def drop_early(self) -> None:
        """End what was begun early: the turn went on, or something else has changed."""
        if self._early is None:
            return
        (response, _), self._early = self._early, None
        self._state.host.early_dropped += 1
        response.stop(Outcome(ResponseStatus.CANCELLED))
        with suppress(EngineStoppedError):  # the host tells every session of that
            await response.conversation.end_reply(response.stream)

    @property
    def early_is_stale(self) -> bool:
        """Whether the turn has gone on after a response to it was begun early."""
        return self._early is not None and self._early[1] != self._state.live_rows()

    async def create(
        self, command: CreateResponse, committed_s: float, vad_wait_ms: float | None = None
    ) -> None:
        """Begin a response to a turn that ended at ``committed_s`` on the host's clock.

        ``vad_wait_ms`` is how long the detector took to know.

        Raises:
            SessionError: there is one in the conversation already, or a name is taken or unknown.
            ContextLengthError, EngineFullError: there is no room, ever or now.
            OptionError, VoiceError: what was chosen means nothing.
        """
        self._require_free(command)
        response, state = await self._response(command, committed_s, vad_wait_ms), self._state
        if response.in_conversation and command.input is None:
            system = state.system(response.reply, command.instructions)
            await response.submit(state.conversation, state.history, system, [])
        else:
            await response.submit(state.new_conversation(), History(), response.prompt, [])
        self._announce(response, command.command_id)
        response.start()

    def _announce(self, response: Response, command_id: str | None) -> None:
        """Tell of a response that the engine has."""
        state, entry, response_id = self._state, response.entry, response.response_id
        self._active[response_id] = response
        begun = response_id, response.reply, response.in_conversation, response.metadata
        state.emit(events.ResponseStarted(*begun, command_id=command_id))
        before = None
        if response.in_conversation:
            state.history.insert(entry)
            before = state.history.before(entry)
        state.emit(events.ItemAdded(entry.item, before, response.in_conversation))

    async def cancel(self, response_id: str | None, reason: Reason) -> None:
        """End a response where it is; None is the conversation's.

        Raises:
            SessionError: there is none of that id, or none in the conversation.
        """
        found = self.current if response_id is None else self._active.get(response_id)
        if not found:
            what = "no response is" if response_id is None else f"response {response_id!r} is not"
            raise SessionError(ErrorCode.RESPONSE_NOT_ACTIVE, f"{what} being made")
        await self._stop(found, reason)

    async def cancel_making(self, entry: Entry) -> None:
        """End the conversation's response where it is, if it is making this item."""
        if self.current and self.current.entry is entry:
            await self._stop(self.current, Reason.CLIENT_CANCELLED)

    async def cancel_all(self, reason: Reason) -> None:
        """End every response where it is."""
        await self.drop_early()
        for each in list(self._active.values()):
            await self._stop(each, reason)

    async def interrupt(self) -> None:
        """The user speaks: end the conversation's response, and by the settings cut what plays."""
        state = self._state
        if self.current:
            await self._stop(self.current, Reason.TURN_DETECTED)
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
        entry.cut(-(-heard // OUTPUT_SAMPLES_PER_CODE))
        self._state.rewrite_reply(entry)
        left_ms = entry.audio_ms or 0
        left = min(heard * 1000 // OUTPUT_RATE, left_ms), -(-left_ms // CODE_MS)
        said = entry.text if entry.text_is_spoken else None
        state.emit(events.ItemTruncated(entry.item_id, *left, by_session, command_id, said))

    async def finish(self, response: Response) -> None:
        """Make an item of a response that has ended, and go on without it."""
        if self._active.get(response.response_id) is not response:
            return  # it was stopped at the moment in which it ended; another may have its id
        del self._active[response.response_id]
        with suppress(EngineStoppedError):  # the host tells every session of that
            await response.conversation.end_reply(response.stream)
            if response.conversation is not self._state.conversation:
                await response.conversation.close()
        self._complete_item(response)
        self._emit_done(response)
        if response.in_conversation:
            self._state.make_room()
            with suppress(EngineStoppedError):
                await self.prefill_ahead()

    async def _stop(self, response: Response, reason: Reason) -> None:
        response.stop(Outcome(ResponseStatus.CANCELLED, reason))
        await self.finish(response)

    def _require_free(self, command: CreateResponse) -> None:
        """Raise SessionError or EngineFullError if too many responses are being made."""
        if command.in_conversation and self.current:
            raise SessionError(
                ErrorCode.RESPONSE_ACTIVE,
                f"response {self.current.response_id} is being made: cancel it first",
            )
        if command.response_id in self._active:
            raise SessionError(
                ErrorCode.BAD_VALUE, f"there is a response {command.response_id!r} already"
            )
        out_of_band = sum(not each.in_conversation for each in self._active.values())
        if not command.in_conversation and out_of_band >= MOST_OUT_OF_BAND:
            raise EngineFullError(
                f"{MOST_OUT_OF_BAND} responses outside the conversation are being made, which is "
                "all that one session may have at a time: wait for the end of one",
                _COME_BACK_S,
            )

    async def _response(
        self,
        command: CreateResponse,
        committed_s: float,
        vad_wait_ms: float | None,
        live: list[Row] | None = None,
    ) -> Response:
        """A response as it was asked for, which the engine does not know of."""
        state, settings = self._state, self._state.settings
        reply = command.reply or settings.reply
        spoken = reply is ReplyMode.AUDIO
        voice = await state.host.voice(command.voice or settings.voice) if spoken else None
        prompt = await self._prompt(command, state.system(reply, command.instructions))
        prompt += live or []
        rows, bounded_by = self._bounds(reply, len(prompt), command.max_rows)
        seed, limits = settings.sampling.seed, settings.limits
        repeating_s = limits.repeating_s
        options = state.host.choices(settings).options(randbits(63) if seed is None else seed)
        script = Script.parse(settings.script) if settings.script else None
        background = not command.in_conversation
        return Response(
            state,
            self._on_end,
            response_id=command.response_id or new_id("resp"),
            reply=reply,
            prompt=prompt,
            params=ReplyParams(
                options,
                Limits(rows),
                script,
                first_rows=state.host.first_rows(voice) if voice else 1,
                background=background,
            ),
            voice=voice,
            in_conversation=command.in_conversation,
            metadata=dict(command.metadata),
            bounded_by=bounded_by,
            repeating_codes=None if repeating_s is None else _codes(repeating_s),
            longest_codes=_codes(limits.longest_s) if state.prompts.writes_first else None,
            committed_s=committed_s,
            vad_wait_ms=vad_wait_ms,
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

    def _bounds(self, reply: ReplyMode, prompt_rows: int, most: int | None) -> tuple[int, Reason]:
        """The most rows of a reply, and what it means if it comes to so many."""
        state, settings = self._state, self._state.settings
        bounds = [state.host.choices(settings).limits().max_new_rows]
        if most is not None:
            bounds.append(Limits(most).max_new_rows)
        if reply is ReplyMode.AUDIO:
            written = _MOST_WRITTEN if state.prompts.writes_first else 0
            bounds.append(_codes(settings.limits.longest_s) + written)
        room = state.context_rows - prompt_rows - state.prompts.prefix_rows
        if room < min(bounds):
            return max(1, room), Reason.CONTEXT
        return min(bounds), Reason.MAX_LENGTH

    def _complete_item(self, response: Response) -> None:
        """Make history of what was made: of a reply that was cut short, what was sent of it."""
        entry, made, outcome = response.entry, response.stream.reply, response.outcome
        assert outcome is not None, "a response that has not ended"
        whole = outcome.status is ResponseStatus.COMPLETED
        # The engine may have gone on before it heard that the response was over.
        read = len(made.rows) if whole else response.rows_read
        entry.reply = Reply(made.rows[:read], made.modes[:read], made.finish_reason)
        entry.status = ItemStatus.COMPLETED if whole else ItemStatus.INCOMPLETE
        if entry.speech:
            entry.heard_codes = None if whole else response.sent_codes
            entry.audio_ms = response.sent_samples * 1000 // OUTPUT_RATE
        self._state.rewrite_reply(entry)

    def _emit_done(self, response: Response) -> None:
        state, item, outcome = self._state, response.entry.item, response.outcome
        assert outcome is not None
        timings = response.timings()
        # One apart gets what conversations leave: how long it waits says nothing of their turns.
        if response.in_conversation and timings.commit_to_first_audio_ms is not None:
            state.host.first_audios_ms.append(timings.commit_to_first_audio_ms)
        own = response.in_conversation and response.entry in state.history
        before = state.history.before(response.entry) if own else None
        state.emit(events.ItemDone(item, before, response.in_conversation))
        state.emit(
            events.ResponseDone(
                response.response_id, outcome.status, outcome.reason, (item,), response.usage,
                timings, response.in_conversation, outcome.message, response.metadata,
            )
        )  # fmt: skip


def _codes(seconds: float) -> int:
    return max(1, math.ceil(seconds * CODES_PER_SECOND))
