"""Admission: who is let in, the refusals that others get, and what a front's connections share."""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError
from mosstalk.server.call_network import CallNetwork
from mosstalk.server.capacity import KeyQuotas
from mosstalk.server.captions import Transcriber
from mosstalk.server.certificate import Tls
from mosstalk.server.conversations import Conversations, key_of
from mosstalk.server.cors import Hosts, Origins, host_name
from mosstalk.server.engine_client import EngineClient, WorkerState
from mosstalk.server.ipc import Loading, WorkerOptions
from mosstalk.server.keys import EPHEMERAL, EphemeralKeys, Grant, Keys, TwilioAccount, shown_key
from mosstalk.server.limits import Limits, Places
from mosstalk.server.logs import LogLimiter, LogStyle
from mosstalk.server.observers import Metrics
from mosstalk.server.realtime.validation import WireError
from mosstalk.server.recording import Recorder
from mosstalk.server.store import StoreError, StoreOptions
from mosstalk.session.commands import ReplyMode, SessionSettings
from mosstalk.session.events import new_id

if TYPE_CHECKING:
    from mosstalk.server.connection import Client
    from mosstalk.server.front_process import FrontProcesses

SUBPROTOCOL = "realtime"
"""What a browser offers, and what it is answered."""


_LOG = logging.getLogger("mosstalk.server")
_TRY_AGAIN_LATER, _WRONG = 1013, 1008
_BETA_SUBPROTOCOL = "openai-beta.realtime-v1"
_BETA_CLOSES = 4000
"""As at OpenAI, which has retired its beta as well."""
LONGEST_NAMED = 200
"""Characters of an origin, a name or a path that are told back."""


@dataclass(frozen=True)
class Refusal:
    """Why somebody is not let in, or a request not served.

    ``retry_after_s`` None: coming back is of no use. ``param``: the field of the request that is
    wrong.
    """

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str | None = None

    @classmethod
    def of(cls, error: MosstalkError) -> "Refusal":
        """What an error in a request, or at the opening of a session, means to who asked."""
        if isinstance(error, RefusedError):
            return error.refusal
        if isinstance(error, EngineFullError):
            return cls(503, "full", str(error), error.retry_after_s)
        if isinstance(error, EngineStoppedError):
            return cls(503, "dead", str(error), 10.0)
        if isinstance(error, StoreError):
            return _STORE_AWAY
        if isinstance(error, WireError):
            return cls(400, error.code, str(error), param=error.param)
        return cls(400, "settings", str(error))

    def error(self) -> dict[str, object]:
        """The error in the API's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, object] = {"type": kind, "code": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        return error | {"param": self.param}

    def answer(self) -> JSONResponse:
        """The refusal as an HTTP response."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return JSONResponse({"error": self.error()}, self.status, headers)


class RefusedError(MosstalkError):
    """A request that is answered with ``refusal``; once sound was sent, it ends there."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


LOADING = Refusal(503, "loading", "the models are still being loaded", 5.0)
DRAINING = Refusal(503, "draining", "the server is about to end", 5.0)
DEAD = Refusal(503, "dead", "the engine has ended; the server is about to", 10.0)
_BEARER = {"WWW-Authenticate": "Bearer"}
NOT_RESUMED = Refusal(
    400,
    "invalid_resume_token",
    "no conversation can be resumed with this token: it is unknown, was used, its time is over, or "
    "it belongs to another key; begin anew: connect without 'resume'",
    param="resume",
)
_STORE_AWAY = Refusal(
    503,
    "store",
    "the conversation cannot be fetched now; come again, or connect without 'resume' to begin anew",
    2.0,
    param="resume",
)
NO_KEY = Refusal(401, "key", "show an API key: Authorization: Bearer KEY", headers=_BEARER)
_EXPIRED = Refusal(
    401,
    "key",
    "this key has expired, or this server has not made it since its start: ask for another",
    headers=_BEARER,
)


_BETA = Refusal(
    400,
    "beta_api_shape_disabled",
    "the beta of the Realtime API is spoken no more; connect without OpenAI-Beta: realtime=v1",
)


def asks_for_beta(socket: WebSocket) -> bool:
    """Whether a client wants the protocol's beta, by its header or as a page by a subprotocol."""
    beta = "realtime=v1" in socket.headers.get("openai-beta", "")
    return beta or _BETA_SUBPROTOCOL in socket.scope["subprotocols"]


def _printable(text: str) -> str:
    """What a stranger has sent, such that it steers no terminal and fills no log."""
    signs = (sign if sign.isascii() and sign.isprintable() else "?" for sign in text)
    return "".join(islice(signs, LONGEST_NAMED))


def subprotocol(socket: WebSocket) -> str | None:
    """The subprotocol of a WebSocket's answer: ``realtime`` where the client has offered it."""
    return SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None


_SCRIPTS = {ReplyMode.AUDIO: "speech:75", ReplyMode.TEXT: "text:40"}
LEFT_S = 5.0
"""How long connections may take to say goodbye."""


@dataclass(frozen=True)
class ServeOptions:
    """All that is chosen for a server; ``name`` None is what the worker calls the model.

    ``transcriber`` None writes nothing down, for the log because of ``untranscribed``. ``store``
    None: conversations end with their connection. ``twilio``
    None takes no calls. ``secret``: what ephemeral keys are signed with, which its
    processes share; b"" is a new one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    limits: Limits = field(default_factory=Limits)
    defaults: SessionSettings = field(default_factory=SessionSettings)
    keys: tuple[str, ...] = ()
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    drain_s: float = 30.0
    watchdog_s: float = 30.0
    record: Path | None = None
    record_days: float | None = None
    transcriber: str | None = None
    untranscribed: str = ""
    front_processes: int | None = None
    tls: Tls | None = None
    store: StoreOptions | None = None
    twilio: TwilioAccount | None = None
    call_network: CallNetwork = field(default_factory=CallNetwork)
    secret: bytes = b""
    log: LogStyle = field(default_factory=LogStyle)


class ServerContext:
    """What all connections of a front share, and whom it lets in.

    ``fronts``: processes that it hands connections over to. ``more_routes``: what is answered to
    GET beside a server's own paths.
    """

    fronts: "FrontProcesses | None" = None
    more_routes: Mapping[str, Callable[..., Awaitable[Response]]] = {}

    def __init__(
        self, options: ServeOptions, on_loading: Callable[[Loading], None] = lambda _: None
    ) -> None:
        """Make what the options ask for, not started; to be called in the loop that serves.

        Raises:
            OptionError: a key is empty.
            OutputError: no recordings can be kept there.
        """
        self.limits, self._defaults, self._name = options.limits, options.defaults, options.name
        self.metrics = metrics = Metrics()
        metrics.sessions_limit.set(options.worker.sessions)
        self.engine = EngineClient(
            options.worker, options.watchdog_s, metrics.on_heartbeat, on_loading
        )
        self.secret = options.secret or token_bytes(32)
        self.keys, self.ephemeral = Keys(options.keys), EphemeralKeys(self.secret)
        self.origins, self.twilio = Origins(options.origins), options.twilio
        self.call_network = options.call_network
        self.tls = options.tls.context() if options.tls else None
        self.quotas = KeyQuotas(options.limits, options.worker.sessions, len(options.keys))
        self._hosts = Hosts(options.hosts, checked=not options.keys)
        self.recorder = (
            Recorder(options.record, metrics, options.record_days) if options.record else None
        )
        self.conversations = Conversations(options.store, metrics) if options.store else None
        self.transcriber: Transcriber | None = None
        if options.transcriber:
            self.transcriber = Transcriber(options.transcriber, options.log)
        self.draining = False
        self.connections: set[Client] = set()
        self.long_work = asyncio.Lock()
        """Held by who has a thread spell a text or decode a piece of a file: one at a time, as
        sockets need the processor."""
        self.uploads = Places(options.limits.uploads)
        self.transcribing = asyncio.Lock()
        """Held by who has a piece of a file written down by the transcriber, which talks need."""
        self._opening = Counter[str]()
        """By key, how many were let in and wait for their session."""
        self._left = asyncio.Event()
        self._logged_refusals = LogLimiter()

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        if self._name is None and self.engine.ready.done():
            return self.engine.ready.result().model
        return self._name or "mosstalk"

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
            return replace(self._defaults, turn_detection=None)
        return self._defaults

    def fitted(self, settings: SessionSettings) -> SessionSettings:
        """Settings as this model needs them: random weights never end a reply by themselves."""
        info = self.engine.ready.result()
        if info.weights_kind != "synthetic" or self._defaults.script is not None:
            return settings
        return replace(settings, script=_SCRIPTS[settings.reply])

    @property
    def client_keys(self) -> list[str]:
        """Of every connection its client's key, also of those that wait for their session."""
        elsewhere = self.fronts.client_keys if self.fronts else []
        return [*self._opening.elements(), *(each.key for each in self.connections), *elsewhere]

    @contextmanager
    def opening(self, key: str) -> Iterator[None]:
        """Count a connection of a key while it waits for its session."""
        self._opening[key] += 1
        try:
            yield
        finally:
            self._opening[key] -= 1
            self._left.set()

    def leave(self, connection: "Client | None" = None) -> None:
        """A connection is over; None: one that another process has."""
        if connection:
            self.connections.discard(connection)
        self._left.set()

    @property
    def unsent_s(self) -> float:
        """Seconds of sound that wait for clients of this process."""
        return sum(each.unsent_s for each in self.connections)

    async def empty(self, most_s: float) -> bool:
        """Wait until all connections are over; whether they are."""
        try:
            async with asyncio.timeout(most_s):
                while self.client_keys:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, most_s: float) -> None:
        """Let nobody in, let running replies finish for so long, then send everybody away."""
        self.draining = True
        self.metrics.draining.set(1)
        if self.fronts:
            self.fronts.drain(most_s)
        for connection in list(self.connections):
            connection.drain()
        if not await self.empty(most_s):
            for connection in list(self.connections):
                connection.send_away()
            await self.empty(LEFT_S)

    # Who is let in, and how others are told.

    def refuse_name(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether the request came by a name that is not this server's."""
        if self._hosts.admits(headers):
            return None
        name = _printable(host_name(headers["host"])) or "NAME"
        return Refusal(
            403,
            "host",
            f"this server does not answer under the name {name}; its owner may start it with "
            f"--allowed-host {name}, or with keys",
        )

    def refuse_origin(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether the request comes from a page that may not ask."""
        if self.origins.admits(headers):
            return None
        origin = _printable(headers["origin"])
        return Refusal(
            403,
            "origin",
            f"pages of {origin} may not connect; this server's owner may start it with "
            f"--allow-origin {origin}",
        )

    def granted(self, asked: HTTPConnection) -> Grant | Refusal:
        """What a client may by the key that it shows, or why nothing."""
        headers, protocols = asked.headers, asked.scope.get("subprotocols", ())
        if refused := self.refuse_origin(headers):
            return refused
        shown = shown_key(headers, protocols)
        if shown and shown.startswith(EPHEMERAL):
            return self.ephemeral.grant_of(shown, time.time()) or _EXPIRED
        name = self.keys.name_of(headers, protocols)
        return Grant(name) if name else NO_KEY

    def answer_to_stranger(self, asked: HTTPConnection) -> Response | None:
        """What is answered to who shows none of this server's keys; None: it may ask."""
        if self.keys.name_of(asked.headers) is not None:
            return None
        self.note_refusal(NO_KEY)
        return NO_KEY.answer()

    def conversation_key(self, token: str, grant: Grant) -> str:
        """Under what the conversation of a token is kept for the key that was shown."""
        owner = self.keys.owner_of(grant.name)
        return key_of(token, owner, self.engine.ready.result().model)

    def refuse_now(self, key: str) -> Refusal | None:
        """Whether nobody is let in now, or nobody more with this key."""
        if self.unavailable:
            return self.unavailable
        if message := self.quotas.refuse_connection(key, self.client_keys):
            return Refusal(429, "per_key", message, 5.0)
        return None

    def refuse_request(self, key: str) -> Refusal | None:
        """The same for a request that has just come, which counts against its key's quota."""
        return self.refuse_now(key) or self.refuse_quota(key)

    def refuse_quota(self, key: str) -> Refusal | None:
        """Whether a key has asked too often; if not, this counts as once more."""
        if not (wait_s := self.quotas.wait_s(key, time.monotonic())):
            return None
        most = self.limits.requests_per_minute
        message = f"this key has asked {most} times within a minute, which is all it may"
        return Refusal(429, "rate_limit_exceeded", message, math.ceil(wait_s))

    async def refuse(self, socket: WebSocket, refusal: Refusal) -> None:
        """Tell who asked: over HTTP before the connection; pages cannot see that: within it."""
        self.note_refusal(refusal)
        # What a page can do about it: come back, or ask without what cannot be served.
        helps = refusal.retry_after_s is not None or refusal.param is not None
        if "origin" not in socket.headers or not helps:
            await socket.send_denial_response(refusal.answer())
            return
        await socket.accept(subprotocol(socket))
        error = refusal.error() | {"event_id": None}
        event = {"type": "error", "event_id": new_id("event"), "error": error}
        await socket.send_text(json.dumps(event))
        code = _WRONG if refusal.retry_after_s is None else _TRY_AGAIN_LATER
        await socket.close(code, refusal.reason)

    async def refuse_beta(self, socket: WebSocket) -> None:
        """Let a client of the beta in and close its connection with the reason, which it sees."""
        self.note_refusal(_BETA)
        await socket.accept(subprotocol(socket))
        await socket.close(_BETA_CLOSES, f"{_BETA.reason}: {_BETA.message}")

    def note_refusal(self, refusal: Refusal) -> None:
        """Count a refusal and log it, as often as anybody wants to read it.

        What an option of the server would change is a warning, and names the option.
        """
        self.metrics.refusals.labels(refusal.reason).inc()
        left_out = self._logged_refusals.take(refusal.reason, time.monotonic())
        if left_out is None:
            return
        fields = {"reason": refusal.reason, "status": refusal.status}
        if left_out:
            _LOG.info("%d more were refused for this reason", left_out, extra=fields)
        if refusal.status == 403:
            _LOG.warning("connection refused: %s", refusal.message, extra=fields)
        else:
            _LOG.info("connection refused", extra=fields)
