"""Where the replicas are, for Prometheus: its HTTP service discovery, at any replica's address.

``/metrics`` of the fleet is that of whichever replica answers. Prometheus asks here for a list of
them all, and then each for its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from mosstalk.server.admission import Refusal, ServerContext

PATH = "/metrics/replicas"
_FRESH_S = 1.0
"""How long an answer is given again: strangers may ask as often as they like, Serve's controller
has other work."""
_UNKNOWN = Refusal(503, "loading", "Ray Serve does not say where the replicas are", 5.0)


class Place(NamedTuple):
    """Where a replica takes connections, and what Ray Serve calls it."""

    host: str
    port: int
    replica: str


class Discovery:
    """The list of replicas that ``ask`` gives, which None is where nobody knows."""

    def __init__(
        self, context: ServerContext, ask: Callable[[], Awaitable[Sequence[Place] | None]]
    ) -> None:
        """Ask nothing yet."""
        self._context, self._ask = context, ask
        self._asked: asyncio.Future[Sequence[Place] | None] | None = None
        self._until_s = 0.0

    async def answer(self, request: Request) -> Response:
        """All replicas that take clients, to whoever may read metrics.

        Where there is none, or nobody knows, this is an error: Prometheus then goes on with the
        replicas that it knows, and sees that they are down.
        """
        if refused := self._context.answer_to_stranger(request):
            return refused
        if not (places := await self._places()):
            return _UNKNOWN.answer()
        return JSONResponse([_group(place) for place in places])

    async def _places(self) -> Sequence[Place] | None:
        now_s = time.monotonic()
        if self._asked is None or now_s >= self._until_s:
            self._until_s = now_s + _FRESH_S
            self._asked = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._asked)


def _group(place: Place) -> dict[str, Any]:
    """A replica as Prometheus reads it."""
    shown = f"[{place.host}]" if ":" in place.host else place.host
    labels = {"replica": place.replica, "node": place.host}
    return {"targets": [f"{shown}:{place.port}"], "labels": labels}
