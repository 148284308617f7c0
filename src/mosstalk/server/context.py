"""What all connections of a front share."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mosstalk.server.admission import DEAD, DRAINING, LOADING, Hosts, Keys, Origins, Refusal
from mosstalk.server.captions import Transcriber
from mosstalk.server.engine_client import EngineClient, WorkerState
from mosstalk.server.limits import Limits
from mosstalk.server.logs import LogLimiter
from mosstalk.server.observers import Metrics
from mosstalk.server.recording import Recorder
from mosstalk.session.settings import ReplyMode, SessionSettings

if TYPE_CHECKING:
    from mosstalk.server.connection import Connection

_SCRIPTS = {ReplyMode.AUDIO: "speech:75", ReplyMode.TEXT: "text:40"}
LEFT_S = 5.0
"""How long connections may take to say goodbye."""


@dataclass
class ServerContext:
    """``name`` is the served model's; None is what the worker calls it."""

    engine: EngineClient
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=lambda: Keys(()))
    origins: Origins = field(default_factory=Origins)
    hosts: Hosts = field(default_factory=Hosts)
    defaults: SessionSettings = field(default_factory=SessionSettings)
    name: str | None = None
    recorder: Recorder | None = None
    transcriber: Transcriber | None = None
    draining: bool = False
    refusals: LogLimiter = field(default_factory=LogLimiter)
    """Which refusals are logged."""
    connections: set["Connection"] = field(default_factory=set)
    _opening: Counter[str] = field(default_factory=Counter)
    """By key, how many were let in and wait for their session."""
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        if self.name is None and self.engine.ready.done():
            return self.engine.ready.result().model
        return self.name or "mosstalk"

    @property
    def unavailable(self) -> Refusal | None:
        """Why nobody is let in now; None if somebody is."""
        if self.engine.state is WorkerState.DEAD:
            return DEAD
        if self.draining:
            return DRAINING
        return LOADING if self.engine.state is WorkerState.LOADING else None

    @property
    def session_defaults(self) -> SessionSettings:
        """What holds for a session until its client says otherwise."""
        if self.engine.ready.result().detector is None:
            return replace(self.defaults, turn_detection=None)
        return self.defaults

    def fitted(self, settings: SessionSettings) -> SessionSettings:
        """Settings as this model needs them: random weights never end a reply by themselves."""
        info = self.engine.ready.result()
        if info.weights_kind != "synthetic" or self.defaults.script is not None:
            return settings
        return replace(settings, script=_SCRIPTS[settings.reply])

    def connections_of(self, key: str) -> int:
        """How many connections a key has."""
        return self._opening[key] + sum(each.key == key for each in self.connections)

    @contextmanager
    def opening(self, key: str) -> Iterator[None]:
        """Count a connection of a key while it waits for its session."""
        self._opening[key] += 1
        try:
            yield
        finally:
            self._opening[key] -= 1
            self._left.set()

    def leave(self, connection: "Connection") -> None:
        """A connection is over."""
        self.connections.discard(connection)
        self._left.set()

    async def empty(self, most_s: float) -> bool:
        """Wait until all connections are over; whether they are."""
        try:
            async with asyncio.timeout(most_s):
                while self.connections or self._opening.total():
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, most_s: float) -> None:
        """Let nobody in, let running replies finish for so long, then send everybody away."""
        self.draining = True
        self.metrics.draining.set(1)
        for connection in list(self.connections):
            connection.drain()
        if not await self.empty(most_s):
            for connection in list(self.connections):
                connection.send_away()
            await self.empty(LEFT_S)
