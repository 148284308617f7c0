"""Bodies of requests: JSON, and forms with files (``multipart/form-data``, RFC 7578)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any

from starlette.requests import ClientDisconnect, Request

from mosstalk.server.admission import LONGEST_NAMED, Refusal, RefusedError
from mosstalk.server.limits import Limits
from mosstalk.server.realtime.validation import (
    ClientObject,
    WireError,
    parse_message,
    require_plain,
)

_FORM = "multipart/form-data"
_MOST_PARTS = 64
_HEAD_BYTES = 8 << 10
"""Longest head of a part."""
_LONGEST_BOUNDARY = 70


async def read_body(
    request: Request,
    most: int,
    most_s: float,
    on_growth: Callable[[int], None] = lambda _: None,
) -> bytes:
    """The body of a request, of at most ``most`` bytes, in ``most_s`` seconds.

    ``on_growth`` is told how many bytes have come, and may raise RefusedError.

    Raises:
        RefusedError: it is too long or too slow, or the client has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(most_s):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    message = f"the body is longer than {most} bytes; send less at a time"
                    raise RefusedError(Refusal(413, "request_too_large", message))
                on_growth(len(body))
    except (TimeoutError, ClientDisconnect):
        message = f"the request was not whole after {most_s:g} s"
        raise RefusedError(Refusal(408, "request_timeout", message)) from None
    return bytes(body)


def json_fields(
    body: bytes, limits: Limits, form: type[ClientObject], sound: str = "audio"
) -> dict[str, Any]:
    """The fields of a request in JSON, all of which ``form`` has; ``sound``: of which hold sound.

    Raises:
        WireError: it is none, or has a field of another name.
    """
    message = parse_message(body, limits, sound)
    require_plain(message, body)
    for name in sorted(message.keys() - form.model_fields.keys()):
        shown = name[:LONGEST_NAMED]
        raise WireError("unknown_parameter", f"Unknown parameter: '{shown}'.", shown)
    return message


@dataclass(frozen=True)
class Part:
    """A field or file of a form."""

    name: str
    content: bytes


def form_parts(content_type: str, body: bytes) -> list[Part]:
    """The parts of a form, in their order; names may come several times.

    Raises:
        WireError: it is none, not whole, or has too many parts.
    """
    mark = b"\r\n--" + _boundary(content_type)
    begin = -2 if body.startswith(mark[2:]) else body.find(mark)
    if begin == -1:
        raise _malformed("its boundary is not in the body")
    place, parts = begin + len(mark), list[Part]()
    while body[place : place + 2] != b"--":
        if len(parts) == _MOST_PARTS:
            raise _malformed(f"it has more than {_MOST_PARTS} parts")
        head_ends = body.find(b"\r\n\r\n", place, place + _HEAD_BYTES)
        ends = body.find(mark, head_ends + 4)
        if head_ends < 0 or ends < 0:
            raise _malformed("a part is not whole")
        parts.append(Part(_name(body[place + 2 : head_ends + 4]), body[head_ends + 4 : ends]))
        place = ends + len(mark)
    return parts


def _boundary(content_type: str) -> bytes:
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != _FORM or not isinstance(boundary, str):
        message = f"send a form: Content-Type: {_FORM}; boundary=..."
        raise WireError("invalid_content_type", message)
    if not (0 < len(boundary) <= _LONGEST_BOUNDARY and boundary.isascii()):
        raise _malformed(f"its boundary is not of 1 to {_LONGEST_BOUNDARY} ASCII characters")
    return boundary.encode()


def _name(head: bytes) -> str:
    name = BytesHeaderParser().parsebytes(head).get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _malformed("a part has no name")
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:LONGEST_NAMED]


def _malformed(why: str) -> WireError:
    return WireError("invalid_form", f"The form cannot be read: {why}.")
