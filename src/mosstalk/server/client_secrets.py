"""``POST /v1/realtime/client_secrets``: an ephemeral key for a page, with a session's settings."""

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from mosstalk.server.keys import LONGEST_EPHEMERAL, EphemeralKeys, Grant
from mosstalk.server.limits import Limits
from mosstalk.server.realtime.session_config import ServedModel, session_config
from mosstalk.server.realtime.session_request import Object, null_is
from mosstalk.server.realtime.validation import (
    ClientObject,
    parse_message,
    require_plain,
    too_long,
    validate,
    whole,
)
from mosstalk.session.events import new_id

_USUAL_S, _SHORTEST_S, _LONGEST_S = 600, 10, 7200


class ExpiresAfter(ClientObject):
    """How long a key holds."""

    anchor: Annotated[Literal["created_at"], null_is("created_at")] = "created_at"
    seconds: Annotated[int, whole(_SHORTEST_S, _LONGEST_S), null_is(_USUAL_S)] = _USUAL_S


class SecretRequest(ClientObject):
    """What is asked for; the session's settings are checked as those of a ``session.update``."""

    expires_after: Object[ExpiresAfter] = ExpiresAfter()
    session: Object[dict[str, Any]] = Field(default_factory=dict)


_REQUEST: TypeAdapter[SecretRequest] = TypeAdapter(SecretRequest)


def client_secret(
    raw: bytes,
    maker: str,
    served: ServedModel,
    keys: EphemeralKeys,
    now: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """The answer to a request of the client whose key has the name ``maker``.

    Raises:
        WireError: what is asked for cannot be served, means nothing, or makes the key too long.
    """
    request = _asked(raw, served.limits)
    config = session_config({}, served).updated(request.session, served)
    expires_at = int(now()) + request.expires_after.seconds
    key = keys.make(Grant(maker, request.session), expires_at)
    if len(key) > LONGEST_EPHEMERAL:
        raise too_long("session", f"{LONGEST_EPHEMERAL} characters of the key it makes", len(key))
    shown = config.shown.model_copy(update={"id": new_id("sess")})
    return {"value": key, "expires_at": expires_at, "session": shown.model_dump(mode="json")}


def _asked(raw: bytes, limits: Limits) -> SecretRequest:
    value = parse_message(raw or b"{}", limits)
    require_plain(value, raw)
    return validate(_REQUEST, value, limits)
