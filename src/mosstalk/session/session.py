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
from mosstalk.session import commands as told
from mosstalk.session import events
from mosstalk.session.answers import Answers, Cause
from mosstalk.session.desk import Desk, new_id, require_usable
from mosstalk.session.events import CloseReason, ErrorCode, ErrorRaised, Event, Reason
from mosstalk.session.history import Entry
from mosstalk.session.items import Items
from mosstalk.session.life import Life
from mosstalk.session.listener import Full, Heard, Idled, LiveTurn, Started, Stopped
from mosstalk.session.refusals import refusal
from mosstalk.session.response import Response
from mosstalk.session.settings import SessionSettings
from mosstalk.session.sound import pcm_of
from mosstalk.session.stage import Stage

_LOG = getLogger(__name__)
_MOST_AT_ONCE = 50
"""Pushes that are heard together when they came faster than they are heard."""


@dataclass(frozen=True)
class _Ended:
    """A response has come to its end by itself."""

    response: Response


@dataclass(frozen=True)
class _Tick:
    """Time has passed."""


_Handler = Callable[[Any, float], Awaitable[None]]
_News = told.Command | _Ended | _Tick


class Session:
    """One conversation in real time; made by ``Host.open``.

    ``do`` and ``push`` take commands at any time from the loop's thread; what comes after the
    end is ignored. Iterate over the session for its events, or over ``audio`` for sound alone:
    one or the other. Leaving its ``async with`` closes it.
    """

    def __init__(
        self, stage: Stage, settings: SessionSettings, gone: Callable[["Session"], None]
    ) -> None:
        self.session_id = new_id("sess")
        self.commands_done = 0
        """Commands that were carried out or refused."""
        self._gone = gone
        self._told: asyncio.Queue[Event] = asyncio.Queue()
        self._desk = Desk(stage, settings, self._told.put_nowait)
        self._answers = Answers(self._desk, self)
        self._handlers: dict[type[told.Command], _Handler] = {
            told.Commit: self._commit,
            told.Clear: self._clear,
            told.CreateResponse: self._create_response,
            told.CancelResponse: self._cancel_response,
            told.UpdateSettings: self._update,
            **Items(self._desk, self._answers).handlers,
        }
        heard_s = lambda: self._desk.clock / INPUT_RATE  # noqa: E731
        self._life = Life(settings.durations, heard_s, stage.clock)
        self._inbox: deque[tuple[_News, float]] = deque()
        self._bell = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._over = self._failed = self._closing = False
        self._task = asyncio.create_task(self._run())

    @property
    def settings(self) -> SessionSettings:
        """What holds now."""
        return self._desk.settings

    @property
    def clock(self) -> int:
        """Samples of input so far, counted at 16 kHz."""
        return self._desk.clock

    @property
    def is_answering(self) -> bool:
        """Whether any response is being made."""
        return self._answers.busy

    def conversation_rows(self) -> list[Row]:
        """The conversation as the model reads it, the turn under way included."""
        return self._desk.rows()

    def do(self, command: told.Command) -> None:
        """Take a command; what comes of it are events. ``Close`` goes before all others."""
        self._closing = self._closing or isinstance(command, told.Close)
        self._post(command, first=isinstance(command, told.Close))

    def push(self, pcm: told.Pcm, rate: int | None = None) -> None:
        """Take sound from the microphone; see ``Push``."""
        self.do(told.Push(pcm, rate))

    async def close(self, reason: str = CloseReason.CLIENT) -> None:
        """End the session; its blocks are free when this returns."""
        self.do(told.Close(reason))
        await asyncio.shield(self._task)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Every event in order, ``Closed`` being the last."""
        while True:
            event = await self._told.get()
            yield event
            if isinstance(event, events.Closed):
                self._told.put_nowait(event)  # whoever iterates again finds the end at once
                return

    async def audio(self) -> AsyncIterator[npt.NDArray[np.int16]]:
        """The sound of all replies, (n,) at 24 kHz, as it is made; other events are skipped."""
        async for event in self:
            if isinstance(event, events.AudioDelta):
                yield np.frombuffer(event.pcm, "<i2")

    # What a response tells while it is made.

    def sounded(self, response: Response, start: int, samples: Samples) -> None:
        """Pass sound on; the listener is hearing it from now on."""
        plan, pcm = response.plan, pcm_of(samples)
        self._tell(events.AudioDelta(plan.response_id, plan.item_id, start, pcm, clock=self.clock))
        at_s = self._desk.playback.sent(plan.item_id, len(samples) / OUTPUT_RATE)
        self._desk.microphone.played(samples, at_s)

    def wrote(self, response: Response, text: str) -> None:
        """Pass text on."""
        plan = response.plan
        self._tell(events.TextDelta(plan.response_id, plan.item_id, text, clock=self.clock))

    def ended(self, response: Response) -> None:
        """Have its end dealt with in turn."""
        self._post(_Ended(response))

    def engine_gone(self, why: str) -> None:
        """The engine has ended, and so must the session."""
        if not self._over:
            self._fail(ErrorCode.ENGINE_STOPPED, why)
            self.do(told.Close(CloseReason.ENGINE))

    def _fail(self, code: ErrorCode, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._tell(ErrorRaised(code, why, fatal=True, clock=self.clock))

    def _tell(self, event: Event) -> None:
        self._desk.tell(event)

    def _post(self, news: _News, *, first: bool = False) -> None:
        if self._over:
            return
        mail = (news, self._desk.stage.clock())
        if first:
            self._inbox.appendleft(mail)
        else:
            self._inbox.append(mail)
        self._bell.set()

    async def _run(self) -> None:
        """Do what is asked until the end; then give everything back."""
        self._tell(events.SessionOpened(self.session_id, self.settings, clock=self.clock))
        reason: str = CloseReason.ERROR
        try:
            await self._desk.follow()
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
            await self._bell.wait()
            self._bell.clear()
            while self._inbox:
                news, arrived_s = self._inbox.popleft()
                if isinstance(news, told.Close):
                    return news.reason
                if isinstance(news, told.Push):
                    await self._hear(news, arrived_s)
                elif isinstance(news, _Ended):
                    await self._answers.finish(news.response)
                elif isinstance(news, told.Command):
                    self._life.sign()
                    await self._obey(news, arrived_s)
                    self.commands_done += 1
                    await asyncio.sleep(0)  # whoever sends many lets others have their turn
                if self._desk.is_to_follow:
                    await self._answers.follow()
                if self._answers.busy or self._desk.playback.audible:
                    self._life.sign()
                if over := self._life.over():
                    return over

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        loop, left_s = asyncio.get_running_loop(), self._life.left_s
        if self._desk.unfollowed_s is not None:
            left_s = min(left_s, max(0.0, self._desk.unfollowed_s - loop.time()))
        self._timer = loop.call_later(left_s, self._post, _Tick())

    async def _end(self, reason: str) -> None:
        if self._timer:
            self._timer.cancel()
        try:
            await self._answers.cancel_all(Reason.SESSION_CLOSED)
            with suppress(EngineStoppedError):
                await self._desk.line.close()
        finally:
            self._over = True
            self._inbox.clear()
            self._desk.microphone.clear()
            self._gone(self)
            self._tell(events.Closed(reason, clock=self.clock))

    async def _obey(self, command: told.Command, arrived_s: float) -> None:
        try:
            await self._handlers[type(command)](command, arrived_s)
        except EngineStoppedError:
            raise
        except MosstalkError as error:
            self._tell(refusal(error, self.clock, command))

    # Sound and turns.

    async def _hear(self, push: told.Push, arrived_s: float) -> None:
        """Hear a push, and those at its rate that have come after it."""
        microphone, pushes = self._desk.microphone, [push]
        rate = microphone.rate_of(push)
        while self._inbox and len(pushes) < _MOST_AT_ONCE:
            news = self._inbox[0][0]
            if not isinstance(news, told.Push) or news.paused_s:
                break
            if microphone.rate_of(news) != rate:
                break
            pushes.append(news)
            self._inbox.popleft()
        self._pause(push.paused_s)
        sounds = [np.zeros(0, np.float32)]
        for each in pushes:
            try:
                sounds.append(microphone.samples_of(each))
            except SessionError as error:
                self._tell(refusal(error, self.clock, each))
        audible = lambda: self._desk.playback.audible_to_microphone  # noqa: E731
        async for heard in microphone.hear(np.concatenate(sounds), rate, audible):
            await self._heard(heard, Cause(arrived_s))
            if self._closing:
                return
        self.commands_done += len(pushes)

    def _pause(self, seconds: float | None) -> None:
        """Take into account that nothing was recorded before the next sound."""
        desk = self._desk
        seconds = desk.playback.pause_s if seconds is None else seconds
        if seconds:
            desk.playback.skip(seconds)
            desk.microphone.paused(seconds)
            self._tell(events.InputPaused(seconds, clock=self.clock))

    async def _heard(self, heard: Heard, cause: Cause) -> None:
        turn, clock = heard.turn, self.clock
        if isinstance(heard, Started):
            turn.item_id = new_id("item")
            self._tell(events.SpeechStarted(turn.item_id, turn.start, clock=clock))
            if self.settings.interrupt_response:
                await self._answers.interrupt()
        elif isinstance(heard, Full):
            self._tell(refusal(heard.error, clock))
            return
        elif isinstance(heard, Stopped):
            assert turn.item_id, "a turn that stopped has started"
            wait = turn.end - heard.speech_end
            self._tell(
                events.SpeechStopped(turn.item_id, turn.end, heard.speech_end, wait, clock=clock)
            )
            await self._answer(turn, Cause(cause.committed_s, 1000 * wait / INPUT_RATE))
        elif isinstance(heard, Idled):
            turn.item_id = new_id("item")
            self._tell(events.IdleTimeout(turn.item_id, heard.start, turn.end, clock=clock))
            await self._answer(turn, cause)
        if not isinstance(heard, Idled):
            self._life.sign()
        await self._answers.follow()

    async def _answer(self, turn: LiveTurn, cause: Cause) -> None:
        """Make an item of a turn that ended by itself, and answer it if that is wanted."""
        try:
            self._desk.require_place(0)
            self._commit_turn(turn, turn.item_id or new_id("item"))
            if self.settings.create_response:
                await self._answers.create(told.CreateResponse(), cause)
        except EngineStoppedError:
            raise
        except MosstalkError as error:
            self._tell(refusal(error, self.clock))

    def _commit_turn(self, turn: LiveTurn, item_id: str, command_id: str | None = None) -> None:
        rows = self._desk.scribe.turn("user", SpeechSegment(tuple(turn.codes.codes)))
        length_ms = (turn.end - turn.start) * 1000 // INPUT_RATE
        before = self._desk.history.last_id
        self._desk.history.require_new(item_id)
        self._tell(events.TurnCommitted(item_id, before, clock=self.clock, command_id=command_id))
        self._desk.add(Entry(item_id, "user", rows, audio_ms=length_ms), command_id=command_id)

    # Commands.

    async def _commit(self, command: told.Commit, _: float) -> None:
        self._desk.history.require_new(command.item_id)
        self._desk.require_place(0)  # before the turn is taken: it may be committed later
        turn = await self._desk.microphone.commit()
        item_id = command.item_id or turn.item_id or new_id("item")
        self._commit_turn(turn, item_id, command.command_id)
        await self._answers.follow()

    async def _clear(self, command: told.Clear, _: float) -> None:
        self._desk.microphone.clear()
        self._tell(events.InputCleared(clock=self.clock, command_id=command.command_id))
        await self._answers.follow()

    async def _create_response(self, command: told.CreateResponse, arrived_s: float) -> None:
        await self._answers.create(command, Cause(arrived_s))

    async def _cancel_response(self, command: told.CancelResponse, _: float) -> None:
        await self._answers.cancel(command.response_id, Reason.CLIENT_CANCELLED)

    async def _update(self, command: told.UpdateSettings, _: float) -> None:
        await require_usable(self._desk.stage, command.settings)
        self._desk.microphone.configure(command.settings)
        self._desk.settings = command.settings
        self._life.durations = command.settings.durations
        self._tell(
            events.SettingsUpdated(
                command.settings, clock=self.clock, command_id=command.command_id
            )
        )
        await self._answers.follow()
