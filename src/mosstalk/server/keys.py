"""Keys that clients show: the owner's, ephemeral ones for pages, and signatures of calls."""

import base64
import hashlib
import hmac
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mosstalk.errors import OptionError

EPHEMERAL = "ek_"
"""What an ephemeral key begins with."""
LONGEST_EPHEMERAL = 6144
"""Characters: proxies take lines of 8 KiB in the head of a request, this server 16 KiB in all."""
_PROTOCOL = "openai-insecure-api-key."
_NAME = "key-"


class Keys:
    """API keys, kept as digests; without any, everybody may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take the keys.

        Raises:
            OptionError: for an empty one, which everybody would have, or one that looks ephemeral.
        """
        given = list(keys)
        if not all(key.strip() for key in given):
            raise OptionError("an API key is empty; every client would have it")
        if any(key.startswith(EPHEMERAL) for key in given):
            raise OptionError(
                f"an API key begins with {EPHEMERAL}, as those do that the server makes for pages; "
                "choose another"
            )
        self._digests = [_digest(key) for key in given]

    def name_of(self, headers: Mapping[str, str], protocols: Sequence[str] = ()) -> str | None:
        """A name for the key that was shown, fit for logs; None if there is no such key.

        All keys are compared, whichever is right, in a time that does not depend on it.
        """
        if not self._digests:
            return "anyone"
        if (key := shown_key(headers, protocols)) is None:
            return None
        shown = _digest(key)
        right = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return f"{_NAME}{right.index(True) + 1}" if any(right) else None

    def owner_of(self, name: str) -> str:
        """What stands for the key of that name at every server that has it; "" for anyone."""
        if not name.startswith(_NAME):
            return ""
        return self._digests[int(name.removeprefix(_NAME)) - 1].hex()


def shown_key(headers: Mapping[str, str], protocols: Sequence[str] = ()) -> str | None:
    """The key that a request shows, right or wrong.

    It is shown as ``Authorization: Bearer KEY``, or as browsers can, by the subprotocol
    ``openai-insecure-api-key.KEY``.
    """
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in protocols:
        if protocol.startswith(_PROTOCOL):
            return protocol.removeprefix(_PROTOCOL)
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# Ephemeral keys.


@dataclass(frozen=True)
class Grant:
    """What a key gives: ``name`` is whose connections count, ``session`` how a session begins.

    ``session`` is as a ``session.update`` asks for it.
    """

    name: str
    session: Mapping[str, Any] = field(default_factory=dict)


class EphemeralKeys:
    """Makes ephemeral keys and reads them.

    A key holds all that it stands for, and a signature (HMAC, RFC 2104). So nothing is kept of it,
    however many are asked for, and all processes that have the same ``secret`` can read it. It is
    not encrypted: who has it can read its session's settings, as the session tells them anyway.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, grant: Grant, expires_at: int) -> str:
        """A key that gives ``grant`` until then, in seconds since 1970."""
        held = json.dumps([expires_at, grant.name, grant.session], separators=(",", ":"))
        text = base64.urlsafe_b64encode(zlib.compress(held.encode())).decode().rstrip("=")
        return f"{EPHEMERAL}{self._signature(text)}{text}"

    def grant_of(self, key: str, now_s: float) -> Grant | None:
        """What a key gives; None if it has expired, or this server has not made it."""
        signed = key.removeprefix(EPHEMERAL)
        signature, text = signed[:_SIGNATURE], signed[_SIGNATURE:]
        right = self._signature(text)
        if not hmac.compare_digest(_bytes(signature), right.encode()):
            return None
        padded = text + "=" * (-len(text) % 4)
        expires_at, name, session = json.loads(zlib.decompress(base64.urlsafe_b64decode(padded)))
        return Grant(name, session) if now_s < expires_at else None

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, _bytes(text), hashlib.sha256).hexdigest()


_SIGNATURE = 2 * hashlib.sha256().digest_size
"""Characters, two a byte."""


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# Calls.


@dataclass(frozen=True)
class TwilioAccount:
    """Whose calls are let in.

    ``token`` is the account's auth token, which signs them. ``public_url`` is where Twilio reaches
    this server, up to the path; None is the name that each request carries in ``Host``.
    """

    token: str = field(repr=False)
    public_url: str | None = None

    def __post_init__(self) -> None:
        """Raise OptionError for no token, and for an address that Twilio cannot call."""
        if not self.token.strip():
            raise OptionError(
                "the Twilio auth token is empty; everybody could sign with it. Give "
                "MOSSTALK_TWILIO_AUTH_TOKEN or --twilio-auth-token one, or leave both out"
            )
        if self.public_url is None:
            return
        parts = urlsplit(self.public_url)
        if parts.scheme not in ("https", "wss") or not parts.hostname or parts.query:
            raise OptionError(
                f"--public-url {self.public_url}: give where this server is reached from outside, "
                "as https://talk.example.org"
            )

    def url_of(self, path: str, headers: Mapping[str, str]) -> str:
        """The URL that Twilio has called, given the path and query as they came: always wss."""
        base = self.public_url or f"wss://{headers.get('host', '')}"
        return f"wss://{base.partition('://')[2].rstrip('/')}{path}"

    def has_signed(self, url: str, headers: Mapping[str, str]) -> bool:
        """Whether ``X-Twilio-Signature`` is that of a URL: its HMAC-SHA1 by the token, in base64.

        A WebSocket's request has no parameters beside those of the URL.
        """
        right = hmac.new(_bytes(self.token.strip()), _bytes(url), hashlib.sha1).digest()
        shown = _bytes(headers.get("x-twilio-signature", ""))
        return hmac.compare_digest(shown, base64.b64encode(right))
