"""A front's end of its link: the worker's process, and its sessions as if they were here."""

import asyncio
import logging
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import Any

from mosstalk.conversation import Row
from mosstalk.errors import EngineStoppedError, MosstalkError
from mosstalk.server import ipc
from mosstalk.server.ipc import Channel, start_child
from mosstalk.session import events
from mosstalk.session.commands import (
    Close,
    Command,
    Push,
    SessionSettings,
    sample_count,
    sounds_of,
)
from mosstalk.session.events import CloseReason, Event

_LOG = logging.getLogger(__name__)
_LOADING_S = 120.0
"""Seconds without a sign of life that are borne while models load, which keeps a machine busy."""
_TICK_S = 0.5
_ENDING_S = 10.0
"""How long the worker may take to close its sessions before it is killed."""
_GATHERED_S = 0.2
"""Sound that is sent together where turns end by hand: nothing comes of it before 400 ms, and a
microphone's frames are many."""
_GATHERED_WHILE_SILENT_S = 0.04
"""The same hands-free, while nobody speaks."""
_LONGEST_GATHERED_S = 0.05
"""Hands-free it goes after so long even so, where the microphone has fallen silent."""


_TURN_EVENTS = (
    events.SpeechStarted, events.SpeechStopped, events.TurnCommitted, events.InputCleared,
    events.SettingsUpdated,
)  # fmt: skip
"""The first begins a turn, and each of the others ends one."""


class WorkerState(StrEnum):
    """How far a worker is."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


class SessionProxy:
    """A session in the worker: ``tell`` it commands, iterate over it for its events.

    If the worker dies, a fatal ``ErrorRaised`` and ``Closed`` are its last events all the same.
    """

    def __init__(self, number: int, settings: SessionSettings, channel: Channel) -> None:
        self.rows: list[Row] | None = None
        """The conversation's rows, at the end, if they were asked for."""
        self.kept: dict[str, events.KeptItem] = {}
        """Items that the model reads, by id, if they were asked for."""
        self.clock = 0
        """Samples of input that were heard, counted at 16 kHz, as of the latest event."""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = False
        self.settings = settings
        """What it was opened with."""
        self._number, self._rate, self._channel = number, settings.input_rate, channel
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._read = False
        self._by_hand, self._speaking = settings.turn_detection is None, False
        self._gathered: list[Push] = []
        """Sound that waits for more to be sent with it; all of it at one rate."""
        self._gathered_timer: asyncio.TimerHandle | None = None
        self._gathered_s = 0.0
        self._unheard_s = 0.0
        self._undone: deque[float] = deque()
        """The sound in each such command, the oldest first."""
        self._done = 0
        self._changed = asyncio.Event()

    @property
    def undone(self) -> int:
        """Commands that were sent and, as far as is known, not yet carried out or refused."""
        return len(self._undone)

    @property
    def unheard_s(self) -> float:
        """Seconds of sound in commands that, as far as is known, have not been carried out."""
        return self._unheard_s + self._gathered_s

    def tell(self, command: Command) -> None:
        """Send a command, sound perhaps with what follows it; after the end it is lost."""
        if self.over:
            return
        if self._gathered and not (isinstance(command, Push) and self._goes_with(command)):
            self._send_gathered()
        sounds = sounds_of(command)
        seconds = sum(sample_count(each.pcm) / (each.rate or self._rate) for each in sounds)
        if not isinstance(command, Push) or not (most_s := self._most_gathered_s):
            self._send(command, seconds)
            return
        self._gathered.append(command)
        self._gathered_s += seconds
        if round(self._gathered_s, 3) >= most_s:  # ten times 20 ms are a little less
            self._send_gathered()
        elif not self._by_hand and not self._gathered_timer:
            loop = asyncio.get_running_loop()
            self._gathered_timer = loop.call_later(_LONGEST_GATHERED_S, self._send_gathered)

    @property
    def _most_gathered_s(self) -> float:
        """How much sound is sent together; 0: each push by itself."""
        if self._by_hand:
            return _GATHERED_S
        return 0.0 if self._speaking else _GATHERED_WHILE_SILENT_S

    def _goes_with(self, push: Push) -> bool:
        """Whether it may be sent together with what was gathered."""
        is_same = push.paused_s is None and push.rate == self._gathered[0].rate
        return is_same and self._most_gathered_s > 0

    def _send_gathered(self) -> None:
        if self._gathered_timer:
            self._gathered_timer.cancel()
            self._gathered_timer = None
        (first, *_), pcm = self._gathered, b"".join(bytes(each.pcm) for each in self._gathered)
        seconds, self._gathered_s = self._gathered_s, 0.0
        self._gathered = []
        self._send(replace(first, pcm=pcm), seconds)

    def _send(self, command: Command, seconds: float) -> None:
        self._undone.append(seconds)
        self._unheard_s += seconds
        self._channel.post(ipc.SessionCommand(self._number, command))

    def has_room(self, most_s: float, most_commands: int) -> bool:
        """Whether at most so much sound and so many commands are not yet carried out."""
        return self.over or (self.unheard_s <= most_s and self.undone <= most_commands)

    async def room(self, most_s: float, most_commands: int) -> None:
        """Wait for that."""
        if self._gathered:
            self._send_gathered()
        while not self.has_room(most_s, most_commands):
            self._changed.clear()
            await self._changed.wait()

    def close(self, reason: str = CloseReason.CLIENT) -> None:
        """End the session; its last events are still to be read."""
        self.tell(Close(reason))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Every event in order, ``Closed`` being the last."""
        while not self._read:
            event = await self._events.get()
            self._read = isinstance(event, events.Closed)
            yield event

    # What the link hears of it.

    def acknowledged(self, done: int) -> None:
        """The session has carried out or refused so many commands in all."""
        while self._done < done and self._undone:
            self._done += 1
            self._undone.popleft()
        self._unheard_s = sum(self._undone)  # afresh, so that rounding never adds up
        self._changed.set()

    def refused(self, error: MosstalkError) -> None:
        """The session was not opened; whoever waits for it may have gone in the same moment."""
        if not self.opened.done():
            self.opened.set_exception(error)

    def take(self, message: ipc.SessionEvent) -> None:
        """The session has told something."""
        self.rows = message.rows
        if message.kept:
            self._keep(message.kept)
        self.on_event(message.event)

    def _keep(self, kept: events.KeptItem) -> None:
        """An item is there, or has changed; of one that is being made there are more rows."""
        item_id, begins = kept.item.item_id, kept.begins
        if begins:
            if not (before := self.kept.get(item_id)):
                return  # it was deleted meanwhile
            rows = before.rows[:begins] + kept.rows
            modes = (before.modes or ())[:begins] + (kept.modes or ())
            kept = replace(kept, rows=rows, modes=modes, begins=0)
        self.kept[item_id] = kept

    def on_event(self, event: Event) -> None:
        """The session has told something, at first that it is there."""
        if isinstance(event, events.ItemDeleted):
            self.kept.pop(event.item_id, None)
        elif isinstance(event, events.ContextDropped):
            for item_id in event.item_ids:
                self.kept.pop(item_id, None)
        if not self.opened.done():
            self.opened.set_result(None)
        self.clock = max(self.clock, event.clock)
        if isinstance(event, events.SettingsUpdated):
            # What was only asked for counts for nothing.
            self._rate = event.settings.input_rate
            self._by_hand = event.settings.turn_detection is None
        if isinstance(event, _TURN_EVENTS):
            self._speaking = isinstance(event, events.SpeechStarted)
        if isinstance(event, events.Closed):
            self.over = True
            self._changed.set()
        self._events.put_nowait(event)

    def lost(self, why: str) -> None:
        """The worker is gone."""
        if not self.opened.done():
            self.opened.set_exception(EngineStoppedError(why))
        elif not self.over:
            why = f"{why}; open another session later"
            code = events.ErrorCode.ENGINE_STOPPED
            self.on_event(events.ErrorRaised(code, why, fatal=True, clock=self.clock))
            self.on_event(events.Closed(CloseReason.ENGINE, clock=self.clock))


def _new_future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass
class EngineClient:
    """Starts the worker or attaches to it, watches it, and opens sessions in it.

    ``silence_s`` without a sign of life, from the worker's loop or from its engine, counts as
    death. ``on_heartbeat`` is called with every sign of life.
    """

    options: ipc.WorkerOptions
    silence_s: float = 30.0
    on_heartbeat: Callable[[ipc.Heartbeat], None] = lambda _: None
    on_loading: Callable[[ipc.Loading], None] = lambda _: None
    heartbeat: ipc.Heartbeat | None = None
    ready: "asyncio.Future[ipc.WorkerInfo]" = field(default_factory=_new_future)
    """Done once sessions can be opened."""
    dead: "asyncio.Future[ipc.Failed]" = field(default_factory=_new_future)
    """Done once the worker is dead, unless it was stopped."""
    _sessions: dict[int, SessionProxy] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)
    _process: "subprocess.Popen[bytes] | None" = None
    _carrier: socket.socket | None = None
    _channel: Channel | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False
    _heard_s: float = 0.0

    async def start(self) -> None:
        """Start the process; ``ready`` is done once sessions can be opened."""
        self._carrier, theirs = ipc.socket_carrier()
        with theirs:
            self._process, end = start_child("mosstalk.server.worker", theirs)
        await self.attach(end)
        assert self._channel
        self._channel.post(self.options)

    async def attach(self, end: socket.socket) -> None:
        """Use a worker that another front has started, over an end of a ``new_link`` to it."""
        self._channel = await Channel.over(end)
        self._heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    def new_link(self) -> socket.socket:
        """The other end of one more link to the worker that was started here.

        Raises:
            OSError: the worker is gone.
        """
        assert self._carrier, "the worker was started here"
        ours, theirs = socket.socketpair()
        with theirs:
            ipc.hand_over(self._carrier, theirs)
        return ours

    async def stop(self) -> None:
        """Close the link; the worker, if it was started here, ends: in order if it still can."""
        self._stopping = True
        if self._channel is None:
            return
        if process := self._process:
            self._channel.post(ipc.Stop())
            try:
                await asyncio.to_thread(process.wait, 0 if self.dead.done() else _ENDING_S)
            except subprocess.TimeoutExpired:
                self.kill()
                await asyncio.to_thread(process.wait)
        for task in self._tasks:
            task.cancel()
        self._channel.close()
        if self._carrier:
            self._carrier.close()

    def kill(self) -> None:
        """End the worker at once."""
        if self._process:
            self._process.kill()

    @property
    def state(self) -> WorkerState:
        """How far it is."""
        if self.dead.done():
            return WorkerState.DEAD
        return WorkerState.READY if self.ready.done() else WorkerState.LOADING

    async def open(
        self,
        settings: SessionSettings,
        *,
        rows: bool = False,
        keep: bool = False,
        items: tuple[events.KeptItem, ...] = (),
    ) -> SessionProxy:
        """A new session; with ``rows`` it gives its rows at the end, with ``keep`` its items.

        It goes on from ``items`` of an earlier one.

        Raises:
            EngineStoppedError: the worker is not ready, or dead.
            EngineFullError, OptionError, ScriptError, SessionError, VoiceError: see ``Host.open``.
        """
        if self._channel is None or self.state is not WorkerState.READY:
            raise EngineStoppedError(f"the worker is {self.state}")
        number = next(self._numbers)
        session = self._sessions[number] = SessionProxy(number, settings, self._channel)
        session.kept = {each.item.item_id: each for each in items}
        self._channel.post(ipc.Open(number, settings, rows, keep, items))
        try:
            await session.opened
        except BaseException:
            self._sessions.pop(number, None)
            session.tell(Close())
            raise
        return session

    async def _listen(self) -> None:
        assert self._channel
        try:
            async for message in self._channel:
                self._on_message(message)
        finally:
            self._dead(ipc.Failed("the worker's process has ended"))

    def _on_message(self, message: ipc.ToFront) -> None:
        match message:
            case ipc.SessionEvent(number) if session := self._sessions.get(number):
                session.take(message)
                if session.over:
                    self._sessions.pop(number)
            case ipc.Refused(number) if session := self._sessions.get(number):
                session.refused(message.raised())
            case ipc.Heartbeat():
                self.heartbeat, self._heard_s = message, time.monotonic()
                for number, done in message.done.items():
                    if number in self._sessions:
                        self._sessions[number].acknowledged(done)
                self.on_heartbeat(message)
            case ipc.Loading():
                self.on_loading(message)
            case ipc.WorkerInfo():
                self.ready.set_result(message)
            case ipc.Failed():
                self._dead(message)

    async def _watch(self) -> None:
        """Notice a worker that lives and does nothing."""
        while not self.dead.done():
            await asyncio.sleep(_TICK_S)
            engine_s = self.heartbeat.engine_silent_s if self.heartbeat else 0.0
            silent_s = max(time.monotonic() - self._heard_s, engine_s)
            patience_s = self.silence_s if self.ready.done() else max(self.silence_s, _LOADING_S)
            if silent_s > patience_s:
                self._dead(ipc.Failed(f"the worker has not answered for {silent_s:.0f} s"))

    def _dead(self, failure: ipc.Failed) -> None:
        """Tell every session; the first reason given is the one that counts."""
        if not (self.dead.done() or self._stopping):
            _LOG.error("%s", failure.message)
            self.dead.set_result(failure)
            self.kill()
        # Of a worker that was stopped too: a connection waits for its session's end.
        for session in self._sessions.values():
            session.lost(failure.message)
        self._sessions.clear()
