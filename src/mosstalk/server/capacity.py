"""How much room a server has left for connections, and each API key's share of it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mosstalk.server.limits import Limits, TokenBucket

if TYPE_CHECKING:
    from mosstalk.server.admission import ServerContext

_MINUTE_S = 60.0


class KeyQuotas:
    """How many of a server's ``sessions`` each API key may have, and how many requests it may make.

    ``keys`` is how many keys there are. Where several share a server, a key that has a place leaves
    the last ones to the keys that have none, so that no key can take them all.
    """

    def __init__(self, limits: Limits, sessions: int, keys: int) -> None:
        self._limits, self.sessions, self._keys = limits, sessions, keys
        self._asked: dict[str, TokenBucket] = {}

    def refuse_connection(self, key: str, connected: Sequence[str]) -> str | None:
        """Why a key may not have one more; None if it may. ``connected``: every one's key."""
        count, most = connected.count(key), self._limits.per_key
        if most is not None and count >= most:
            return f"this key has {most} connections, which is all it may"
        others = self._keys - len({*connected, key})
        if count and 0 < self.sessions - len(connected) <= others:
            return (
                f"this key has {count} of {self.sessions} places, and the last ones are kept for "
                "keys that have none"
            )
        return None

    def wait_s(self, key: str, now_s: float) -> float:
        """Count a request of a key and return 0, or the seconds until the key may make it."""
        most = self._limits.requests_per_minute
        if most is None:
            return 0.0
        if key not in self._asked:
            self._asked[key] = TokenBucket(most / _MINUTE_S, _MINUTE_S, now_s)
        return self._asked[key].wait_for_s(1.0, now_s)

    def left(self, key: str, now_s: float) -> int | None:
        """How many requests a key may make at once now; None without a limit."""
        most = self._limits.requests_per_minute
        return int(self._asked[key].left(now_s)) if key in self._asked else most


def capacity(context: "ServerContext", key: str) -> dict[str, Any]:
    """The answer to ``GET /v1/capacity``: what is left, and how long a first sound takes.

    It tells of places, of rows of K and V, and of a key's quotas.
    Counts of the worker are those of its last sign of life, some tenths of a second old. Without
    a limit, and where there is nothing to tell yet, a value is None.
    """
    limits, places, unavailable = context.limits, context.quotas.sessions, context.unavailable
    connected, heartbeat = context.client_keys, context.engine.heartbeat
    own, most = connected.count(key), limits.per_key
    refused = unavailable or context.refuse_now(key)
    found: dict[str, Any] = {
        "object": "capacity",
        "status": unavailable.reason if unavailable else "ready",
        "admits": refused is None and len(connected) < places,
        "places": {
            "total": places,
            "used": min(len(connected), places),
            "free": max(0, places - len(connected)),
        },
        "key": {
            "connections": own,
            "most_connections": most,
            "requests_left": context.quotas.left(key, time.monotonic()),
        },
    }
    if unavailable or heartbeat is None:
        return found
    block_rows = context.engine.ready.result().block_rows
    recent = heartbeat.first_audio_ms
    return found | {
        "rows": {
            "total": heartbeat.blocks * block_rows,
            "free": (heartbeat.blocks - heartbeat.blocks_in_use) * block_rows,
        },
        "replies": {"running": heartbeat.replies, "waiting": heartbeat.waiting},
        "first_audio_ms": recent and {"p50": recent[0], "p95": recent[1]},
    }
