"""The process with the models: sessions on one side, the links to the fronts on the other."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from mosstalk.conversation import Conversation
from mosstalk.engine.async_engine import AsyncEngine
from mosstalk.errors import EngineStoppedError, MosstalkError
from mosstalk.runtime.busy import Busy, BusyPart, count_card_time, settle_card_time, spend, taken
from mosstalk.runtime.device import gc_frozen
from mosstalk.runtime.graphs import CAPTURES, expect_no_more
from mosstalk.server import ipc
from mosstalk.server.ipc import Channel, loop_factory, resident_bytes, trim_memory_forever
from mosstalk.server.loading import Loaded, load
from mosstalk.session.commands import Close, Command
from mosstalk.session.events import (
    AudioDelta,
    Closed,
    Event,
    ItemDone,
    ItemTruncated,
    KeptItem,
    TextDelta,
)
from mosstalk.session.session import Session

_LOG = logging.getLogger(__name__)
HEARTBEAT_S = 0.25


def run(end: socket.socket, carrier: socket.socket) -> int:
    """Do what comes over the link to the first front until it is closed; the exit code.

    Ends of links to more fronts come over ``carrier``.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(end, carrier))


async def _serve(end: socket.socket, carrier: socket.socket) -> int:
    channel = await Channel.over(end)
    messages = aiter(channel)
    options = await anext(messages, None)
    if not isinstance(options, ipc.WorkerOptions):
        return 0
    options.log.install("worker")
    worker = Worker(channel, options)
    asyncio.get_running_loop().add_reader(carrier, worker.take_link, carrier)
    working = asyncio.create_task(worker.run())
    reading = asyncio.create_task(worker.first.handle(messages))
    await asyncio.wait((working, reading), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        return working.result()
    working.cancel()
    await worker.stop()
    reading.result()
    return 0


class Link:
    """A front and the sessions that it has in this worker."""

    def __init__(self, channel: Channel, opened: Callable[[ipc.Open], Awaitable[Session]]):
        self.channel, self._opened = channel, opened
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each session, until its last event is sent."""
        self._sessions: dict[int, Session] = {}
        self._early: dict[int, list[Command]] = {}
        """What was told to sessions that are still being opened."""

    async def handle(self, messages: AsyncIterator[Any]) -> None:
        """Do what the front says until it says ``Stop`` or is gone."""
        async for message in messages:
            if isinstance(message, ipc.Stop):
                return
            if isinstance(message, ipc.SessionCommand):
                self._tell(message.number, message.command)
            elif isinstance(message, ipc.Open):
                self._early[message.number] = []
                task = asyncio.create_task(self._converse(message))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    def close(self) -> None:
        """The front is gone: close its sessions."""
        for number in (*self._sessions, *self._early):
            self._tell(number, Close())
        self.channel.close()

    def done(self) -> dict[int, int]:
        """How many commands each session has carried out or refused."""
        return {number: session.commands_done for number, session in self._sessions.items()}

    async def _converse(self, asked: ipc.Open) -> None:
        """One session, from its opening to its last event."""
        number = asked.number
        try:
            session = await self._opened(asked)
        except MosstalkError as error:
            self._early.pop(number)
            await self.channel.send(ipc.Refused.of(number, error))
            return
        self._sessions[number] = session
        for command in self._early.pop(number):
            session.do(command)
        told = dict[str, int]()
        """By item, the rows of it that the front has while it is made."""
        async for event in session:
            rows, kept = None, _kept(session, event, told) if asked.keep else None
            if isinstance(event, Closed):
                self._sessions.pop(number)
                rows = session.conversation_rows() if asked.rows else None
            await self.channel.send(ipc.SessionEvent(number, event, rows, kept))

    def _tell(self, number: int, command: Command) -> None:
        if number in self._sessions:
            self._sessions[number].do(command)
        elif number in self._early:
            self._early[number].append(command)


def _kept(session: Session, event: Event, told: dict[str, int]) -> KeptItem | None:
    """What has changed of the item that an event is about, if it is of the conversation."""
    match event:
        case ItemDone(in_conversation=True):
            told.pop(event.item.item_id, None)
            return session.kept(event.item.item_id)
        case ItemTruncated():
            return session.kept(event.item_id)
        case AudioDelta() | TextDelta(spoken=False):
            kept = session.kept(event.item_id, told.get(event.item_id, 0))
            if kept:
                told[event.item_id] = kept.begins + len(kept.rows)
            return kept
    return None


class Worker:
    """Loads, says when it is ready, and lends its sessions to the fronts.

    ``first`` is the link to the front that started it, which alone hears how things are.
    """

    def __init__(self, channel: Channel, options: ipc.WorkerOptions) -> None:
        self.first = Link(channel, self._open)
        self._links = {self.first}
        self._options = options
        self._loaded: Loaded | None = None
        self._ready: ipc.WorkerInfo | None = None
        self._probe = _EngineProbe()
        self._loop_cpu_s = 0.0
        self._begun_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Load, warm up, and watch the engine until it ends; the exit code."""
        beside = (asyncio.create_task(self._beat()), asyncio.create_task(trim_memory_forever()))
        try:
            return await self._work()
        except MosstalkError as error:
            await self._tell_all(ipc.Failed(str(error), by_input=True))
        except Exception as error:
            _LOG.exception("the worker failed")
            await self._tell_all(ipc.Failed(f"{type(error).__name__}: {error}"))
        finally:
            for task in beside:
                task.cancel()
        return 1

    def take_link(self, carrier: socket.socket) -> None:
        """Another front is there: serve it until it is gone."""
        end, _ = ipc.taken_over(carrier)
        task = asyncio.create_task(self._serve_link(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Close every session and end the threads."""
        if self._loaded:
            await self._loaded.host.stop()
        await self._sessions_over()
        for link in self._links:
            link.channel.close()

    async def _serve_link(self, end: socket.socket) -> None:
        link = Link(await Channel.over(end), self._open)
        self._links.add(link)
        if self._ready:
            link.channel.post(self._ready)
        try:
            await link.handle(aiter(link.channel))
        finally:
            self._links.discard(link)
            link.close()

    async def _sessions_over(self) -> None:
        """Wait until every session has ended and its last event is sent."""
        tasks = [task for link in self._links for task in link.tasks]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_all(self, message: ipc.ToFront) -> None:
        for link in list(self._links):
            await link.channel.send(message)

    async def _work(self) -> int:
        loop = asyncio.get_running_loop()

        def tell(what: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self.first.channel.post, ipc.Loading(what, done, total))

        loaded = await asyncio.to_thread(load, self._options, tell)
        host = loaded.host
        await host.start()
        self._loaded = loaded
        begun_s = time.monotonic()
        await host.warm_up()
        count_card_time()
        loaded.steps.taken_s()
        self._spent()
        expect_no_more()
        _LOG.info("ready after %.1f s: %s", time.monotonic() - self._begun_s, CAPTURES)
        self._ready = loaded.info(time.monotonic() - begun_s)
        # The last heartbeat may have counted the warm-up's session: a ready worker has none.
        await self.first.channel.send(self._heartbeat(loaded))
        await self._tell_all(self._ready)
        with gc_frozen():
            await asyncio.shield(asyncio.wrap_future(host.engine.ended))
        failure = host.engine.failure
        _LOG.error("the engine has ended", exc_info=failure)
        await self._sessions_over()
        await self._tell_all(ipc.Failed(f"the engine has ended: {type(failure).__name__}"))
        return 1

    async def _open(self, asked: ipc.Open) -> Session:
        if not self._loaded:
            raise EngineStoppedError("the models are still being loaded")
        try:
            return await self._loaded.host.open(asked.settings, asked.items)
        except MosstalkError:
            raise
        except Exception as error:  # a fault of this one: the others go on
            _LOG.exception("a session could not be opened")
            raise EngineStoppedError(f"{type(error).__name__} at the opening") from error

    async def _beat(self) -> None:
        """Say that this loop and the engine's thread live, and how things are."""
        while True:
            loaded = self._loaded
            if loaded:
                self._probe.look(loaded.host.engine)
            await self.first.channel.send(self._heartbeat(loaded))
            for link in self._links - {self.first}:
                link.channel.post(ipc.Heartbeat(resident_bytes(), done=link.done()))
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self, loaded: Loaded | None) -> ipc.Heartbeat:
        if loaded is None:
            return ipc.Heartbeat(resident_bytes())
        return ipc.Heartbeat(
            resident_bytes(),
            engine_silent_s=self._probe.silent_s,
            **vars(loaded.host.figures),
            first_audio_ms=loaded.host.first_audio_ms,
            steps_s=loaded.steps.taken_s(),
            busy=self._spent(),
            done=self.first.done(),
        )

    def _spent(self) -> dict[BusyPart, Busy]:
        """What each part, this loop's thread among them, has spent since this was last asked."""
        settle_card_time()
        cpu_s = time.thread_time() - self._loop_cpu_s
        self._loop_cpu_s += cpu_s
        spend(BusyPart.SESSION, cpu_s, cpu_s)
        return taken()


class _EngineProbe:
    """Asks the engine's thread for nothing, to see how long it takes to be done."""

    def __init__(self) -> None:
        self._asked: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    @property
    def silent_s(self) -> float:
        """For how long an answer has been missing."""
        if self._asked is None or self._asked.done():
            return 0.0
        return time.monotonic() - self._asked_s

    def look(self, engine: AsyncEngine) -> None:
        """Ask, unless an answer is still missing."""
        if self._asked is None or self._asked.done():
            self._asked_s = time.monotonic()
            self._asked = asyncio.create_task(self._ask(engine))

    async def _ask(self, engine: AsyncEngine) -> None:
        with contextlib.suppress(EngineStoppedError):  # whoever watches the engine will tell
            await engine.close(engine.open(Conversation(engine.core.ids, lambda _: [])))
