"""The names that a server answers under, and the pages that may ask it.

CORS (the Fetch standard, 3.2) tells browsers of the pages that may: they read the answers.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from mosstalk.server.certificate import is_address

_HEADER_NAMES = re.compile(r"[\w-]+(, ?[\w-]+)*", re.ASCII)
_MOST_HEADERS = 1024
_KNOWN_S = 600
"""How long a browser need not ask again."""
_LOCALHOST = "localhost"
ANY = "*"


@dataclass(frozen=True)
class Hosts:
    """Names under which a server answers, as requests carry them in ``Host``.

    Somebody else's page can point a name of its own at this server (DNS rebinding), and is a page
    of this server's to a browser then. Where keys are needed (``checked`` is false) it has none,
    so any name will do. Where none are, a server answers under names that nobody else can point
    at it: ``localhost``, addresses, and those in ``allowed``. A request without a name is no
    browser's.
    """

    allowed: frozenset[str] = frozenset()
    checked: bool = True

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request came by a name that is the server's."""
        host = headers.get("host", "")
        if not self.checked or not host or ANY in self.allowed:
            return True
        name = host_name(host)
        return name == _LOCALHOST or name in self.allowed or is_address(name)


@dataclass(frozen=True)
class Origins:
    """Pages that browsers may connect from: the server's own, and those in ``allowed``."""

    allowed: frozenset[str] = frozenset()

    def admits_elsewhere(self, origin: str) -> bool:
        """Whether pages of another origin may ask, and read the answer."""
        return ANY in self.allowed or origin.rstrip("/") in self.allowed

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may come from where it comes; programs that are no browser may."""
        origin = headers.get("origin")
        if origin is None or self.admits_elsewhere(origin):
            return True
        _, scheme_ends, place = origin.partition("://")
        return bool(scheme_ends) and place.lower() == headers.get("host", "").lower()


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header, without its port; "" if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host == _LOCALHOST or (is_address(host) and ipaddress.ip_address(host).is_loopback)


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
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
        "Access-Control-Max-Age": str(_KNOWN_S),
    }
    if len(wanted) <= _MOST_HEADERS and _HEADER_NAMES.fullmatch(wanted):
        headers["Access-Control-Allow-Headers"] = wanted
    return Response(status_code=204, headers=headers)
