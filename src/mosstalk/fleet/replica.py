"""One replica: the front of a server with all its endpoints, in an actor of Ray Serve.

HAProxy, which Ray Serve runs and tells of every replica, hands each connection to the one with the
fewest. There uvicorn, as Serve sets it up, reads the request. A WebSocket is then taken off it,
before the handshake is answered, and is one of mosstalk's own from there on, with all its limits:
uvicorn's would be read without end, whoever listens. Serve counts it until it is over.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mosstalk.environment import unset_among
from mosstalk.errors import OptionError
from mosstalk.fleet.config import Autoscaling, FleetConfig, serve_options
from mosstalk.fleet.discovery import PATH, Discovery, Place
from mosstalk.server.admission import Refusal, ServerContext
from mosstalk.server.app import make_server
from mosstalk.server.front import bound_kernel
from mosstalk.server.ipc import trim_memory_forever
from mosstalk.server.websocket import note_of, take_over

_LOG = logging.getLogger("mosstalk.fleet")
NAME = "mosstalk"
"""The application and its one deployment."""
_RAY_PATHS = "/-/"
"""Where the paths of Ray Serve itself are: health of the ingress and its routes."""
_HEALTH = f"{_RAY_PATHS}healthz"
_DRAINING = b"DRAINING"
"""What Serve answers there once this replica is to end."""
_LOOK_S = 1.0
_UNBOUNDED = 100_000
"""Requests that Serve lets through to a replica at a time: who is refused the server says."""
_PENDING = "mosstalk.pending"
"""The extension of a scope that holds a ``_PendingWebSocket``."""
_HEALTH_EVERY_S, _HEALTH_MOST_S = 1.0, 5.0
"""How often Serve asks a replica, and how long it waits: one that fails three times is ended."""
_ENDING_S = 15.0
"""What a replica may take to end beside its replies."""
_EVERYWHERE = ("0.0.0.0", "::")
_ASKED_MOST_S = 5.0
"""How long Serve's controller may take to say where the replicas are."""
_NO_REPLICA = Refusal(503, "loading", "no replica of this fleet is there yet", 5.0)


def application(config: FleetConfig, secret: bytes = b"") -> serve.Application:
    """The fleet as an application of Ray Serve, whose ephemeral keys are made with ``secret``.

    Raises:
        OptionError: this process, and so perhaps Ray's, lacks settings that Ray needs.
    """
    if missing := unset_among(config.settings):
        raise OptionError(
            f"Ray must be started with {', '.join(missing)} set; mosstalk fleet FILE --environment "
            "prints what to set before ray start and serve run"
        )
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if isinstance(most := config.replicas, Autoscaling):
        bounds = {"min_replicas": most.min, "initial_replicas": most.min, "max_replicas": most.max}
        delays = most.model_dump(include={"upscale_delay_s", "downscale_delay_s"})
        target = {"target_ongoing_requests": config.target_sessions}
        scaling = {"autoscaling_config": bounds | delays | target}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": _gpus(config)},
        health_check_period_s=_HEALTH_EVERY_S,
        health_check_timeout_s=_HEALTH_MOST_S,
        graceful_shutdown_timeout_s=config.drain_s + _ENDING_S,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scaling,
    )
    return deployment.bind(config.options(), secret or secrets.token_bytes(32))


def _gpus(config: FleetConfig) -> float:
    if config.gpus is not None or config.serve.get("device") == "cpu":
        return config.gpus or 0.0
    return float(ray.is_initialized() and "GPU" in ray.cluster_resources())


class Replica:
    """A server without a listening socket of its own, once its models are loaded."""

    async def __init__(self, options: Mapping[str, Any], secret: bytes) -> None:  # type: ignore[misc]
        """Start the worker and wait for it.

        Raises:
            OptionError: an option means nothing on this machine, or the models cannot be served.
        """
        self._options = served = replace(serve_options(options), secret=secret)
        served.log.install("front")
        self._context = context = ServerContext(served)
        context.more_routes = {PATH: Discovery(context, _places).answer}
        self._server = make_server(context)
        self._beside = [each for each in (context.conversations, context.transcriber) if each]
        await context.engine.start()
        for part in self._beside:
            await part.start()
        engine = context.engine
        await asyncio.wait((engine.ready, engine.dead), return_when=asyncio.FIRST_COMPLETED)
        if engine.dead.done():
            raise OptionError(engine.dead.result().message)
        context.metrics.worker_up.set(1)
        self._tasks = [
            asyncio.create_task(trim_memory_forever()),
            asyncio.create_task(self._drain_when_told()),
        ]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What answers requests; called by Serve."""

        app = cast(ASGIApp, self._server.config.app)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            elif scope["type"] == "http":
                await app(scope, receive, send)
            else:
                await self._talk(scope["extensions"][_PENDING])

        return answer

    async def check_health(self) -> None:
        """Raise RuntimeError once the engine is dead: Serve puts another replica in its place."""
        engine = self._context.engine
        if engine.dead.done():
            raise RuntimeError(engine.dead.result().message)

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the start, which is over, to the end of the replica."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in self._tasks:
            task.cancel()
        context = self._context
        await context.engine.stop()
        for part in self._beside:
            await part.stop()
        if context.recorder:
            context.recorder.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _talk(self, pending: "_PendingWebSocket") -> None:
        """One client's connection, to its end."""
        connection, request = pending.take()
        bound_kernel(connection)
        note = note_of(0, request)
        await take_over(connection, note, self._server, lambda _: pending.over.set())
        await pending.over.wait()

    async def _drain_when_told(self) -> None:
        """Send everybody away, after the replies that are being made, once Serve ends this replica.

        Serve lets a replica that is to end live until its connections are over, and tells it
        nothing; but it answers so whoever asks for its health.
        """
        while _DRAINING not in await _health():
            await asyncio.sleep(_LOOK_S)
        _LOG.info("draining for up to %g s", self._options.drain_s)
        await self._context.drain(self._options.drain_s)


async def _places() -> list[Place] | None:
    """Where the replicas are that take clients, as HAProxy is told; None: nobody answers.

    Serve's public interface tells no ports of replicas.
    """
    try:
        async with asyncio.timeout(_ASKED_MOST_S):
            controller = await asyncio.to_thread(
                ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
            )
            http = await controller.get_http_config.remote()
            groups = await controller.get_target_groups.remote(NAME, from_proxy_manager=True)
    except (TimeoutError, RayError, ValueError) as error:  # ValueError: there is no controller
        _LOG.warning("where the replicas are is not known: %r", error)
        return None
    # A replica listens where the fleet does: at one address, or at each of its machine's.
    targets = (target for group in groups for target in group.targets)
    return [
        Place(it.ip if http.host in _EVERYWHERE else http.host, it.port, it.name.rpartition("#")[2])
        for it in targets
    ]


class _PendingWebSocket:
    """A WebSocket as uvicorn has it, before its handshake is answered."""

    def __init__(self, protocol: Any, scope: Scope) -> None:
        self.over = asyncio.Event()
        self._protocol, self._scope = protocol, scope

    def take(self) -> tuple[socket.socket, bytes]:
        """The socket, which uvicorn has no longer, and the head of the request that came by it.

        Raises:
            OSError: no file is left, or the client has gone.
        """
        protocol, transport = self._protocol, self._protocol.transport
        transport.pause_reading()
        taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        taken.setblocking(False)
        protocol.handshake_complete = True  # as far as uvicorn is concerned
        transport.close()
        return taken, _head(self._scope)


def _head(scope: Scope) -> bytes:
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = (b"%b: %b" % header for header in scope["headers"])
    return b"\r\n".join((b"GET %b HTTP/1.1" % target, *lines, b"", b""))


# Between uvicorn and Ray Serve, in replicas and in Serve's own proxies.

_inner: ASGIApp | None = None
"""Ray Serve's application in this process."""


def middlewares() -> list[Middleware]:
    """What Ray Serve puts around its application; it asks for them by the setting's name."""
    return [Middleware(_ReplicaMiddleware)]


class _ReplicaMiddleware:
    """Leaves each WebSocket in reach of the replica, and refuses who comes by another way.

    HAProxy falls back to Serve's own proxy where there is no replica. That would have the client
    wait in silence until there is one.
    """

    def __init__(self, app: ASGIApp) -> None:
        global _inner
        self._app = _inner = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(_RAY_PATHS):
            await self._app(scope, receive, send)
        elif not _is_replica():
            await _refuse(scope, receive, send)
        elif scope["type"] == "http":
            await self._app(scope, receive, send)
        else:
            pending = _PendingWebSocket(cast(Any, receive).__self__, scope)
            scope.setdefault("extensions", {})[_PENDING] = pending
            await self._app(scope, partial(_until_over, pending), send)


def _is_replica() -> bool:
    try:
        return serve.get_replica_context() is not None
    except serve.exceptions.RayServeException:
        return False


async def _until_over(pending: _PendingWebSocket) -> Message:
    """In place of uvicorn's ``receive``, which would tell Serve that the client has gone."""
    await pending.over.wait()
    return {"type": "websocket.disconnect", "code": 1005}


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await _NO_REPLICA.answer()(scope, receive, send)
        return
    answer = _NO_REPLICA.answer()
    start = {"type": "websocket.http.response.start", "status": answer.status_code}
    await send(start | {"headers": answer.raw_headers})
    await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})


async def _health() -> bytes:
    """What Ray Serve says of this replica's health."""
    said = bytearray()

    async def send(message: Message) -> None:
        said.extend(message.get("body", b""))

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": _HEALTH, "headers": [], "query_string": b""}
    if _inner:
        with suppress(AssertionError):  # Serve still waits for the replica to start
            await _inner(scope, receive, send)
    return bytes(said)
