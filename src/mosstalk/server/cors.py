"""CORS (the Fetch standard, 3.2): pages of allowed origins may ask, and read the answers."""

import re

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from mosstalk.server.admission import Origins

_HEADER_NAMES = re.compile(r"[\w-]+(, ?[\w-]+)*", re.ASCII)
_MOST_HEADERS = 1024
_KNOWN_S = 600
"""How long a browser need not ask again."""


def headers_of(asked: Headers, origins: Origins) -> list[tuple[bytes, bytes]]:
    """What every answer says to a page of an allowed origin; nothing to others."""
    origin = asked.get("origin")
    if origin is None or not origins.admits_elsewhere(origin):
        return []
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


def is_preflight(scope: Scope, asked: Headers, origins: Origins) -> bool:
    """Whether a browser asks what a page of an allowed origin may ask."""
    preflight = scope.get("method") == "OPTIONS" and "access-control-request-method" in asked
    return preflight and bool(headers_of(asked, origins))


def preflight(asked: Headers) -> Response:
    """The answer: what the server serves, with any headers."""
    wanted = asked.get("access-control-request-headers", "")
    headers = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST",
        "Access-Control-Max-Age": str(_KNOWN_S),
    }
    if len(wanted) <= _MOST_HEADERS and _HEADER_NAMES.fullmatch(wanted):
        headers["Access-Control-Allow-Headers"] = wanted
    return Response(status_code=204, headers=headers)
