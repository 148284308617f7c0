"""Front processes: more processes with sockets, for crowds that keep one busy.

The first front listens, refuses whom it must and answers HTTP. A WebSocket that it lets in it hands
over, before the handshake is answered, to the front process with the fewest: that one speaks with
the client to the end, over a link of its own to the worker. Where there is none, the first front
does it all. A front process that ends takes its own conversations along, and another is started.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from prometheus_client import Metric

from mosstalk.server import ipc
from mosstalk.server.admission import ServeOptions, ServerContext
from mosstalk.server.app import make_server
from mosstalk.server.engine_client import EngineClient
from mosstalk.server.ipc import Channel, loop_factory, start_child, trim_memory_forever
from mosstalk.server.websocket import WebSocketProtocol, take_over

_LOG = logging.getLogger("mosstalk.server")
SESSIONS = 96
"""Sessions for which one process with sockets will do: hands-free they send 4,800 frames of 20 ms
a second, of some 0.1 ms each."""
_PROCESSORS = 4
"""For one of so many processors there is at most one more."""
_LOOK_S = 1.0
_STARTING_S = 120.0
"""How long it may take to start, on a machine that is busy loading models."""
_ENDING_S = 5.0


def front_processes(options: ServeOptions) -> int:
    """How many there are beside the first front, unless it was said."""
    if options.front_processes is not None:
        return options.front_processes
    sessions = options.worker.sessions
    # Each would start a transcriber of its own, which takes more than the sockets do.
    if sessions <= SESSIONS or options.transcriber or not hasattr(socket, "send_fds"):
        return 0
    return min(math.ceil(sessions / SESSIONS), (os.cpu_count() or 1) // _PROCESSORS)


# From the first front, and ``ipc.Stop``.


@dataclass(frozen=True)
class Begin:
    """Be the front of this name in the log."""

    name: str
    options: ServeOptions


@dataclass(frozen=True)
class Drain:
    """Send everybody away within so many seconds, once running replies have finished."""

    most_s: float


@dataclass(frozen=True)
class Count:
    """Say what has been counted: answered with ``Counted``."""


# To it.


@dataclass(frozen=True)
class Counted:
    """What has been counted so far, and how many seconds of sound wait for clients."""

    families: list[Metric]
    unsent_s: float

    @property
    def open_sessions(self) -> int:
        """How many sessions have begun here and not ended."""
        samples = [sample for family in self.families for sample in family.samples]
        opened, closed = (
            sum(each.value for each in samples if each.name == f"mosstalk_sessions_{what}_total")
            for what in ("opened", "closed")
        )
        return int(opened - closed)


@dataclass(frozen=True)
class Left:
    """The connection that was handed over under this number is over."""

    number: int


@dataclass
class FrontProcess:
    """The first front's end of one: starts it and hands connections over.

    ``connections`` are those that it has, each with its client's key.
    """

    name: str
    options: ServeOptions
    on_left: Callable[[], None]
    connections: dict[int, str] = field(default_factory=dict)
    counted: Counted | None = None
    """What it has counted, as of when it last said so; once it has, it takes connections."""
    _numbers: "count[int]" = field(default_factory=count)
    _process: "subprocess.Popen[bytes] | None" = None
    _channel: Channel | None = None
    _carrier: socket.socket | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, engine: EngineClient) -> None:
        """From its start to its end.

        Raises:
            OSError: the worker is gone.
        """
        self._carrier, carried = ipc.socket_carrier()
        with self._carrier:
            with carried, engine.new_link() as link:
                self._process, end = start_child(__name__, link, carried)
            self._channel = await Channel.over(end)
            self._channel.post(Begin(self.name, self.options))
            looking = asyncio.create_task(self._look())
            try:
                async for message in self._channel:
                    self._on_message(message)
            finally:
                looking.cancel()
                self._end()
                await asyncio.to_thread(self._process.wait)

    def take(self, websocket: WebSocketProtocol, key: str) -> bool:
        """Hand a connection over; whether the process has it."""
        assert self._carrier
        number = next(self._numbers)
        try:
            websocket.give_away(self._carrier, number)
        except OSError:
            return False
        self.connections[number] = key
        return True

    def post(self, message: Drain | ipc.Stop) -> None:
        """Tell it something."""
        if self._channel:
            self._channel.post(message)

    async def count(self, most_s: float) -> bool:
        """Have ``counted`` brought up to date; whether it has answered within the time."""
        if self._channel is None:
            return False
        self._answered.clear()
        self._channel.post(Count())
        try:
            return await asyncio.wait_for(self._answered.wait(), most_s)
        except TimeoutError:
            return False

    def kill(self) -> None:
        """End it at once."""
        if self._process:
            self._process.kill()

    async def _look(self) -> None:
        """Kill it when it lives and does nothing."""
        patience_s = max(self.options.watchdog_s, _STARTING_S)
        while await self.count(patience_s):
            patience_s = self.options.watchdog_s
            await asyncio.sleep(_LOOK_S)
        _LOG.error("%s has not answered for %.0f s", self.name, patience_s)
        self.kill()

    def _on_message(self, message: Counted | Left) -> None:
        if isinstance(message, Counted):
            self.counted = message
            self._answered.set()
        else:
            self.connections.pop(message.number, None)
            self.on_left()

    def _end(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None
        self.kill()
        self.connections.clear()
        self.on_left()


class FrontProcesses:
    """All of them; one that ends has a successor, unless it never got as far as to answer."""

    def __init__(self, number: int, options: ServeOptions, context: ServerContext) -> None:
        self._context = context
        # The first front has counted keys: whoever gets there has been let in.
        limits = replace(options.limits, per_key=None, requests_per_minute=None)
        options = replace(options, front_processes=0, limits=limits, secret=context.secret)
        self._names = [f"front-{1 + index}" for index in range(number)]
        self._make = partial(FrontProcess, options=options, on_left=context.leave)
        self._fronts: dict[str, FrontProcess] = {}
        self._ended: list[Counted] = []
        """What those had counted that are no more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Start them; each takes connections once it is there."""
        self._tasks = [asyncio.create_task(self._keep(name)) for name in self._names]

    async def stop(self) -> None:
        """End them, in order if they still can."""
        self._stopping = True
        for front in self._fronts.values():
            front.post(ipc.Stop())
        await asyncio.wait(self._tasks, timeout=_ENDING_S)
        for front in self._fronts.values():
            front.kill()
        await asyncio.gather(*self._tasks)

    @property
    def client_keys(self) -> list[str]:
        """Of every connection that they have its client's key."""
        return [key for front in self._fronts.values() for key in front.connections.values()]

    def take(self, websocket: WebSocketProtocol, key: str) -> bool:
        """Hand a connection over to the one with the fewest; whether one has it."""
        ready = [front for front in self._fronts.values() if front.counted]
        ready.sort(key=lambda front: len(front.connections))
        return any(front.take(websocket, key) for front in ready)

    def drain(self, most_s: float) -> None:
        """See ``ServerContext.drain``."""
        for front in self._fronts.values():
            front.post(Drain(most_s))

    async def counted(self) -> list[Counted]:
        """What each has counted, also those that are no more."""
        fronts = list(self._fronts.values())
        await asyncio.gather(*(front.count(_LOOK_S) for front in fronts if front.counted))
        now = [front.counted for front in self._fronts.values() if front.counted]
        self._context.metrics.front_processes.set(len(now))
        return self._ended + now

    async def _keep(self, name: str) -> None:
        while not self._stopping:
            front = self._fronts[name] = self._make(name)
            with contextlib.suppress(OSError):  # the worker is gone, and the server soon
                await front.run(self._context.engine)
            del self._fronts[name]
            if not self._stopping:
                _LOG.error("%s has ended", name)
            if front.counted is None:
                return
            self._ended.append(replace(front.counted, unsent_s=0.0))
            self._context.metrics.closes.labels("front").inc(front.counted.open_sessions)


def run(control: socket.socket, link: socket.socket, carrier: socket.socket) -> int:
    """One of them: what the first front says over ``control`` until it is gone; the exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(control, link, carrier))


async def _serve(control: socket.socket, link: socket.socket, carrier: socket.socket) -> int:
    channel = await Channel.over(control)
    messages = aiter(channel)
    begin = await anext(messages, None)
    if not isinstance(begin, Begin):
        return 0
    begin.options.log.install(begin.name)
    context = ServerContext(begin.options)
    await context.engine.attach(link)
    beside = [each for each in (context.conversations, context.transcriber) if each]
    for part in beside:
        await part.start()
    front = _Front(channel, context)
    asyncio.get_running_loop().add_reader(carrier, front.take, carrier)
    await front.handle(messages)
    await context.engine.stop()
    for part in beside:
        await part.stop()
    if context.recorder:
        context.recorder.stop()
    return 0


class _Front:
    """Speaks with the clients that it is given."""

    def __init__(self, channel: Channel, context: ServerContext) -> None:
        self._channel, self._context = channel, context
        self._server = make_server(context)
        self._tasks = set[asyncio.Task[None]]()
        self._begin(trim_memory_forever())

    async def handle(self, messages: AsyncIterator[Any]) -> None:
        """Do what the first front says until it says ``Stop`` or is gone."""
        context = self._context
        async for message in messages:
            if isinstance(message, ipc.Stop):
                return
            if isinstance(message, Drain):
                self._begin(context.drain(message.most_s))
            elif isinstance(message, Count):
                self._channel.post(Counted(context.metrics.totals(), context.unsent_s))

    def take(self, carrier: socket.socket) -> None:
        """A connection is handed over."""
        self._begin(self._talk(*ipc.taken_over(carrier)))

    async def _talk(self, connection: socket.socket, note: bytes) -> None:
        # The first front may have heard a moment earlier that the worker is ready.
        engine = self._context.engine
        await asyncio.wait((engine.ready, engine.dead), return_when=asyncio.FIRST_COMPLETED)
        await take_over(connection, note, self._server, self._lost)

    def _lost(self, number: int) -> None:
        self._channel.post(Left(number))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
