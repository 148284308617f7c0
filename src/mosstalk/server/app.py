"""Routes: Realtime and calls by WebSocket, speech, chats, models, health, metrics, the page."""

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mosstalk.server import admission, cors
from mosstalk.server.admission import Refusal, RefusedError, ServerContext
from mosstalk.server.capacity import capacity
from mosstalk.server.chat import ChatReply, SpokenReplies
from mosstalk.server.client_secrets import client_secret
from mosstalk.server.connection import opened
from mosstalk.server.engine_client import WorkerState
from mosstalk.server.keys import Grant
from mosstalk.server.limits import OTHER_FILES, ConnectionLimiter, Limits, raise_file_limit
from mosstalk.server.observers import CONTENT_TYPE
from mosstalk.server.realtime.protocol import RealtimeProtocol
from mosstalk.server.realtime.session_config import ServedModel
from mosstalk.server.realtime.validation import WireError
from mosstalk.server.resume import end_forerunner, resume_key
from mosstalk.server.speech import SpeechReply, speech_request
from mosstalk.server.store import StoreError
from mosstalk.server.telephony import TWILIO, TwilioProtocol, granted
from mosstalk.server.tls import TlsProtocol
from mosstalk.server.transcription import TranscriptionReply
from mosstalk.server.uploads import read_body
from mosstalk.server.webrtc import Calls
from mosstalk.server.websocket import WEBSOCKET, HttpProtocol, ServerConfig, WebSocketProtocol

VERSION = version("mosstalk")
BACKLOG = 128
"""Newcomers that may wait to be accepted."""
FOLDER = Path(__file__).parent / "web"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}
_HOST = re.compile(r"[\w.:\[\]-]+")


REALTIME = "/v1/realtime"
SPEECH = "/v1/audio/speech"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
CHAT = "/v1/chat/completions"
CAPACITY = "/v1/capacity"
CONVERSATION = f"{REALTIME}/conversation"
CLIENT_SECRETS = f"{REALTIME}/client_secrets"
CALLS = f"{REALTIME}/calls"
SERVED = (
    f"served are WebSockets at {REALTIME} and {TWILIO}, POST {SPEECH}, POST {TRANSCRIPTIONS}, "
    f"POST {CHAT}, POST {CLIENT_SECRETS}, POST {CALLS} for WebRTC, "
    f"DELETE {CONVERSATION}, and GET /v1/models, /v1/models/NAME, {CAPACITY}, /health, /ready, "
    "/metrics and /, a page to talk with"
)
"""What is said to whoever asks for something else."""
_METHODS = ("GET", "HEAD")
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")


def make_app(context: ServerContext) -> ASGIApp:
    """The application of one server."""
    routes, pages = Routes(context), PageFiles()
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={404: _unknown_url, 405: _unknown_method, 500: _fault},
    )
    app.add_api_websocket_route(REALTIME, routes.realtime)
    app.add_api_websocket_route(TWILIO, routes.call)
    app.add_api_websocket_route("/{name:path}", routes.no_socket)
    answers: dict[str, Callable[..., Awaitable[Response]]] = {
        REALTIME: routes.realtime_over_http,
        CAPACITY: routes.capacity,
        "/v1/models": routes.models,
        "/v1/models/{name}": routes.model,
        "/health": routes.health,
        "/ready": routes.ready,
        "/metrics": routes.metrics,
        "/": partial(pages.answer, INDEX),
    }
    for name in pages.names:
        answers[f"/{name}"] = partial(pages.answer, name)
    for path, answer in {**answers, **context.more_routes}.items():
        app.add_api_route(path, answer, methods=list(_METHODS))
    app.add_api_route(SPEECH, routes.speech, methods=["POST"])
    app.add_api_route(TRANSCRIPTIONS, routes.transcription, methods=["POST"])
    app.add_api_route(CHAT, routes.chat, methods=["POST"])
    calls = Calls(context, _served)
    app.add_api_route(CALLS, calls.begin, methods=["POST"])
    app.add_api_route(f"{CALLS}/{{call_id}}/hangup", calls.hang_up, methods=["POST"])
    app.add_api_route(CLIENT_SECRETS, routes.client_secret, methods=["POST"])
    app.add_api_route(CONVERSATION, routes.delete, methods=["DELETE"])
    return _Entrance(app, context)


class _Entrance:
    """What every request passes before it is routed, and every answer after it was made."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        more = [_NO_SNIFFING, *cors.headers_of(headers, self._context.origins)]

        async def send_marked(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        refusal = self._context.refuse_name(headers)
        if refusal is None and scope.get("method") not in (None, *_METHODS):
            refusal = self._context.refuse_origin(headers)
        if refusal is None and cors.is_preflight(scope, headers, self._context.origins):
            await cors.preflight(headers)(scope, receive, send_marked)
        elif refusal is None:
            await self._app(scope, receive, send_marked)
        elif scope["type"] == "websocket":
            await self._context.refuse(WebSocket(scope, receive, send_marked), refusal)
        else:
            self._context.note_refusal(refusal)
            await refusal.answer()(scope, receive, send_marked)


async def _unknown_url(request: Request, _: Exception) -> Response:
    return _nothing_at(f"{request.method} {request.url.path}").answer()


async def _unknown_method(request: Request, error: Exception) -> Response:
    methods = sorted(cast(HTTPException, error).headers["Allow"].split(", "))  # type: ignore[index]
    message = f"{request.url.path} takes {' and '.join(methods)}, not {request.method}; {SERVED}"
    allow = {"Allow": ", ".join(methods)}
    return Refusal(405, "method_not_supported", message, headers=allow).answer()


async def _fault(_: Request, __: Exception) -> Response:
    return Refusal(500, "server_error", "an internal error; the server's log says more").answer()


def _nothing_at(what: str) -> Refusal:
    return Refusal(
        404, "unknown_url", f"there is no {what[: admission.LONGEST_NAMED]} here; {SERVED}"
    )


class PageFiles:
    """Files by their place in the folder, as it is when this is made; nothing else is given."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self.names = [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        ]

    async def answer(self, name: str, request: Request) -> Response:
        """One of ``names``; asked for again each time, sent again only if it changed."""
        path = self._folder / name
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = _headers(request.headers.get("host", "")) | {"ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers | {"Content-Type": _TYPES[path.suffix]})


def _headers(host: str) -> dict[str, str]:
    # Some browsers do not count a WebSocket to the same host as 'self'.
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    policy = (
        "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; "
        f"img-src 'self' data:; media-src 'self' blob:; connect-src 'self'{sockets}; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Permissions-Policy": "microphone=(self)",
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
    }


class Routes:
    """What is answered where."""

    def __init__(self, context: ServerContext) -> None:
        self._context, self._started_s = context, int(time.time())
        self._spoken = SpokenReplies(context.limits.kept_chars)

    async def health(self) -> Response:
        """200 as long as the worker lives, whatever it is doing."""
        engine = self._context.engine
        body: dict[str, Any] = {"status": "ok", "worker": engine.state, "version": VERSION}
        if engine.dead.done():
            body |= {"status": "dead", "failure": engine.dead.result().message}
        return JSONResponse(body, 503 if engine.dead.done() else 200)

    async def ready(self) -> Response:
        """200 as long as somebody new is let in."""
        if self._context.unavailable:
            return self._context.unavailable.answer()
        info = self._context.engine.ready.result()
        body = {"status": "ready", "model": self._context.model, "worker": asdict(info)}
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        """Everything that is counted, in all processes with sockets together."""
        if refused := self._context.answer_to_stranger(request):
            return refused
        context = self._context
        others = await context.fronts.counted() if context.fronts else []
        context.metrics.unsent.set(context.unsent_s + sum(each.unsent_s for each in others))
        text = context.metrics.text(family for each in others for family in each.families)
        return Response(text, media_type=CONTENT_TYPE)

    async def capacity(self, request: Request) -> Response:
        """What is left, of all and for the key that asks."""
        key = self._context.keys.name_of(request.headers) or ""
        return self._context.answer_to_stranger(request) or JSONResponse(
            capacity(self._context, key)
        )

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        listed = {"object": "list", "data": [self._model()]}
        return self._context.answer_to_stranger(request) or JSONResponse(listed)

    async def model(self, name: str, request: Request) -> Response:
        """A model by name."""
        if refused := self._context.answer_to_stranger(request):
            return refused
        if name != self._context.model:
            return Refusal(404, "model_not_found", f"there is no model {name!r} here").answer()
        return JSONResponse(self._model())

    async def speech(self, request: Request) -> Response:
        """A text read aloud."""
        context, key = self._context, self._let_in(request)
        if isinstance(key, Response):
            return key
        try:
            asked = speech_request(await _read_json(request, context.limits), context)
        except (WireError, RefusedError) as error:
            return Refusal.of(error).answer()
        return SpeechReply(context, key, asked)

    async def transcription(self, request: Request) -> Response:
        """A file's speech written down."""
        key = self._let_in(request)
        return key if isinstance(key, Response) else TranscriptionReply(self._context, key)

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        key = self._let_in(request)
        return key if isinstance(key, Response) else ChatReply(self._context, key, self._spoken)

    async def client_secret(self, request: Request) -> Response:
        """An ephemeral key for a page, to whoever has a key that is none."""
        context = self._context
        if refused := self._context.answer_to_stranger(request):
            return refused
        if context.unavailable:
            return context.unavailable.answer()
        maker = context.keys.name_of(request.headers) or ""
        if refusal := context.refuse_quota(maker):
            context.note_refusal(refusal)
            return refusal.answer()
        try:
            raw = await _read_json(request, context.limits)
            made = client_secret(raw, maker, _served(context), context.ephemeral)
        except (WireError, RefusedError) as error:
            return Refusal.of(error).answer()
        return JSONResponse(made, headers={"Cache-Control": "no-store"})

    async def delete(self, request: Request) -> Response:
        """Delete the conversation whose token is shown, with all recordings of it."""
        context = self._context
        grant = context.granted(request)
        if isinstance(grant, Refusal):
            context.note_refusal(grant)
            return grant.answer()
        if refusal := context.unavailable or context.refuse_quota(grant.name):
            context.note_refusal(refusal)
            return refusal.answer()
        key, conversations = resume_key(request, context, grant), context.conversations
        try:
            kept = await conversations.delete(key) if key and conversations else None
        except StoreError as error:
            return Refusal.of(error).answer()
        if kept is None:
            return admission.NOT_RESUMED.answer()
        recorder, name, recordings = context.recorder, kept.conversation_id, 0
        if recorder:
            recordings = await asyncio.wrap_future(recorder.delete(name))
        told = {"id": name, "object": "conversation.deleted", "deleted": True}
        return JSONResponse(told | {"mosstalk": {"recordings": recordings}})

    async def realtime_over_http(self) -> Response:
        """Not a conversation: that needs a WebSocket."""
        message = f"connect to {REALTIME} with a WebSocket; {SERVED}"
        return Refusal(426, "upgrade_required", message, headers={"Upgrade": "websocket"}).answer()

    async def no_socket(self, socket: WebSocket) -> None:
        """There is no WebSocket at this path."""
        await self._context.refuse(socket, _nothing_at(f"WebSocket {socket.url.path}"))

    async def realtime(self, socket: WebSocket) -> None:
        """A conversation with a client of the Realtime protocol."""
        await self._talk(socket, self._context.granted(socket), RealtimeProtocol)

    async def call(self, socket: WebSocket) -> None:
        """A conversation with a caller, over Twilio Media Streams."""
        await self._talk(socket, granted(socket, self._context), TwilioProtocol)

    async def _talk(
        self, socket: WebSocket, grant: Grant | Refusal, speaks: type[RealtimeProtocol]
    ) -> None:
        """Let a client in or refuse it, and stay with it until it has gone."""
        context = self._context
        if isinstance(grant, Refusal):
            await context.refuse(socket, grant)
            return
        key = grant.name
        if context.unavailable is None and speaks is RealtimeProtocol:
            await end_forerunner(socket, context, grant)
        if refusal := context.refuse_request(key):
            await context.refuse(socket, refusal)
        elif admission.asks_for_beta(socket):
            await context.refuse_beta(socket)
        elif context.fronts and context.fronts.take(socket.scope["extensions"][WEBSOCKET], key):
            return  # another process has it
        else:
            with context.opening(key):  # before anything is waited for, so that all are counted
                served = _served(context, socket.query_params.get("model"))
                connection = await opened(socket, context, grant, speaks, served)
            if connection:
                await connection.run(admission.subprotocol(socket))

    def _let_in(self, request: Request) -> str | Response:
        """The name of a client's key, or why nothing is done for it now."""
        context = self._context
        if refused := self._context.answer_to_stranger(request):
            return refused
        key = context.keys.name_of(request.headers) or ""
        if refusal := context.refuse_request(key):
            context.note_refusal(refusal)
            return refusal.answer()
        return key

    def _model(self) -> dict[str, Any]:
        engine, more = self._context.engine, dict[str, Any]()
        if engine.state is WorkerState.READY:
            info = engine.ready.result()
            more = {"voices": info.voices, "weights": info.weights_kind}
        own = {"id": self._context.model, "object": "model", "owned_by": "mosstalk"}
        return own | {"created": self._started_s} | more


def _served(context: ServerContext, asked_model: str | None = None) -> ServedModel:
    """What there is, once the worker is ready."""
    return ServedModel(
        context.model,
        context.engine.ready.result().voices,
        context.session_defaults,
        context.limits,
        asked_model,
        context.transcriber.info if context.transcriber else None,
    )


async def _read_json(request: Request, limits: Limits) -> bytes:
    return await read_body(request, limits.large_bytes, limits.header_s)


_HEADER_BYTES = 16 << 10
"""Longest head of a request."""


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(context: ServerContext) -> uvicorn.Server:
    """What speaks HTTP and WebSockets for the application; as many files may be open as needed."""
    limits = context.limits
    raise_file_limit(limits.connections + OTHER_FILES)
    limiter = ConnectionLimiter(limits, context.metrics)
    limiter.elsewhere = lambda: len(context.fronts.client_keys) if context.fronts else 0
    config = ServerConfig(
        limiter,
        context.tls,
        make_app(context),
        log_config=None,
        access_log=False,
        http=TlsProtocol if context.tls else HttpProtocol,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.header_s),
        ws=WebSocketProtocol,
        ws_max_size=limits.message_bytes,
        ws_per_message_deflate=False,  # sound hardly shrinks, and packing it takes time
        ws_ping_interval=limits.ping_s,
        ws_ping_timeout=limits.pong_s,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return _Server(config)
