"""Who may come in: API keys, and the pages that browsers may connect from."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mosstalk.errors import OptionError

SUBPROTOCOL = "realtime"
"""What a browser offers, and what it is answered."""
_KEY_PROTOCOL = "openai-insecure-api-key."
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"


class Keys:
    """API keys, kept as digests; without any, everybody may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, headers: Mapping[str, str], protocols: Sequence[str] = ()) -> str | None:
        """A name for the key that was shown, fit for logs; None if there is no such key.

        It is shown as ``Authorization: Bearer KEY``, or as browsers can, by the subprotocol
        ``openai-insecure-api-key.KEY``. All keys are compared, whichever is right, in a time that
        does not depend on it.
        """
        if not self._digests:
            return "anyone"
        shown = _digest(_shown(headers, protocols) or "")
        right = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return f"key-{right.index(True) + 1}" if any(right) else None


def read_keys(path: Path) -> list[str]:
    """Keys of a file, one a line; lines that are empty or begin with # are none.

    Raises:
        OptionError: the file cannot be read or holds no key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as a file of keys ({error})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise OptionError(f"{path}: holds no key; write one a line")
    return keys


@dataclass(frozen=True)
class Origins:
    """Pages that browsers may connect from: the server's own, and those in ``allowed``.

    A server that listens on this machine alone (``loopback``) is its own origin only under this
    machine's names: otherwise any page could reach it by a name of its own that leads here.
    """

    allowed: frozenset[str] = frozenset()
    loopback: bool = False

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may come from where it comes; programs that are no browser may."""
        origin = headers.get("origin")
        if origin is None or ANY in self.allowed or origin.rstrip("/") in self.allowed:
            return True
        host = headers.get("host", "")
        if urlsplit(origin).netloc.lower() != host.lower():
            return False
        return not self.loopback or urlsplit(f"//{host}").hostname in _LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host in _LOOPBACK or host.startswith("127.")


def _shown(headers: Mapping[str, str], protocols: Sequence[str]) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in protocols:
        if protocol.startswith(_KEY_PROTOCOL):
            return protocol.removeprefix(_KEY_PROTOCOL)
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
