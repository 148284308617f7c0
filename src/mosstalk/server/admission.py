"""Who is let in to talk, and how those who are not are told."""

import json
import logging
import math
from dataclasses import dataclass
from secrets import token_hex

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from mosstalk.errors import EngineFullError, EngineStoppedError, MosstalkError
from mosstalk.server.auth import SUBPROTOCOL
from mosstalk.server.house import Closed, House

_LOG = logging.getLogger("mosstalk.server")
_TRY_AGAIN_LATER = 1013


@dataclass(frozen=True)
class Refusal:
    """Why somebody is not let in; ``retry_after_s`` None: coming back is of no use."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: MosstalkError) -> "Refusal":
        """What an error at the opening of a session means to who asked."""
        if isinstance(error, EngineFullError):
            return cls(503, "full", str(error), error.retry_after_s)
        if isinstance(error, EngineStoppedError):
            return cls(503, "dead", str(error), 10.0)
        return cls(400, "settings", str(error))

    @classmethod
    def when(cls, closed: Closed) -> "Refusal":
        """What it means to who asks that nobody is let in."""
        return cls(503, closed.reason, closed.message, closed.retry_after_s)

    def error(self) -> dict[str, object]:
        """The error in the API's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, object] = {"type": kind, "code": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        return error | {"param": None}

    def answer(self) -> JSONResponse:
        """The refusal as an HTTP response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return JSONResponse({"error": self.error()}, self.status, headers)


NO_KEY = Refusal(401, "key", "show an API key: Authorization: Bearer KEY")


def refuse_stranger(socket: WebSocket, house: House) -> Refusal | None:
    """Whether origin and key are wrong."""
    if not house.origins.admits(socket.headers):
        return Refusal(403, "origin", "pages of this origin may not connect; see --allow-origin")
    if house.keys.name_of(socket.headers, socket.scope["subprotocols"]) is None:
        return NO_KEY
    return None


def refuse_now(key: str, house: House) -> Refusal | None:
    """Whether nobody is let in now, or nobody more with this key."""
    if closed := house.closed:
        return Refusal.when(closed)
    most = house.limits.per_key
    if most is not None and house.connections_of(key) >= most:
        return Refusal(429, "per_key", f"this key has {most} connections, which is all it may", 5.0)
    return None


async def refuse(socket: WebSocket, refusal: Refusal, house: House) -> None:
    """Tell who asked: over HTTP before the connection, which pages cannot see, so them within."""
    house.metrics.refusals.labels(refusal.reason).inc()
    _LOG.info("connection refused", extra={"reason": refusal.reason, "status": refusal.status})
    if "origin" not in socket.headers or refusal.retry_after_s is None:
        await socket.send_denial_response(refusal.answer())
        return
    await socket.accept(subprotocol(socket))
    event = {"type": "error", "event_id": f"event_{token_hex(8)}", "error": refusal.error()}
    event["error"] = refusal.error() | {"event_id": None}
    await socket.send_text(json.dumps(event))
    await socket.close(_TRY_AGAIN_LATER, refusal.reason)


def subprotocol(socket: WebSocket) -> str | None:
    """What is answered to a browser's offer."""
    return SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None
