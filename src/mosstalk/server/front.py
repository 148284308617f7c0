"""The process with the sockets: it starts the worker, serves, and ends in order."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mosstalk.errors import OptionError
from mosstalk.server.admission import ServeOptions, ServerContext
from mosstalk.server.app import BACKLOG, make_server
from mosstalk.server.engine_client import EngineClient
from mosstalk.server.front_process import FrontProcesses, front_processes
from mosstalk.server.ipc import (
    Failed,
    Loading,
    WorkerInfo,
    loop_factory,
    trim_memory_forever,
)
from mosstalk.server.logs import bounded_output
from mosstalk.server.store import MEMORY

_LOG = logging.getLogger("mosstalk.server")
_T = TypeVar("_T")
WORKER_DEAD = 70
"""Exit code when the worker is dead: a supervisor should start the server again."""
WRONG_INPUT = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 1.0
"""How long /health says that the worker is dead before the server ends."""
_UNREAD_MS = 30_000
"""How long a client's machine may take nothing off before the kernel drops the connection."""
_KERNEL_BYTES = 64 << 10
"""What the kernel may hold for a client, about: 1 s of sound. What waits beyond it is counted."""


@dataclass(frozen=True)
class Reports:
    """Callbacks that are told how far a server is; ``listening`` is given its URL."""

    listening: Callable[[str], None] = lambda _: None
    loading: Callable[[Loading], None] = lambda _: None
    ready: Callable[[WorkerInfo], None] = lambda _: None
    failed: Callable[[Failed], None] = lambda _: None


def serve(options: ServeOptions, reports: Reports | None = None) -> int:
    """Serve until a signal or until the worker dies; the exit code.

    Raises:
        OptionError: nothing can listen there.
        OutputError: no recordings can be kept there.
    """
    listener = listen(options.host, options.port)
    with bounded_output(), listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        options.log.install("front")
        return runner.run(Front(options, listener, reports or Reports()).run())


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; raise OptionError where none can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound_kernel(listener)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "something listens there already" if in_use else str(error)
        raise OptionError(
            f"cannot listen on {host} port {port} ({why}); choose with --host and --port"
        ) from None
    listener.listen(BACKLOG)
    return listener


def bound_kernel(connection: socket.socket) -> None:
    """Bound what the kernel holds for a client of this socket, and how long; see above."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that reads nothing holds no socket for ever
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)


class Front:
    """One run of a server on a listening socket."""

    def __init__(self, options: ServeOptions, listener: socket.socket, reports: Reports) -> None:
        self._options, self._listener, self._reports = options, listener, reports
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> int:
        """Serve; the exit code."""
        number = front_processes(self._options)
        if number and self._options.store and self._options.store.url == MEMORY:
            # A client that comes back may come to another process.
            _LOG.warning("several processes speak with clients: to resume, give them a --store")
            self._options = replace(self._options, store=None)
        context = ServerContext(self._options, self._reports.loading)
        beside = [each for each in (context.conversations, context.transcriber) if each]
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, self._signals.put_nowait, each)
        server = make_server(context)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        tidying = asyncio.create_task(trim_memory_forever())
        try:
            await context.engine.start()
            for part in beside:
                await part.start()
            if why := self._options.untranscribed:
                _LOG.warning("what users say is not written down: %s", why)
            if number:
                context.fronts = FrontProcesses(number, self._options, context)
                context.fronts.start()
            self._reports.listening(_url(self._listener, "https" if context.tls else "http"))
            code = await self._until_the_end(context)
        finally:
            tidying.cancel()
            server.should_exit = server.force_exit = True
            await serving
            if context.fronts:
                await context.fronts.stop()
            await context.engine.stop()
            for part in beside:
                await part.stop()
            if context.recorder:
                context.recorder.stop()
        return code

    async def _until_the_end(self, context: ServerContext) -> int:
        becoming = asyncio.create_task(self._become_ready(context))
        over = await _first(self._signals.get(), _failure_of(context.engine))
        becoming.cancel()
        if isinstance(over, Failed):
            return await self._last_words(over, context)
        _LOG.info("draining for up to %g s; a second signal ends at once", self._options.drain_s)
        again = await _first(
            self._signals.get(), context.drain(self._options.drain_s), _failure_of(context.engine)
        )
        if isinstance(again, Failed):
            return await self._last_words(again, context)
        if again is not None:
            context.engine.kill()
            return 128 + int(again)
        return 0

    async def _become_ready(self, context: ServerContext) -> None:
        info = await asyncio.shield(context.engine.ready)
        context.metrics.worker_up.set(1)
        _LOG.info("ready: %s on %s in %s", info.model, info.device, info.dtype)
        self._reports.ready(info)

    async def _last_words(self, failure: Failed, context: ServerContext) -> int:
        """Let clients hear of it, and whoever asks for /health."""
        context.metrics.worker_up.set(0)
        self._reports.failed(failure)
        if failure.by_input:
            return WRONG_INPUT
        await asyncio.gather(context.empty(5.0), asyncio.sleep(_LAST_WORDS_S))
        return WORKER_DEAD


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _failure_of(engine: EngineClient) -> Failed:
    return await asyncio.shield(engine.dead)


async def _first(*waits: Coroutine[Any, Any, _T]) -> _T:
    """What comes first; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    return done.pop().result()
