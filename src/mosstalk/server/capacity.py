"""What a server has left for whoever comes next: ``GET /v1/capacity``."""

import time
from typing import Any

from mosstalk.server.admission import ServerContext


def capacity(context: ServerContext, key: str) -> dict[str, Any]:
    """What is left of places, of rows of K and V and of a key's quotas, and what a turn takes.

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
