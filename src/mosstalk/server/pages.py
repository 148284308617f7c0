"""The page at ``/`` and the files it asks for, out of the package."""

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

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


class PageFiles:
    """Files by their place in the folder, as it is when this is made; nothing else is given."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self.names = [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        ]

    def answer(self, name: str, request: Request) -> Response:
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
