"""A session: commands in, events out.

Whatever changes a session's state happens in one task, in the order in which it was asked;
responses run beside it and report back to it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
import numpy.typing as npt

from mosstalk.audio.sound import Samples
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.conversation import Row, SpeechSegment
from mosstalk.errors import EngineStoppedError, MosstalkError, SessionError
from mosstalk.session import commands, events
from mosstalk.session.conversation_state import ConversationState, new_id, require_usable
from mosstalk.session.error_events import error_event
from mosstalk.session.events import CloseReason, ErrorCode, ErrorRaised, Event, Reason
from mosstalk.session.history import Entry
from mosstalk.session.item_commands import ItemCommands
from mosstalk.session.listener import (
    ListenerEvent,
    LiveTurn,
    TurnFull,
    TurnIdled,
    TurnStarted,
    TurnStopped,
)
from mosstalk.session.resources import SessionResources
from mosstalk.session.response import Response
from mosstalk.session.response_manager import ResponseManager, TurnTiming
from mosstalk.session.settings import SessionSettings
from mosstalk.session.sound import pcm_of
from mosstalk.session.timeouts import Timeouts

_LOG = getLogger(__name__)
_MOST_AT_ONCE = 50
"""Pushes that are heard together when they came faster than they are heard."""


@dataclass(frozen=True)
class _ResponseEnded:
    """A response has come to its end by itself."""

    response: Response


@dataclass(frozen=True)
class _Tick:
    """Time has passed."""


_Handler = Callable[[Any, float], Awaitable[None]]
_Message = commands.Command | _ResponseEnded | _Tick


class Session:
    """One conversation in real time; made by ``Host.open``.

    ``do`` and ``push`` take commands at any time from the loop's thread; what comes after the
    end is ignored. Iterate over the session for its events, or over ``audio`` for sound alone:
    one or the other. Leaving its ``async with`` closes it.
    """

    def __init__(
        self,
        resources: SessionResources,
        settings: SessionSettings,
        on_closed: Callable[["Session"], None],
    ) -> None:
        self.session_id = new_id("sess")
        self.commands_done = 0
        """Commands that were carried out or refused."""
        self._on_closed = on_closed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._state = ConversationState(resources, settings, self._events.put_nowait)
        self._responses = ResponseManager(self._state, self)
        self._handlers: dict[type[commands.Command], _Handler] = {
            commands.Commit: self._commit,
            commands.Clear: self._clear,
            commands.CreateResponse: self._create_response,
            commands.CancelResponse: self._cancel_response,
            commands.UpdateSettings: self._update,
            **ItemCommands(self._state, self._responses).handlers,
        }
        heard_s = lambda: self._state.clock / INPUT_RATE  # noqa: E731
        self._timeouts = Timeouts(settings.durations, heard_s, resources.clock)
        self._inbox: deque[tuple[_Message, float]] = deque()
        self._wakeup = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._over = self._failed = self._closing = False
        self._task = asyncio.create_task(self._run())

    @property
    def settings(self) -> SessionSettings:
        """What holds now."""
        return self._state.settings

    @property
    def clock(self) -> int:
        """Samples of input so far, counted at 16 kHz."""
        return self._state.clock

    @property
    def is_answering(self) -> bool:
        """Whether any response is being made."""
        return self._responses.busy

    def conversation_rows(self) -> list[Row]:
        """The conversation as the model reads it, the turn under way included."""
        return self._state.rows()

    def do(self, command: commands.Command) -> None:
        """Take a command; what comes of it are events. ``Close`` goes before all others."""
        self._closing = self._closing or isinstance(command, commands.Close)
        self._post(command, first=isinstance(command, commands.Close))

    def push(self, pcm: commands.Pcm, rate: int | None = None) -> None:
        """Take sound from the microphone; see ``Push``."""
        self.do(commands.Push(pcm, rate))

    async def close(self, reason: str = CloseReason.CLIENT) -> None:
        """End the session; its blocks are free when this returns."""
        self.do(commands.Close(reason))
        await asyncio.shield(self._task)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Every event in order, ``Closed`` being the last."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, events.Closed):
                self._events.put_nowait(event)  # whoever iterates again finds the end at once
                return

    async def audio(self) -> AsyncIterator[npt.NDArray[np.int16]]:
        """The sound of all replies, (n,) at 24 kHz, as it is made; other events are skipped."""
        async for event in self:
            if isinstance(event, events.AudioDelta):
                yield np.frombuffer(event.pcm, "<i2")

    # What a response tells while it is made.

    def on_audio(self, response: Response, start: int, samples: Samples) -> None:
        """Pass sound on; the listener is hearing it from now on."""
        plan, pcm = response.plan, pcm_of(samples)
        self._emit(events.AudioDelta(plan.response_id, plan.item_id, start, pcm, clock=self.clock))
        at_s = self._state.playback.sent(plan.item_id, len(samples) / OUTPUT_RATE)
        self._state.audio_input.played(samples, at_s)

    def on_text(self, response: Response, text: str) -> None:
        """Pass text on."""
        plan = response.plan
        self._emit(events.TextDelta(plan.response_id, plan.item_id, text, clock=self.clock))

    def on_end(self, response: Response) -> None:
        """Have its end dealt with in turn."""
        self._post(_ResponseEnded(response))

    def on_engine_ended(self, why: str) -> None:
        """The engine has ended, and so must the session."""
        if not self._over:
            self._fail(ErrorCode.ENGINE_STOPPED, why)
            self.do(commands.Close(CloseReason.ENGINE))

    def _fail(self, code: ErrorCode, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._emit(ErrorRaised(code, why, fatal=True, clock=self.clock))

    def _emit(self, event: Event) -> None:
        self._state.emit(event)

    def _post(self, message: _Message, *, first: bool = False) -> None:
        if self._over:
            return
        mail = (message, self._state.resources.clock())
        if first:
            self._inbox.appendleft(mail)
        else:
            self._inbox.append(mail)
        self._wakeup.set()

    async def _run(self) -> None:
        """Do what is asked until the end; then give everything back."""
        self._emit(events.SessionOpened(self.session_id, self.settings, clock=self.clock))
        reason: str = CloseReason.ERROR
        try:
            await self._state.prefill_ahead()
            reason = await self._work()
        except EngineStoppedError as error:
            self._fail(ErrorCode.ENGINE_STOPPED, str(error))
            reason = CloseReason.ENGINE
        except Exception as error:
            _LOG.exception("session %s failed", self.session_id)
            self._fail(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            await self._end(reason)

    async def _work(self) -> str:
        """Take one piece of news after the other; return why the session is over."""
        while True:
            self._set_timer()
            await self._wakeup.wait()
            self._wakeup.clear()
            while self._inbox:
                message, arrived_s = self._inbox.popleft()
                if isinstance(message, commands.Close):
                    return message.reason
                if isinstance(message, commands.Push):
                    await self._take_audio(message, arrived_s)
                elif isinstance(message, _ResponseEnded):
                    await self._responses.finish(message.response)
                elif isinstance(message, commands.Command):
                    self._timeouts.touch()
                    await self._execute(message, arrived_s)
                    self.commands_done += 1
                    await asyncio.sleep(0)  # whoever sends many lets others have their turn
                if self._state.prefill_is_due:
                    await self._responses.prefill_ahead()
                if self._responses.busy or self._state.playback.audible:
                    self._timeouts.touch()
                if expired := self._timeouts.expired():
                    return expired

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        loop, remaining_s = asyncio.get_running_loop(), self._timeouts.remaining_s
        if self._state.prefill_due_s is not None:
            remaining_s = min(remaining_s, max(0.0, self._state.prefill_due_s - loop.time()))
        self._timer = loop.call_later(remaining_s, self._post, _Tick())

    async def _end(self, reason: str) -> None:
        if self._timer:
            self._timer.cancel()
        try:
            await self._responses.cancel_all(Reason.SESSION_CLOSED)
            with suppress(EngineStoppedError):
                await self._state.conversation.close()
        finally:
            self._over = True
            self._inbox.clear()
            self._state.audio_input.clear()
            self._on_closed(self)
            self._emit(events.Closed(reason, clock=self.clock))

    async def _execute(self, command: commands.Command, arrived_s: float) -> None:
        try:
            await self._handlers[type(command)](command, arrived_s)
        except EngineStoppedError:
            raise
        except MosstalkError as error:
            self._emit(error_event(error, self.clock, command))

    # Sound and turns.

    async def _take_audio(self, push: commands.Push, arrived_s: float) -> None:
        """Hear a push, and those at its rate that have come after it."""
        audio_input, pushes = self._state.audio_input, [push]
        rate = audio_input.rate_of(push)
        while self._inbox and len(pushes) < _MOST_AT_ONCE:
            message = self._inbox[0][0]
            if not isinstance(message, commands.Push) or message.paused_s:
                break
            if audio_input.rate_of(message) != rate:
                break
            pushes.append(message)
            self._inbox.popleft()
        self._note_pause(push.paused_s)
        sounds = [np.zeros(0, np.float32)]
        for each in pushes:
            try:
                sounds.append(audio_input.samples_of(each))
            except SessionError as error:
                self._emit(error_event(error, self.clock, each))
        audible = lambda: self._state.playback.audible_to_microphone  # noqa: E731
        async for heard in audio_input.hear(np.concatenate(sounds), rate, audible):
            await self._on_listener_event(heard, TurnTiming(arrived_s))
            if self._closing:
                return
        self.commands_done += len(pushes)

    def _note_pause(self, seconds: float | None) -> None:
        """Take into account that nothing was recorded before the next sound."""
        state = self._state
        seconds = state.playback.pause_s if seconds is None else seconds
        if seconds:
            state.playback.skip(seconds)
            state.audio_input.paused(seconds)
            self._emit(events.InputPaused(seconds, clock=self.clock))

    async def _on_listener_event(self, heard: ListenerEvent, timing: TurnTiming) -> None:
        turn, clock = heard.turn, self.clock
        if isinstance(heard, TurnStarted):
            turn.item_id = new_id("item")
            self._emit(events.SpeechStarted(turn.item_id, turn.start, clock=clock))
            if self.settings.interrupt_response:
                await self._responses.interrupt()
        elif isinstance(heard, TurnFull):
            self._emit(error_event(heard.error, clock))
            return
        elif isinstance(heard, TurnStopped):
            assert turn.item_id, "a turn that stopped has started"
            wait = turn.end - heard.speech_end
            self._emit(
                events.SpeechStopped(turn.item_id, turn.end, heard.speech_end, wait, clock=clock)
            )
            await self._commit_and_respond(
                turn, TurnTiming(timing.committed_s, 1000 * wait / INPUT_RATE)
            )
        elif isinstance(heard, TurnIdled):
            turn.item_id = new_id("item")
            self._emit(events.IdleTimeout(turn.item_id, heard.start, turn.end, clock=clock))
            await self._commit_and_respond(turn, timing)
        if not isinstance(heard, TurnIdled):
            self._timeouts.touch()
        await self._responses.prefill_ahead()

    async def _commit_and_respond(self, turn: LiveTurn, timing: TurnTiming) -> None:
        """Make an item of a turn that ended by itself, and answer it if that is wanted."""
        try:
            self._state.require_place(0)
            self._commit_turn(turn, turn.item_id or new_id("item"))
            if self.settings.create_response:
                await self._responses.create(commands.CreateResponse(), timing)
        except EngineStoppedError:
            raise
        except MosstalkError as error:
            self._emit(error_event(error, self.clock))

    def _commit_turn(self, turn: LiveTurn, item_id: str, command_id: str | None = None) -> None:
        rows = self._state.prompts.turn("user", SpeechSegment(tuple(turn.codes.codes)))
        length_ms = (turn.end - turn.start) * 1000 // INPUT_RATE
        before = self._state.history.last_id
        self._state.history.require_new(item_id)
        self._emit(events.TurnCommitted(item_id, before, clock=self.clock, command_id=command_id))
        self._state.add(Entry(item_id, "user", rows, audio_ms=length_ms), command_id=command_id)

    # Commands.

    async def _commit(self, command: commands.Commit, _: float) -> None:
        self._state.history.require_new(command.item_id)
        self._state.require_place(0)  # before the turn is taken: it may be committed later
        turn = await self._state.audio_input.commit()
        item_id = command.item_id or turn.item_id or new_id("item")
        self._commit_turn(turn, item_id, command.command_id)
        await self._responses.prefill_ahead()

    async def _clear(self, command: commands.Clear, _: float) -> None:
        self._state.audio_input.clear()
        self._emit(events.InputCleared(clock=self.clock, command_id=command.command_id))
        await self._responses.prefill_ahead()

    async def _create_response(self, command: commands.CreateResponse, arrived_s: float) -> None:
        await self._responses.create(command, TurnTiming(arrived_s))

    async def _cancel_response(self, command: commands.CancelResponse, _: float) -> None:
        await self._responses.cancel(command.response_id, Reason.CLIENT_CANCELLED)

    async def _update(self, command: commands.UpdateSettings, _: float) -> None:
        await require_usable(self._state.resources, command.settings)
        self._state.audio_input.configure(command.settings)
        self._state.settings = command.settings
        self._timeouts.durations = command.settings.durations
        self._emit(
            events.SettingsUpdated(
                command.settings, clock=self.clock, command_id=command.command_id
            )
        )
        await self._responses.prefill_ahead()
