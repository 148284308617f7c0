"""A session: commands in, events out.

Whatever changes a session's state happens in one task, in the order in which it was asked;
responses run beside it and report back to it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mosstalk.constants import INPUT_RATE
from mosstalk.conversation import Row, SpeechSegment
from mosstalk.errors import EngineStoppedError, MosstalkError
from mosstalk.session import commands, events
from mosstalk.session.commands import Durations, SessionSettings
from mosstalk.session.conversation_state import ConversationState
from mosstalk.session.events import CloseReason, ErrorCode, Event, Reason, error_event, new_id
from mosstalk.session.history import Entry
from mosstalk.session.listener import LiveTurn, TurnUpdate
from mosstalk.session.response import Response
from mosstalk.session.response_manager import ResponseManager
from mosstalk.session.sound import require_rate, samples_of

if TYPE_CHECKING:
    from mosstalk.session.host import Host

_LOG = getLogger(__name__)
_MOST_AT_ONCE = 50
"""Pushes that are heard together when they came faster than they are heard."""
_SLICE_S, _SLICE_BY_HAND_S = 0.1, 0.4
"""However much is pushed at once, it is heard so much after so much."""

_Handler = Callable[[Any, float], Awaitable[None]]


@dataclass(frozen=True)
class _TurnEncoded:
    """The turn under way has new codes, or will have none because of ``error``."""

    error: BaseException | None


_Message = commands.Command | Response | _TurnEncoded | None
"""What to do; what has come to its end by itself; or nothing: time has passed."""


@dataclass
class Timeouts:
    """How long a session has lasted, and since when nothing has happened in it.

    Both in seconds on two clocks, of which the one that is further counts. ``heard_s`` counts the
    samples that came in, for who sends an hour of sound in a minute; ``wall_s`` goes on for who
    sends none.
    """

    durations: Durations
    heard_s: Callable[[], float]
    wall_s: Callable[[], float]
    _begun: tuple[float, float] = field(init=False)
    _touched: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._touched = self.heard_s(), self.wall_s()

    def touch(self) -> None:
        """Something happens."""
        self._touched = self.heard_s(), self.wall_s()

    def expired(self) -> CloseReason | None:
        """Why the session must end now, if it must."""
        if self._since(self._begun) >= self.durations.longest_s:
            return CloseReason.LONGEST
        return CloseReason.IDLE if self._since(self._touched) >= self.durations.idle_s else None

    @property
    def remaining_s(self) -> float:
        """Seconds that will pass before it can expire."""
        longest_s = self.durations.longest_s - self._since(self._begun)
        return max(0.0, min(longest_s, self.durations.idle_s - self._since(self._touched)))

    def _since(self, then: tuple[float, float]) -> float:
        return max(self.heard_s() - then[0], self.wall_s() - then[1])


class Session:
    """One conversation in real time; made by ``Host.open``.

    ``do`` and ``push`` take commands at any time from the loop's thread; what comes after the
    end is ignored. Iterate over the session for its events, or over ``audio`` for sound alone:
    one or the other. Leaving its ``async with`` closes it.
    """

    def __init__(
        self,
        host: "Host",
        settings: SessionSettings,
        on_closed: Callable[["Session"], None],
        items: Iterable[events.KeptItem] = (),
    ) -> None:
        """``items`` are of an earlier session, whose conversation goes on here."""
        self.session_id = new_id("sess")
        self.commands_done = 0
        """Commands that were carried out or refused."""
        self._on_closed = on_closed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._state = ConversationState(
            host, settings, self._events.put_nowait, lambda error: self._post(_TurnEncoded(error))
        )
        self._emit, self._items = self._state.emit, items
        self._responses = ResponseManager(self._state, self._post)
        self._handlers: dict[type[commands.Command], _Handler] = {
            commands.Commit: self._commit,
            commands.Clear: self._clear,
            commands.CreateText: self._create_item,
            commands.CreateAudio: self._create_item,
            commands.CreateMessage: self._create_item,
            commands.DeleteItem: self._delete_item,
            commands.Truncate: self._truncate,
            commands.CreateResponse: self._responses.create,
            commands.CancelResponse: self._cancel_response,
            commands.UpdateSettings: self._update,
        }
        heard_s = lambda: self._state.clock / INPUT_RATE  # noqa: E731
        self._timeouts = Timeouts(settings.durations, heard_s, host.clock)
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

    def kept(self, item_id: str, begins: int = 0) -> events.KeptItem | None:
        """An item of the conversation as it stands, for another session to go on from.

        Of a reply that is being made the rows before ``begins`` are left out. None: it is gone.
        """
        making = self._responses.current
        if making and making.entry.item_id == item_id:
            return making.kept(begins)
        entry = self._state.history.get(item_id)
        return entry.kept() if entry else None

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

    def on_engine_ended(self, why: str) -> None:
        """The engine has ended, and so must the session."""
        if not self._over:
            self._fail(ErrorCode.ENGINE_STOPPED, why)
            self.do(commands.Close(CloseReason.ENGINE))

    def _fail(self, code: ErrorCode, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._emit(events.ErrorRaised(code, why, fatal=True))

    def _post(self, message: _Message, *, first: bool = False) -> None:
        if not self._over:
            put = self._inbox.appendleft if first else self._inbox.append
            put((message, self._state.host.clock()))
            self._wakeup.set()

    # The session's task.

    async def _run(self) -> None:
        """Do what is asked until the end; then give everything back."""
        self._emit(events.SessionOpened(self.session_id, self.settings))
        reason: str = CloseReason.ERROR
        try:
            self._state.take_up(self._items)
            self._items = ()
            await self._responses.prefill_ahead()
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
        """Take one message after the other; return why the session is over."""
        while True:
            self._set_timer()
            await self._wakeup.wait()
            self._wakeup.clear()
            while self._inbox:
                message, arrived_s = self._inbox.popleft()
                if isinstance(message, commands.Close):
                    return message.reason
                await self._take(message, arrived_s)
                if self._state.prefill_is_due:
                    await self._responses.prefill_ahead()
                if self._responses.busy or self._state.playback.audible:
                    self._timeouts.touch()
                if expired := self._timeouts.expired():
                    return expired

    async def _take(self, message: _Message, arrived_s: float) -> None:
        if isinstance(message, commands.Push):
            await self._push(message, arrived_s)
        elif isinstance(message, Response):
            await self._responses.finish(message)
        elif isinstance(message, _TurnEncoded):
            if message.error:
                raise message.error
            await self._responses.begin_early()  # it has what is new read itself, in the same step
            await self._responses.prefill_ahead()
        elif message:
            await self._execute(message, arrived_s)

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        loop, wait_s = asyncio.get_running_loop(), self._timeouts.remaining_s
        if self._state.prefill_due_s is not None:
            wait_s = min(wait_s, max(0.0, self._state.prefill_due_s - loop.time()))
        self._timer = loop.call_later(wait_s, self._post, None)

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
            self._state.listener.clear()
            self._state.listener.close()
            self._on_closed(self)
            self._emit(events.Closed(reason))

    async def _execute(self, command: commands.Command, arrived_s: float) -> None:
        self._timeouts.touch()
        with self._refusals(command):
            await self._responses.drop_early()
            await self._handlers[type(command)](command, arrived_s)
        self.commands_done += 1
        await asyncio.sleep(0)  # whoever sends many lets others have their turn

    @contextmanager
    def _refusals(self, command: commands.Command | None = None) -> Iterator[None]:
        """What is refused in here is told, as the command's if it is one's; the session goes on."""
        try:
            yield
        except EngineStoppedError:
            raise
        except MosstalkError as error:
            self._emit(error_event(error, command))

    # Sound and turns.

    async def _push(self, push: commands.Push, arrived_s: float) -> None:
        """Hear a push, and those at its rate that have come after it."""
        listener, pushes = self._state.listener, [push]
        rate = push.rate or listener.rate
        while self._inbox and len(pushes) < _MOST_AT_ONCE:
            message = self._inbox[0][0]
            if not isinstance(message, commands.Push) or message.paused_s:
                break
            if (message.rate or listener.rate) != rate:
                break
            pushes.append(message)
            self._inbox.popleft()
        self._note_pause(push.paused_s)
        sounds = [np.zeros(0, np.float32)]
        for each in pushes:
            with self._refusals(each):
                require_rate(rate)
                sounds.append(samples_of(each.pcm))
        audible = lambda: self._state.playback.audible_to_microphone  # noqa: E731
        sound = np.concatenate(sounds)
        size = max(1, round(rate * (_SLICE_S if listener.finds_turns else _SLICE_BY_HAND_S)))
        for start in range(0, len(sound), size):
            async for update in listener.hear(sound[start : start + size], rate, audible):
                await self._on_turn_update(update, arrived_s)
            if self._responses.early_is_stale:
                await self._responses.drop_early()
                await self._responses.prefill_ahead()
            if self._closing:
                return
            if listener.turn and not listener.turn.is_full:
                self._timeouts.touch()
        self.commands_done += len(pushes)

    def _note_pause(self, seconds: float | None) -> None:
        """Take into account that nothing was recorded before the next sound."""
        state = self._state
        seconds = state.playback.pause_s if seconds is None else seconds
        if seconds:
            state.playback.skip(seconds)
            state.listener.paused(seconds)
            self._emit(events.InputPaused(seconds))

    async def _on_turn_update(self, update: TurnUpdate, arrived_s: float) -> None:
        """Tell what was heard, and do what follows from it."""
        turn, event = update
        self._emit(event)
        if isinstance(event, events.ErrorRaised):
            return
        if isinstance(event, events.SpeechStarted) and self.settings.interrupt_response:
            await self._responses.interrupt()
        elif isinstance(event, events.SpeechStopped):
            await self._answer(turn, arrived_s, 1000 * event.wait / INPUT_RATE)
        elif isinstance(event, events.IdleTimeout):
            await self._answer(turn, arrived_s)
        if not isinstance(event, events.IdleTimeout):
            self._timeouts.touch()
        await self._responses.prefill_ahead()

    async def _answer(
        self, turn: LiveTurn, ended_s: float, vad_wait_ms: float | None = None
    ) -> None:
        """Make an item of a turn that ended by itself, and answer it if that is wanted."""
        with self._refusals():
            self._state.require_place(0)
            entry = self._commit_turn(turn, turn.item_id)
            adopted = await self._responses.adopt_early(entry, ended_s, vad_wait_ms)
            if self.settings.create_response and not adopted:
                await self._responses.create(commands.CreateResponse(), ended_s, vad_wait_ms)

    def _commit_turn(self, turn: LiveTurn, item_id: str, command_id: str | None = None) -> Entry:
        state = self._state
        rows = state.prompts.turn("user", SpeechSegment(tuple(turn.codes.codes)))
        before = state.history.last_id
        state.history.require_new(item_id)
        self._emit(events.TurnCommitted(item_id, before, command_id=command_id))
        length_ms = events.ms_of(turn.samples)
        entry = Entry(item_id, "user", rows, audio_ms=length_ms)
        state.add(entry, command_id=command_id)
        return entry

    # Commands.

    async def _commit(self, command: commands.Commit, _: float) -> None:
        self._state.history.require_new(command.item_id)
        self._state.require_place(0)  # before the turn is taken: it may be committed later
        turn = await self._state.listener.commit()
        self._commit_turn(turn, command.item_id or turn.item_id, command.command_id)
        self._state.prefill_soon()

    async def _clear(self, command: commands.Clear, _: float) -> None:
        self._state.listener.clear()
        self._emit(events.InputCleared(command_id=command.command_id))
        await self._responses.prefill_ahead()

    async def _create_item(self, command: commands.NewItem, _: float) -> None:
        """Put text and speech into the conversation."""
        state, (message,) = self._state, commands.messages_of(command)
        state.history.require_new(command.item_id)
        state.require_place(0, message.role)  # before anything is made of it
        entry = await state.entry_of(message, command.item_id or new_id("item"))
        state.require_place(len(entry.rows), entry.role)
        state.add(entry, command.previous_item_id, command.command_id)
        if not self._responses.current:
            state.make_room()
        state.prefill_soon()

    async def _delete_item(self, command: commands.DeleteItem, _: float) -> None:
        """Take an item out; a response that is making it ends."""
        state = self._state
        entry = state.history.find(command.item_id)
        await self._responses.cancel_making(entry)
        if entry in state.history:  # the end of a response may have dropped it
            state.history.remove(entry)
        self._emit(events.ItemDeleted(entry.item_id, command_id=command.command_id))
        state.prefill_soon()

    async def _truncate(self, command: commands.Truncate, _: float) -> None:
        """Cut a spoken reply; if it is being made or played, that ends."""
        state = self._state
        entry = state.history.find(command.item_id)
        await self._responses.cancel_making(entry)
        self._responses.truncate(entry, command.heard_ms, command_id=command.command_id)
        if state.playback.latest == entry.item_id:
            state.silence()
        state.prefill_soon()

    async def _cancel_response(self, command: commands.CancelResponse, _: float) -> None:
        await self._responses.cancel(command.response_id, Reason.CLIENT_CANCELLED)

    async def _update(self, command: commands.UpdateSettings, _: float) -> None:
        state, settings = self._state, command.settings
        await state.host.require_usable(settings)
        state.listener.configure(settings)
        state.settings = settings
        self._timeouts.durations = settings.durations
        self._emit(events.SettingsUpdated(settings, command_id=command.command_id))
        await self._responses.prefill_ahead()
