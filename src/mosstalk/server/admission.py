"""Who is let in to talk, and how those who are not are told."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from secrets import token_hex

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError
from mosstalk.server.auth import SUBPROTOCOL, host_name
from mosstalk.server.context import ServerContext, Unavailable

_LOG = logging.getLogger("mosstalk.server")
_TRY_AGAIN_LATER = 1013
_BETA_SUBPROTOCOL = "openai-beta.realtime-v1"
_BETA_CLOSES = 4000
"""As at OpenAI, which has retired its beta as well."""
LONGEST_NAMED = 200
"""Characters of an origin, a name or a path that are told back."""


@dataclass(frozen=True)
class Refusal:
    """Why somebody is not let in; ``retry_after_s`` None: coming back is of no use."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: MosstalkError) -> "Refusal":
        """What an error at the opening of a session means to who asked."""
        if isinstance(error, EngineFullError):
            return cls(503, "full", str(error), error.retry_after_s)
        if isinstance(error, EngineStoppedError):
            return cls(503, "dead", str(error), 10.0)
        return cls(400, "settings", str(error))

    @classmethod
    def when(cls, unavailable: Unavailable) -> "Refusal":
        """What it means to who asks that nobody is let in."""
        return cls(503, unavailable.reason, unavailable.message, unavailable.retry_after_s)

    def error(self) -> dict[str, object]:
        """The error in the API's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, object] = {"type": kind, "code": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        return error | {"param": None}

    def answer(self) -> JSONResponse:
        """The refusal as an HTTP response."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return JSONResponse({"error": self.error()}, self.status, headers)


NO_KEY = Refusal(
    401,
    "key",
    "show an API key: Authorization: Bearer KEY",
    headers={"WWW-Authenticate": "Bearer"},
)


_BETA = Refusal(
    400,
    "beta_api_shape_disabled",
    "the beta of the Realtime API is spoken no more; connect without OpenAI-Beta: realtime=v1",
)


def refuse_name(headers: Mapping[str, str], context: ServerContext) -> Refusal | None:
    """Whether the request came by a name that is not this server's."""
    if context.hosts.admits(headers):
        return None
    name = _printable(host_name(headers["host"])) or "NAME"
    return Refusal(
        403,
        "host",
        f"this server does not answer under the name {name}; its owner may start it with "
        f"--allowed-host {name}, or with keys",
    )


def refuse_stranger(socket: WebSocket, context: ServerContext) -> Refusal | None:
    """Whether origin and key are wrong."""
    if not context.origins.admits(socket.headers):
        origin = _printable(socket.headers["origin"])
        return Refusal(
            403,
            "origin",
            f"pages of {origin} may not connect; this server's owner may start it with "
            f"--allow-origin {origin}",
        )
    if context.keys.name_of(socket.headers, socket.scope["subprotocols"]) is None:
        return NO_KEY
    return None


def refuse_now(key: str, context: ServerContext) -> Refusal | None:
    """Whether nobody is let in now, or nobody more with this key."""
    if unavailable := context.unavailable:
        return Refusal.when(unavailable)
    most = context.limits.per_key
    if most is not None and context.connections_of(key) >= most:
        return Refusal(429, "per_key", f"this key has {most} connections, which is all it may", 5.0)
    return None


async def refuse(socket: WebSocket, refusal: Refusal, context: ServerContext) -> None:
    """Tell who asked: over HTTP before the connection, which pages cannot see, so them within."""
    note_refusal(refusal, context)
    if "origin" not in socket.headers or refusal.retry_after_s is None:
        await socket.send_denial_response(refusal.answer())
        return
    await socket.accept(subprotocol(socket))
    event = {"type": "error", "event_id": f"event_{token_hex(8)}", "error": refusal.error()}
    event["error"] = refusal.error() | {"event_id": None}
    await socket.send_text(json.dumps(event))
    await socket.close(_TRY_AGAIN_LATER, refusal.reason)


def asks_for_beta(socket: WebSocket) -> bool:
    """Whether a client wants the protocol's beta, by its header or as a page by a subprotocol."""
    beta = "realtime=v1" in socket.headers.get("openai-beta", "")
    return beta or _BETA_SUBPROTOCOL in socket.scope["subprotocols"]


async def refuse_beta(socket: WebSocket, context: ServerContext) -> None:
    """Let a client of the beta in and close its connection with the reason, which it then sees."""
    note_refusal(_BETA, context)
    await socket.accept(subprotocol(socket))
    await socket.close(_BETA_CLOSES, f"{_BETA.reason}: {_BETA.message}")


def note_refusal(refusal: Refusal, context: ServerContext) -> None:
    """Count a refusal and log it, as often as anybody wants to read it.

    What an option of the server would change is a warning, and names the option.
    """
    context.metrics.refusals.labels(refusal.reason).inc()
    left_out = context.refusals.take(refusal.reason, time.monotonic())
    if left_out is None:
        return
    fields = {"reason": refusal.reason, "status": refusal.status}
    if left_out:
        _LOG.info("%d more were refused for this reason", left_out, extra=fields)
    if refusal.status == 403:
        _LOG.warning("connection refused: %s", refusal.message, extra=fields)
    else:
        _LOG.info("connection refused", extra=fields)


def _printable(text: str) -> str:
    """What a stranger has sent, such that it steers no terminal and fills no log."""
    signs = (sign if sign.isascii() and sign.isprintable() else "?" for sign in text)
    return "".join(islice(signs, LONGEST_NAMED))


def subprotocol(socket: WebSocket) -> str | None:
    """What is answered to a browser's offer."""
    return SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None
