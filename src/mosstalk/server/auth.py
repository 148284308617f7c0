"""Who may come in: API keys, the names a server answers under, the pages browsers connect from."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mosstalk.errors import OptionError

SUBPROTOCOL = "realtime"
"""What a browser offers, and what it is answered."""
_KEY_PROTOCOL = "openai-insecure-api-key."
_BYTE_ORDER_MARK = "\ufeff"
_LOCALHOST = "localhost"
ANY = "*"


class Keys:
    """API keys, kept as digests; without any, everybody may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take the keys; raise OptionError for an empty one, which everybody would have."""
        given = list(keys)
        if not all(key.strip() for key in given):
            raise OptionError("an API key is empty; every client would have it")
        self._digests = [_digest(key) for key in given]

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
        if (key := _shown(headers, protocols)) is None:
            return None
        shown = _digest(key)
        right = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return f"key-{right.index(True) + 1}" if any(right) else None


def read_keys(path: Path) -> list[str]:
    """Keys of a file, one a line; empty lines and comments, which begin with #, are none.

    Spaces around a key, and the byte order mark that some editors write, are no part of it.

    Raises:
        OptionError: the file cannot be read or holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").replace(_BYTE_ORDER_MARK, "").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as a file of keys in UTF-8 ({error})") from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise OptionError(f"{path}: holds no key; write one a line")
    return keys


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
        return name == _LOCALHOST or name in self.allowed or _is_address(name)


@dataclass(frozen=True)
class Origins:
    """Pages that browsers may connect from: the server's own, and those in ``allowed``."""

    allowed: frozenset[str] = frozenset()

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may come from where it comes; programs that are no browser may."""
        origin = headers.get("origin")
        if origin is None or ANY in self.allowed or origin.rstrip("/") in self.allowed:
            return True
        _, scheme_ends, place = origin.partition("://")
        return bool(scheme_ends) and place.lower() == headers.get("host", "").lower()


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header, without its port; "" if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host == _LOCALHOST or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


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
